"""Second order: the explicit formula of attention's gradients, in differentiable torch operations.

Only `create_graph=True` followed by a second backward comes here. Unlike the fused kernels this
takes memory for several [B,H,T,S] matrices. The formula is that of src/attention/README.md; sums
are in fp32 (fp64 for fp64), as in the kernels. Packed sequences are padded first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

import torch

Maybe = Optional[torch.Tensor]
ORDER = ("dout", "dlse", "q", "k", "v", "bias", "sinks")  # what the gradients are functions of


class Options(NamedTuple):
    """The numbers of the op's schema, in its order."""

    max_t: int
    max_s: int
    scale: Optional[float]
    causal: bool
    bottom_right: bool
    window_left: int
    window_right: int
    softcap: float
    dropout: float


# ---- Dropout -------------------------------------------------------------------------------------

def _multiply(a: int, b: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * b: in halves of b, so that int64 holds every step."""
    part = a * (b & 0xFFFF)
    rest = a * (b >> 16) + (part >> 16)
    return rest >> 16, ((rest & 0xFFFF) << 16) | (part & 0xFFFF)


def philox(seed: int, rows: torch.Tensor, queries: torch.Tensor,
           keys: torch.Tensor) -> torch.Tensor:
    """The word of Philox4x32-10 that attention.h gives to (row = b*H + h, query, key)."""
    low = 0xFFFFFFFF
    key = [seed & low, (seed >> 32) & low]
    word = [keys // 4, queries, rows, torch.zeros_like(keys)]
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, word[0])
        high1, low1 = _multiply(0xCD9E8D57, word[2])
        word = [high1 ^ word[1] ^ key[0], low1, high0 ^ word[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    words = torch.stack(torch.broadcast_tensors(*word))
    return words.gather(0, (keys % 4).expand(words.shape[1:])[None])[0]


def keep(seed: torch.Tensor, dropout: float, batch: int, heads: int, length_t: int,
         length_s: int) -> torch.Tensor:
    """Which probabilities dropout keeps: bool [B,H,T,S]."""
    rows = torch.arange(batch * heads).view(batch, heads, 1, 1)
    words = philox(int(seed), rows, torch.arange(length_t).view(-1, 1), torch.arange(length_s))
    return words >= int(dropout * 2.0 ** 32 + 0.5)


# ---- What each query sees ------------------------------------------------------------------------

class Packing:
    """Rows of packed sequences [total,...] to a padded batch [n,longest,...] and back."""

    def __init__(self, cu_seqlens: torch.Tensor, longest: int) -> None:
        self.lengths = cu_seqlens.diff()
        place = torch.arange(longest)
        self.valid = place < self.lengths[:, None]
        self.rows = torch.where(self.valid, cu_seqlens[:-1, None] + place, 0)

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[total,H,...] to [n,H,longest,...], 0 where a sequence has ended."""
        padded = packed[self.rows].transpose(1, 2)
        valid = self.valid[:, None, :]
        return torch.where(valid.view(*valid.shape, *[1] * (padded.dim() - 3)), padded, 0)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return padded.transpose(1, 2)[self.valid]


class Scene(NamedTuple):
    """All that is constant: who sees whom and where, what dropout keeps."""

    seen: torch.Tensor            # bool, broadcasts to [B,H,T,S]
    penalty: Maybe                # ALiBi's, to be subtracted
    factor: Maybe                 # dropout's: 0 or 1 / (1 - p)
    scale: float
    softcap: float


def _scene(q, k, mask, alibi, key_lengths, seed, lengths_t, lengths_s, options, dtype) -> Scene:
    batch, heads, length_t, size = q.shape
    length_s = k.shape[2]
    if key_lengths is not None:
        lengths_s = key_lengths
    queries, keys = torch.arange(length_t)[:, None], torch.arange(length_s)
    at = queries
    if options.bottom_right:
        ends_t = length_t if lengths_t is None else lengths_t.view(-1, 1, 1, 1)
        ends_s = length_s if lengths_s is None else lengths_s.view(-1, 1, 1, 1)
        at = queries + (ends_s - ends_t)
    seen = torch.ones(1, 1, length_t, length_s, dtype=torch.bool)
    if options.causal:
        seen = seen & (keys <= at)
    if options.window_left >= 0:
        seen = seen & (keys >= at - options.window_left)
    if options.window_right >= 0:
        seen = seen & (keys <= at + options.window_right)
    if lengths_s is not None:
        seen = seen & (keys < lengths_s.view(-1, 1, 1, 1))
    if mask is not None:
        seen = seen & mask
    penalty = factor = None
    if alibi is not None:
        penalty = alibi.to(dtype).view(-1, heads, 1, 1) * (at - keys).abs()
    if options.dropout > 0:
        kept = keep(seed, options.dropout, batch, heads, length_t, length_s)
        factor = kept.to(dtype) * (1 / (1 - options.dropout) if options.dropout < 1 else 0.0)
    scale = size ** -0.5 if options.scale is None else options.scale
    return Scene(seen, penalty, factor, scale, options.softcap)


# ---- The formula ---------------------------------------------------------------------------------

def _padded_gradients(scene: Scene, dout, dlse, q, k, v, bias, sinks):
    """dq, dk, dv, dscore and dsinks for [B,H,T,...] tensors with as many key heads as heads."""
    score, slope = scene.scale * (q @ k.mT), 1.0
    if scene.softcap:
        bent = torch.tanh(score / scene.softcap)
        score, slope = scene.softcap * bent, 1 - bent * bent
    if scene.penalty is not None:
        score = score - scene.penalty
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~scene.seen, float("-inf"))
    top = score.detach().amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach().view(-1, 1, 1))
    top = torch.where(top.isinf(), 0.0, top)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        share = torch.exp(sinks.view(-1, 1, 1) - top)
        total = total + share
    total = torch.where(total == 0, 1.0, total)  # a query without keys: all 0, not NaN
    weight = weight / total
    inner, kept = dout @ v.mT, weight
    if scene.factor is not None:
        inner, kept = inner * scene.factor, weight * scene.factor
    delta = (weight * inner).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    dscore = weight * (inner - delta)
    dproduct = scene.scale * dscore * slope
    dsinks = None if sinks is None else -(share / total * delta).sum((0, 2, 3))
    return dproduct @ k, dproduct.mT @ q, kept.mT @ dout, dscore, dsinks


def _gradients(tensors, options: Options, dout, dlse, q, k, v, bias, sinks):
    """All five gradients in the layout and dtype of their inputs."""
    _, _, _, _, mask, alibi, _, key_lengths, cu_q, cu_k, seed = tensors
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    given = [None if x is None else x.to(dtype) for x in (dout, dlse, q, k, v, bias, sinks)]
    dout_, dlse_, q_, k_, v_, bias_, sinks_ = given
    lengths_t = lengths_s = None
    if cu_q is not None:
        packing_t, packing_s = Packing(cu_q, options.max_t), Packing(cu_k, options.max_s)
        lengths_t, lengths_s = packing_t.lengths, packing_s.lengths
        dout_, q_ = packing_t.pad(dout_), packing_t.pad(q_)
        dlse_ = None if dlse_ is None else packing_t.pad(dlse_)
        k_, v_ = packing_s.pad(k_), packing_s.pad(v_)
    batch, heads = q_.shape[:2]
    groups = k_.shape[1]
    scene = _scene(q_, k_, mask, alibi, key_lengths, seed, lengths_t, lengths_s, options, dtype)
    repeat = heads // groups
    dq, dk, dv, dscore, dsinks = _padded_gradients(
        scene, dout_, dlse_, q_, k_.repeat_interleave(repeat, 1), v_.repeat_interleave(repeat, 1),
        bias_, sinks_)
    dk, dv = (x.view(batch, groups, repeat, *x.shape[2:]).sum(2) for x in (dk, dv))
    if cu_q is not None:
        dq, dk, dv = packing_t.pack(dq), packing_s.pack(dk), packing_s.pack(dv)
    dbias = None if bias is None else dscore.sum_to_size(bias.shape).to(bias.dtype)
    dsinks = None if sinks is None else dsinks.to(sinks.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, dsinks


def backward(needs: int, cotangents: Sequence[Maybe], dout: torch.Tensor, dlse: Maybe,
             tensors: Sequence[Maybe], options: Sequence) -> Tuple[Maybe, ...]:
    """Given d/d(dq ... dsinks), the derivatives by dout, dlse, q, k, v, bias and sinks."""
    inputs = (dout, dlse, tensors[0], tensors[1], tensors[2], tensors[3], tensors[6])
    present = [i for i, x in enumerate(inputs) if x is not None]
    wanted = [i for i in range(5) if needs >> i & 1 and cotangents[i] is not None]
    if not wanted or not all(x.numel() for x in tensors[:3]):
        return tuple(None if x is None else torch.zeros_like(x) for x in inputs)

    def gradients(*given):
        full = [None] * len(inputs)
        for i, x in zip(present, given):
            full[i] = x
        made = _gradients(tensors, Options(*options), *full)
        return tuple(made[i] for i in wanted)

    with torch.autocast(dout.device.type, enabled=False):
        _, pull = torch.func.vjp(gradients, *[inputs[i] for i in present])
        found = pull(tuple(cotangents[i] for i in wanted))
    result: list = [None] * len(inputs)
    for i, x in zip(present, found):
        result[i] = x
    return tuple(result)
