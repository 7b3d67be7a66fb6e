"""DLPack through ctypes: torch tensors, JAX arrays, and whatever else exports `__dlpack__`.

An exporter hands out a capsule. Who wants the memory for good renames it and calls the deleter
inside; here it is kept as it is for as long as a call lasts, and then gives the memory back by
itself. Both kinds are read: "dltensor", and since DLPack 1.0 "dltensor_versioned", which also says
whether the memory is read-only or a copy. Only memory of the CPU is taken.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Tuple

from . import _structs
from ._exports import Export, dense_strides, python_call
from ._library import ArgumentError, DeviceError, DtypeError

CPU = 1
_DEVICES = {2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm",
            11: "rocm_host", 13: "cuda_managed", 14: "oneapi"}

READ_ONLY, IS_COPIED = 1, 2  # bits of DLManagedTensorVersioned.flags

_DTYPES = {  # (code, bits)
    (2, 64): _structs.F64, (2, 32): _structs.F32, (2, 16): _structs.F16, (4, 16): _structs.BF16,
    (0, 64): _structs.I64, (0, 32): _structs.I32, (0, 16): _structs.I16, (0, 8): _structs.I8,
    (1, 8): _structs.U8, (6, 8): _structs.BOOL,
}
_CODES = {dtype: pair for pair, dtype in _DTYPES.items()}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    ]


_valid = python_call("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = python_call("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)

# A capsule keeps the address of its name, not a copy: these live as long as the module.
PLAIN, VERSIONED = b"dltensor", b"dltensor_versioned"


def _capsule(op: str, name: str, array: Any) -> Any:
    """Asks for the newest capsule that the exporter knows."""
    try:
        try:
            return array.__dlpack__(max_version=(1, 1))
        except TypeError:  # exporters older than DLPack 1.0 know no max_version
            return array.__dlpack__()
    except Exception as why:
        raise ArgumentError(f"{op}: {name} cannot be read through DLPack: {why}") from why


def _refuse_device(op: str, name: str, device: Tuple[int, int]) -> None:
    kind = _DEVICES.get(device[0], f"DLPack device {device[0]}")
    raise DeviceError(f"{op}: {name} is on {kind}:{device[1]}, only memory of the CPU is taken "
                      "here; orchard.torch takes tensors of torch on every device that it knows")


def take(op: str, name: str, capsule: Any) -> Export:
    """What the capsule holds; the Export keeps the capsule."""
    kind = next((kind for kind in (VERSIONED, PLAIN) if _valid(capsule, kind)), None)
    if kind is None:
        raise ArgumentError(f"{op}: {name}'s __dlpack__ gave {type(capsule).__name__}, "
                            "not a DLPack capsule that nobody has used")
    managed: Any = (DLManagedTensorVersioned if kind == VERSIONED else DLManagedTensor
                    ).from_address(_pointer(capsule, kind))
    flags = 0
    if kind == VERSIONED:
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
        except Exception as why:
            raise ArgumentError(f"{op}: {name} cannot be read through DLPack: {why}") from why
        if kind != CPU:
            _refuse_device(op, name, (kind, number))
    return take(op, name, _capsule(op, name, array))


# ---- The other way: memory of ours for somebody else ---------------------------------------------

_lent: Dict[int, tuple] = {}  # address of what was lent: (it, sizes, strides, memory's owner)


# What was lent may outlive this module, when the interpreter ends: what these two need, they hold.

@Deleter
def _given_back(address: int, lent: Any = _lent) -> None:
    lent.pop(address, None)


_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = python_call("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)
# The destructor gets the dying capsule as an address: as an object it would be revived.
_dying_valid = python_call("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = python_call("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p,
                             ctypes.c_char_p)


@_Destructor
def _unused(capsule: int, lent: Any = _lent, kinds: Any = (PLAIN, VERSIONED),
            valid: Any = _dying_valid, pointer: Any = _dying_pointer) -> None:
    for kind in kinds:
        if valid(capsule, kind):
            lent.pop(pointer(capsule, kind), None)


for _for_ever in (_given_back, _unused):
    python_call("Py_IncRef", None, ctypes.py_object)(_for_ever)


def lend(owner: Any, address: int, dtype: int, shape: Tuple[int, ...], versioned: bool) -> Any:
    """A capsule over dense memory that `owner` keeps alive."""
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    strides = (ctypes.c_int64 * max(len(shape), 1))(*dense_strides(shape))
    code, bits = _CODES[dtype]
    managed: Any = DLManagedTensorVersioned(major=1, minor=0) if versioned else DLManagedTensor()
    managed.tensor = DLTensor(data=address, device_type=CPU, ndim=len(shape), code=code, bits=bits,
                              lanes=1, shape=sizes, strides=strides)
    managed.deleter = ctypes.cast(_given_back, ctypes.c_void_p).value
    _lent[ctypes.addressof(managed)] = (managed, sizes, strides, owner)
    return _new(ctypes.addressof(managed), VERSIONED if versioned else PLAIN, _unused)
