"""What another library's array looks like from here: address, dtype, sizes, strides, owner.

`Export` is that description while it is held; `release` gives the memory back to its owner, once.
`_buffers` and `_dlpack` make them, `arrays` uses them.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from . import _structs
from ._library import ArgumentError, LayoutError, lib


class Dtype(NamedTuple):
    """An element type as others call it."""

    name: str    # NumPy's and torch's
    format: str  # a memoryview's: it casts to no 16-bit floats
    code: int    # DLPack's


DTYPES = {
    _structs.F64: Dtype("float64", "d", 2),
    _structs.F32: Dtype("float32", "f", 2),
    _structs.F16: Dtype("float16", "H", 2),
    _structs.BF16: Dtype("bfloat16", "H", 4),
    _structs.I64: Dtype("int64", "q", 0),
    _structs.I32: Dtype("int32", "i", 0),
    _structs.I16: Dtype("int16", "h", 0),
    _structs.I8: Dtype("int8", "b", 0),
    _structs.U8: Dtype("uint8", "B", 1),
    _structs.BOOL: Dtype("bool", "?", 6),
}
SIZES = {dtype: lib.orchard_dtype_size(dtype) for dtype in DTYPES}

# What arrays and numbers of others raise where they have nothing to offer. Not every Exception: a
# signal's handler may raise its own in here (a deadline, say), which is not ours to swallow.
REFUSALS = (BufferError, TypeError, ValueError, RuntimeError, AttributeError,
            OverflowError)


def python_call(name: str, result: Any, *parameters: Any) -> Any:
    """A function of the interpreter's C API. A prototype of our own: those that hang on
    ctypes.pythonapi are shared with every other user of ctypes in the process."""
    return ctypes.PYFUNCTYPE(result, *parameters)((name, ctypes.pythonapi))


def dense_strides(shape: Sequence[int]) -> Tuple[int, ...]:
    """Strides in elements of a row-major array: the last index moves fastest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def check_storage(op: str, name: str, tensor: Any) -> None:
    """Refuses a torch tensor whose storage was shrunk under it (FSDP does so to free memory): torch
    does not notice, and its pointer leads to what is no longer there."""
    if not tensor.numel():
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if needed > there:
        raise ArgumentError(f"{op}: {name} needs {needed} bytes of its storage, which has {there}")


class Export:
    """Memory of another object, held until `release`; strides are in elements."""

    __slots__ = ("address", "dtype", "shape", "strides", "read_only", "copied", "_owner")

    def __init__(self, address: int, dtype: int, shape: Sequence[int],
                 strides: Optional[Sequence[int]], read_only: bool, copied: bool = False,
                 owner: Any = None) -> None:
        self.address = address
        self.dtype = dtype
        self.shape = tuple(shape)
        self.strides = dense_strides(self.shape) if strides is None else tuple(strides)
        self.read_only = read_only
        self.copied = copied
        self._owner = owner  # as long as it lives, so does the memory

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if isinstance(owner, memoryview):  # others may hold it too: a traceback's frames
            owner.release()

    def tensor(self, op: str, name: str) -> _structs.Tensor:
        """The C view. What C checks (rank, dtype, alignment, negative strides) is left to C."""
        view = _structs.Tensor(data=self.address or None, dtype=self.dtype, rank=len(self.shape))
        for i, size, stride in zip(range(_structs.MAX_RANK), self.shape, self.strides):
            view.size[i] = size
            # The stride of a dimension of one element says nothing and may be anything.
            view.stride[i] = stride if size > 1 else max(stride, 0)
        return view


def element_strides(op: str, name: str, shape: Sequence[int], byte_strides: Sequence[int],
                    item: int) -> Tuple[int, ...]:
    """Strides in elements from strides in bytes, which must be multiples of the element's size."""
    for i, (size, stride) in enumerate(zip(shape, byte_strides)):
        if size > 1 and stride % item:
            raise LayoutError(f"{op}: {name} has a stride of {stride} bytes in dimension {i}, "
                              f"which is no multiple of its {item}-byte elements")
    return tuple(stride // item for stride in byte_strides)
