"""Attention on MPS tensors: shall Orchard's kernels do it, or PyTorch itself?

The question is asked once, before the forward, for forward and backward together: gradients of a
fused forward need its own backward, so that a kernel which does not compile must be known in time.
A refusal is counted (`orchard.report()`); with ORCHARD_STRICT=1 it is an error instead.

`inputs` and `options` have the names of the C struct orchard_attention.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Tuple

import torch

from . import mps
from .outputs import new_gradients, new_outputs

# What PyTorch's scaled_dot_product_attention has no word for.
NO_WORD = ("softcap", "sinks", "cu_seqlens_q")

# Not F.scaled_dot_product_attention, which `orchard.enable()` leads back here.
_PYTORCH = torch._C._nn.scaled_dot_product_attention


def _meta(like: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Shape and strides without memory."""
    return None if like is None else torch.empty_strided(like.shape, like.stride(),
                                                         dtype=like.dtype, device="meta")


def _refusal_of_backward(launcher: mps.Launcher, inputs: mps.Operands, options: Mapping[str, Any],
                         needs: int, out: torch.Tensor, lse: torch.Tensor,
                         count: bool) -> Optional[str]:
    made = new_gradients(needs, *(_meta(inputs.get(n)) for n in ("q", "k", "v", "bias", "sinks")))
    # Without dlse: the kernels are the same with it.
    operands = mps.backward_operands(needs, inputs, _meta(out), None, out, lse, made)
    return launcher.supported("attention_backward", operands, options, check_lengths=False,
                              count=count)


def refusal(launcher: mps.Launcher, inputs: mps.Operands, options: Mapping[str, Any],
            needs: int = 0, *, check_lengths: bool = False, count: bool = True) -> Optional[str]:
    """None: the launcher takes the forward, and the backward for the gradients of `needs` (bits as
    in outputs.py). Otherwise why not; counted. Raises where the call is wrong; the numbers of
    lengths are looked at only if asked for."""
    asked = (needs, tuple(options.items()), tuple(
        (name, x.dtype, x.shape, x.stride(), x.storage_offset())
        for name, x in inputs.items() if x is not None))
    if not check_lengths and asked in launcher.agreed:
        return None
    packed = inputs.get("cu_seqlens_q") is not None
    q, v = _meta(inputs["q"]), _meta(inputs["v"])
    out = lse = None
    if q.dim() == v.dim() == (3 if packed else 4):
        out, lse = new_outputs(q, v, packed)
    reason = launcher.supported("attention_forward", dict(inputs, out=out, lse=lse), options,
                                check_lengths=check_lengths, count=count)
    if reason is None and needs:
        reason = _refusal_of_backward(launcher, inputs, options, needs, out, lse, count)
    if reason is None:
        launcher.agree(asked)
    return reason


def _visible(inputs: Mapping[str, Optional[torch.Tensor]], options: Mapping[str, Any]
             ) -> Tuple[Optional[torch.Tensor], torch.Tensor]:
    """[B or 1, 1, T, S]: which keys causal, window and lengths let a query see (None: all), and how
    far apart the two stand."""
    q, k = inputs["q"], inputs["k"]
    T, S = q.shape[-2], k.shape[-2]
    lengths = inputs.get("key_lengths")
    j = torch.arange(S, device=q.device)
    position = torch.arange(T, device=q.device)[:, None]
    ends = S if lengths is None else lengths.reshape(-1, 1, 1, 1)
    if options.get("align"):
        position = position + (ends - T)
    seen = None if lengths is None else j < ends
    conditions = []
    if options.get("causal"):
        conditions.append(j <= position)
    if options.get("has_window") and options["window_left"] >= 0:
        conditions.append(j >= position - options["window_left"])
    if options.get("has_window") and options["window_right"] >= 0:
        conditions.append(j <= position + options["window_right"])
    for condition in conditions:
        seen = condition if seen is None else seen & condition
    return seen, (position - j).abs()


def fall_back(inputs: Mapping[str, Optional[torch.Tensor]], options: Mapping[str, Any]
              ) -> torch.Tensor:
    """`out` by torch.nn.functional.scaled_dot_product_attention, differentiable by PyTorch's rules.
    Dropout draws PyTorch's random numbers, not those of the seed."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    only_causal = options.get("causal") and not (
        options.get("align") or options.get("has_window")
        or any(inputs.get(n) is not None for n in ("bias", "mask", "alibi", "key_lengths")))
    mask: Optional[torch.Tensor] = None
    if not only_causal:
        seen, apart = _visible(inputs, options)
        given = inputs.get("mask")
        if given is not None:
            seen = given if seen is None else seen & given
        mask = inputs.get("bias")
        if inputs.get("alibi") is not None:
            slopes = inputs["alibi"].reshape(-1, q.shape[1], 1, 1) * -apart
            mask = slopes if mask is None else mask + slopes
        if mask is not None:
            mask = (mask if seen is None else mask.masked_fill(~seen, float("-inf"))).to(q.dtype)
        else:
            mask = seen
    return _PYTORCH(
        q, k, v, attn_mask=mask, dropout_p=options.get("dropout", 0.0), is_causal=bool(only_causal),
        scale=options["scale"] if options.get("has_scale") else None,
        enable_gqa=q.shape[1] != k.shape[1])


def _strict() -> bool:
    return os.environ.get("ORCHARD_STRICT", "") not in ("", "0")


def instead(with_lse: bool, needs: int, *arguments: Any) -> Optional[torch.Tensor]:
    """None: Orchard's kernels take the call. Otherwise `out` by PyTorch's own operation, or an
    UnsupportedError that says why there is none. Arguments as in the ops' schemas."""
    inputs, options = mps.named(*arguments)
    inputs = {name: x if x is None else x.resolve_neg() for name, x in inputs.items()}
    options.pop("seed", None)  # the answer is the same for all of them, and kept
    reason = refusal(mps.launcher, inputs, options, needs)
    if reason is None:
        return None
    op = "attention_forward"
    if _strict():
        raise mps.refused(op, reason, " and strict forbids a fallback")
    missing = [name for name in NO_WORD if options.get(name) or inputs.get(name) is not None]
    if with_lse or missing:
        raise mps.refused(op, reason, " and PyTorch's own attention has no "
                          + (missing[0] if missing else "lse"))
    if inputs["key_lengths"] is not None:  # PyTorch would not say that one is wrong
        refusal(mps.launcher, inputs, options, check_lengths=True, count=False)
    out = fall_back(inputs, options)
    mps.launcher.count(op, None, "pytorch")
    return out
