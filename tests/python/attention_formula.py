"""Attention written out in PyTorch, as include/orchard/attention.h defines it: the judge of tests.

Every step is a PyTorch operation on the CPU, gradients are autograd's. `dtype` is what the formula
is computed in: float64 for the truth, a tensor's own type for what plain PyTorch would make of it.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple

import numpy as np
import torch


# ---- Dropout: Philox4x32-10, as Random123 has it ------------------------------------------------

def philox(counter: np.ndarray, key: Tuple[int, int]) -> np.ndarray:
    """Four words for each counter of four words (last dimension)."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [np.uint64(key[0]), np.uint64(key[1])]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> high) ^ c[1] ^ k[0], b & low, (a >> high) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1)


def keep_mask(B: int, H: int, T: int, S: int, dropout: float, seed: int, offset: int = 0
              ) -> torch.Tensor:
    """[B,H,T,S]: which probabilities stay."""
    blocks = (S + 3) // 4
    counter = np.zeros((B, H, T, blocks, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(blocks)
    counter[..., 1] = np.arange(T)[:, None]
    counter[..., 2] = (np.arange(B)[:, None] * H + np.arange(H))[:, :, None, None]
    counter[..., 3] = offset
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(B, H, T, -1)[..., :S]
    return torch.from_numpy(words >= np.uint64(round(dropout * 2**32)))


# ---- Attention -----------------------------------------------------------------------------------

def visible(B: int, T: int, S: int, options: Dict[str, Any],
            key_lengths: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """[B,1,T,S]: what ranges let a query see; and |p(i) - j| for ALiBi."""
    lengths = key_lengths.cpu().long() if key_lengths is not None else torch.full((B,), S)
    j = torch.arange(S)
    shift = (lengths - T if options.get("align", 0) else torch.zeros(B, dtype=torch.long))
    position = torch.arange(T)[None, :, None] + shift[:, None, None]
    seen = (j < lengths[:, None, None]).expand(B, T, S)
    if options.get("causal"):
        seen = seen & (j <= position)
    if options.get("has_window"):
        left, right = options["window_left"], options["window_right"]
        seen = seen & ((j >= position - left) if left >= 0 else True)
        seen = seen & ((j <= position + right) if right >= 0 else True)
    return seen[:, None], (position - j).abs()[:, None]


def attention(inputs: Dict[str, Optional[torch.Tensor]], options: Dict[str, Any],
              dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    """out [B,H,T,E] and lse [B,H,T] of CPU tensors in [B,H,T,D]."""
    q, k, v = (inputs[name].to(dtype) for name in ("q", "k", "v"))
    B, H, T, D = q.shape
    G, S = k.shape[1:3]
    k, v = (x.repeat_interleave(H // G, dim=1) if G else x for x in (k, v))
    scale = options["scale"] if options.get("has_scale") else 1 / math.sqrt(D)
    s = (q @ k.transpose(-1, -2)) * scale
    if options.get("softcap"):
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    seen, distance = visible(B, T, S, options, inputs.get("key_lengths"))
    if inputs.get("alibi") is not None:
        s = s - inputs["alibi"].to(dtype).view(-1, H, 1, 1) * distance.to(dtype)
    if inputs.get("bias") is not None:
        s = s + inputs["bias"].to(dtype)
    if inputs.get("mask") is not None:
        seen = seen & inputs["mask"]
    s = s.masked_fill(~seen, -math.inf)
    if inputs.get("sinks") is not None:
        s = torch.cat([s, inputs["sinks"].to(dtype).view(1, H, 1, 1).expand(B, H, T, 1)], dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))[..., :S]
    if options.get("dropout"):
        kept = keep_mask(B, H, T, S, options["dropout"], options["seed"],
                         options.get("dropout_offset", 0))
        p = torch.where(kept, p / (1 - options["dropout"]), torch.zeros_like(p))
    return p @ v, lse
