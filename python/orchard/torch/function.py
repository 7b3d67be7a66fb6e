"""The public function: torch's own arguments and more, to the ops' arguments."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch.autograd import forward_ad

from .._library import ArgumentError, DtypeError, ShapeError, UnsupportedError
from . import autograd, ops

Tensor = torch.Tensor
NUMBER = (int, float, torch.SymInt, torch.SymFloat)
INTEGER = (int, torch.SymInt)
ALIGNMENTS = {"top_left": False, "bottom_right": True}

# Function.apply itself asks this; private, so it may be absent.
_functorch_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


# ---- Checks that the C library cannot make -------------------------------------------------------

def _check_tensor(name: str, tensor: object, device: Optional[torch.device]) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"attention: {name} is a {type(tensor).__name__}, must be a tensor")
    if tensor.is_nested:
        raise UnsupportedError(f"attention: {name} is a nested tensor; use cu_seqlens for "
                               "sequences of different lengths")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"attention: {name} has layout {tensor.layout}, must be strided")
    if device is None:
        if tensor.device.type not in ("cpu", "mps", "meta"):
            ops.kernel_for(tensor.device.type)
    elif tensor.device != device:
        raise ArgumentError(f"attention: {name} is on {tensor.device}, query is on {device}")


def _check_number(name: str, value: object, kinds: tuple = NUMBER) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        word = "an integer" if kinds is INTEGER else "a number"
        raise ArgumentError(f"attention: {name} is {value!r}, must be {word}")


# ---- Shapes --------------------------------------------------------------------------------------

def _fold(tensor: Tensor) -> Tensor:
    """[...,H,T,D] as [B,H,T,D]."""
    rank = tensor.dim()
    if rank == 4:
        return tensor
    if rank < 4:
        return tensor[(None,) * (4 - rank)]
    return tensor.flatten(0, rank - 4)


def _fold_scores(name: str, tensor: Tensor, leading: Tuple[int, ...]) -> Tensor:
    """A mask [...,H,T,S], some leading dimensions missing, as [1 or B,H,T,S]; sizes of 1 stay."""
    extra = len(leading)
    rank = tensor.dim()
    if rank > extra + 3 and rank > 4:
        raise ShapeError(f"attention: {name} has {rank} dimensions, the query {extra + 3}")
    if rank <= 4 and extra <= 1:
        return tensor if rank == 4 else tensor[(None,) * (4 - rank)]
    tensor = tensor[(None,) * (extra + 3 - rank)]
    if all(size == 1 for size in tensor.shape[:extra]):
        return tensor.flatten(0, extra - 1)
    return tensor.expand(*leading, *tensor.shape[extra:]).flatten(0, extra - 1)


def _match(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tuple[Tensor, Tensor, Tensor]:
    """Repeats batches and heads of size 1 as torch does; grouped heads only if asked for."""
    leading = q.shape[:-3]
    if k.shape[:-3] != leading or v.shape[:-3] != leading:
        try:
            leading = torch.broadcast_shapes(leading, k.shape[:-3], v.shape[:-3])
        except RuntimeError:
            raise ShapeError(f"attention: query {list(q.shape)}, key {list(k.shape)} and value "
                             f"{list(v.shape)} have batches that do not fit together") from None
        q, k, v = (x.expand(*leading, *x.shape[-3:]) for x in (q, k, v))
    if q.dim() < 3 or k.dim() < 3 or v.dim() < 3:
        return q, k, v
    heads, key_heads, value_heads = q.shape[-3], k.shape[-3], v.shape[-3]
    if key_heads != value_heads and (key_heads == 1 or value_heads == 1):
        most = max(key_heads, value_heads)
        k, v = (x.expand(*x.shape[:-3], most, -1, -1) for x in (k, v))
        key_heads = most
    if heads != key_heads and not gqa:
        if heads == 1:
            q = q.expand(*q.shape[:-3], key_heads, -1, -1)
        elif key_heads != 1:
            raise ShapeError(f"attention: key has {key_heads} heads, query has {heads}; grouped "
                             "heads are used only with enable_gqa=True")
    return q, k, v


# ---- The call ------------------------------------------------------------------------------------

def attention(*args) -> Tuple[Tensor, Tensor]:
    """(out, lse) for arguments in the order of the op's schema, by the right Function."""
    if not torch.compiler.is_compiling():
        if _functorch_active() or forward_ad._current_level >= 0:
            return autograd.Attention.apply(*args)
    if torch.is_grad_enabled():
        q, k, v, bias, sinks = args[0], args[1], args[2], args[3], args[6]
        if (q.requires_grad or k.requires_grad or v.requires_grad
                or (bias is not None and bias.requires_grad)
                or (sinks is not None and sinks.requires_grad)):
            return autograd.AttentionFast.apply(*args)
    return ops.forward(*args)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """What autocast does to scaled_dot_product_attention: lower precision, but fp64 stays."""
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
                 for x in (q, k, v))


def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: Optional[float] = None,
        enable_gqa: bool = False, *, bias: Optional[Tensor] = None,
        window: Optional[Tuple[int, int]] = None, softcap: Optional[float] = None,
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
    window=(left, right)     a query at p sees keys p-left ... p+right; -1 = no limit.
    softcap                  scores become softcap * tanh(score / softcap).
    alibi_slopes             [H] or [B,H]: -slope * |p - key| is added to the score.
    sinks                    [H]: a logit per head that joins the softmax's denominator only.
    causal_alignment         "top_left" (p = i, as torch) or "bottom_right" (the last query stands
                             at the last key); for causal, window and alibi_slopes.
    key_lengths              [B] ints: only the first so many keys of each batch element count.
    cu_seqlens_q, _k         packed sequences: query [total,H,D], key and value [total,G,D|E];
                             [n+1] ints, with max_seqlen_q and max_seqlen_k.
    return_lse               also return the logarithm of the softmax's denominator, [...,H,T] fp32
                             (fp64 for fp64), which carries gradients too.

    Dropout takes one number from torch's generator per call. Gradients of gradients are computed by
    an explicit formula that needs memory for [B,H,T,S]. Errors are exceptions of `orchard`.
    """
    _check_tensor("query", query, None)
    device = query.device
    _check_tensor("key", key, device)
    _check_tensor("value", value, device)
    q, k, v = query, key, value
    for name, tensor in (("attn_mask", attn_mask), ("bias", bias), ("alibi_slopes", alibi_slopes),
                         ("sinks", sinks), ("key_lengths", key_lengths),
                         ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is not None:
            _check_tensor(name, tensor, device)
    if torch.is_autocast_enabled(device.type):
        q, k, v = _autocast(q, k, v)

    mask = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            mask = attn_mask
        elif not attn_mask.is_floating_point():
            raise DtypeError(f"attention: attn_mask is {attn_mask.dtype}, must be bool or floating")
        elif bias is not None:
            raise ArgumentError("attention: attn_mask is floating and bias is given too: add them "
                                "yourself, or make attn_mask bool")
        else:
            bias = attn_mask
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("attention: alibi_slopes requires a gradient, which Orchard does "
                               "not compute; detach it")

    _check_number("dropout_p", dropout_p)
    if scale is not None:
        _check_number("scale", scale)
    if softcap is not None:
        _check_number("softcap", softcap)
    window_left, window_right = -1, -1
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ArgumentError(f"attention: window is {window!r}, must be (left, right)")
        window_left, window_right = window
        _check_number("window", window_left, INTEGER)
        _check_number("window", window_right, INTEGER)
    if causal_alignment not in ALIGNMENTS:
        raise ArgumentError(f"attention: causal_alignment is {causal_alignment!r}, must be "
                            '"top_left" or "bottom_right"')

    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    max_t = max_s = 0
    leading: Tuple[int, ...] = ()
    shape = q.shape
    if packed:
        if max_seqlen_q is None or max_seqlen_k is None:
            raise ArgumentError("attention: cu_seqlens needs max_seqlen_q and max_seqlen_k")
        _check_number("max_seqlen_q", max_seqlen_q, INTEGER)
        _check_number("max_seqlen_k", max_seqlen_k, INTEGER)
        max_t, max_s = max_seqlen_q, max_seqlen_k
        leading = (1,)
        if q.dim() == 3 and k.dim() == 3 and q.shape[1] != k.shape[1] and not enable_gqa:
            raise ShapeError(f"attention: key has {k.shape[1]} heads, query has {q.shape[1]}; "
                             "grouped heads are used only with enable_gqa=True")
    else:
        if q.dim() < 2 or k.dim() < 2 or v.dim() < 2:
            raise ShapeError(f"attention: query, key and value have {q.dim()}, {k.dim()} and "
                             f"{v.dim()} dimensions, must be at least 2")
        q, k, v = _match(q, k, v, enable_gqa)
        shape = q.shape
        leading = shape[:-3]
        q, k, v = _fold(q), _fold(k), _fold(v)
    if mask is not None:
        mask = _fold_scores("attn_mask", mask, leading)
    if bias is not None:
        bias = _fold_scores("attn_mask" if bias is attn_mask else "bias", bias, leading)

    seed = None
    if dropout_p > 0:
        seed = torch.randint(2 ** 63 - 1, ())
    out, lse = attention(q, k, v, bias, mask, alibi_slopes, sinks, key_lengths, cu_seqlens_q,
                         cu_seqlens_k, seed, max_t, max_s, scale, bool(is_causal),
                         ALIGNMENTS[causal_alignment], window_left, window_right, softcap or 0.0,
                         dropout_p)
    if not packed and len(shape) != 4:
        out = out.view(*shape[:-1], v.shape[-1]) if len(shape) < 4 else out.unflatten(0, leading)
        lse = lse.view(shape[:-1]) if len(shape) < 4 else lse.unflatten(0, leading)
    return (out, lse) if return_lse else out
