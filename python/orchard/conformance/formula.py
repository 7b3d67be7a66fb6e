"""The reference: attention with every step written out, nothing fused, any precision.

    s = scale * q_i . k_j                    then, each where it is given and in this order:
    s = softcap * tanh(s / softcap)          soft cap
    s = s - slope * |p(i) - j|               ALiBi
    s = s + bias                             additive mask
    (i,j) is left out                        boolean mask, causal, window, key lengths
    lse_i = log(sum_j exp(s_ij) + exp(sink)) the sink joins the denominator only
    out_i = sum_j keep_ij exp(s_ij - lse_i) v_j

p(i) is i (top-left) or i + S - T (bottom-right, S being the batch element's key length). A query
that sees no key has out 0 and gradients 0. Run in float64 this is the truth; run in the tensors'
own dtype it is what a plain implementation achieves, and the error bar is made from it.
"""

from __future__ import annotations

import math
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

# Plain implementations differ in where they put the scale and in which order they sum.
VARIANTS = ("split", "scores", "reversed")


def positions(t: int, s: int, align: str, lengths: Optional[Tensor], device) -> Tensor:
    """p(i) as [B or 1, 1, T, 1]."""
    row = torch.arange(t, device=device).view(1, 1, t, 1)
    if align == "top_left":
        return row
    last = torch.tensor([s], device=device) if lengths is None else lengths.to(device).long()
    return row + (last - t).view(-1, 1, 1, 1)


def visible(t: int, s: int, device, *, mask: Optional[Tensor] = None, causal: bool = False,
            align: str = "top_left", window: Optional[Tuple[int, int]] = None,
            lengths: Optional[Tensor] = None) -> Tensor:
    """Which query may see which key, broadcastable to [B,H,T,S]."""
    place = positions(t, s, align, lengths, device)
    key = torch.arange(s, device=device).view(1, 1, 1, s)
    seen = torch.ones(1, 1, t, s, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (key <= place)
    if window is not None:
        left, right = window
        if left >= 0:
            seen = seen & (key >= place - left)
        if right >= 0:
            seen = seen & (key <= place + right)
    if lengths is not None:
        seen = seen & (key < lengths.to(device).view(-1, 1, 1, 1))
    return seen if mask is None else seen & mask


def attention(q: Tensor, k: Tensor, v: Tensor, *, sinks: Optional[Tensor] = None,
              keep: Optional[Tensor] = None, variant: str = "scores",
              **options) -> Tuple[Tensor, Tensor]:
    """(out [B,H,T,E], lse [B,H,T]) for q [B,H,T,D], k [B,G,S,D], v [B,G,S,E].

    `keep` is dropout's multiplier: 0 where a probability was dropped, 1 / (1 - p) elsewhere.
    """
    score = scores(q, k, variant=variant, **options)
    v = grouped(v, q.shape[1])
    if variant == "reversed":
        score, v = score.flip(-1), v.flip(2)
        keep = None if keep is None else keep.flip(-1)
    weight, lse = softmax(score, sinks)
    return (weight if keep is None else weight * keep) @ v, lse


def grouped(x: Tensor, heads: int) -> Tensor:
    """Key head g stands for the query heads g * H/G and the ones after it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def scores(q: Tensor, k: Tensor, *, mask: Optional[Tensor] = None, bias: Optional[Tensor] = None,
           causal: bool = False, align: str = "top_left",
           window: Optional[Tuple[int, int]] = None, scale: Optional[float] = None,
           softcap: Optional[float] = None, alibi: Optional[Tensor] = None,
           lengths: Optional[Tensor] = None, variant: str = "scores") -> Tensor:
    """The score of every query and key, [B,H,T,S]; -inf where a query may not see."""
    heads, t, s = q.shape[1], q.shape[2], k.shape[2]
    k = grouped(k, heads)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    if variant == "split" and scale > 0:
        root = math.sqrt(scale)
        score = (q * root) @ (k * root).transpose(-1, -2)
    else:
        score = scale * (q @ k.transpose(-1, -2))
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if alibi is not None:
        key = torch.arange(s, device=q.device).view(1, 1, 1, s)
        far = (positions(t, s, align, lengths, q.device) - key).abs().to(score.dtype)
        score = score - alibi.view(-1, heads, 1, 1) * far
    if bias is not None:
        score = score + bias
    seen = visible(t, s, q.device, mask=mask, causal=causal, align=align, window=window,
                   lengths=lengths)
    return score.masked_fill(~seen, -math.inf)


def softmax(score: Tensor, sinks: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """(probabilities, lse). A row of nothing but -inf has probabilities 0 and lse -inf."""
    if score.shape[-1] == 0:
        top = score.new_full(score.shape[:-1], -math.inf)
    else:
        top = score.detach().amax(-1)
    if sinks is not None:
        sink = sinks.view(1, -1, 1).expand(top.shape)
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    weight = torch.exp(score - top.unsqueeze(-1))
    total = weight.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    fully_masked = total == 0
    total = torch.where(fully_masked, torch.ones_like(total), total)
    lse = torch.where(fully_masked, torch.full_like(total, -math.inf), top + torch.log(total))
    return weight / total.unsqueeze(-1), lse


def roundings(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Optional[Tensor], *,
              unit: float, out_unit: float, sinks: Optional[Tensor] = None,
              keep: Optional[Tensor] = None, **options) -> Dict[str, Tensor]:
    """What one rounding of each term may cost each answer at most.

    Gradients are sums of P (dP - delta), where dP and delta may nearly cancel: a plain
    implementation that happens not to take the difference is exact by luck, and its error says
    nothing about what is fair to ask. So every term is given one rounding (`unit`), and what is
    stored between forward and backward one of its dtype (`out_unit`); a score's own terms make its
    exponential uncertain in proportion.
    """
    heads, groups = q.shape[1], k.shape[1]
    score = scores(q, k, **options)
    weight, lse = softmax(score, sinks)
    weight = weight.nan_to_num(nan=0.0)
    kept = weight if keep is None else weight * keep
    k, v = grouped(k, heads).abs(), grouped(v, heads).abs()
    scale = options.get("scale")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else abs(scale)
    terms = scale * (q.abs() @ k.transpose(-1, -2))
    rest = (score.abs() - terms).nan_to_num(posinf=0.0)      # bias and ALiBi
    terms = 1.0 + terms + torch.where(rest < 1e3, rest.clamp(min=0.0), torch.zeros_like(rest))
    log = lse.abs().nan_to_num(posinf=0.0)
    terms = terms + torch.where(log < 1e3, log, torch.zeros_like(log)).unsqueeze(-1)
    dout = dout.abs()
    delta = (dout * (kept @ v)).sum(-1) * (1.0 + out_unit / unit)
    if dlse is not None:
        delta = delta + dlse.abs()
    ds = terms * (kept * (dout @ v.transpose(-1, -2)) + weight * delta.unsqueeze(-1))
    found = {"out": (kept * terms) @ v, "lse": terms.amax(-1) if terms.shape[-1] else log,
             "dq": scale * (ds @ k), "dk": folded(scale * (ds.transpose(-1, -2) @ q.abs()), groups),
             "dv": folded((kept * terms).transpose(-1, -2) @ dout, groups), "ds": ds}
    if sinks is not None:
        share = torch.exp(sinks.view(1, -1, 1) - lse)
        found["dsinks"] = (share * (2.0 + log) * delta).sum((0, 2))
    return {name: unit * x for name, x in found.items()}


def folded(x: Tensor, groups: int) -> Tensor:
    """The sum over the query heads of each key head."""
    return x.unflatten(1, (groups, -1)).sum(2) if x.shape[1] != groups else x
