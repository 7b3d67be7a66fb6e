"""The switch: torch's own functions computed by Orchard, in code that does not know it.

    with orchard.enable():
        train(model)            # or: orchard.enable() ... orchard.disable()

While the switch is on, for all threads, sdpa.py replaces F.scaled_dot_product_attention, and
kernels.py stands before the operations of aten that Orchard's rooms compute. What Orchard refuses
goes to torch, and `orchard.counts()` says how many calls, by reason.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Set

from .._library import UnsupportedError
from .._locks import ProcessLock
from . import sdpa as _sdpa  # first: it says so where torch is absent or too old
from . import kernels as _kernels
from .counting import SERVED, counts

__all__ = ["SERVED", "Handle", "active", "counts", "disable", "disable_pytorch_overrides", "enable",
           "enable_pytorch_overrides", "get_active_overrides"]

if "_handles" in globals():  # importlib.reload
    disable()  # noqa: F821

_lock = ProcessLock()
_handles: Set["Handle"] = set()


class Handle:
    """One `enable()`: undone by leaving its `with` block or by `remove()`; on again in a later
    block."""

    def __init__(self, wanted: Dict[str, int], imported_names: bool = True) -> None:
        self.wanted = wanted  # attention and each group: a level
        self.imported_names = imported_names
        self._blocks = 0

    def remove(self) -> None:
        """Undoes this enable and no other; a second time does nothing."""
        with _lock.here():
            if self in _handles:
                _handles.remove(self)
                _settle()

    def __enter__(self) -> "Handle":
        with _lock.here():
            _handles.add(self)
            _settle()
            self._blocks += 1  # last: Ctrl-C before it leaves no block to wait for
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock.here():
            self._blocks -= 1
            if not self._blocks:
                self.remove()


def _settle() -> None:
    """Makes what is replaced agree with the handles that are left: the highest level of each."""
    levels = {name: max((one.wanted.get(name, _kernels.OFF) for one in _handles),
                        default=_kernels.OFF) for name in ("attention", *_kernels.GROUPS)}
    wanted = bool(levels.pop("attention"))
    _kernels.settle(levels)
    _sdpa.settle(wanted, any(one.imported_names and one.wanted["attention"]
                                  for one in _handles))


def _levels(all: Optional[bool], **groups: Optional[bool]) -> Dict[str, int]:
    for name, value in (*groups.items(), ("all", all)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"orchard.enable: {name} is {value!r}, must be True, False or None")
    asked = {name: value for name, value in groups.items() if value and name != "attention"}
    missing = _kernels.missing(asked)
    if missing:
        raise UnsupportedError(f"orchard.enable: {', '.join(missing)}: not in this version")
    by_default = _kernels.ON if all else _kernels.FASTER
    return {name: by_default if value is None else _kernels.ON if value else _kernels.OFF
            for name, value in groups.items()}


def enable(*, attention: Optional[bool] = True, activations: Optional[bool] = None,
           normalization: Optional[bool] = None, softmax: Optional[bool] = None,
           embedding: Optional[bool] = None, optimizers: Optional[bool] = None,
           linalg: Optional[bool] = None, all: bool = False,
           imported_names: bool = True) -> Handle:
    """Computes supported calls of torch's own functions by Orchard, in all threads.

    As a context manager it ends with the block; otherwise `disable()` ends it. May be nested: each
    part is on while any block wants it. True: whatever Orchard can compute; False: nothing; None:
    what measures faster than torch on that device and in that size. all=True says True for what
    is not named. imported_names=False leaves alone what other modules bound to
    F.scaled_dot_product_attention before, as `torch_attention = F.scaled_dot_product_attention`
    does.
    """
    wanted = _levels(all, attention=attention, activations=activations, normalization=normalization,
                     softmax=softmax, embedding=embedding, optimizers=optimizers, linalg=linalg)
    with _lock.here():
        handle = Handle(wanted, imported_names)
        _handles.add(handle)
        _settle()
        return handle


def disable() -> None:
    """Undoes every `enable()`: each function of torch is the original object again."""
    with _lock.here():
        _handles.clear()
        _settle()


def active() -> List[str]:
    """What is replaced at the moment, as dotted names; empty while the switch is off."""
    with _lock.here():
        attention = any(one.wanted["attention"] for one in _handles)
        return (_sdpa.active() if attention else []) + _kernels.active()


# ---- metalcore's names ---------------------------------------------------------------------------

def _show(verbose: bool) -> None:
    if verbose:
        print("orchard: " + (", ".join(active()) or "no overrides are active"))


def enable_pytorch_overrides(activations: bool = False, embedding_bag: bool = False,
                             normalization: bool = False, softmax: bool = False,
                             linalg: bool = False, optimizers: bool = False, all: bool = False,
                             verbose: bool = False, attention: bool = True) -> Optional[Handle]:
    """`enable()` under metalcore's name: what is not named stays off, unless all=True."""
    named = {"activations": activations, "normalization": normalization, "softmax": softmax,
             "embedding": embedding_bag, "linalg": linalg, "optimizers": optimizers}
    handle = None
    if attention or all or any(named.values()):
        handle = enable(attention=attention, all=all,
                        **{name: on or (None if all else False) for name, on in named.items()})
    _show(verbose)
    return handle


def disable_pytorch_overrides(activations: bool = False, embedding_bag: bool = False,
                              normalization: bool = False, softmax: bool = False,
                              linalg: bool = False, optimizers: bool = False, all: bool = True,
                              verbose: bool = False, attention: bool = False) -> None:
    """`disable()` under metalcore's name; with all=False only what is named."""
    named = {"activations": activations, "normalization": normalization, "softmax": softmax,
             "embedding": embedding_bag, "linalg": linalg, "optimizers": optimizers,
             "attention": attention}
    if all:
        disable()
    with _lock.here():
        for handle in _handles:
            handle.wanted.update({name: _kernels.OFF for name, off in named.items() if off})
        _settle()
    _show(verbose)


def get_active_overrides() -> List[str]:
    """`active()` under metalcore's name."""
    return active()
