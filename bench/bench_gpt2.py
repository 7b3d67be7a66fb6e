"""A training step of GPT-2 124M in PyTorch, with and without `orchard.enable()`.

    python bench/bench_gpt2.py [--steps 8] [--length 1024] [--layers 12] [--dropout 0 0.1]

Random weights and tokens, B=1, fp32, AdamW, the model of Transformers with "sdpa" attention. The two
kinds of step take turns in one process, and turns at being first; "ratio" is the best time without
over the best time with Orchard, "median" that of the ratios of two neighbouring steps: what other
tenants do to the machine meets both alike. Peak memory is measured in a process of its own for each.
Prints markdown.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import orchard


def make(dropout, options):
    """The model and its tokens. Only attention has dropout: the rest is the same work for both."""
    torch.manual_seed(1)
    config = GPT2Config(attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0,
                        n_layer=options.layers, n_positions=options.length, use_cache=False)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").train()
    return model, torch.randint(config.vocab_size, (1, options.length))


def step(model, optimizer, tokens):
    """Seconds of one step, and its loss."""
    start = time.perf_counter()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start, loss.item()


def compare(dropout, options):
    """Seconds of each step and the last loss, without and with Orchard: two models that take turns."""
    sides = []
    for _ in range(2):
        model, tokens = make(dropout, options)
        sides.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens, [], []))
    for turn in range(options.steps + 1):
        for at in (turn % 2, 1 - turn % 2):
            model, optimizer, tokens, times, losses = sides[at]
            with orchard.enable() if at else contextlib.nullcontext():
                taken, loss = step(model, optimizer, tokens)
            times.append(taken)
            losses.append(loss)
    return [(times[1:], losses[-1]) for *_, times, losses in sides]


def peak(dropout, with_orchard, options):
    """Peak memory in MiB of a process that makes two steps."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", json.dumps([dropout, with_orchard]),
         "--length", str(options.length), "--layers", str(options.layers)],
        check=True, capture_output=True, text=True)
    return float(done.stdout)


def own_peak():
    """MiB. Not getrusage: after fork and exec it still tells the parent's peak."""
    with open("/proc/self/status", encoding="ascii") as lines:
        line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def print_peak(dropout, with_orchard, options):
    model, tokens = make(dropout, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if with_orchard:
        orchard.enable()
    for _ in range(2):
        step(model, optimizer, tokens)
    print(own_peak())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(*json.loads(options.peak), options)
        return
    print(f"{datetime.date.today()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"Orchard {orchard.version()}; `python bench/bench_gpt2.py`\n")
    print("| GPT-2 124M step, B=1 | attention dropout | torch s | Orchard s | ratio | median | "
          "loss torch / Orchard | peak MiB torch / Orchard |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dropout in options.dropout:
        (plain, plain_loss), (ours, our_loss) = compare(dropout, options)
        memory = [peak(dropout, with_orchard, options) for with_orchard in (False, True)]
        pairs = statistics.median(a / b for a, b in zip(plain, ours))
        print(f"| T={options.length} fp32 | {dropout} | {min(plain):.3f} | {min(ours):.3f} | "
              f"{min(plain) / min(ours):.2f} | {pairs:.2f} | {plain_loss:.5f} / {our_loss:.5f} | "
              f"{memory[0]:.0f} / {memory[1]:.0f} |", flush=True)


main()
