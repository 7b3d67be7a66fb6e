"""Is Metal really there? Asked by running a small attention on it, not by looking for names."""

from __future__ import annotations

import functools
from typing import Optional

import torch

from orchard.torch.attention import mps_attention
from orchard.torch.mps import storage_is_shared

__all__ = ["probe", "storage_is_shared", "why_not"]


def why_not() -> Optional[str]:
    """None if attention, forward and backward, runs on Metal and is right; else the reason."""
    if not torch.backends.mps.is_available():
        built = torch.backends.mps.is_built()
        return ("there is no Metal device (torch.backends.mps.is_available() is False)" if built
                else "this torch was built without MPS, so there is no Metal")
    try:
        return probed("mps")
    except Exception as why:
        return f"attention on mps does not work: {type(why).__name__}: {why}"


def probe(device: str) -> Optional[str]:
    """A small training step there and on the CPU: None if Orchard's kernels ran it, not PyTorch's
    operations in their place, and the two agree."""
    with torch.inference_mode(False), torch.enable_grad():
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            return _step(device)


probed = functools.lru_cache(maxsize=None)(probe)  # keeps answers, not errors


def _step(device: str) -> Optional[str]:
    from orchard.torch import scaled_dot_product_attention
    results = []
    mps_attention.last.refusal = None
    for where in ("cpu", device):
        random = torch.Generator("cpu").manual_seed(1)
        q, k, v, dout = (torch.randn(1, 2, 9, 16, generator=random, device="cpu").to(where)
                         for _ in range(4))
        leaves = [x.requires_grad_(True) for x in (q, k, v)]
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = torch.autograd.grad(out, leaves, dout)
        results.append([x.detach().cpu() for x in (out, *grads)])
    if mps_attention.last.refusal is not None:
        return mps_attention.last.refusal
    for name, right, found in zip(("out", "dq", "dk", "dv"), *results):
        apart = (right - found).abs().max().item()
        if not apart <= 1e-4:
            return f"{name} on {device} is off by {apart:.3g}"
    return None
