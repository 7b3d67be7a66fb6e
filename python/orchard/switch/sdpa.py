"""The switch for attention: F.scaled_dot_product_attention by Orchard, in code unaware of it.

aten has no operation to replace here: torch chooses among several. While it is on, these are
replaced and afterwards put back, object by object (`orchard.active()` lists them):

    torch.nn.functional.scaled_dot_product_attention     also found there by nn.MultiheadAttention
    every module-level name in sys.modules bound to it   `from torch.nn.functional import ...`
    CausalBias.__torch_function__                        it compares the function with the first
    torch.backends.mha's fast path: off                  it would skip the function in eval mode

A call that Orchard serves is torch's in everything but the kernel. Every other call (nested
tensors, other devices, sdpa_kernel(MATH), what torch refuses ...) goes to the original function
untouched, and `orchard.counts()` says how many, by reason. docs/pytorch.md says what is
not reached.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set

from .. import torch as _orchard_torch  # first: it says so where torch is absent or too old

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils._device import DeviceContext

from .._library import LayoutError, OrchardError
from ..torch import tracing as _tracing
from ..torch.attention import mps_attention as _mps_attention
from .counting import SERVED
from .counting import count as _count

NAME = "scaled_dot_product_attention"
BUILTIN: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention

# The last two are what torch.compile calls multi_head_attention_forward with.
_PLAIN = (torch.Tensor, torch.nn.Parameter, *_tracing.TRACED)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DEVICES = ("cpu", "mps")
_LARGEST_HEAD = 512

# Private, so it may be absent: then every mode is taken for one that should see the call.
_mode_at = getattr(torch._C, "_get_function_stack_at", None)


# ---- What can be served --------------------------------------------------------------------------

def _transforms_refused() -> bool:
    """Whether torch.func is at work with more than grad, vmap and jvp, which Orchard follows."""
    try:
        kinds = [str(one.key()) for one in torch._C._functorch.get_interpreter_stack()]
    except AttributeError:
        return True
    return any(not kind.endswith(("Grad", "Vmap", "Jvp")) for kind in kinds)


def _why_not_now() -> Optional[str]:
    """What forbids any call at this moment, whatever its tensors."""
    compiling = _tracing.compiling()
    # The flag is there for all threads: those that export have a mode at work.
    if _tracing.exporting() and (compiling or _tracing.dispatch_modes()):
        return "torch.export, whose programs must run anywhere"
    if _tracing.functorch_active():
        if compiling and not _tracing.forward_mode():  # whose tangents torch might lose
            return "torch.func transforms in compiled code"
        if _transforms_refused():
            return "torch.func transforms other than grad, vmap and jvp"
    if not compiling and torch.jit.is_tracing():
        return "torch.jit tracing"
    for at in range(_tracing.function_modes()):
        if _mode_at is None or type(_mode_at(at)) is not DeviceContext:
            return "a TorchFunctionMode that should see the call"
    return None


def _why_not_mask(mask: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool,
                  autocast: bool) -> Optional[str]:
    if type(mask) not in _PLAIN:
        return "a tensor subclass, or no tensor"
    if is_causal:
        return "attn_mask together with is_causal"
    if mask.is_nested or mask.layout is not torch.strided or mask.device != query.device:
        return "an attn_mask that is nested, not strided or on another device"
    # float32 suits all; with a float64 query torch 2.13's own flash kernel would misread it.
    if mask.dtype not in (torch.bool, query.dtype, torch.float32) and not (
            autocast and mask.dtype in (torch.float16, torch.bfloat16)):
        return "an attn_mask of a dtype that does not fit the query"
    full = (*query.shape[:-1], key.shape[-2])
    rank = mask.dim()
    if rank < 2 or rank > len(full):
        return "an attn_mask that does not broadcast"
    for have, want in zip(mask.shape, full[len(full) - rank:]):
        if have != want and have != 1:
            return "an attn_mask that does not broadcast"
    return None


def _why_not(query: Any, key: Any, value: Any, mask: Any, dropout_p: Any, is_causal: Any,
             scale: Any, enable_gqa: Any) -> Optional[str]:
    """Why this call must go to the original, in a few words; None where Orchard serves it."""
    if type(query) not in _PLAIN or type(key) not in _PLAIN or type(value) not in _PLAIN:
        return "a tensor subclass, or no tensor"
    device = query.device
    if device.type not in _DEVICES or key.device != device or value.device != device:
        return "a device that Orchard does not serve"
    if query.is_nested or key.is_nested or value.is_nested:
        return "a nested tensor"
    if not (query.layout is key.layout is value.layout is torch.strided):
        return "a tensor that is not strided"
    dtype = query.dtype
    autocast = torch.is_autocast_enabled(device.type)
    if dtype not in _DTYPES or key.dtype not in _DTYPES or value.dtype not in _DTYPES or (
            not autocast and not (dtype is key.dtype is value.dtype)):
        return "a dtype that Orchard lacks, or dtypes that differ"
    if autocast and torch.float64 in (dtype, key.dtype, value.dtype):
        return "float64 under autocast"
    if not torch._C._get_flash_sdp_enabled():
        return "sdpa_kernel without FLASH_ATTENTION"
    refusal = _why_not_now()
    if refusal is not None:
        return refusal
    rank = query.dim()
    if rank < 3 or key.dim() != rank or value.dim() != rank:
        return "shapes that differ in rank, or have no head dimension"
    if query.numel() == 0 or key.numel() == 0 or value.numel() == 0:
        return "an empty tensor"
    heads, key_heads = query.shape[-3], key.shape[-3]
    if (query.shape[:-3] != key.shape[:-3] or key.shape[:-1] != value.shape[:-1]
            or query.shape[-1] != key.shape[-1]
            or (heads != key_heads and (not enable_gqa or rank < 4 or heads % key_heads != 0))):
        return "shapes that torch broadcasts or refuses"
    if query.shape[-1] > _LARGEST_HEAD or value.shape[-1] > _LARGEST_HEAD:
        return f"a head size above {_LARGEST_HEAD}"
    if not (isinstance(is_causal, bool) and isinstance(enable_gqa, bool)):
        return "an is_causal or enable_gqa that torch refuses"
    if not isinstance(dropout_p, (int, float, torch.SymFloat)) or not 0 <= dropout_p <= 1 or (
            dropout_p is True):
        return "a dropout_p that is no number, or that torch refuses"
    if scale is not None and (not isinstance(scale, (int, float, torch.SymFloat))
                              or isinstance(scale, bool) or not -1e30 <= scale <= 1e30):
        return "a scale that is no number of -1e30 ... 1e30"
    return None if mask is None else _why_not_mask(mask, query, key, is_causal, autocast)


# ---- The function in its place -------------------------------------------------------------------

_on = False
_original: Callable[..., torch.Tensor] = BUILTIN  # what stood in the place, and will again
_beneath: Callable[..., torch.Tensor] = BUILTIN  # the same, without others' wrappers around ours


def _serve(query, *arguments, **options):
    """Orchard's answer, counted: on mps it may have had to come from PyTorch, for a reason."""
    if _tracing.compiling():  # a compiled graph runs without us: not calls but traces
        return _orchard_torch.scaled_dot_product_attention(query, *arguments, **options)
    _mps_attention.last.refusal = None
    what: Optional[str] = SERVED
    try:
        return _orchard_torch.scaled_dot_product_attention(query, *arguments, **options)
    except OrchardError:
        what = None
        raise
    finally:  # not after: a checkpoint's recomputation ends inside the call, by an exception
        what = _mps_attention.last.refusal or what
        if what:
            _count(what)


def _grouped(enable_gqa: bool) -> Dict[str, bool]:
    # Passed on only where it says something: wrappers of the original may not know it.
    return {} if enable_gqa is False else {"enable_gqa": enable_gqa}


_passing = threading.local()  # .depth: how often the original is being asked


def _pass_on(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """The original's answer. It may be somebody's wrapper around this very function, made while the
    switch was on: the call comes back then, and what lies beneath answers."""
    depth = getattr(_passing, "depth", 0)
    wanted = _original if _on and not depth else _beneath if depth < 2 else BUILTIN
    if wanted is BUILTIN:
        return BUILTIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                       **_grouped(enable_gqa))
    _passing.depth = depth + 1
    try:
        return wanted(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                      **_grouped(enable_gqa))
    finally:
        _passing.depth = depth


def _with_causal_bias(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa):
    """A CausalBias mask: lower right by our alignment, all else as CausalBias itself does it."""
    if (bias.variant == CausalVariant.LOWER_RIGHT and bias.seq_len_q != bias.seq_len_kv
            and not is_causal
            and _why_not(query, key, value, None, dropout_p, False, scale, enable_gqa) is None
            and (bias.seq_len_q, bias.seq_len_kv) == (query.shape[-2], key.shape[-2])):
        try:
            return _serve(query, key, value, None, dropout_p, True, scale, enable_gqa,
                          causal_alignment="bottom_right")
        except LayoutError:  # not aligned: torch's, the long way
            pass
    # Comes back here with is_causal or a plain mask instead of the bias.
    return CausalBias._dispatch(query, key, value, bias, dropout_p, is_causal, scale,
                                **_grouped(enable_gqa))


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                                 *, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention, computed by Orchard where it can be.

    What stands in the original's place while the switch is on. A name that was bound to it
    meanwhile still works after `disable()`: it is then the original with one more call.
    """
    if not _on:
        return _pass_on(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(attn_mask, CausalBias):
        return _with_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                 enable_gqa)
    refusal = _why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if refusal is None:
        try:
            return _serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except LayoutError:  # which looking at every address beforehand would cost every call
            refusal = "a tensor that is not aligned to its elements"
    if not _tracing.compiling() and not getattr(_passing, "depth", 0):
        _count(refusal)
    return _pass_on(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


# ---- On and off ----------------------------------------------------------------------------------

class _Replaced(NamedTuple):
    """A name that was given another object: where, and what it was."""
    place: str
    names: Dict[str, Any]
    name: str
    before: Any


_replaced: List[_Replaced] = []  # other modules' names; torch.nn.functional's own is not in it
_bias_before: Any = None
_fastpath_before = True
_half_off = False  # what is replaced is being put back


def _holders(wanted: Any) -> Iterator[_Replaced]:
    """Every module-level name bound to `wanted`, outside torch and this module."""
    seen: Set[int] = set()
    for place, module in list(sys.modules.items()):
        # torch's own modules compare with their objects, so nothing is touched there.
        if (not isinstance(module, types.ModuleType) or place == __name__
                or place.partition(".")[0] == "torch"):
            continue
        names = types.ModuleType.__getattribute__(module, "__dict__")
        if id(names) in seen:  # one module may have two names, as __main__ can
            continue
        seen.add(id(names))
        # By id and not by ==, which a module's arrays and tensors answer with arrays and tensors.
        if id(wanted) in map(id, list(names.values())):
            for name, value in list(names.items()):
                if value is wanted:
                    yield _Replaced(place, names, name, wanted)


def _replace_names() -> None:
    for one in list(_holders(_original)):
        one.names[one.name] = scaled_dot_product_attention
        _replaced.append(one)


def _restore_names() -> None:
    for one in _replaced:
        if one.names.get(one.name) is scaled_dot_product_attention:  # else: given anew since
            one.names[one.name] = one.before
    _replaced.clear()


def _causal_bias_function(cls, func, types, args=(), kwargs=None):
    # A name that the switch did not reach still calls the built-in, which CausalBias would not
    # recognise now: it would be taken for an ordinary tensor and its mask be lost.
    if func is BUILTIN or func is _original:
        return scaled_dot_product_attention(*args, **(kwargs or {}))
    return _bias_before.__func__(cls, func, types, args, kwargs)


def _held(wrapper: Any) -> Iterator[Any]:
    """What a wrapper may call: by its closure, as a partial, a method, or one of its attributes."""
    for cell in getattr(wrapper, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            pass
    for name in ("__wrapped__", "__func__", "__self__", "func"):
        yield getattr(wrapper, name, None)
    yield from list(getattr(wrapper, "__dict__", {}).values())


def _leads_here(function: Any) -> bool:
    """Whether it is a wrapper around ours, made while the switch was on."""
    seen: Dict[int, Any] = {}
    left = [function]
    while left and len(seen) < 1000:
        one = left.pop()
        if one is scaled_dot_product_attention:
            return True
        if id(one) not in seen and not isinstance(one, (type, types.ModuleType, torch.Tensor)):
            seen[id(one)] = one
            left += _held(one)
    return False


def _turn_on() -> None:
    global _on, _original, _beneath, _bias_before, _fastpath_before
    # torch lists what a __torch_function__ may see when first asked, and keeps the list for good.
    torch.overrides.get_overridable_functions()
    present = F.scaled_dot_product_attention
    _original = _beneath if present is scaled_dot_product_attention else present
    if not _leads_here(present):
        _beneath = present
    _fastpath_before = torch.backends.mha.get_fastpath_enabled()
    _bias_before = vars(CausalBias)["__torch_function__"]
    _on = True  # all is known by which to put back what Ctrl-C leaves half replaced
    F.scaled_dot_product_attention = scaled_dot_product_attention
    CausalBias.__torch_function__ = classmethod(_causal_bias_function)
    torch.backends.mha.set_fastpath_enabled(False)


def _turn_off() -> None:
    global _on, _half_off
    _half_off = True
    if F.scaled_dot_product_attention is scaled_dot_product_attention:  # else: another's wrapper
        F.scaled_dot_product_attention = _original
    CausalBias.__torch_function__ = _bias_before
    if not torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(_fastpath_before)
    for one in list(_holders(scaled_dot_product_attention)):  # imported while the switch was on
        one.names[one.name] = _original
    _on = _half_off = False


def settle(wanted: bool, imported_names: bool) -> None:
    """Makes what is replaced agree with what is wanted. Called under the switch's lock."""
    if _half_off:  # by Ctrl-C
        _turn_off()
    if wanted and not _on:
        _turn_on()
    if imported_names and not _replaced:
        _replace_names()
    if not imported_names:
        _restore_names()
    if not wanted and _on:
        _turn_off()


def active() -> List[str]:
    """What is replaced at the moment."""
    names = ["torch.nn.functional." + NAME]
    names += [f"{one.place}.{one.name}" for one in _replaced]
    names.append("torch.nn.attention.bias.CausalBias.__torch_function__")
    return names + ["torch.backends.mha.set_fastpath_enabled(False)"]


try:  # TorchScript compiles Python functions it meets, and could not compile this one.
    from torch.jit._builtins import _register_builtin
    _register_builtin(scaled_dot_product_attention, "aten::" + NAME)
except ImportError:
    pass
