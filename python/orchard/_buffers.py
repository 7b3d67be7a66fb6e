"""The buffer protocol, read through ctypes: NumPy arrays, array.array, bytearray, memoryview.

Python's own memoryview does not tell the address of read-only memory, so this asks the interpreter
for the buffer as a C extension would. While the buffer is held its owner cannot move or free it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from . import _structs
from ._exports import Export, element_strides, python_call
from ._library import ArgumentError, DtypeError, LayoutError


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython; part of its stable ABI since 3.11, the same before."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)), ("internal", ctypes.c_void_p),
    ]


_FULL_READ_ONLY = 0x11C  # PyBUF_FULL_RO: any strides, with format; writable if it happens to be

_check = python_call("PyObject_CheckBuffer", ctypes.c_int, ctypes.py_object)
_get = python_call("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer),
                   ctypes.c_int)
_release = python_call("PyBuffer_Release", None, ctypes.POINTER(_PyBuffer))

_FLOATS = {"d": _structs.F64, "f": _structs.F32, "e": _structs.F16}
_SIGNED = {8: _structs.I64, 4: _structs.I32, 2: _structs.I16, 1: _structs.I8}


def has_buffer(array: Any) -> bool:
    return bool(_check(array))


def _dtype(op: str, name: str, text: str, item: int) -> int:
    """The dtype of a format such as "<f", "@l" or "?"."""
    order, code = (text[0], text[1:]) if text[:1] in "@=<>!|" and text else ("@", text)
    foreign = ">!" if sys.byteorder == "little" else "<"
    if order in foreign and item > 1:
        raise DtypeError(f"{op}: {name} is {'big' if order != '<' else 'little'}-endian "
                         f"(format \"{text}\"), this machine is not; convert it first")
    if code in _FLOATS:
        return _FLOATS[code]
    if code in ("b", "h", "i", "l", "q", "n") and item in _SIGNED:
        return _SIGNED[item]
    if code == "B":
        return _structs.U8
    if code == "?":
        return _structs.BOOL
    raise DtypeError(f"{op}: {name} has elements of format \"{text}\"; known are f64, f32, f16, "
                     "bf16, signed integers, u8 and bool")


def _read(op: str, name: str, owner: memoryview) -> Export:
    view = _PyBuffer()
    seen = ctypes.byref(view)
    try:
        _get(owner, seen, _FULL_READ_ONLY)
        rank, item = view.ndim, view.itemsize
        shape = view.shape[:rank] if view.shape else []
        if view.suboffsets and any(offset >= 0 for offset in view.suboffsets[:rank]):
            raise LayoutError(f"{op}: {name} is an array of pointers to rows, not one block")
        dtype = _dtype(op, name, (view.format or b"B").decode("ascii", "replace"), item)
        # Absent strides mean dense: ctypes' own arrays leave them out though they were asked for.
        strides = (element_strides(op, name, shape, view.strides[:rank], item)
                   if rank and view.strides else None)
        return Export(view.buf or 0, dtype, shape, strides, bool(view.readonly), owner=owner)
    finally:
        _release(seen)  # nothing, where nothing was got


def export(op: str, name: str, array: Any) -> Export:
    """Holds the array's buffer by a memoryview, which gives it back however this ends: Ctrl-C may
    come between any two lines."""
    owner = memoryview(array)  # raises by itself
    try:
        return _read(op, name, owner)
    except BaseException:
        owner.release()  # now: the exception's traceback holds it
        raise


def export_bfloat16(op: str, name: str, array: Any) -> Export:
    """The same for ml_dtypes' bfloat16 in a NumPy array, which neither DLPack nor the buffer
    protocol knows, through NumPy's own description of its memory."""
    seen = array.__array_interface__
    if seen["typestr"][1:] not in ("V2", "f2"):
        raise ArgumentError(f"{op}: {name} says that it is bfloat16 but has elements of type "
                            f"{seen['typestr']}")
    address, read_only = seen["data"]
    shape, strides = seen["shape"], seen.get("strides")
    if strides is not None:
        strides = element_strides(op, name, shape, strides, 2)
    return Export(address, _structs.BF16, shape, strides, bool(read_only), owner=array)
