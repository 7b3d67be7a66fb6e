"""Masks of your own: what to pass, what it costs, and that it is right.

    python examples/custom_mask.py --length 512

orchard.torch.scaled_dot_product_attention takes torch's arguments and more. A mask that can be
said in numbers (causal, window, key lengths) costs no memory at all; one that cannot is a bool
tensor, of size 1 wherever it repeats itself; a learned bias gets its gradient. Every call below is
compared with the plain formula in float64.
"""

import argparse
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from orchard.torch import scaled_dot_product_attention


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v over the keys that are seen; float64, the whole matrix."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.double()
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512)
    length = parser.parse_args().length
    torch.manual_seed(0)
    batch, heads, size = 2, 4, 32
    q, k, v = (torch.randn(batch, heads, length, size, requires_grad=True) for _ in range(3))
    row, column = torch.arange(length)[:, None], torch.arange(length)[None, :]
    lengths = torch.tensor([length, length // 2])
    prefix = length // 4
    bias = torch.randn(1, heads, 1, length, requires_grad=True)  # learned, one number per key

    # A prefix that everybody sees, causal after it: not to be said in numbers, so a bool tensor,
    # the same for every batch element and head.
    prefix_seen = (column <= row) | (column < prefix)
    calls: Dict[str, Dict[str, Any]] = {
        "causal, window of 64": dict(is_causal=True, window=(63, 0)),
        "causal, padded batch": dict(is_causal=True, key_lengths=lengths),
        "prefix, then causal": dict(attn_mask=prefix_seen[None, None]),
        "causal, learned bias": dict(is_causal=True, bias=bias),
    }
    seen = {
        "causal, window of 64": (column <= row) & (column > row - 64),
        "causal, padded batch": (column <= row) & (column < lengths[:, None, None, None]),
        "prefix, then causal": prefix_seen,
        "causal, learned bias": column <= row,
    }
    weight = torch.randn(batch, heads, length, size)
    for name, options in calls.items():
        leaves = [q, k, v] + ([bias] if "bias" in options else [])
        out = scaled_dot_product_attention(q, k, v, **options)
        gradients = torch.autograd.grad((out * weight).sum(), leaves)
        right = formula(q, k, v, seen[name], options.get("bias"))
        right_gradients = torch.autograd.grad((right * weight).sum(), leaves)
        worst = max(float((have - want).detach().abs().max()) for have, want in
                    zip([out, *gradients], [right, *right_gradients]))
        mask = options.get("attn_mask")
        print(f"{name:<22} mask of {0 if mask is None else mask.numel():7} bytes, "
              f"largest deviation of output and gradients {worst:.1e}")
        if worst > 1e-3:
            raise SystemExit(f"{name}: wrong")


if __name__ == "__main__":
    main()
