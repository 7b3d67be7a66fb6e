"""A room for the tests of the switch, in torch's own formulas: what is replaced, in which group, and
how often each function ran. `computed` counts by operation; `refuse` and `slow` name operations
that refuse, or that never measure faster.
"""

import collections
import contextlib

import torch

from orchard.switch import kernels
from orchard.torch.replacement import Refusal, Replacement

computed = collections.Counter()
refuse = set()  # operations that answer with a Refusal
slow = {}  # operation: what `faster` answers
seen = []  # (operation, its arguments) of each call


def _softmax(x, dim, half_to_float):
    x = x.contiguous()
    up = torch.exp(x - x.amax(dim, keepdim=True)) if x.numel() else x.clone()
    return up / up.sum(dim, keepdim=True)


def _softmax_out(x, dim, half_to_float, out):
    if out.shape != x.shape or out.dtype != x.dtype:
        return Refusal("an out of another shape or dtype")
    return out.copy_(_softmax(x, dim, half_to_float))


def _softmax_backward(dout, out, dim, input_dtype):
    return out * (dout - (dout * out).sum(dim, keepdim=True)).contiguous()


def _like(made, x):
    """In memory as torch's elementwise operations leave it."""
    return torch.empty_like(x).copy_(made)


def _gelu(x, approximate):
    if approximate not in ("none", "tanh"):
        return Refusal("an approximation that torch refuses")
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x ** 3)
        return _like(0.5 * x * (1 + torch.tanh(inner)), x)
    return _like(0.5 * x * (1 + torch.erf(x * 0.5 ** 0.5)), x)


def _gelu_in_place(x, approximate):
    return x.copy_(_gelu(x, approximate))


def _gelu_backward(dout, x, approximate):
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x ** 3)
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x ** 2)
        t = torch.tanh(inner)
        return _like(dout * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope), x)
    density = torch.exp(-0.5 * x * x) * 0.3989422804014327
    return _like(dout * (0.5 * (1 + torch.erf(x * 0.5 ** 0.5)) + x * density), x)


def _silu(x):
    return Refusal("complex numbers") if x.is_complex() else _like(x / (1 + torch.exp(-x)), x)


def _silu_backward(dout, x):
    if x.is_complex():
        return Refusal("complex numbers")
    s = 1 / (1 + torch.exp(-x))
    return _like(dout * s * (1 + x * (1 - s)), x)


def _misfit(x, shape, *weights):
    """Whether torch refuses it, or it has no elements."""
    return not x.numel() or not shape or tuple(x.shape[-len(shape):]) != tuple(shape) or any(
        w is not None and (w.dtype != x.dtype or tuple(w.shape) != tuple(shape)) for w in weights)


def _layer_norm(x, shape, weight, bias, eps):
    if _misfit(x, shape, weight, bias):
        return Refusal("shapes or dtypes that do not fit")
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    x = x.contiguous()
    mean = x.mean(dims, keepdim=True)
    rstd = ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
    out = (x - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


def _layer_norm_backward(dout, x, shape, mean, rstd, weight, bias, wanted):
    if _misfit(x, shape, weight, bias):
        return Refusal("shapes or dtypes that do not fit")
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    rows = tuple(range(x.dim() - len(shape)))
    normal = (x - mean) * rstd
    inner = dout if weight is None else dout * weight
    dx = rstd * (inner - inner.mean(dims, keepdim=True)
                 - normal * (inner * normal).mean(dims, keepdim=True))

    def over_rows(values):
        return values.sum(rows) if rows else values.clone()
    return (dx.contiguous() if wanted[0] else None,
            over_rows(dout * normal) if wanted[1] else None,
            over_rows(dout).contiguous() if wanted[2] else None)


def _rms_norm(x, shape, weight, eps):
    """Above autograd: its derivative is what autograd makes of it."""
    if _misfit(x, shape, weight):
        return Refusal("shapes or dtypes that do not fit")
    eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps \
        if eps is None else eps
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    out = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return (out if weight is None else out * weight).contiguous()


_FLOATS = (torch.float32, torch.float64)


def _replacement(op, group, function):
    def run(*arguments):
        seen.append((op, arguments))
        if op in refuse:
            return Refusal("planted")
        if arguments[0].dtype not in _FLOATS:
            return Refusal("a dtype that the planted room lacks")
        result = function(*arguments)
        if not isinstance(result, Refusal):
            computed[op] += 1
        return result
    return Replacement(op, group, run, lambda *arguments: slow.get(op, True))


PLANTED = [_replacement(*one) for one in (
    ("aten::_softmax", "softmax", _softmax),
    ("aten::_softmax.out", "softmax", _softmax_out),
    ("aten::_softmax_backward_data", "softmax", _softmax_backward),
    ("aten::gelu", "activations", _gelu),
    ("aten::gelu_", "activations", _gelu_in_place),
    ("aten::gelu_backward", "activations", _gelu_backward),
    ("aten::silu", "activations", _silu),
    ("aten::silu_backward", "activations", _silu_backward),
    ("aten::native_layer_norm", "normalization", _layer_norm),
    ("aten::native_layer_norm_backward", "normalization", _layer_norm_backward),
    ("aten::rms_norm", "normalization", _rms_norm),
)]


@contextlib.contextmanager
def only(*replacements):
    """These are all that the switch finds; nothing in other rooms' stead unless they are given."""
    found, kernels.replacements = kernels.replacements, lambda: list(replacements)
    for kept in (computed, refuse, slow, seen):
        kept.clear()
    try:
        yield
    finally:
        kernels.replacements = found
