"""The operands of attention's ops, to the C library's structs."""

from __future__ import annotations

from typing import Optional

import torch

from ... import _structs
from ..._exports import check_storage
from ..._library import DtypeError
from ..tensors import describe

TENSORS = 11  # how many of the arguments that the ops share are tensors: q ... seed
Q, K, V, BIAS, MASK, ALIBI, SINKS, KEY_LENGTHS, CU_SEQLENS_Q, CU_SEQLENS_K, SEED = range(TENSORS)


def new_seed(dropout: float) -> Optional[torch.Tensor]:
    """From torch's generator: torch.manual_seed repeats a run. 63 bits: torch's integers are
    signed."""
    return None if dropout == 0.0 else torch.randint(2 ** 63 - 1, (), device="cpu")


def without_options(scale: Optional[float], causal: bool, seed: Optional[torch.Tensor] = None,
                    dropout: float = 0.0) -> tuple:
    """What stands behind q, k, v in the ops' schemas, where there is nothing but these."""
    return (None,) * 7 + (seed, 0, 0, scale, causal, False, -1, -1, 0.0, dropout)


def attention(target: _structs.Attention, op: str, q: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, bias: Optional[torch.Tensor], mask: Optional[torch.Tensor],
              alibi: Optional[torch.Tensor], sinks: Optional[torch.Tensor],
              key_lengths: Optional[torch.Tensor], cu_seqlens_q: Optional[torch.Tensor],
              cu_seqlens_k: Optional[torch.Tensor], seed: Optional[torch.Tensor], max_t: int,
              max_s: int, scale: Optional[float], causal: bool, bottom_right: bool,
              window_left: int, window_right: int, softcap: float, dropout: float) -> None:
    """Fills the struct that forward and backward share; parameters as in the ops' schemas."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias), ("mask", mask),
                         ("alibi", alibi), ("sinks", sinks), ("key_lengths", key_lengths),
                         ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        describe(getattr(target, name), tensor, op, name)
    target.max_t, target.max_s = max_t, max_s
    if scale is not None:
        target.has_scale, target.scale = 1, scale
    target.causal, target.align = causal, bottom_right
    target.has_window = 1
    target.window_left, target.window_right = window_left, window_right
    target.softcap, target.dropout = softcap, dropout
    if seed is not None:
        if seed.dtype != torch.int64 or seed.dim():
            raise DtypeError("attention: seed must be one int64")
        check_storage(op, "seed", seed)
        target.seed = int(seed)
