#!/usr/bin/env python3
"""Peak memory of attention in training, forward and backward: Orchard, and torch's two ways.

    .venv/bin/python bench/bench_memory.py [--lengths 4096,16384,65536]

One head of 64 in fp32, 2 threads, a process for each cell. What counts is how far the process's
resident peak rises above what it was with the inputs in place. "fused" is torch's CPU kernel, which
stores no matrix either; "formula" is what torch runs where it has no fused backward: on MPS always,
on the CPU with dropout. A cell that would not fit in this machine's memory is left out."""
import argparse
import os
import resource
import subprocess
import sys

WAYS = ("orchard", "fused", "formula")


def peak():
    """In bytes; Linux counts in KiB."""
    counted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return counted if sys.platform == "darwin" else counted * 1024


def measure(way, length):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import orchard.torch

    torch.set_num_threads(2)
    kernels = SDPBackend.MATH if way == "formula" else SDPBackend.FLASH_ATTENTION
    call = torch.nn.functional.scaled_dot_product_attention
    if way == "orchard":
        call = orchard.torch.scaled_dot_product_attention

    def step(n):
        inputs = [torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3)]
        upstream = torch.randn(1, 1, n, 64)
        before = peak()
        with sdpa_kernel(kernels):
            call(*inputs, is_causal=True).backward(upstream)
        return peak() - before

    step(64)  # loads what a first call loads
    return step(length)


def fits(way, length):
    """The formula holds about six matrices at once."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return way != "formula" or 6 * 4 * length * length < 0.8 * memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,16384,65536")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(options.measure[0], int(options.measure[1])))
        return
    print("| tokens | Orchard, MiB | torch fused, MiB | torch formula, MiB |")
    print("| --- | --- | --- | --- |")
    for length in map(int, options.lengths.split(",")):
        cells = []
        for way in WAYS:
            if not fits(way, length):
                cells.append("does not fit")
                continue
            told = subprocess.run([sys.executable, __file__, "--measure", way, str(length)],
                                  stdout=subprocess.PIPE, text=True, check=True).stdout
            cells.append(f"{int(told) / 2**20:.0f}")
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
