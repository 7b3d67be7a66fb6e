"""The public function: torch's own arguments and more, to the ops' arguments."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Optional, Sequence, Tuple, Union, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..._library import ArgumentError, DtypeError, OrchardError, ShapeError, UnsupportedError
from ..._shown import shown
from .. import checks, cpu, tracing
from ..checks import INTEGER
from ..tracing import observed
from . import autograd, explicit, mps_attention, operands, ops, outputs

ALIGNMENTS = {"top_left": False, "bottom_right": True}


# ---- Checks that the C library cannot make -------------------------------------------------------

_check_tensor = partial(checks.check_tensor, "attention", first="query")
_check_number = partial(checks.check_number, "attention")
_check_flag = partial(checks.check_flag, "attention")


def _check_alignment(alignment: object) -> bool:
    """Whether it is at the bottom right."""
    if not isinstance(alignment, str) or alignment not in ALIGNMENTS:
        raise ArgumentError(f"attention: causal_alignment is {shown(alignment)}, must be "
                            '"top_left" or "bottom_right"')
    return ALIGNMENTS[alignment]


def _check_window(window: object) -> Tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(f"attention: window is {shown(window)}, must be (left, right)")
    left, right = (-1 if side is None else _check_number("window", side, INTEGER)
                   for side in window)
    return left, right


def _check_options(device: torch.device, alibi_slopes, sinks, key_lengths, scale, softcap,
                   window) -> Tuple[Optional[float], int, int, float]:
    """scale, window's two sides and softcap as the op takes them."""
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks),
                         ("key_lengths", key_lengths)):
        if tensor is not None:
            _check_tensor(name, tensor, device)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("attention: alibi_slopes requires a gradient, which Orchard does "
                               "not compute; detach it")
    if scale is not None:
        scale = _check_number("scale", scale)
    softcap = 0.0 if softcap is None else _check_number("softcap", softcap)
    left, right = (-1, -1) if window is None else _check_window(window)
    return scale, left, right, softcap


def _check_packed(cu_q: object, cu_k: object, max_t: object, max_s: object,
                  device: torch.device) -> Tuple[int, int]:
    """max_t and max_s as the op takes them."""
    max_t = _check_number("max_seqlen_q", max_t, INTEGER)
    max_s = _check_number("max_seqlen_k", max_s, INTEGER)
    for name, tensor in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if tensor is not None:
            _check_tensor(name, tensor, device)
    return max_t, max_s


def _check_causal_bias(mask: CausalBias, q: Tensor, k: Tensor) -> None:
    """Of one aligned at the lower right torch makes a mask, which must fit."""
    want = (q.size(-2), k.size(-2))
    if (mask.seq_len_q, mask.seq_len_kv) != want:
        raise ShapeError(f"attention: attn_mask is causal_lower_right({mask.seq_len_q}, "
                         f"{mask.seq_len_kv}), there are {want[0]} queries and {want[1]} keys")


# ---- Shapes --------------------------------------------------------------------------------------

def _fold(tensor: Tensor) -> Tensor:
    """[...,H,T,D] as [B,H,T,D]."""
    rank = tensor.dim()
    if rank < 4:
        return tensor[(None,) * (4 - rank)]
    return tensor if rank == 4 else tensor.flatten(0, rank - 4)


def _fold_scores(name: str, tensor: Tensor, leading: Tuple[int, ...]) -> Tensor:
    """A mask [...,H,T,S], some leading dimensions missing, as [1 or B,H,T,S]; sizes of 1 stay."""
    extra, rank = len(leading), tensor.dim()
    if rank > max(extra, 1) + 3:
        raise ShapeError(f"attention: {name} has {rank} dimensions, the query {extra + 3}")
    if extra <= 1:
        return tensor if rank == 4 else tensor[(None,) * (4 - rank)]
    tensor = tensor[(None,) * (extra + 3 - rank)]
    if all(size == 1 for size in tensor.shape[:extra]):
        return tensor.flatten(0, extra - 1)
    try:
        return tensor.expand(*leading, *tensor.shape[extra:]).flatten(0, extra - 1)
    except RuntimeError:
        raise ShapeError(f"attention: {name} has shape {list(tensor.shape)}, the query's batch is "
                         f"{list(leading)}") from None


def _match_batches(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Repeats batches of size 1 as torch does."""
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise ShapeError(f"attention: query, key and value have {q.dim()}, {k.dim()} and "
                         f"{v.dim()} dimensions, must be at least 2")
    rank = max(q.dim(), k.dim(), v.dim(), 3)
    q, k, v = (x[(None,) * (rank - x.dim())] for x in (q, k, v))
    try:
        leading = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        raise ShapeError(f"attention: query {list(q.shape)}, key {list(k.shape)} and value "
                         f"{list(v.shape)} have batches that do not fit together") from None
    return tuple(x.expand(*leading, *x.shape[-3:]) for x in (q, k, v))


def _match_heads(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Without enable_gqa: one head is repeated as torch does, other groups are an error."""
    heads, key_heads, value_heads = q.shape[-3], k.shape[-3], v.shape[-3]
    if key_heads != value_heads and (key_heads == 1 or value_heads == 1):
        key_heads = value_heads if key_heads == 1 else key_heads
        k, v = (x.expand(*x.shape[:-3], key_heads, -1, -1) for x in (k, v))
    if heads != key_heads and key_heads != 1:
        if heads != 1:
            raise ShapeError(f"attention: key has {key_heads} heads, query has {heads}; grouped "
                             "heads are used only with enable_gqa=True")
        q = q.expand(*q.shape[:-3], key_heads, -1, -1)
    return q, k, v


def _fold_all(q: Tensor, k: Tensor, v: Tensor, gqa: bool):
    """q, k, v in four dimensions, and the batch dimensions that became one."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.size(0) == k.size(0) == v.size(0)):
        q, k, v = _match_batches(q, k, v)
    if not gqa and not q.size(-3) == k.size(-3) == v.size(-3):
        q, k, v = _match_heads(q, k, v)
    leading = q.shape[:-3]
    if len(leading) != 1:
        q, k, v = _fold(q), _fold(k), _fold(v)
    return q, k, v, leading


def _fold_packed(q: Tensor, k: Tensor, v: Tensor, gqa: bool):
    """The same for packed sequences, whose heads come second; masks have one batch dimension."""
    if not gqa and q.dim() == k.dim() == v.dim() == 3:
        matched = _match_heads(*(x.transpose(0, 1) for x in (q, k, v)))
        q, k, v = (x.transpose(0, 1) for x in matched)
    return q, k, v, (1,)


def _unfold(tensor: Tensor, leading: Tuple[int, ...], rank: int) -> Tensor:
    """A result of the op as torch shapes it: `rank` is the largest of the operands'."""
    if rank > 4:
        return tensor.unflatten(0, leading)
    return tensor[0] if rank == 3 else tensor[0, 0] if rank == 2 else tensor


def _beside(q: Tensor, operand: Optional[Tensor]) -> Optional[Tensor]:
    """What is added to scores, float32, widened where the query is float64."""
    if operand is not None and q.dtype == torch.float64 and operand.dtype == torch.float32:
        return operand.double()
    return operand


def _split_mask(attn_mask: Optional[Tensor], bias: Optional[Tensor], q: Tensor,
                leading: Tuple[int, ...]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """(mask, bias): what is bool and what is added, in four dimensions."""
    for name, tensor in (("attn_mask", attn_mask), ("bias", bias)):
        if tensor is not None:
            _check_tensor(name, tensor, q.device)
    mask, name = None, "bias"
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            mask = _fold_scores("attn_mask", attn_mask, leading)
        elif bias is not None:
            raise ArgumentError("attention: attn_mask is not bool and bias is given too: add the "
                                "two, or make attn_mask bool")
        else:
            bias, name = attn_mask, "attn_mask"
    if bias is not None:
        if not bias.is_floating_point():
            raise DtypeError(f"attention: {name} is {bias.dtype}, must be "
                             f"{'bool or ' if name == 'attn_mask' else ''}floating")
        bias = _fold_scores(name, _beside(q, bias), leading)
    return mask, bias


# ---- The call ------------------------------------------------------------------------------------

def _transformed() -> bool:
    """Whether torch.func or forward AD looks on. Compiled code would silently lose what they ask
    for, so it refuses; without fullgraph, torch.compile then runs the call uncompiled."""
    found = tracing.functorch_active() or tracing.forward_mode()
    if found and tracing.compiling():
        raise UnsupportedError(autograd.NOT_COMPILED)
    return found


def _unrecorded(arguments: tuple) -> Tuple[Tensor, Tensor]:
    """(out, lse) under no_grad within torch.func's transforms. A Function would be recorded all the
    same by all but the innermost; tangents no_grad does not stop."""
    if tracing.forward_mode():
        return explicit.forward(arguments[:operands.TENSORS], arguments[operands.TENSORS:])[:2]
    return ops.forward(*arguments)


def attention(with_lse: bool, q, k, v, bias, mask, alibi, sinks,
              *rest) -> Tuple[Tensor, Optional[Tensor]]:
    """(out, lse) for arguments in the order of the op's schema, by the right Function or op."""
    if _transformed():
        arguments = q, k, v, bias, mask, alibi, sinks, *rest
        if tracing.functorch_active() and not torch.is_grad_enabled():
            return _unrecorded(arguments)
        return autograd.Attention.apply(*arguments)[:2]
    needs = outputs.needed(q, k, v, bias, sinks) if torch.is_grad_enabled() else 0
    if tracing.recording_graph() or (needs and tracing.compiling()):
        return ops.differentiable(q, k, v, bias, mask, alibi, sinks, *rest)[:2]
    if mps_attention.asks(q):
        made = mps_attention.instead(with_lse, needs, q, k, v, bias, mask, alibi, sinks, *rest)
        if made is not None:
            return made
    if needs:
        made = autograd.AttentionFast.apply(q, k, v, bias, sinks, (mask, alibi, *rest[:4]),
                                            rest[4:], with_lse)
        return made if with_lse else (made, None)
    return ops.forward(q, k, v, bias, mask, alibi, sinks, *rest)


def _lower(tensor: Tensor) -> Tensor:
    """What autocast does to an operand of scaled_dot_product_attention: fp64 stays."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _widen(operand: object) -> object:
    """Under autocast, what is added to scores may be of the other 16-bit type: fp32 suits both."""
    if (isinstance(operand, Tensor) and not isinstance(operand, CausalBias)
            and operand.dtype in (torch.float16, torch.bfloat16)):
        return operand.float()
    return operand


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], causal: bool,
           gqa: bool) -> Optional[Tensor]:
    """A call without options by the ops made for that; None where they do not serve: then
    `_general` does, or says what is wrong. Only the questions that those ops would not notice
    themselves."""
    if (not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and q.dim() == 4)
            or not (gqa or q.shape[1:2] == k.shape[1:2] == v.shape[1:2])
            or not (scale is None or type(scale) is float) or observed()):
        return None
    if is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return autograd.record_plain(q, k, v, scale, causal)
    try:
        return ops.plain_forward(q, k, v, scale, causal)[0]
    except (RuntimeError, OrchardError) as error:
        found = cpu.translate(error)
        if cpu.misused(found):
            return None
        raise found from None


def _general(with_lse, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, bias,
             window, softcap, alibi_slopes, sinks, causal_alignment, key_lengths, cu_seqlens_q,
             cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> Tuple[Tensor, Optional[Tensor]]:
    """Any call, with every check; parameters as in the public function."""
    q, k, v = query, key, value
    _check_tensor("query", q, None)
    device = q.device
    _check_tensor("key", k, device)
    _check_tensor("value", v, device)
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        q, k, v = _lower(q), _lower(k), _lower(v)
        attn_mask, bias, alibi_slopes, sinks = map(_widen, (attn_mask, bias, alibi_slopes, sinks))

    bottom_right = _check_alignment(causal_alignment)
    if isinstance(attn_mask, CausalBias):
        bottom_right, is_causal = attn_mask.variant == CausalVariant.LOWER_RIGHT, True
        if bottom_right and cu_seqlens_q is None and min(q.dim(), k.dim()) > 1:
            _check_causal_bias(attn_mask, q, k)
        attn_mask = None

    max_t = max_s = 0
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        max_t, max_s = _check_packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                     device)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        raise ArgumentError("attention: max_seqlen_q and max_seqlen_k belong to cu_seqlens, which "
                            "is absent")
    q, k, v, leading = (_fold_packed if packed else _fold_all)(q, k, v, enable_gqa)

    mask = None
    if attn_mask is not None or bias is not None:
        mask, bias = _split_mask(attn_mask, bias, q, leading)
    scale, left, right, softcap = _check_options(device, alibi_slopes, sinks, key_lengths, scale,
                                                 softcap, window)
    alibi_slopes, sinks = _beside(q, alibi_slopes), _beside(q, sinks)
    dropout = 0.0 if dropout_p == 0.0 else _check_number("dropout_p", dropout_p)
    seed = operands.new_seed(dropout)

    out, lse = attention(with_lse, q, k, v, bias, mask, alibi_slopes, sinks, key_lengths,
                         cu_seqlens_q, cu_seqlens_k, seed, max_t, max_s, scale, is_causal,
                         bottom_right, left, right, softcap, dropout)
    rank = max(query.dim(), key.dim(), value.dim())
    if rank != 4 and not packed:
        out = _unfold(out, leading, rank)
        lse = _unfold(lse, leading, rank) if with_lse else None
    return out, lse


# For type checkers, which want the whole signature again for each kind of result.
@overload
def scaled_dot_product_attention(*operands: Any, return_lse: Literal[True],
                                 **options: Any) -> Tuple[Tensor, Tensor]: ...


@overload
def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: Optional[float] = None,
        enable_gqa: bool = False, *, bias: Optional[Tensor] = None,
        window: Optional[Sequence[int]] = None, softcap: Optional[float] = None,
        alibi_slopes: Optional[Tensor] = None, sinks: Optional[Tensor] = None,
        causal_alignment: str = "top_left", key_lengths: Optional[Tensor] = None,
        cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
        max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
        return_lse: Literal[False] = False) -> Tensor: ...


@overload
def scaled_dot_product_attention(*operands: Any, return_lse: bool, **options: Any
                                 ) -> Union[Tensor, Tuple[Tensor, Tensor]]: ...


def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: Optional[float] = None,
        enable_gqa: bool = False, *, bias: Optional[Tensor] = None,
        window: Optional[Sequence[int]] = None, softcap: Optional[float] = None,
        alibi_slopes: Optional[Tensor] = None, sinks: Optional[Tensor] = None,
        causal_alignment: str = "top_left", key_lengths: Optional[Tensor] = None,
        cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
        max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
        return_lse: bool = False) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """torch.nn.functional.scaled_dot_product_attention, fused forward and backward.

    The first eight arguments are torch's: query [...,H,T,D], key [...,G,S,D], value [...,G,S,E],
    attn_mask bool (True = may see) or additive float, broadcast to [...,H,T,S], which may require a
    gradient. Beyond torch:

    attn_mask and is_causal  may be given together: both apply.
    bias                     an additive float mask beside a bool attn_mask.
    window=(left, right)     a query at p sees keys p-left ... p+right; -1 or None = no limit.
    softcap                  scores become softcap * tanh(score / softcap).
    alibi_slopes             [H] or [B,H], fp32, or fp64 beside an fp64 query: -slope * |p - key| is
                             added to the score.
    sinks                    [H]: a logit per head that joins the softmax's denominator only; fp32
                             or the query's dtype, as float masks.
    causal_alignment         "top_left" (p = i, as torch) or "bottom_right" (the last query stands
                             at the last key); for causal, window and alibi_slopes.
    key_lengths              [B] ints: only the first so many keys of each batch element count.
    cu_seqlens_q, _k         packed sequences: query [total,H,D], key and value [total,G,D|E];
                             [n+1] ints, with max_seqlen_q and max_seqlen_k.
    return_lse               also return the logarithm of the softmax's denominator, [...,H,T] fp32
                             (fp64 for fp64), which carries gradients too.

    Dropout takes one number from torch's generator per call. Gradients of gradients and tangents of
    forward mode are computed by an explicit formula that needs memory for [B,H,T,S]. Errors are
    exceptions of `orchard`.
    """
    try:
        if not (type(is_causal) is type(enable_gqa) is type(return_lse) is bool):
            is_causal = _check_flag("is_causal", is_causal)
            enable_gqa = _check_flag("enable_gqa", enable_gqa)
            return_lse = _check_flag("return_lse", return_lse)
        if (attn_mask is bias is window is softcap is alibi_slopes is sinks is key_lengths is
                cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None
                and dropout_p == 0.0 and causal_alignment == "top_left" and not return_lse):
            out = _plain(query, key, value, scale, is_causal, enable_gqa)
            if out is not None:
                return out
        out, lse = _general(return_lse, query, key, value, attn_mask, dropout_p, is_causal, scale,
                            enable_gqa, bias, window, softcap, alibi_slopes, sinks,
                            causal_alignment, key_lengths, cu_seqlens_q, cu_seqlens_k,
                            max_seqlen_q, max_seqlen_k)
        return (out, lse) if return_lse else out
    except (RuntimeError, ValueError) as error:
        if isinstance(error, OrchardError):
            raise
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, tensor, None)
        _check_number("dropout_p", dropout_p)
        _check_alignment(causal_alignment)
        cpu.reraise(error)
