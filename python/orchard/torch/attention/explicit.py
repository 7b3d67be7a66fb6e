"""The explicit formula of attention and of its derivatives, in differentiable torch operations.

Three come here: `create_graph=True` followed by a second backward; forward mode; and calls on mps
that Orchard's kernels refuse and PyTorch's own attention has no word for. Unlike the fused kernels
this takes memory for several [B,H,T,S] matrices. The formula is that of src/attention/README.md;
sums are in fp32 (fp64 for fp64), as in the kernels. Packed sequences are padded first.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple, Optional, Sequence, Tuple, Union

import torch

from ..transforms import no_autocast, pull
from .operands import (ALIBI, BIAS, CU_SEQLENS_K, CU_SEQLENS_Q, KEY_LENGTHS, MASK, SEED, SINKS, K,
                       Q, V)

Maybe = Optional[torch.Tensor]


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


def philox(seed: torch.Tensor, rows: torch.Tensor, queries: torch.Tensor,
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
    """Which probabilities dropout keeps: bool [B,H,T,S], on the CPU, whose integers of 64 bits are
    exact in every operation."""
    rows = torch.arange(batch * heads, device="cpu").view(batch, heads, 1, 1)
    queries = torch.arange(length_t, device="cpu").view(-1, 1)
    words = philox(seed.cpu(), rows, queries, torch.arange(length_s, device="cpu"))
    return words >= int(dropout * 2.0 ** 32 + 0.5)


class Keep(torch.autograd.Function):
    """`keep` under vmap, where each sample may have a seed: what the kernels drew for it. `joined`
    says whether the samples were one batch there, with the first one's seed (batching.py)."""

    @staticmethod
    def forward(seed, dropout, batch, heads, length_t, length_s, joined):
        return keep(seed, dropout, batch, heads, length_t, length_s)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, seed, dropout, batch, heads, length_t, length_s, joined):
        count, rest = info.batch_size, (heads, length_t, length_s, joined)
        seeds = seed.movedim(in_dims[0], 0)
        if not count:
            return Keep.apply(seeds.sum(0), dropout, batch, *rest)[None][:0], 0
        if joined:
            made = Keep.apply(seeds[0], dropout, count * batch, *rest)
            return made.unflatten(0, (count, batch)), 0
        return torch.stack([Keep.apply(one, dropout, batch, *rest) for one in seeds.unbind()]), 0


# ---- What each query sees ------------------------------------------------------------------------

class Packing:
    """Rows of packed sequences [total,...] to a padded batch [n,longest,...] and back. No size
    depends on the numbers: vmap may give each sample its own."""

    def __init__(self, cu_seqlens: torch.Tensor, longest: int, total: int) -> None:
        self.lengths = cu_seqlens.diff()
        place = torch.arange(longest, device=cu_seqlens.device)
        self.valid = place < self.lengths[:, None]
        self.rows = torch.where(self.valid, cu_seqlens[:-1, None] + place, 0)
        row = torch.arange(total, device=cu_seqlens.device)
        self.sequence = (row[:, None] >= cu_seqlens[1:]).sum(-1)
        self.place = row - cu_seqlens[self.sequence]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[total,H,...] to [n,H,longest,...], 0 where a sequence has ended."""
        if not packed.shape[0]:  # whose row 0 stands in for the missing; cat keeps the history
            packed = torch.cat((packed, packed.new_zeros(1, *packed.shape[1:])))
        padded = packed[self.rows].transpose(1, 2)
        valid = self.valid[:, None, :]
        return torch.where(valid.view(*valid.shape, *[1] * (padded.dim() - 3)), padded, 0)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return padded.transpose(1, 2)[self.sequence, self.place]


def hide(seen: torch.Tensor, *tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Keys or values [B,G,S,...] with 0 in place of those that no query of their batch element
    sees: they may hold anything, and 0 * NaN is NaN. `seen` broadcasts to [B,H,T,S]."""
    seen = seen[(None,) * (4 - seen.dim())]
    shown = seen.any(2).any(1)[:, None, :, None]
    return tuple(torch.where(shown, x, 0) for x in tensors)


def not_left_out(seen: Maybe, bias: Maybe) -> Maybe:
    """`seen` without the pairs that a bias of -inf leaves out; None: all are seen."""
    if bias is None:
        return seen
    finite = bias != float("-inf")
    return finite if seen is None else seen & finite


class Scene(NamedTuple):
    """All that is constant: who sees whom and where, what dropout keeps."""

    seen: torch.Tensor            # bool, broadcasts to [B,H,T,S]
    penalty: Maybe                # ALiBi's, to be subtracted
    factor: Maybe                 # dropout's: 0 or 1 / (1 - p)
    scale: float
    softcap: float


def visible(length_t: int, length_s: int, device: torch.device, causal: bool, bottom_right: bool,
            window_left: int, window_right: int, lengths_t: Maybe, lengths_s: Maybe
            ) -> Tuple[Maybe, torch.Tensor, torch.Tensor]:
    """(seen, at, keys): bool, which keys causal, window and lengths let a query see (None: all),
    and the places of queries and keys; all broadcast to [B,1,T,S]."""
    at = torch.arange(length_t, device=device)[:, None]
    keys = torch.arange(length_s, device=device)
    if bottom_right:
        ends_t, ends_s = (longest if lengths is None else lengths.view(-1, 1, 1, 1)
                          for longest, lengths in ((length_t, lengths_t), (length_s, lengths_s)))
        at = at + (ends_s - ends_t)
    conditions = []
    if causal:
        conditions.append(keys <= at)
    if window_left >= 0:
        conditions.append(at - keys <= window_left)  # no sum: it may be 2^63 - 1
    if window_right >= 0:
        conditions.append(keys - at <= window_right)
    if lengths_s is not None:
        conditions.append(keys < lengths_s.view(-1, 1, 1, 1))
    return reduce(torch.logical_and, conditions) if conditions else None, at, keys


def _scene(q, k, tensors, lengths_t, lengths_s, options, dtype) -> Scene:
    """For q [B,H,T,D] and k [B,G,S,D]; `tensors` are the op's, which say the rest."""
    device, mask, alibi, key_lengths = q.device, tensors[MASK], tensors[ALIBI], tensors[KEY_LENGTHS]
    batch, heads, length_t, size = q.shape
    length_s = k.shape[2]
    if key_lengths is not None:  # of a packed sequence, at most what it has
        lengths_s = key_lengths if lengths_s is None else torch.minimum(lengths_s, key_lengths)
    seen, at, keys = visible(length_t, length_s, device, options.causal, options.bottom_right,
                             options.window_left, options.window_right, lengths_t, lengths_s)
    if mask is not None:
        seen = mask if seen is None else seen & mask
    if seen is None:
        seen = torch.ones(length_t, length_s, dtype=torch.bool, device=device)
    penalty = factor = None
    if alibi is not None:
        penalty = alibi.to(dtype)[..., None, None] * (at - keys).abs()
    if options.dropout > 0:
        joined = tensors[SINKS] is None and tensors[CU_SEQLENS_Q] is None
        kept = Keep.apply(tensors[SEED], options.dropout, batch, heads, length_t, length_s, joined)
        gain = 1 / (1 - options.dropout) if options.dropout < 1 else 0.0
        factor = kept.to(device).to(dtype) * gain
    scale = size ** -0.5 if options.scale is None else options.scale
    return Scene(seen, penalty, factor, scale, options.softcap)


# ---- The formula ---------------------------------------------------------------------------------

class Laid(NamedTuple):
    """A call in the precision of its sums, [B,H,T,D] and [B,G,S,D|E]."""

    scene: Scene
    packing_t: Optional[Packing]
    packing_s: Optional[Packing]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: Maybe
    sinks: Maybe
    shown: torch.Tensor           # bool, broadcasts to [B,H,T,S]: the pairs that count
    fully_masked: torch.Tensor    # bool, to [B,H,T,1]: queries that see no key, holding anything

    def repeated(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """k and v with as many heads as q."""
        return self.repeat(self.k), self.repeat(self.v)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        """[B,G,...] as [B,H,...]."""
        return x.repeat_interleave(self.group(), 1)

    def group(self) -> int:
        """How many heads of q share one of k."""
        return self.q.shape[1] // max(self.k.shape[1], 1)  # there may be none of either


def _sums(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide(x: Maybe, dtype: torch.dtype, packing: Optional[Packing] = None) -> Maybe:
    """In the precision of sums, padded."""
    if x is None:
        return None
    x = x.to(dtype)
    return x if packing is None else packing.pad(x)


def _lay(tensors, options: Options, q, k, v, bias, sinks) -> Laid:
    dtype = _sums(q)
    packing_t = packing_s = lengths_t = lengths_s = None
    if tensors[CU_SEQLENS_Q] is not None:
        packing_t = Packing(tensors[CU_SEQLENS_Q], options.max_t, q.shape[0])
        packing_s = Packing(tensors[CU_SEQLENS_K], options.max_s, k.shape[0])
        lengths_t, lengths_s = packing_t.lengths, packing_s.lengths
    q, k, v = (_wide(x, dtype, p) for x, p in ((q, packing_t), (k, packing_s), (v, packing_s)))
    scene = _scene(q, k, tensors, lengths_t, lengths_s, options, dtype)
    bias = _wide(bias, dtype)
    shown = not_left_out(scene.seen, bias)
    fully_masked = ~shown.any(-1, keepdim=True)
    return Laid(scene, packing_t, packing_s, torch.where(fully_masked, 0, q), *hide(shown, k, v),
                bias, _wide(sinks, dtype), shown, fully_masked)


class Softmax(NamedTuple):
    """[B,H,T,S] each, but for lse [B,H,T]."""

    weight: torch.Tensor          # before dropout
    slope: Union[float, torch.Tensor]  # of the soft cap; 1 without
    sink: Maybe                   # what the sinks take of each query's softmax
    lse: torch.Tensor
    lse_rest: torch.Tensor        # what lse lost when it was rounded


def _softmax(laid: Laid, k: torch.Tensor) -> Softmax:
    scene, sinks = laid.scene, laid.sinks
    score, slope = scene.scale * (laid.q @ k.mT), 1.0
    if scene.softcap:
        bent = torch.tanh(score / scene.softcap)
        score, slope = scene.softcap * bent, 1 - bent * bent
    if scene.penalty is not None:
        score = score - scene.penalty
    if laid.bias is not None:
        score = score + laid.bias
    score = score.masked_fill(~laid.shown, float("-inf"))  # and no gradient passes there
    top = (score.detach().amax(-1, keepdim=True) if score.shape[-1]
           else score.new_full((*score.shape[:-1], 1), float("-inf")))
    share = None
    if sinks is not None:
        sinks = sinks.view(-1, 1, 1)
        whole = sinks == float("inf")  # it takes all: lse is the sink, and moves with it
        top = torch.where(whole, sinks, torch.maximum(top, sinks.detach()))
    top = torch.where(top == float("-inf"), 0.0, top)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        share = torch.exp(torch.where(whole, 0.0, sinks - top))
        total = total + share
    fully_masked = total == 0
    total = torch.where(fully_masked, 1.0, total)  # a query without keys: all 0, not NaN
    logarithm = torch.log(total)
    lse = torch.where(fully_masked, float("-inf"), top + logarithm)
    return Softmax(weight / total, slope, None if share is None else share / total,
                   lse.squeeze(-1), _rest(lse.detach(), top, logarithm.detach()).squeeze(-1))


def _rest(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a + b has beyond `total`, its rounded sum (Knuth's TwoSum); 0 where that is infinite."""
    of_b = total - a
    rest = (a - (total - of_b)) + (b - of_b)
    return torch.where(rest.isfinite(), rest, 0.0)


def forward(tensors: Sequence[Maybe], options: Sequence
            ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, lse_rest) of attention_forward_rest, differentiable by PyTorch but for the last;
    the arguments of its schema."""
    q, k, v = tensors[:3]
    with no_autocast(q):
        laid = _lay(tensors, Options(*options), q, k, v, tensors[BIAS], tensors[SINKS])
        k, v = laid.repeated()
        made = _softmax(laid, k)
        factor = laid.scene.factor
        out = (made.weight if factor is None else made.weight * factor) @ v
        out = torch.where(laid.fully_masked, 0, out)  # whatever its gradient is
        found = out, made.lse, made.lse_rest
        if laid.packing_t is not None:
            found = tuple(laid.packing_t.pack(x) for x in found)
        return (found[0].to(q.dtype), *found[1:])


def tangents(tensors: Sequence[Maybe], options: Sequence, dq: Maybe, dk: Maybe, dv: Maybe,
             dbias: Maybe, dsinks: Maybe) -> Tuple[torch.Tensor, torch.Tensor]:
    """(dout, dlse): how out and lse change with q, k, v, bias and sinks, to first order; None: that
    one does not change. Differentiable by PyTorch as `forward` is."""
    q, k, v = tensors[:3]
    with no_autocast(q):
        laid = _lay(tensors, Options(*options), q, k, v, tensors[BIAS], tensors[SINKS])
        scene, dtype = laid.scene, laid.q.dtype
        k, v = laid.repeated()
        weight, slope, sink = _softmax(laid, k)[:3]
        dq, dbias, dsinks = (_wide(x, dtype, packing) for x, packing in (
            (dq, laid.packing_t), (dbias, None), (dsinks, None)))
        dk, dv = (x if x is None else
                  laid.repeat(hide(laid.shown, _wide(x, dtype, laid.packing_s))[0])
                  for x in (dk, dv))
        # Not laid.q.new_zeros(()), to which nothing can be added where vmap has no samples.
        dproduct = torch.zeros((), dtype=dtype, device=q.device)
        if dq is not None:
            dproduct = dproduct + torch.where(laid.fully_masked, 0, dq) @ k.mT
        if dk is not None:
            dproduct = dproduct + laid.q @ dk.mT
        dscore = scene.scale * dproduct * slope
        if dbias is not None:
            dscore = dscore + dbias
        dscore = torch.where(laid.shown, dscore, 0.0)  # a hidden pair's may be NaN
        dlse = (weight * dscore).sum(-1, keepdim=True)
        if dsinks is not None:
            dlse = dlse + sink * dsinks.view(-1, 1, 1)
        dweight = weight * (dscore - dlse)
        if scene.factor is not None:
            weight, dweight = weight * scene.factor, dweight * scene.factor
        dout, dlse = dweight @ v, dlse.squeeze(-1)
        if dv is not None:
            dout = dout + weight @ dv
        dout = torch.where(laid.fully_masked, 0, dout)
        if laid.packing_t is not None:
            dout, dlse = laid.packing_t.pack(dout), laid.packing_t.pack(dlse)
        return dout.to(q.dtype), dlse


def _of_larger(laid: Laid, own: torch.Tensor, lse: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """(larger, share), [B,H,T,1]: whether a row's lse is that of a softmax over more keys than
    there are here (ring attention), and what part of it the keys here are; none if lse is -inf."""
    rounding = 4 * torch.finfo(lse.dtype).eps * torch.minimum(lse.abs(), own.abs())
    same = (lse == own) | ((lse - own).abs() <= rounding)
    if laid.packing_t is not None:
        same = same | ~laid.packing_t.valid[:, None, :]
    part = torch.where(lse == float("-inf"), 0.0, torch.exp(own - lse))
    return ~same[..., None], torch.where(same, 1.0, part)[..., None]


def gradients(tensors: Sequence[Maybe], options: Sequence, dout: torch.Tensor, dlse: Maybe,
              q, k, v, bias, sinks,
              known: Optional[Tuple[torch.Tensor, torch.Tensor]] = None) -> Tuple[Maybe, ...]:
    """dq, dk, dv, dbias and dsinks in the layout and dtype of their inputs; q ... sinks are those
    among `tensors`, or what a transform has put in their places. `known`: (out, lse), which may be
    those of a larger softmax; without it they are made of the inputs."""
    laid = _lay(tensors, Options(*options), q, k, v, bias, sinks)
    scene = laid.scene
    out, lse = known or (None, None)
    dout, dlse, out, lse = (_wide(x, laid.q.dtype, laid.packing_t) for x in (dout, dlse, out, lse))
    if lse is not None:  # of -inf: the larger softmax saw nothing
        fully_masked = laid.fully_masked | (lse == float("-inf"))[..., None]
        laid = laid._replace(q=torch.where(fully_masked, 0, laid.q), fully_masked=fully_masked)
    shown_dout = torch.where(laid.fully_masked, 0, dout)
    k_, v_ = laid.repeated()
    weight, slope, sink, own, _ = _softmax(laid, k_)
    inner = shown_dout @ v_.mT
    if scene.factor is not None:
        inner = inner * scene.factor
    delta = (weight * inner).sum(-1, keepdim=True)
    if lse is not None:
        larger, share = _of_larger(laid, own, lse)
        product = torch.where(laid.fully_masked & (out == 0), 0, dout * out)
        delta = torch.where(larger, product.sum(-1, keepdim=True), delta)
        weight, sink = weight * share, sink if sink is None else sink * share
    kept = weight if scene.factor is None else weight * scene.factor
    if dlse is not None:
        delta = delta - dlse[..., None]
    dscore = weight * (inner - torch.where(laid.fully_masked, 0, delta))
    dproduct = scene.scale * dscore * slope
    # What is 0 whatever the inputs are passes no gradient on: it might be NaN.
    dq = torch.where(laid.fully_masked, 0, dproduct @ k_)
    dk, dv = (x.view(x.shape[0], laid.k.shape[1], laid.group(), *x.shape[2:]).sum(2)
              for x in hide(laid.shown, dproduct.mT @ laid.q, kept.mT @ shown_dout))
    if laid.packing_t is not None:
        dq, dk, dv = laid.packing_t.pack(dq), laid.packing_s.pack(dk), laid.packing_s.pack(dv)
    dbias = None
    if bias is not None:
        dbias = torch.where(laid.shown, dscore, 0).sum_to_size(bias.shape).to(bias.dtype)
    dsinks = None
    if sinks is not None:
        dsinks = -(sink * torch.where(sink == 0, 0, delta)).sum((0, 2, 3)).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, dsinks


def second_order(needs: int, cotangents: Sequence[Maybe], dout: torch.Tensor, dlse: Maybe,
                 tensors: Sequence[Maybe], options: Sequence) -> Tuple[Maybe, ...]:
    """Given d/d(dq ... dsinks), the derivatives by dout, dlse, q, k, v, bias and sinks."""
    inputs = (dout, dlse, *(tensors[place] for place in (Q, K, V, BIAS, SINKS)))
    present = [i for i, x in enumerate(inputs) if x is not None]
    wanted = [i for i in range(5) if needs >> i & 1 and cotangents[i] is not None]
    if not wanted:
        return tuple(None if x is None else torch.zeros_like(x) for x in inputs)

    def of(*given):
        full = [None] * len(inputs)
        for i, x in zip(present, given):
            full[i] = x
        made = gradients(tensors, options, *full)
        return tuple(made[i] for i in wanted)

    with no_autocast(dout):
        found = pull(of, [inputs[i] for i in present], tuple(cotangents[i] for i in wanted))
    result: list = [None] * len(inputs)
    for i, x in zip(present, found):
        result[i] = x
    return tuple(result)
