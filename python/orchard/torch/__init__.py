"""Orchard for PyTorch: `scaled_dot_product_attention`, the functions of the rooms (rooms/), modules
in `orchard.torch.nn`, and the ops `torch.ops.orchard.*`."""

from __future__ import annotations

_NEEDS = (2, 10)

try:
    import torch as _torch
except ImportError as _why:
    raise ImportError(f"orchard.torch needs PyTorch {_NEEDS[0]}.{_NEEDS[1]} or later, which cannot "
                      f"be imported: {_why}") from None

if tuple(int(_n) for _n in _torch.__version__.split("+")[0].split(".")[:2]) < _NEEDS:
    raise ImportError(f"orchard.torch needs PyTorch {_NEEDS[0]}.{_NEEDS[1]} or later, this is "
                      f"{_torch.__version__}")

from typing import TYPE_CHECKING, Any

from . import nn
from .attention.function import scaled_dot_product_attention
from .rooms import all_rooms as _all_rooms

__all__ = ["nn", "scaled_dot_product_attention"]
for _room in _all_rooms():
    for _name in _room.__all__:
        if not hasattr(nn, _name):
            globals()[_name] = getattr(_room, _name)
            __all__.append(_name)

if TYPE_CHECKING:  # the rooms' functions, whose names are in their own files
    def __getattr__(name: str) -> Any: ...
