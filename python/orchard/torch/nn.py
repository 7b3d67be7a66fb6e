"""The rooms' modules: orchard.torch.nn.Softmax and so on, as torch.nn has them."""

from __future__ import annotations

import torch as _torch

from .rooms import all_rooms as _all_rooms

__all__ = []
for _room in _all_rooms():
    for _name in _room.__all__:
        _found = getattr(_room, _name)
        if isinstance(_found, type) and issubclass(_found, _torch.nn.Module):
            globals()[_name] = _found
            __all__.append(_name)
