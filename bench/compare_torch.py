"""Orchard beside PyTorch's scaled_dot_product_attention, in one process, interleaved.

    .venv/bin/python bench/compare_torch.py [--library build/liborchard.so] [--rows WORD] ...

Prints a markdown table (that of bench/results.md). Orchard is called through ctypes on torch's
own tensors and, unless said, on torch's own threads (torch_parallel_for). Each sample times torch
and then Orchard; "ratio" is torch's best time over Orchard's best, "median" the median of the
samples' ratios. torch's forward runs with gradients recorded, as in training; its backward is
autograd.grad alone on a kept graph. Orchard writes into tensors that exist already: its callers
own all memory. Where the two compute the same (all but dropout), results are compared, and a
difference is a failure.
"""

import argparse
import ctypes
import datetime
import os
import statistics
import sys
import time
from ctypes import byref

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import liborchard as lo

DTYPES = {torch.float64: lo.F64, torch.float32: lo.F32, torch.float16: lo.F16,
          torch.bfloat16: lo.BF16, torch.int64: lo.I64, torch.bool: lo.BOOL}
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def describe(tensor):
    """The orchard_tensor of a torch tensor; the caller keeps the torch tensor alive."""
    made = lo.Tensor(data=tensor.data_ptr(), dtype=DTYPES[tensor.dtype], rank=tensor.dim())
    made.size[:tensor.dim()] = tensor.shape
    made.stride[:tensor.dim()] = tensor.stride()
    return made


class Case:
    """One row: its tensors, torch's way and Orchard's way to compute it."""

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
        self.torch_mask = self.bias
        if window:
            place = torch.arange(N)
            ahead = place[:, None] - place[None, :]
            self.torch_mask = (ahead >= 0) & (ahead < window)
        if lengths:
            self.lengths = torch.tensor(lengths)
            self.torch_mask = (torch.arange(N) < self.lengths[:, None])[:, None, None, :]
        self.inputs = [self.q, self.k, self.v] + ([self.bias] if bias_grad else [])
        self.make_args(window, lengths)

    def make_args(self, window, lengths):
        self.out = torch.empty_like(self.dout)
        self.grads = [torch.empty_like(x) for x in self.inputs]
        self.lse = torch.empty(self.dout.shape[:3])
        attention = lo.Attention(q=describe(self.q), k=describe(self.k), v=describe(self.v),
                                 causal=self.causal, dropout=self.dropout, seed=1)
        if self.bias is not None:
            attention.bias = describe(self.bias)
        if window:
            attention.has_window, attention.window_left, attention.window_right = 1, window - 1, 0
        if lengths:
            attention.key_lengths = describe(self.lengths)
        out, lse = describe(self.out), describe(self.lse)
        self.forward_args = lo.ForwardArgs(out=out, lse=lse, attention=attention)
        names = ["dq", "dk", "dv", "dbias"]
        self.backward_args = lo.BackwardArgs(dout=describe(self.dout), out=out, lse=lse,
                                             attention=attention)
        for name, gradient in zip(names, self.grads):
            setattr(self.backward_args, name, describe(gradient))

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
    """Samples of each call, taken in turn, after one untimed round; at least three rounds."""
    samples = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while len(samples[0]) < 3 or (time.perf_counter() < end and len(samples[0]) < 2000):
        for call, taken in zip(calls, samples):
            taken.append(clock(call))
    return samples


def print_row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def compare(case, direction, shared, own, seconds):
    """One line of the table; returns whether the results agree."""
    if direction == "forward":
        def theirs():
            with torch.set_grad_enabled(not case.decode):
                return case.torch_forward()

        def ours(ctx):
            ctx.forward(byref(case.forward_args))

        ours(shared)
        expected, found = [theirs()], [case.out]
    else:
        graph = case.torch_forward()

        def theirs():
            return torch.autograd.grad(graph, case.inputs, case.dout, retain_graph=True)

        def ours(ctx):
            ctx.backward(byref(case.backward_args))

        shared.forward(byref(case.forward_args))
        ours(shared)
        expected, found = theirs(), case.grads
    agree = bool(case.dropout) or all(case.difference(e, f) <= 1 for e, f in zip(expected, found))
    torch_times, our_times = interleave([theirs, lambda: ours(shared)], seconds)
    own_times, = interleave([lambda: ours(own)], seconds / 4)
    median = statistics.median(a / b for a, b in zip(torch_times, our_times))
    print_row(case.name, direction, case.torch_path(), f"{1e3 * min(torch_times):.3f}",
              f"{1e3 * min(our_times):.3f}", f"{min(torch_times) / min(our_times):.2f}",
              f"{median:.2f}", f"{1e3 * min(own_times):.3f}",
              "NO" if not agree else "(dropout)" if case.dropout else "yes")
    return agree


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
        for name, ctx in contexts:
            def ours(ctx=ctx, case=case):
                ctx.forward(byref(case.forward_args))

            alone, = interleave([ours], seconds / 2)
            _, _, turn = interleave([lambda: torch.exp(numbers),
                                     lambda: torch.mm(matrix, matrix), ours], seconds)
            print_row(f"causal forward N={length}", name, f"{1e3 * min(alone):.3f}",
                      f"{1e3 * min(turn):.3f}", f"{min(alone) / min(turn):.2f}",
                      f"{statistics.median(alone) / statistics.median(turn):.2f}")


def scratch(library, threads, backend, shrink):
    """Bytes that the context's allocator hands out during one call."""
    print("\nScratch beside inputs and outputs, counted by the allocator, N=16384 H=1 D=64 fp32, "
          f"{threads} threads\n")
    print_row("direction", "MiB", "limit MiB")
    print_row(*["---"] * 3)
    case = Case("", H=1, N=max(8, 16384 // shrink))
    for direction, limit in (("forward", 4), ("backward", 40)):
        counter = lo.CountingAllocator()
        with library.context(threads=threads, backend=backend, alloc=counter) as ctx:
            before = counter.bytes
            if direction == "forward":
                ctx.forward(byref(case.forward_args))
            else:
                ctx.backward(byref(case.backward_args))
        print_row(direction, f"{(counter.peak - before) / 2**20:.2f}", limit)


# ---- The command ---------------------------------------------------------------------------------

def torch_parallel_for():
    """Its address; torch loads its library privately, so it is asked for by name."""
    lib = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
    return ctypes.cast(lib.torch_parallel_for, ctypes.c_void_p).value


def cpu_model():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line for line in lines if line.startswith("model name"))
        return name.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return "unknown processor"


def parse():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="Orchard beside torch's attention")
    parser.add_argument("--library", default=os.path.join(here, "..", "build", "liborchard.so"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--backend", help="as ORCHARD_BACKEND")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths, for a quick look")
    return parser.parse_args()


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    library = lo.Library(os.path.abspath(options.library))
    settings = {"threads": options.threads, "backend": options.backend}
    good = True
    with library.context(parallel_for=torch_parallel_for(), **settings) as shared, \
            library.context(**settings) as own:
        print(f"{datetime.date.today()}, {cpu_model()}, {options.threads} threads, torch "
              f"{torch.__version__}, Orchard {library.version()} ({shared.cpu()}); "
              f"`python {' '.join(sys.argv)}`\n")
        print_row("B=1 H=12 N=1024 D=64 fp32 unless said", "direction", "torch's path", "torch ms",
                  "Orchard ms", "ratio", "median", "Orchard ms, own threads", "same result")
        print_row(*["---"] * 9)
        for name, shape in cases(options.shrink):
            if options.rows.lower() not in name.lower():
                continue
            case = Case(name, **shape)
            for direction in ("forward",) if case.decode else ("forward", "backward"):
                good = compare(case, direction, shared, own, options.seconds) and good
        if not options.rows:
            alternate([("torch", shared), ("its own", own)], options.shrink, options.seconds)
            scratch(library, options.threads, options.backend, options.shrink)
    if not good:
        sys.exit("compare_torch: results differ where the table says NO")


if __name__ == "__main__":
    main()
