"""DLPack through ctypes: torch tensors, JAX arrays, and whatever else exports `__dlpack__`.

An exporter hands out a capsule. Who wants the memory for good renames it and calls the deleter
inside; here it is kept as it is for as long as a call lasts, and then gives the memory back by
itself. Both kinds are read: "dltensor", and since DLPack 1.0 "dltensor_versioned", which also says
whether the memory is read-only or a copy. Only memory of the CPU is taken.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Optional, Tuple

from ._exports import DTYPES, REFUSALS, SIZES, Export, python_call
from ._library import ArgumentError, DeviceError, DtypeError

CPU = 1
_DEVICES = {2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm",
            11: "rocm_host", 13: "cuda_managed", 14: "oneapi"}

READ_ONLY, IS_COPIED = 1, 2  # bits of DLManagedTensorVersioned.flags

_CODES = {dtype: (of.code, 8 * SIZES[dtype]) for dtype, of in DTYPES.items()}
_DTYPES = {pair: dtype for dtype, pair in _CODES.items()}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    ]


_valid = python_call("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = python_call("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)

PLAIN, VERSIONED = b"dltensor", b"dltensor_versioned"


def _newest(array: Any, max_version: Tuple[int, int]) -> Any:
    """The newest capsule that the exporter knows."""
    try:
        return array.__dlpack__(max_version=max_version)
    except TypeError:  # exporters older than DLPack 1.0 know no max_version
        return array.__dlpack__()


def _managed(capsule: Any) -> Any:
    """What an unused capsule holds; None where it is none."""
    for kind, layout in ((VERSIONED, DLManagedTensorVersioned), (PLAIN, DLManagedTensor)):
        if _valid(capsule, kind):
            return layout.from_address(_pointer(capsule, kind))
    return None


def _capsule(op: str, name: str, array: Any) -> Any:
    try:
        return _newest(array, (1, 1))
    except REFUSALS as why:
        raise ArgumentError(f"{op}: {name} cannot be read through DLPack: {why}") from why


def _refuse_device(op: str, name: str, device: Tuple[int, int]) -> None:
    kind = _DEVICES.get(device[0], f"DLPack device {device[0]}")
    raise DeviceError(f"{op}: {name} is on {kind}:{device[1]}, only memory of the CPU is taken "
                      "here; orchard.torch takes tensors of torch on every device that it knows")


def take(op: str, name: str, capsule: Any) -> Export:
    """What the capsule holds; the Export keeps the capsule."""
    managed = _managed(capsule)
    if managed is None:
        raise ArgumentError(f"{op}: {name}'s __dlpack__ gave {type(capsule).__name__}, "
                            "not a DLPack capsule that nobody has used")
    flags = 0
    if isinstance(managed, DLManagedTensorVersioned):
        if managed.major != 1:
            raise ArgumentError(f"{op}: {name} comes as DLPack {managed.major}."
                                f"{managed.minor}, versions 0 and 1 are known")
        flags = managed.flags
    return _read(op, name, managed.tensor, flags, capsule)


def _read(op: str, name: str, tensor: DLTensor, flags: int, capsule: Any) -> Export:
    if tensor.device_type != CPU:
        _refuse_device(op, name, (tensor.device_type, tensor.device_id))
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise DtypeError(f"{op}: {name} has DLPack type (code {tensor.code}, {tensor.bits} bits, "
                         f"{tensor.lanes} lanes); known are f64, f32, f16, bf16, signed integers, "
                         "u8 and bool")
    rank = tensor.ndim
    shape = tensor.shape[:rank] if rank else []
    strides = tensor.strides[:rank] if rank and tensor.strides else None
    return Export((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides,
                  bool(flags & READ_ONLY), bool(flags & IS_COPIED), capsule)


def export(op: str, name: str, array: Any) -> Export:
    """Holds the array's memory; the caller releases it."""
    device = getattr(array, "__dlpack_device__", None)
    if device is not None:
        try:
            kind, number = (int(part) for part in device())
        except REFUSALS as why:
            raise ArgumentError(f"{op}: {name} cannot be read through DLPack: {why}") from why
        if kind != CPU:
            _refuse_device(op, name, (kind, number))
    return take(op, name, _capsule(op, name, array))


# ---- The other way: memory of ours for somebody else ---------------------------------------------

def _integers(memory: Any, name: str, shape: Tuple[int, ...]) -> Any:
    """An array of NumPy or torch over the memory; whoever asks for a capsule has one of them."""
    try:
        import numpy
        return numpy.ndarray(shape, name, memory)
    except ImportError:
        pass
    try:
        import torch
    except ImportError:
        raise BufferError("orchard.Array: lent through NumPy or torch, and neither can be "
                          "imported; memory() needs none") from None
    kind, count = getattr(torch, name), math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count).view(shape)


def lend(memory: Any, dtype: int, shape: Tuple[int, ...],
         max_version: Optional[Tuple[int, int]]) -> Any:
    """A capsule over dense memory, which lives as long as the capsule or who took it. It is one for
    integers of the same size, by NumPy or torch, that says what they are: those give memory back in
    C. A callback of ctypes would lose the exception that may be on its way then."""
    code, bits = _CODES[dtype]
    array = _integers(memory, f"int{bits}", shape)
    capsule = array.__dlpack__() if max_version is None else _newest(array, max_version)
    _managed(capsule).tensor.code = code
    return capsule
