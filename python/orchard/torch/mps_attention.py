"""Attention on MPS tensors: shall the launcher do it, or PyTorch itself?

The question is asked once, before the forward, for forward and backward together: gradients of a
fused forward need its own backward, so that a kernel which does not compile must be known in time.

    reason = refusal(launcher, inputs, options, gradients)
    if reason is None: ...                      # launcher.run, forward and backward
    else: out = fall_back(inputs, options)      # PyTorch's own operation and its own autograd

`inputs` and `options` have the names of the C struct orchard_attention.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

import torch

from .mps import Launcher, Unsupported

# What PyTorch's scaled_dot_product_attention has no word for.
NO_WORD = ("softcap", "sinks", "cu_seqlens_q")


def _meta(like: torch.Tensor, shape: Optional[Tuple[int, ...]] = None,
          dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    return torch.empty(like.shape if shape is None else shape, dtype=dtype or like.dtype,
                       device="meta")


def refusal(launcher: Launcher, inputs: Mapping[str, Optional[torch.Tensor]],
            options: Mapping[str, Any], gradients: Iterable[str] = (), *,
            check_lengths: bool = True) -> Optional[str]:
    """None: the launcher takes the forward, and the backward for gradients of these inputs ("q",
    "bias", ...). Otherwise why not; counted."""
    q, v = inputs["q"], inputs["v"]
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _meta(q, q.shape[:-1] + v.shape[-1:])
    lse = _meta(q, q.shape[:-1], sums)
    forward: Dict[str, Optional[torch.Tensor]] = dict(inputs, out=out, lse=lse)
    reason = launcher.supported("attention_forward", forward, options, check_lengths=check_lengths)
    wanted = {"d" + name: _meta(inputs[name]) for name in gradients}  # type: ignore[arg-type]
    if reason is not None or not wanted:
        return reason
    backward = dict(forward, dout=_meta(out), dlse=_meta(lse), **wanted)
    return launcher.supported("attention_backward", backward, options, check_lengths=False)


def _visible(inputs: Mapping[str, Optional[torch.Tensor]], options: Mapping[str, Any]
             ) -> Tuple[Optional[torch.Tensor], torch.Tensor]:
    """[B or 1, 1, T, S]: which keys causal, window and lengths let a query see (None: all), and how
    far apart the two stand."""
    q, k = inputs["q"], inputs["k"]
    T, S = q.shape[-2], k.shape[-2]
    lengths = inputs.get("key_lengths")
    j = torch.arange(S, device=q.device)
    position = torch.arange(T, device=q.device)[:, None]
    ends = S if lengths is None else lengths.view(-1, 1, 1, 1)
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
    Dropout draws PyTorch's random numbers, not those of the seed. Unsupported: PyTorch has no such
    operation."""
    for name in NO_WORD:
        if options.get(name) or inputs.get(name) is not None:
            raise Unsupported("attention_forward", f"and PyTorch's own attention has no {name}")
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if q.dim() == 3:
        headed = {name: x.unsqueeze(1) if x.dim() == 3 else x  # bias and mask may have a head
                  for name, x in inputs.items() if x is not None}
        return fall_back(headed, options).squeeze(1)
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
            slopes = inputs["alibi"].view(-1, q.shape[1], 1, 1) * -apart
            mask = slopes if mask is None else mask + slopes
        if mask is not None:
            mask = (mask if seen is None else mask.masked_fill(~seen, float("-inf"))).to(q.dtype)
        else:
            mask = seen
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=options.get("dropout", 0.0), is_causal=bool(only_causal),
        scale=options["scale"] if options.get("has_scale") else None,
        enable_gqa=q.shape[1] != k.shape[1])
