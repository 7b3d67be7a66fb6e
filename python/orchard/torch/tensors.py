"""From torch tensors to the C library's structs."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

from .. import _exports, _structs
from .._exports import check_storage
from .._library import ArgumentError, DtypeError
from .._operations import describe
from .._structs import MAX_RANK, Tensor

DTYPES = {getattr(torch, of.name): dtype for dtype, of in _exports.DTYPES.items()}

_TENSOR = struct.Struct(f"=QQQii{MAX_RANK}q{MAX_RANK}q")
_PAD = (0,) * MAX_RANK
assert _TENSOR.size == ctypes.sizeof(Tensor)
_OPTION = {_structs.OPTION_I32: struct.Struct("=i"), _structs.OPTION_I64: struct.Struct("=q"),
           _structs.OPTION_F64: struct.Struct("=d")}


def address_of(op: str, name: str, tensor: torch.Tensor) -> int:
    """Where a CPU tensor's memory is, which is there."""
    check_storage(op, name, tensor)
    return tensor.data_ptr()


class Arguments:
    """An args struct of one operation, being filled; `struct` is what C calls take."""

    def __init__(self, op: str) -> None:
        self._of = describe(op)
        self.bytes = bytearray(self._of.args_size)
        self.struct = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)

    def set_tensor(self, name: str, address: int, dtype: int, size: Sequence[int],
                   stride: Sequence[int]) -> None:
        """KeyError: there is no such operand. A rank beyond 8 is told to C, which says so."""
        rank = len(size)
        if rank > MAX_RANK:
            size, stride = size[:MAX_RANK], stride[:MAX_RANK]
        pad = _PAD[len(size):]
        _TENSOR.pack_into(self.bytes, self._of.operands[name].offset, address, 0, 0, dtype, rank,
                          *size, *pad, *stride, *pad)

    def set_option(self, name: str, value: float) -> None:
        """KeyError: the operation has no such option."""
        option = self._of.options[name]
        try:
            _OPTION[option.kind].pack_into(self.bytes, option.offset, value)
        except struct.error:
            raise ArgumentError(f"{self._of.name}: {name} is {value}, must fit into "
                                f"{8 * _OPTION[option.kind].size} bits") from None

    def fill(self, operands: Mapping[str, Optional[torch.Tensor]], options: Mapping[str, Any],
             address: Callable[[str, torch.Tensor], int]) -> None:
        """All of a call; `address` tells where a tensor's memory is."""
        for name, tensor in operands.items():
            if tensor is not None:
                dtype = DTYPES.get(tensor.dtype)
                if dtype is None:
                    raise DtypeError(f"{self._of.name}: {name} is {tensor.dtype}, which Orchard "
                                     "does not know")
                self.set_tensor(name, address(name, tensor), dtype, tensor.shape, tensor.stride())
        for name, value in options.items():
            self.set_option(name, value)
