"""Checks that the C library cannot make, of what Python passes. `op` begins each message."""

from __future__ import annotations

import numbers
from typing import Any, Optional

import torch
from torch import Tensor

from .._library import ArgumentError, UnsupportedError
from .._shown import shown
from . import tracing

NUMBER = (int, float, torch.SymInt, torch.SymFloat)
INTEGER = (int, torch.SymInt)
DEVICES = ("cpu", "mps", "meta")


def check_tensor(op: str, name: str, tensor: object, device: Optional[torch.device],
                 first: str = "") -> None:
    """`device`: that of the operand `first`; None: this is the first."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(tensor).__name__}, must be a tensor")
    if tensor.is_nested:
        raise UnsupportedError(f"{op}: {name} is a nested tensor")
    if tensor.is_quantized:
        raise UnsupportedError(f"{op}: {name} is quantized ({tensor.dtype})")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{op}: {name} has layout {tensor.layout}, must be strided")
    if device is None:
        check_device(op, tensor.device.type)
    elif tensor.device != device:
        raise ArgumentError(f"{op}: {name} is on {tensor.device}, {first} is on {device}")


def check_device(op: str, device: str) -> None:
    if device not in DEVICES:
        raise UnsupportedError(f"{op}: tensors are on device {device}, Orchard serves cpu and mps")


def check_number(op: str, name: str, value: Any, kinds: tuple = NUMBER) -> Any:
    """The number as the op takes it: NumPy's, which torch takes too, as Python's."""
    if not isinstance(value, kinds) and isinstance(value, numbers.Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, kinds) or isinstance(value, bool):
        word = "an integer" if kinds is INTEGER else "a number"
        raise ArgumentError(f"{op}: {name} is {shown(value)}, must be {word}")
    # Not of numbers that a compiler does not know yet: they are torch's, and fit.
    if isinstance(value, int) and not tracing.compiling() and not -2 ** 63 <= value < 2 ** 63:
        raise ArgumentError(f"{op}: {name} is {value}, must fit into 64 bits")
    return value


def check_flag(op: str, name: str, flag: Any) -> bool:
    """As Python's bool: numbers, NumPy's and tensors of no dimension too; no strings, whatever they
    say."""
    if isinstance(flag, (int, torch.SymBool)) or getattr(flag, "ndim", None) == 0:
        return bool(flag)
    small = flag is None or isinstance(flag, (str, float))
    what = repr(flag) if small else "a " + type(flag).__name__
    raise ArgumentError(f"{op}: {name} is {what}, must be True or False")
