"""Orchard's norms, activations and softmax beside PyTorch's, in one process, interleaved.

    .venv/bin/python bench/compare_ops.py [--rows WORD] [--seconds S] [--dtypes float32,bfloat16]

Prints a markdown table (of bench/results.md): the best time of each in microseconds and torch's
over Orchard's, forward with gradients recorded, as in training, and autograd.grad alone on a kept
graph. Values and gradients are compared, and a difference is a failure. For torch held to AVX2 set
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 before it starts.

Needs the package, as compare_torch.py does.
"""

import argparse
import time

import torch
import torch.nn.functional as F

import orchard.torch as ours


def rows():
    """(name, Orchard's function, torch's, shapes of the tensors, all of which get gradients)"""
    wide, model, inner = (1024, 768), (768,), (1024, 3072)
    yield ("layer_norm", lambda x, w, b: ours.layer_norm(x, model, w, b),
           lambda x, w, b: F.layer_norm(x, model, w, b), (wide, model, model))
    yield ("residual + layer_norm",
           lambda x, r, w, b: ours.layer_norm(x, model, w, b, residual=r)[0],
           lambda x, r, w, b: F.layer_norm(x + r, model, w, b), (wide, wide, model, model))
    yield ("rms_norm", lambda x, w: ours.rms_norm(x, model, w),
           lambda x, w: F.rms_norm(x, model, w), (wide, model))
    yield ("residual + rms_norm", lambda x, r, w: ours.rms_norm(x, model, w, residual=r)[0],
           lambda x, r, w: F.rms_norm(x + r, model, w), (wide, wide, model))
    yield "gelu", ours.gelu, F.gelu, (inner,)
    yield ("gelu tanh", lambda x: ours.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"),
           (inner,))
    yield ("bias + gelu tanh", lambda x, b: ours.gelu(x, "tanh", bias=b),
           lambda x, b: F.gelu(x + b, approximate="tanh"), (inner, (3072,)))
    yield "silu", ours.silu, F.silu, (inner,)
    yield "relu2", ours.relu2, lambda x: F.relu(x).square(), (inner,)
    yield "swiglu", ours.swiglu, lambda g, u: F.silu(g) * u, (inner, inner)
    yield "geglu", ours.geglu, lambda g, u: F.gelu(g) * u, (inner, inner)
    yield ("softmax", lambda x: ours.softmax(x, -1), lambda x: F.softmax(x, -1), (inner,))
    yield ("log_softmax", lambda x: ours.log_softmax(x, -1), lambda x: F.log_softmax(x, -1),
           (inner,))
    yield ("softmax 256x50257", lambda x: ours.softmax(x, -1), lambda x: F.softmax(x, -1),
           ((256, 50257),))
    yield ("softmax of dim 1, 64x128x256", lambda x: ours.softmax(x, 1), lambda x: F.softmax(x, 1),
           ((64, 128, 256),))


def once(call):
    start = time.perf_counter()
    made = call()
    return time.perf_counter() - start, made


def best(calls, seconds):
    """The best time of each, in turn."""
    found = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            found[i] = min(found[i], once(call)[0])
    return found


def close(name, mine, theirs, dtype):
    bound = (2e-5 if dtype == torch.float32 else 2e-2) * max(1, float(theirs.abs().max()))
    off = float((mine.float() - theirs.float()).abs().max())
    assert off <= bound, f"{name}: off by {off}"


def measure(name, mine, theirs, shapes, dtype, seconds):
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    made = [call(*inputs) for call in (theirs, mine)]
    dout = torch.randn(made[0].shape).to(dtype)
    backward = [lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True)
                for out in made]
    close(name, made[1], made[0], dtype)
    for ours_is, torchs in zip(backward[1](), backward[0]()):
        close(name + " gradient", ours_is, torchs, dtype)
    forward = best([lambda: theirs(*inputs), lambda: mine(*inputs)], seconds)
    back = best(backward, seconds)
    cells = [f"{1e6 * forward[0]:.0f}", f"{1e6 * forward[1]:.0f}", f"{forward[0] / forward[1]:.2f}",
             f"{1e6 * back[0]:.0f}", f"{1e6 * back[1]:.0f}", f"{back[0] / back[1]:.2f}"]
    print(f"| {name} | {str(dtype).removeprefix('torch.')} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("| operation | dtype | torch forward, us | Orchard | ratio | torch backward, us "
          "| Orchard | ratio |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, mine, theirs, shapes in rows():
        for dtype in options.dtypes.split(","):
            if options.rows in name:
                measure(name, mine, theirs, shapes, getattr(torch, dtype), options.seconds)


if __name__ == "__main__":
    main()
