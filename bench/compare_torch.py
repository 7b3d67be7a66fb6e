"""Orchard beside PyTorch's scaled_dot_product_attention, in one process, interleaved.

    .venv/bin/python bench/compare_torch.py [--rows WORD] [--shrink N] ...

Prints markdown tables (those of bench/results.md). Each sample times three calls in turn: torch;
Orchard's C library through ctypes, on torch's own tensors and threads (torch_parallel_for), into
tensors that exist already, since its callers own all memory; and orchard.torch as a user calls it,
with fresh outputs and gradients by autograd. A ratio is torch's best time over Orchard's best,
"median" the median of the samples' ratios. Forward runs with gradients recorded, as in training;
backward is autograd.grad alone on a kept graph. Where they compute the same (all but dropout),
results are compared, and a difference is a failure. Then: what a call costs when there is hardly
anything to compute and what that is made of, what orchard.enable() costs other code, what speed is
kept beside torch's operations, and scratch memory.

Needs the package: `make python` installs it; or PYTHONPATH=python with ORCHARD_LIBRARY (and, for
the kernels in C, ORCHARD_TORCH_LIBRARY) set.
"""

import argparse
import ctypes
import datetime
import statistics
import sys
import time
from ctypes import byref, c_size_t, c_void_p

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import orchard
from orchard import _structs as structs
from orchard._context import Context
from orchard._library import check, lib
from orchard.torch import cpu, threads
from orchard.torch.attention import ops
from orchard.torch import scaled_dot_product_attention

DTYPES = {torch.float64: structs.F64, torch.float32: structs.F32, torch.float16: structs.F16,
          torch.bfloat16: structs.BF16, torch.int64: structs.I64, torch.bool: structs.BOOL}
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def describe(tensor):
    """The orchard_tensor of a torch tensor; the caller keeps the torch tensor alive."""
    made = structs.Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], rank=tensor.dim())
    made.size[:tensor.dim()] = tensor.shape
    made.stride[:tensor.dim()] = tensor.stride()
    return made


class Case:
    """One row: its tensors, and torch's way and Orchard's two ways to compute it."""

    def __init__(self, name, B=1, H=12, G=None, N=1024, T=None, D=64, dtype=torch.float32,
                 causal=False, dropout=0.0, bias=False, bias_grad=False, window=None,
                 lengths=None, decode=False):
        self.name, self.causal, self.dropout, self.decode = name, causal, dropout, decode
        T = N if T is None else T
        G = H if G is None else G
        grad = not decode
        self.q = torch.randn(B, H, T, D, dtype=dtype).requires_grad_(grad)
        self.k = torch.randn(B, G, N, D, dtype=dtype).requires_grad_(grad)
        self.v = torch.randn(B, G, N, D, dtype=dtype).requires_grad_(grad)
        self.dout = torch.randn(B, H, T, D, dtype=dtype)
        self.bias = torch.randn(1, H, T, N, dtype=dtype).requires_grad_(bias_grad) if bias else None
        self.gqa = G != H
        self.lengths = None
        self.torch_mask = self.bias
        if window:
            place = torch.arange(N)
            ahead = place[:, None] - place[None, :]
            self.torch_mask = (ahead >= 0) & (ahead < window)
        if lengths:
            self.lengths = torch.tensor(lengths)
            self.torch_mask = (torch.arange(N) < self.lengths[:, None])[:, None, None, :]
        self.window = (window - 1, 0) if window else None
        self.inputs = [self.q, self.k, self.v] + ([self.bias] if bias_grad else [])
        self.make_args()

    def make_args(self):
        """The structs of the C calls, and the tensors that they write to."""
        self.out = torch.empty_like(self.dout)
        self.grads = [torch.empty_like(x) for x in self.inputs]
        self.lse = torch.empty(self.dout.shape[:3])
        attention = structs.Attention(q=describe(self.q), k=describe(self.k), v=describe(self.v),
                                      causal=self.causal, dropout=self.dropout, seed=1)
        if self.bias is not None:
            attention.bias = describe(self.bias)
        if self.window:
            attention.has_window = 1
            attention.window_left, attention.window_right = self.window
        if self.lengths is not None:
            attention.key_lengths = describe(self.lengths)
        out, lse = describe(self.out), describe(self.lse)
        self.forward_args = structs.AttentionForwardArgs(out=out, lse=lse, attention=attention)
        self.backward_args = structs.AttentionBackwardArgs(dout=describe(self.dout), out=out,
                                                           lse=lse, attention=attention)
        for name, gradient in zip(["dq", "dk", "dv", "dbias"], self.grads):
            setattr(self.backward_args, name, describe(gradient))

    def c_forward(self, context):
        check(lib.orchard_attention_forward(context, byref(self.forward_args)))
        return self.out

    def c_backward(self, context):
        check(lib.orchard_attention_backward(context, byref(self.backward_args)))
        return self.grads

    def our_forward(self):
        return scaled_dot_product_attention(self.q, self.k, self.v, self.bias, self.dropout,
                                            self.causal, enable_gqa=self.gqa, window=self.window,
                                            key_lengths=self.lengths)

    def torch_causal(self):
        return self.causal and self.torch_mask is None

    def torch_forward(self):
        return F.scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=self.torch_mask,
                                              dropout_p=self.dropout, is_causal=self.torch_causal(),
                                              enable_gqa=self.gqa)

    def torch_path(self):
        choice = torch._fused_sdp_choice(self.q, self.k, self.v, self.torch_mask, self.dropout,
                                         self.torch_causal(), enable_gqa=self.gqa)
        return {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash"}.get(
            SDPBackend(choice), str(SDPBackend(choice)))

    def difference(self, expected, found):
        """The largest difference, relative to the largest element and the dtype's tolerance."""
        expected = expected.detach()
        off = (expected.double() - found.double()).abs().max() / expected.double().abs().max()
        return off.item() / TOLERANCE[expected.dtype]


def cases(shrink):
    """The rows of the speed table. `shrink` divides the lengths, for a quick look."""
    def n(length):
        return max(8, length // shrink)

    def row(name, **options):
        return name, options

    bf16, fp16 = torch.bfloat16, torch.float16
    return [
        row("full", N=n(1024)),
        row("causal", N=n(1024), causal=True),
        row("N=256 causal", N=n(256), causal=True),
        row("B=4 N=64 causal", B=4, N=n(64), causal=True),
        row("H=1 N=4096 causal", H=1, N=n(4096), causal=True),
        row("D=128 full", N=n(1024), D=128),
        row("D=128 causal", N=n(1024), D=128, causal=True),
        row("bf16 causal", N=n(1024), dtype=bf16, causal=True),
        row("fp16 causal", N=n(1024), dtype=fp16, causal=True),
        row("dropout 0.1 full", N=n(1024), dropout=0.1),
        row("dropout 0.1 causal", N=n(1024), dropout=0.1, causal=True),
        row("additive mask", N=n(1024), bias=True),
        row("additive mask with its gradient", N=n(1024), bias=True, bias_grad=True),
        row("GQA 12/4 causal", N=n(1024), G=4, causal=True),
        row("MQA 12/1 causal", N=n(1024), G=1, causal=True),
        row("window 512 N=4096 causal (torch by mask)", N=n(4096), causal=True, window=n(512)),
        row("key padding B=4 N=512, lengths 512 300 200 100", B=4, N=n(512),
            lengths=[max(1, length // shrink) for length in (512, 300, 200, 100)]),
        row("decode H=32 G=8 T=1 S=8192 D=128", H=32, G=8, T=1, N=n(8192), D=128, decode=True),
        row("decode bf16", H=32, G=8, T=1, N=n(8192), D=128, dtype=bf16, decode=True),
    ]


# ---- Timing --------------------------------------------------------------------------------------

def clock(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(calls, seconds):
    """Samples of each call, taken in turn, after one untimed round; at least nine rounds."""
    samples = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while len(samples[0]) < 9 or (time.perf_counter() < end and len(samples[0]) < 2000):
        for call, taken in zip(calls, samples):
            taken.append(clock(call))
    return samples


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def compare(case, direction, context, seconds):
    """One line of the table; returns whether the results agree."""
    if direction == "forward":
        calls = [lambda: [case.torch_forward()], lambda: [case.c_forward(context)],
                 lambda: [case.our_forward()]]
    else:
        def gradients(output):
            return torch.autograd.grad(output, case.inputs, case.dout, retain_graph=True)

        torch_out, our_out = case.torch_forward(), case.our_forward()
        case.c_forward(context)
        calls = [lambda: gradients(torch_out), lambda: case.c_backward(context),
                 lambda: gradients(our_out)]
    expected, *found = (call() for call in calls)
    agree = bool(case.dropout) or all(case.difference(e, f) <= 1
                                      for ours in found for e, f in zip(expected, ours))
    with torch.set_grad_enabled(not case.decode):
        times = interleave(calls, seconds)
    best = [min(taken) for taken in times]
    medians = [statistics.median(a / b for a, b in zip(times[0], ours)) for ours in times[1:]]
    print_row(case.name, direction, case.torch_path(), *(f"{1e3 * t:.3f}" for t in best),
              f"{best[0] / best[1]:.2f}", f"{medians[0]:.2f}", f"{best[0] / best[2]:.2f}",
              f"{medians[1]:.2f}", f"{best[1] / best[2]:.2f}",
              "NO" if not agree else "(dropout)" if case.dropout else "yes")
    return agree


class Nothing(torch.autograd.Function):
    """Three tensors in, one out, nothing computed: what autograd in Python costs alone."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx, dout):
        ctx.saved_tensors
        return dout, dout, dout


def microseconds(calls, seconds):
    """Of each call, in bursts of 100 taken in turn: the best burst."""
    def burst(call):
        for _ in range(100):
            call()

    return [1e4 * min(taken) for taken in interleave([lambda c=call: burst(c) for call in calls],
                                                     seconds)]


def cold_microseconds(calls, seconds):
    """Of each call alone, when an attention of 0.5 ms has just had the caches: the median."""
    large = Case("", B=4, N=64, causal=True)
    context = Context(1, parallel_for=threads.parallel_for)
    turns = [turn for call in calls for turn in (lambda: large.c_forward(context.handle), call)]
    return [1e6 * statistics.median(taken) for taken in interleave(turns, seconds)[1::2]]


def overhead(seconds):
    """What a call costs when there is hardly anything to compute, and what that is made of."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    small = Case("", H=2, N=4)
    context = Context(1, parallel_for=threads.parallel_for)
    inputs = small.q, small.k, small.v
    tensors = [x.detach() for x in inputs]
    forward = (*tensors, None, False)
    backward = (7, small.dout, *ops.plain_forward_rest(*forward), *tensors, None, False)
    views = [x.view_as(x) for x in inputs]
    cotangents = [small.dout] * 3

    def no_grad(function):
        with torch.no_grad():
            return function(*tensors)

    def recording(function):
        return function(*inputs)

    def both(function):
        return torch.autograd.grad(recording(function), inputs, small.dout)

    print(f"\nA call on [1,2,4,64] fp32, 1 thread, kernels in {cpu.kernel()}: microseconds, the "
          "best of bursts of 100\n")
    print_row("call", "torch", "orchard.torch", "orchard / torch", "aim")
    print_row(*["---"] * 5)
    for name, what, aim in (("forward, no_grad", no_grad, "<= 2"),
                            ("forward, recording", recording, ""),
                            ("forward + backward", both, "<= 1.3")):
        a, b = microseconds([lambda w=what: w(F.scaled_dot_product_attention),
                             lambda w=what: w(scaled_dot_product_attention)], seconds)
        print_row(name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", aim)
    print("\nWhat orchard.torch's time is made of, each line with all above it in the direction; "
          "\"cold\": right after an attention of 0.5 ms, the median of single calls\n")
    print_row("direction", "up to", "microseconds", "cold")
    print_row(*["---"] * 4)
    names = (("forward", "the C library by ctypes, outputs there"),
             ("forward", "torch's dispatcher, kernel.c and fresh outputs"),
             ("forward", "Orchard's checks in Python"), ("forward", "recorded by autograd"),
             ("backward", "the C library by ctypes"),
             ("backward", "torch's dispatcher, kernel.c and fresh gradients"),
             ("both", "autograd in Python around nothing"), ("both", "all"),
             ("forward", "for comparison: torch's product q * k, recorded"),
             ("both", "for comparison: the same, and its gradients"),
             ("backward", "for comparison: torch.autograd.grad through views, nothing computed"))
    calls = [lambda: small.c_forward(context.handle), lambda: ops.plain_forward(*forward),
             lambda: no_grad(scaled_dot_product_attention),
             lambda: recording(scaled_dot_product_attention),
             lambda: small.c_backward(context.handle), lambda: ops.plain_backward(*backward),
             lambda: both(Nothing.apply), lambda: both(scaled_dot_product_attention),
             lambda: small.q * small.k,
             lambda: torch.autograd.grad(small.q * small.k, (small.q, small.k), small.dout),
             lambda: torch.autograd.grad(views, inputs, cotangents, retain_graph=True)]
    for (direction, name), warm, cold in zip(names, microseconds(calls, 4 * seconds),
                                             cold_microseconds(calls, 4 * seconds)):
        print_row(direction, name, f"{warm:.1f}", f"{cold:.1f}")
    torch.set_num_threads(before)


def short_backward(context, seconds):
    """Where the time of the shortest row goes, between the C library and a user's call."""
    case = Case("", B=4, N=64, causal=True)
    tensors = [x.detach() for x in case.inputs]
    kept = ops.plain_forward_rest(*tensors, None, True)
    recorded, views = case.our_forward(), [x.view_as(x) for x in case.inputs]
    nothing, cotangents = Nothing.apply(*case.inputs), [case.dout] * 3
    case.c_forward(context)
    calls = [lambda: case.c_backward(context),
             lambda: ops.plain_backward(7, case.dout, *kept, *tensors, None, True),
             lambda: torch.autograd.grad(recorded, case.inputs, case.dout, retain_graph=True),
             lambda: torch.autograd.grad(nothing, case.inputs, case.dout, retain_graph=True),
             lambda: torch.autograd.grad(views, case.inputs, cotangents, retain_graph=True)]
    names = ("the C library by ctypes, into gradients that exist", "orchard's op, fresh gradients",
             "the op by torch.autograd.grad",
             "torch.autograd.grad through a Function that computes nothing",
             "torch.autograd.grad through three views")
    print("\nThe backward of B=4 N=64 causal, the calls in turn: microseconds\n")
    print_row("call", "best", "median", "C's best / its best", "by medians")
    print_row(*["---"] * 5)
    times = interleave(calls, 4 * seconds)
    best, middle = ([1e6 * of(taken) for taken in times] for of in (min, statistics.median))
    for name, least, usual in zip(names, best, middle):
        print_row(name, f"{least:.0f}", f"{usual:.0f}", f"{best[0] / least:.2f}",
                  f"{middle[0] / usual:.2f}")


def switch_cost(seconds):
    """What orchard.enable() costs code that does not call attention."""
    x, layer, count = torch.randn(4, 16), torch.nn.Linear(16, 16), 300

    def burst():
        for _ in range(count):
            F.gelu(layer(x)).sum()

    def warm():
        burst()  # enable() looks through all modules: the caches are full of them
        return clock(burst)

    def switched():
        with orchard.enable():
            return warm()

    pairs = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs) < 4:
        # Now one first, now the other: whoever comes second finds the processor warm.
        if len(pairs) % 2:
            pairs.append((warm(), switched()))
        else:
            pairs.append((switched(), warm())[::-1])
    off, on = (1e6 / count * min(column) for column in zip(*pairs))
    ratio = statistics.median(on / off for off, on in pairs)
    print("\nlinear + gelu + sum on [4,16], no attention: microseconds without and with "
          f"orchard.enable(): {off:.2f}, {on:.2f}; median ratio {ratio:.3f}")


def alternate(contexts, shrink, seconds):
    """Orchard alone, and called in turn with torch's operations: speed kept."""
    numbers, matrix = torch.randn(1 << 18), torch.randn(256, 256)
    print("\nCalled in turn with torch operations (exp of 2^18 numbers, mm of 256^3): its time "
          "alone over its time in turn\n")
    print_row("case", "threads of", "alone ms", "in turn ms", "speed kept (best)",
              "speed kept (median)")
    print_row(*["---"] * 6)
    for length in (256, 1024):
        case = Case("", N=max(8, length // shrink), causal=True)
        for name, context in contexts:
            def ours(context=context, case=case):
                case.c_forward(context)

            alone, = interleave([ours], seconds / 2)
            _, _, turn = interleave([lambda: torch.exp(numbers),
                                     lambda: torch.mm(matrix, matrix), ours], seconds)
            print_row(f"causal forward N={length}", name, f"{1e3 * min(alone):.3f}",
                      f"{1e3 * min(turn):.3f}", f"{min(alone) / min(turn):.2f}",
                      f"{statistics.median(alone) / statistics.median(turn):.2f}")


class CountingAllocator:
    """The C library's realloc, with a count of bytes held and their peak."""

    def __init__(self):
        libc = ctypes.CDLL(None)
        libc.realloc.restype, libc.realloc.argtypes = c_void_p, [c_void_p, c_size_t]
        libc.free.restype, libc.free.argtypes = None, [c_void_p]
        self.bytes = self.peak = 0

        def alloc(_user, pointer, old_size, new_size):
            held = old_size if pointer else 0
            if not new_size:
                libc.free(pointer)
                self.bytes -= held
                return None
            block = libc.realloc(pointer, new_size)
            self.bytes += new_size - held if block else 0
            self.peak = max(self.peak, self.bytes)
            return block

        self.function = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)(alloc)
        self.address = ctypes.cast(self.function, c_void_p).value


def scratch(options):
    """Bytes that the context's allocator hands out during one call."""
    print("\nScratch beside inputs and outputs, counted by the allocator, N=16384 H=1 D=64 fp32, "
          f"{options.threads} threads\n")
    print_row("direction", "MiB", "limit MiB")
    print_row(*["---"] * 3)
    case = Case("", H=1, N=max(8, 16384 // options.shrink))
    for direction, call, limit in (("forward", case.c_forward, 4),
                                   ("backward", case.c_backward, 40)):
        counter, context = CountingAllocator(), c_void_p()
        opts = structs.CtxOpts(threads=options.threads, alloc=counter.address)
        opts.backend = options.backend.encode() if options.backend else None
        check(lib.orchard_ctx_create_version(byref(context), byref(opts), structs.HEADER_VERSION))
        before = counter.bytes
        call(context)
        lib.orchard_ctx_free(context)
        print_row(direction, f"{(counter.peak - before) / 2**20:.2f}", limit)


# ---- The command ---------------------------------------------------------------------------------

def cpu_model():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line for line in lines if line.startswith("model name"))
        return name.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return "unknown processor"


def parse():
    parser = argparse.ArgumentParser(description="Orchard beside torch's attention")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="per line of the table")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--backend", help="of the C calls, as ORCHARD_BACKEND")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths, for a quick look")
    return parser.parse_args()


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shared = Context(options.threads, options.backend, parallel_for=threads.parallel_for)
    own = Context(options.threads, options.backend)
    print(f"{datetime.date.today()}, {cpu_model()}, {options.threads} threads, torch "
          f"{torch.__version__}, Orchard {orchard.version()} ({shared.cpu}), orchard.torch's "
          f"kernels in {cpu.kernel()}; `python {' '.join(sys.argv)}`\n")
    print_row("B=1 H=12 N=1024 D=64 fp32 unless said", "direction", "torch's path", "torch ms",
              "C ms", "orchard.torch ms", "C ratio", "median", "orchard.torch ratio", "median",
              "of C's", "same result")
    print_row(*["---"] * 12)
    good = True
    for name, shape in cases(options.shrink):
        if options.rows.lower() in name.lower():
            case = Case(name, **shape)
            for direction in ("forward",) if case.decode else ("forward", "backward"):
                good = compare(case, direction, shared.handle, options.seconds) and good
    if not options.rows:
        overhead(options.seconds)
        short_backward(shared.handle, options.seconds)
        switch_cost(options.seconds)
        alternate([("torch", shared.handle), ("its own", own.handle)], options.shrink,
                  options.seconds)
        scratch(options)
    if not good:
        sys.exit("compare_torch: results differ where the table says NO")


if __name__ == "__main__":
    main()
