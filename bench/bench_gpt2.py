"""A training step of GPT-2 124M in PyTorch, with and without `orchard.enable()`.

    python bench/bench_gpt2.py [--steps 8] [--length 1024] [--layers 12] [--dropout 0 0.1]
                               [--malloc default|keeps|returns]
                               [--gelu gelu_new|gelu_pytorch_tanh]

Random weights and tokens, B=1, fp32, fused AdamW, Transformers' model with "sdpa" attention. Each
kind of step has a process of its own, as a user's would be; they take turns, and turns at being
first, so that what other tenants do to the machine meets both alike. "ratio" is the best time
without over the best time with Orchard, "median" that of the ratios of two neighbouring steps.
Prints markdown.

A step allocates and frees gigabytes. What glibc's malloc gives back, the system must map and clear
again: by luck a second of a step's time and hundreds of MiB of its peak. `--malloc keeps` lets it
keep everything, `--malloc returns` give back every larger block at once: the peak is what is used.
"""

import argparse
import ctypes
import datetime
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

# mallopt's parameters in glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
MALLOC = {"default": {}, "keeps": {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1},
          "returns": {M_MMAP_THRESHOLD: 1 << 16}}


# ---- A process that trains -----------------------------------------------------------------------

def peak():
    """MiB. On Linux not getrusage: after fork and exec it still tells the parent's peak."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20
    with open("/proc/self/status", encoding="ascii") as lines:
        line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def train(dropout, with_orchard, options):
    """Makes a step for each line that it reads; answers with seconds, loss and peak memory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import orchard

    for setting, value in MALLOC[options.malloc].items():
        if not ctypes.CDLL(None).mallopt(setting, value):
            sys.exit(f"bench_gpt2: malloc does not take {setting}={value}")
    torch.manual_seed(1)
    # Only attention has dropout: the rest is the same work for both.
    config = GPT2Config(attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
                        n_layer=options.layers, n_positions=options.length,
                        activation_function=options.gelu)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").train()
    tokens = torch.randint(config.vocab_size, (1, options.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if with_orchard:
        orchard.enable()
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(json.dumps([time.perf_counter() - start, loss.item(), peak()]), flush=True)


# ---- The command ---------------------------------------------------------------------------------

def step(process):
    process.stdin.write("step\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"bench_gpt2: the training process ended with {process.wait()}")
    return json.loads(answer)


def compare(dropout, options):
    """Seconds of each step, the last loss and the peak, without and with Orchard."""
    sides = [subprocess.Popen([sys.executable, *sys.argv, "--train",
                               json.dumps([dropout, with_orchard])],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
             for with_orchard in (False, True)]
    answers = [[], []]
    for turn in range(options.steps + 1):
        for at in (turn % 2, 1 - turn % 2):
            answers[at].append(step(sides[at]))
    for process in sides:
        process.stdin.close()
        process.wait()
    return [([seconds for seconds, _, _ in taken[1:]], *taken[-1][1:]) for taken in answers]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--gelu", choices=("gelu_new", "gelu_pytorch_tanh"), default="gelu_new")
    parser.add_argument("--malloc", choices=MALLOC, default="default")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*json.loads(options.train), options)
        return
    print(f"{datetime.date.today()}, torch {version('torch')}, Transformers "
          f"{version('transformers')}, Orchard {version('orchard')}; "
          f"`python {' '.join(sys.argv)}`\n")
    print("| GPT-2 124M step, B=1 | attention dropout | torch s | Orchard s | ratio | median | "
          "loss torch / Orchard | peak MiB torch / Orchard |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for dropout in options.dropout:
        (plain, plain_loss, plain_peak), (ours, our_loss, our_peak) = compare(dropout, options)
        pairs = statistics.median(a / b for a, b in zip(plain, ours))
        print(f"| T={options.length} fp32 | {dropout} | {min(plain):.3f} | {min(ours):.3f} | "
              f"{min(plain) / min(ours):.2f} | {pairs:.2f} | {plain_loss:.5f} / {our_loss:.5f} | "
              f"{plain_peak:.0f} / {our_peak:.0f} |", flush=True)


main()
