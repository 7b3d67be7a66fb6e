"""Attention on arrays of any library: orchard.attention_forward and orchard.attention_backward.

The contract (shapes, dtypes, what each option means and in which order they apply) is that of
include/orchard/attention.h; so are the checks and their messages, which arrive as exceptions:
`orchard.OrchardError` and its kinds. Letters: B batch, H query heads, G key/value heads, T queries,
S keys, D head size of q and k, E head size of v.

    out, lse = orchard.attention_forward(q, k, v, causal=True)
    grads = orchard.attention_backward(dout, q, k, v, out, lse, causal=True)
    grads.dq, grads.dk, grads.dv

The Python interpreter is free for other threads during a call.
"""

from __future__ import annotations

import ctypes
import numbers
import operator
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from . import _structs
from ._context import Context, context
from ._exports import REFUSALS
from ._library import ArgumentError, DeviceError, InternalError, OutOfMemoryError, lib
from ._shown import shown
from ._uncompiled import uncompiled
from .arrays import Operands, empty_like_kind

_ALIGN = {"top_left": _structs.TOP_LEFT, "bottom_right": _structs.BOTTOM_RIGHT}


class Gradients(NamedTuple):
    """What attention_backward computed; None for what was not asked for."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None


# ---- Options: numbers as C takes them ------------------------------------------------------------


def _integer(op: str, name: str, value: Any, low: int, high: int,
             kind: str = "an integer") -> int:
    """ctypes would cut a number that does not fit; this refuses it."""
    try:
        number = operator.index(value)
    except REFUSALS:
        raise ArgumentError(f"{op}: {name} is {shown(value)}, must be {kind}") from None
    if not low <= number <= high:
        raise ArgumentError(f"{op}: {name} is {shown(number)}, must be {low} ... {high}")
    return number


def _flag(op: str, name: str, value: Any) -> int:
    """NumPy's bool is no integer to Python, but it is meant as one here."""
    meant = bool(value) if type(value).__name__ in ("bool", "bool_") else value
    return _integer(op, name, meant, -2**31, 2**31 - 1, "True or False")


def _int64(op: str, name: str, value: Any) -> int:
    return _integer(op, name, value, -2**63, 2**63 - 1)


def _is_real(value: Any) -> bool:
    """NumPy's texts and complex numbers convert to float too."""
    if isinstance(value, numbers.Real):
        return True
    if isinstance(value, (str, numbers.Complex)) or "complex" in str(getattr(value, "dtype", "")):
        return False
    return hasattr(value, "__float__")


def _real(op: str, name: str, value: Any) -> float:
    if not _is_real(value):
        raise ArgumentError(f"{op}: {name} is {shown(value)}, must be a number")
    if getattr(value, "requires_grad", False):
        raise ArgumentError(f"{op}: {name} is a torch tensor that requires grad, and gets no "
                            f"gradient: pass float({name})")
    try:
        return float(value)
    except REFUSALS as why:
        raise ArgumentError(f"{op}: {name} is no number that fits: {why}") from None


def _window(op: str, window: Any) -> Tuple[int, int]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ArgumentError(f"{op}: window is {shown(window)}, must be (left, right), "
                            "-1 for no limit") from None
    return (-1 if left is None else _int64(op, "window's left", left),
            -1 if right is None else _int64(op, "window's right", right))


_TENSORS = ("bias", "mask", "alibi", "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k")


def _fill(operands: Operands, into: _structs.Attention, options: Dict[str, Any]) -> None:
    """All of orchard_attention but q, k and v."""
    op = operands.op
    for name in _TENSORS:
        if options[name] is not None:
            setattr(into, name, operands.input(name, options[name]))
    into.max_t = _int64(op, "max_t", options["max_t"])
    into.max_s = _int64(op, "max_s", options["max_s"])
    if options["scale"] is not None:
        into.scale, into.has_scale = _real(op, "scale", options["scale"]), 1
    into.causal = _flag(op, "causal", options["causal"])
    if not isinstance(options["align"], str) or options["align"] not in _ALIGN:
        raise ArgumentError(f"{op}: align is {shown(options['align'])}, must be \"top_left\" or "
                            "\"bottom_right\"")
    into.align = _ALIGN[options["align"]]
    if options["window"] is not None:
        into.window_left, into.window_right = _window(op, options["window"])
        into.has_window = 1
    into.softcap = _real(op, "softcap", options["softcap"])
    into.dropout = _real(op, "dropout", options["dropout"])
    into.seed = _integer(op, "seed", options["seed"], 0, 2**64 - 1)
    into.dropout_offset = _integer(op, "dropout_offset", options["dropout_offset"], 0, 2**32 - 1)


def _context(op: str, backend: Any, threads: Any) -> Context:
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(f"{op}: backend is {shown(backend)}, must be a name such as \"cpu\"")
    if backend is not None and not (backend.isascii() and backend.isprintable()):
        raise ArgumentError(f"{op}: backend is {backend[:100]!r}, which no backend is called")
    return context(threads=_integer(op, "threads", threads, -2**31, 2**31 - 1),
                   backend=backend or None)


# ---- Calls ---------------------------------------------------------------------------------------

Run = Callable[[Context, Operands, Any], Any]
New = Callable[[str, str, Any, Tuple[int, ...], int], Any]


def _run(ctx: Context, operands: Operands, args: Any) -> None:
    try:
        ctx.call(getattr(lib, "orchard_" + operands.op), ctypes.byref(args))
    except (DeviceError, InternalError):  # outputs are undefined, or an audit found them wrong
        operands.written()
        raise
    operands.written()


def _new(op: str, name: str, like: Any, shape: Tuple[int, ...], dtype: int) -> Any:
    """A result of the kind of `like`; whatever its library says where there is no memory."""
    try:
        return empty_like_kind(like, shape, dtype)
    except (MemoryError, OverflowError, RuntimeError, ValueError) as why:
        raise OutOfMemoryError(f"{op}: no memory for {name}, {list(shape)}: {why}") from why


def shape_of(view: _structs.Tensor) -> Tuple[int, ...]:
    return tuple(view.size[:view.rank])


def forward(run: Run, new: New, q: Any, k: Any, v: Any, out: Any, lse: Any, lse_rest: Any,
            backend: Any, threads: Any, options: Dict[str, Any]) -> Tuple[Any, Any, Any]:
    """Builds the forward call, with results by `new` where none are given, and hands it to `run`:
    (out, lse, what run returned)."""
    op = "attention_forward"
    args = _structs.AttentionForwardArgs()
    with Operands(op) as operands:
        views = args.attention
        views.q, views.k, views.v = (operands.input(name, array)
                                     for name, array in (("q", q), ("k", k), ("v", v)))
        _fill(operands, views, options)
        if q is not None and v is not None:  # else C says which is missing
            # q's rows, with v's head size and without one: in every layout.
            rows, last = shape_of(views.q)[:-1], shape_of(views.v)[-1:]
            if out is None:
                out = new(op, "out", q, rows + last, views.q.dtype)
            if lse is None:
                lse = new(op, "lse", q, rows, lse_dtype(views.q.dtype))
        args.out = operands.output("out", out)
        args.lse = operands.output("lse", lse)
        if lse_rest is not None:
            views.lse_rest = operands.output("lse_rest", lse_rest)
        return out, lse, run(_context(op, backend, threads), operands, args)


def lse_dtype(dtype: int) -> int:
    """fp32, for fp64 fp64."""
    return _structs.F64 if dtype == _structs.F64 else _structs.F32


def _asked(op: str, want: Any, given: Dict[str, Any]) -> set:
    names = (want,) if isinstance(want, str) else want
    try:
        wanted = set(names)
    except TypeError:
        raise ArgumentError(f"{op}: want is {shown(want)}, must hold names of gradients") from None
    unknown = sorted(str(name) for name in wanted - set(given))
    if unknown:
        raise ArgumentError(f"{op}: want holds {shown(unknown[0])}, there are: {', '.join(given)}")
    return wanted | {name for name, array in given.items() if array is not None}


def backward(run: Run, new: New, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any,
             lse_rest: Any, dlse: Any, want: Any, given: Dict[str, Any], backend: Any, threads: Any,
             options: Dict[str, Any]) -> Tuple[Gradients, Any]:
    """Builds the backward call as `forward` does: (gradients, what run returned)."""
    op = "attention_backward"
    args = _structs.AttentionBackwardArgs()
    asked = _asked(op, want, given)
    sources = {"dq": q, "dk": k, "dv": v, "dbias": options["bias"], "dsinks": options["sinks"]}
    with Operands(op) as operands:
        for name, array in (("q", q), ("k", k), ("v", v)):
            setattr(args.attention, name, operands.input(name, array))
        _fill(operands, args.attention, options)
        for name, array in (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse)):
            setattr(args, name, operands.input(name, array))
        if lse_rest is not None:
            args.attention.lse_rest = operands.input("lse_rest", lse_rest)
        results = {}
        for name in sorted(asked):
            results[name] = given[name]
            source = sources[name]
            if results[name] is None and source is not None:
                view = getattr(args.attention, name[1:])
                results[name] = new(op, name, source, shape_of(view), view.dtype)
            elif results[name] is None and name in ("dbias", "dsinks"):
                raise ArgumentError(f"{op}: {name} is wanted without {name[1:]}")
            setattr(args, name, operands.output(name, results[name]))
        return Gradients(**results), run(_context(op, backend, threads), operands, args)


@uncompiled
def attention_forward(
        q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, bias: Any = None,
        mask: Any = None, alibi: Any = None, sinks: Any = None, key_lengths: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_t: int = 0, max_s: int = 0,
        scale: Optional[float] = None, causal: bool = False, align: str = "top_left",
        window: Optional[Tuple[Optional[int], Optional[int]]] = None, softcap: float = 0.0,
        dropout: float = 0.0, seed: int = 0, dropout_offset: int = 0, lse_rest: Any = None,
        backend: Optional[str] = None, threads: int = 0) -> Tuple[Any, Any]:
    """softmax(scale * q k^T + ...) v and the logarithm of its denominator, exactly, without the
    matrix: returns (out, lse).

    Args:
        q, k, v: [B,H,T,D], [B,G,S,D], [B,G,S,E], H a multiple of G; or [B,T,D] with one head; or,
            with cu_seqlens, packed [total,H,D]. One dtype: fp64, fp32, fp16 or bf16. Any strides
            that are not negative: [B,T,H,D] is a transposed view.
        out, lse: memory for the results, [B,H,T,E] in q's dtype and [B,H,T] in fp32 (fp64 for
            fp64). None: new dense arrays of q's kind.
        bias: [B,H,T,S], each size 1 or full, added to the scores; q's dtype or fp32.
        mask: [B,H,T,S] bool, each size 1 or full; True = this query may see this key.
        alibi: slopes [H] or [B,H]; the score falls by slope * distance. fp32 (fp64 for fp64).
        sinks: [H]; a logit per head that joins the denominator only. q's dtype or fp32 (fp64 for
            fp64).
        key_lengths: [B] int32 or int64; keys from there on are padding.
        cu_seqlens_q, cu_seqlens_k: [n+1], where each packed sequence begins, ending with the total;
            with max_t and max_s, the longest of them.
        scale: None is 1/sqrt(D).
        causal: each query sees keys up to its own position; `align` says whether query 0 stands at
            key 0 ("top_left", as in torch) or the last query at the last key ("bottom_right").
        window: (left, right) keys around a query's position; -1 or None = no limit on that side.
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        dropout, seed, dropout_offset: probability of dropping an attention weight, and what the
            choice is a function of. Give backward the same.
        lse_rest: memory as lse's for what lse loses when it is rounded. Give it to backward, where
            scores are large: without it gradients are off by that rounding.
        backend: "cpu", "ref", "opencl", "metal" or a list "opencl,cpu"; None = those of
            ORCHARD_BACKEND, else all, best first.
        threads: up to 256; 0 = ORCHARD_THREADS, else as many as there are cores. Results do not
            depend on it.

    Raises:
        OrchardError: its kinds say what was wrong, the text which operand and numbers. Nothing was
            written then, unless a device failed at work (DeviceError), or an audit found results
            wrong (InternalError): results are undefined.
    """
    options = dict(bias=bias, mask=mask, alibi=alibi, sinks=sinks, key_lengths=key_lengths,
                   cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_t=max_t, max_s=max_s,
                   scale=scale, causal=causal, align=align, window=window, softcap=softcap,
                   dropout=dropout, seed=seed, dropout_offset=dropout_offset)
    return forward(_run, _new, q, k, v, out, lse, lse_rest, backend, threads, options)[:2]


@uncompiled
def attention_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
        want: Sequence[str] = ("dq", "dk", "dv"), dq: Any = None, dk: Any = None, dv: Any = None,
        dbias: Any = None, dsinks: Any = None, bias: Any = None, mask: Any = None,
        alibi: Any = None, sinks: Any = None, key_lengths: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None, max_t: int = 0, max_s: int = 0, scale: Optional[float] = None,
        causal: bool = False, align: str = "top_left",
        window: Optional[Tuple[Optional[int], Optional[int]]] = None, softcap: float = 0.0,
        dropout: float = 0.0, seed: int = 0, dropout_offset: int = 0, lse_rest: Any = None,
        backend: Optional[str] = None, threads: int = 0) -> Gradients:
    """Gradients of a loss with respect to q, k, v, bias and sinks.

    Args:
        dout: gradient of the loss with respect to out, shaped as out.
        q, k, v, out, lse: forward's inputs and results, unchanged.
        dlse: gradient with respect to lse, where the loss uses it.
        want: names of the gradients to compute: "dq", "dk", "dv", "dbias", "dsinks". What is not
            asked for is not computed.
        dq, dk, dv, dbias, dsinks: memory for the results (asks for them too); None: new arrays of
            the kind of q, k, v, bias, sinks, shaped and typed as those. They are written, not added
            to.
        lse_rest: what forward wrote there, by the same backend.

    All other arguments are attention_forward's and must be the same as there.
    """
    options = dict(bias=bias, mask=mask, alibi=alibi, sinks=sinks, key_lengths=key_lengths,
                   cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_t=max_t, max_s=max_s,
                   scale=scale, causal=causal, align=align, window=window, softcap=softcap,
                   dropout=dropout, seed=seed, dropout_offset=dropout_offset)
    given = dict(dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)
    return backward(_run, _new, dout, q, k, v, out, lse, lse_rest, dlse, want, given, backend,
                    threads, options)[0]
