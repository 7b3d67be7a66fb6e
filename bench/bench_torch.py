"""orchard.torch beside F.scaled_dot_product_attention: whole calls, autograd included.

    python bench/bench_torch.py [--threads 2] [--seconds 2] [--rows WORD] [--shrink N]

The rows are those of bench/compare_torch.py, but both sides are called as a user calls them: a
function of tensors with fresh outputs, gradients by autograd. Each sample times torch and then
Orchard, in one process; "ratio" is torch's best time over Orchard's best, "median" the median of
the samples' ratios. Then what a call costs when there is hardly anything to compute. Prints
markdown. Needs the package: installed, or PYTHONPATH=python with ORCHARD_LIBRARY (and, for the
kernels in C, ORCHARD_TORCH_LIBRARY) set.
"""

import argparse
import datetime
import statistics
import sys

import torch
import torch.nn.functional as F

from compare_torch import Case, cases, cpu_model, interleave, print_row

import orchard
from orchard.torch import cpu
from orchard.torch import scaled_dot_product_attention as attention


class Call(Case):
    """A row of compare_torch, called through orchard.torch."""

    def __init__(self, name, window=None, lengths=None, **shape):
        super().__init__(name, window=window, lengths=lengths, **shape)
        self.window = (window - 1, 0) if window else None
        self.key_lengths = self.lengths if lengths else None

    def make_args(self, window, lengths):
        """No C structs here."""

    def our_forward(self):
        return attention(self.q, self.k, self.v, self.bias, self.dropout, self.causal,
                         enable_gqa=self.gqa, window=self.window, key_lengths=self.key_lengths)


def compare(call, direction, seconds):
    """One line of the table; returns whether the results agree."""
    if direction == "forward":
        def timed(function):
            with torch.set_grad_enabled(not call.decode):
                return [function()]

        def sides():
            return [lambda: timed(call.torch_forward), lambda: timed(call.our_forward)]
    else:
        graphs = [call.torch_forward(), call.our_forward()]

        def sides():
            return [lambda g=g: torch.autograd.grad(g, call.inputs, call.dout, retain_graph=True)
                    for g in graphs]

    theirs, ours = sides()
    agree = bool(call.dropout) or all(call.difference(e, f) <= 1
                                      for e, f in zip(theirs(), ours()))
    torch_times, our_times = interleave([theirs, ours], seconds)
    median = statistics.median(a / b for a, b in zip(torch_times, our_times))
    print_row(call.name, direction, call.torch_path(), f"{1e3 * min(torch_times):.3f}",
              f"{1e3 * min(our_times):.3f}", f"{min(torch_times) / min(our_times):.2f}",
              f"{median:.2f}", "NO" if not agree else "(dropout)" if call.dropout else "yes")
    return agree


def overhead(seconds):
    """What a call costs with [1,2,4,64] tensors on one thread: bursts of 100, the best of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tensors = [torch.randn(1, 2, 4, 64) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    dout = torch.randn(1, 2, 4, 64)

    def no_grad(function):
        with torch.no_grad():
            for _ in range(100):
                function(*tensors)

    def recording(function):
        for _ in range(100):
            function(*leaves)

    def both(function):
        for _ in range(100):
            torch.autograd.grad(function(*leaves), leaves, dout)

    print(f"\nA call on [1,2,4,64] fp32, 1 thread, kernels in {cpu.kernel()}: microseconds, the "
          "best of bursts of 100\n")
    print_row("call", "torch", "orchard.torch", "orchard / torch", "aim")
    print_row(*["---"] * 5)
    for name, what, aim in (("forward, no_grad", no_grad, "<= 2"),
                            ("forward, recording", recording, ""),
                            ("forward + backward", both, "<= 1.3")):
        torch_times, our_times = interleave([lambda w=what: w(F.scaled_dot_product_attention),
                                             lambda w=what: w(attention)], seconds)
        a, b = 1e4 * min(torch_times), 1e4 * min(our_times)
        print_row(name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", aim)
    torch.set_num_threads(before)


def main():
    parser = argparse.ArgumentParser(description="orchard.torch beside torch's attention")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths, for a quick look")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{datetime.date.today()}, {cpu_model()}, {options.threads} threads, torch "
          f"{torch.__version__}, Orchard {orchard.version()}, kernels in {cpu.kernel()}; "
          f"`python {' '.join(sys.argv)}`\n")
    print_row("B=1 H=12 N=1024 D=64 fp32 unless said", "direction", "torch's path", "torch ms",
              "orchard.torch ms", "ratio", "median", "same result")
    print_row(*["---"] * 8)
    good = True
    for name, shape in cases(options.shrink):
        if options.rows.lower() in name.lower():
            call = Call(name, **shape)
            for direction in ("forward",) if call.decode else ("forward", "backward"):
                good = compare(call, direction, options.seconds) and good
    overhead(options.seconds)
    if not good:
        sys.exit("bench_torch: results differ where the table says NO")


if __name__ == "__main__":
    main()
