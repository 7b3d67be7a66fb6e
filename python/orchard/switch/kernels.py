"""The switch for torch's own operations: aten::_softmax and whatever else the rooms replace.

Each operation that a room lists (orchard/torch/replacement.py) gets a kernel at the dispatch key
BackendSelect, which every call passes just before it reaches its device: below autograd, autocast,
torch.func and Python's modes, so that C++ callers, modules, names imported earlier and all threads
are reached, and torch's formulas of the derivatives stay. The kernel runs the room's function, or
goes on to whatever torch has for the device: nothing of torch's is overridden.

A kernel is registered once, by the first enable() that wants its group, and stays: torch does not
guard its table of kernels against threads that are inside a call. From then on a number in it says
whether it does anything; it costs 2 to 3 us a call while it does nothing.

An operation that torch composes of others, and differentiates through them, has no kernel to stand
before: its room's function runs above autograd and brings its own derivative.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import torch as _orchard_torch
from .._library import InternalError
from ..torch import tracing as _tracing
from ..torch.replacement import Refusal, Replacement
from .counting import SERVED, count

GROUPS = ("activations", "normalization", "softmax", "embedding", "optimizers", "linalg")
OFF, FASTER, ON = 0, 1, 2  # a group that is FASTER serves what measures faster

_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet
_BELOW = torch._C._dispatch_keyset_full_after(_Key.BackendSelect)
# Of a call's dispatch keys what is left for plain tensors: no sparse, nested, fake or meta ones.
_PLAIN = {_Keys(_Key.CPU).raw_repr(): "cpu", _Keys(_Key.MPS).raw_repr(): "mps"}
# What else plain tensors have above autograd, where no mode, transform or tracer is at work.
_ABOVE = (_Keys(_Key.AutogradCPU) | _Keys(_Key.ADInplaceOrView) | _Keys(_Key.BackendSelect)
          ).raw_repr() & ~_Keys(_Key.CPU).raw_repr()

_OTHERS = "no plain tensors on cpu or mps, or torch.func"

_running = threading.local()  # .room: a room's function is at work; what it calls is torch's


class _Operation:
    """One operation of aten: what computes it, and whether it shall."""

    def __init__(self, name: str) -> None:
        packet, _, overload = name.partition("::")[2].partition(".")
        self.name = name
        self.op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        self.level = OFF
        self.by: Optional[Replacement] = None
        self._schema = [(one.name, one.default_value) for one in self.op._schema.arguments]
        self._served = f"{name}: {SERVED}"
        has = self.op.has_kernel_for_dispatch_key
        self.composite = has(_Key.CompositeImplicitAutograd) and not has(_Key.CPU)

    def register(self) -> None:
        name = self.name.partition("::")[2]
        _library.impl(name, self._before_device, "BackendSelect", with_keyset=True)
        if self.composite:
            for key in ("AutogradCPU", "AutogradMPS"):
                _library.impl(name, self._above_autograd, key, with_keyset=True)

    def _before_device(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = keys & _BELOW
        device = _PLAIN.get(keys.raw_repr())
        if device is None:
            handler = self._of_python(keys)
            if handler is not None:
                return handler(*args, **kwargs)
            if self.level and not keys.has(_Key.Meta):
                count(f"{self.name}: {_OTHERS}")
        elif self.level and not getattr(_running, "room", False):
            result = self._serve(device, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.op.redispatch(keys, *args, **kwargs)

    def _above_autograd(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        device = _PLAIN.get(keys.raw_repr() & ~_ABOVE)
        if not self.level or keys.has(_Key.Python) or getattr(_running, "room", False):
            pass
        elif device is None or _tracing.forward_mode():
            count(f"{self.name}: {_OTHERS if device is None else 'forward-mode derivatives'}")
        else:
            result = self._serve(device, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.op.decompose(*args, **kwargs)

    def _of_python(self, keys: Any) -> Optional[Callable[..., Any]]:
        """torch's function in Python that its compiler prefers to the kernel of these keys."""
        if not torch._C._dispatch_tls_is_dispatch_key_included(_Key.PythonDispatcher):
            return None
        key = keys.remove(_Key.PythonDispatcher).highestPriorityTypeId()
        handler = self.op.py_kernels.get(key)
        return handler if callable(handler) else None

    def _serve(self, device: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """The room's results; NotImplemented, counted, where torch shall compute the call."""
        by, level = self.by, self.level
        if by is None:  # switched off in between
            return NotImplemented
        if len(args) < len(self._schema):  # torch leaves out what equals its default
            args += tuple(kwargs.get(name, default) for name, default in self._schema[len(args):])
        # Below autograd autocast has had its say; above it the room's function decides.
        autocast = not self.composite and torch.is_autocast_enabled(device)
        _running.room = True
        if autocast:
            torch.set_autocast_enabled(device, False)
        try:
            verdict = level == ON or by.faster is not None and by.faster(*args)
            result = by.run(*args) if verdict is True else verdict
        finally:
            _running.room = False
            if autocast:
                torch.set_autocast_enabled(device, True)
        if verdict is True and not isinstance(result, Refusal):
            count(self._served)
            return result
        count(f"{self.name}: {getattr(result, 'reason', result) or 'torch is as fast'}")
        return NotImplemented


_library = torch.library.Library("aten", "IMPL")
_operations: Dict[str, _Operation] = {}


def replacements() -> List[Replacement]:
    """What the rooms can replace."""
    found: List[Replacement] = []
    for one in pkgutil.iter_modules([path + "/rooms" for path in _orchard_torch.__path__]):
        room = importlib.import_module(f"{_orchard_torch.__name__}.rooms.{one.name}")
        found += getattr(room, "REPLACES", ())
    return found


def _by_operation() -> Dict[str, Replacement]:
    found: Dict[str, Replacement] = {}
    for one in replacements():
        if one.op in found or one.group not in GROUPS:
            raise InternalError(f"orchard.enable: {one.op} in group {one.group!r}: two rooms list "
                                "it, or there is no such group")
        found[one.op] = one
    return found


def missing(groups: Dict[str, Any]) -> List[str]:
    """Those of the groups that no room has anything for."""
    have = {one.group for one in _by_operation().values()}
    return [name for name in groups if name not in have]


def settle(levels: Dict[str, int]) -> None:
    """Makes every operation do what its group's level says. Called under the switch's lock."""
    if any(levels.values()):
        for name, by in _by_operation().items():
            level = levels.get(by.group, OFF)
            if level == FASTER and by.faster is None:
                level = OFF
            operation = _operations.get(name)
            if operation is None and level:
                operation = _Operation(name)
                operation.register()
                _operations[name] = operation
            if operation is not None:
                operation.by, operation.level = by, level
    else:
        for operation in _operations.values():
            operation.level = OFF


def active() -> List[str]:
    return [f"torch.ops.{one.name.replace('::', '.')}" for one in _operations.values() if one.level]
