"""The kernels for CPU tensors: the C library on torch's memory and threads.

There are two, for all operations, with the same results to the bit: kernel.c (liborchard_torch),
which torch calls through its stable C ABI without passing through Python, and `in_python`, used
where this torch lacks what kernel.c needs, and with ORCHARD_TORCH_KERNEL=python.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from typing import Any, Callable, List, NoReturn, Optional, Tuple

import torch

from .. import _library
from .._library import (ERRORS, ArgumentError, DtypeError, InternalError, LayoutError, OrchardError,
                        ShapeError, lib)
from . import threads
from .signature import ABSENT, DENSE, Layout, Signature
from .tensors import Arguments, address_of


def in_python(signature: Signature) -> Callable[..., Tuple[torch.Tensor, ...]]:
    """The kernel of an operation: its arguments are those of the schema."""
    op = signature.op

    def run(*args: Any) -> Tuple[torch.Tensor, ...]:
        operands, options, wanted = signature.named(args)
        made, outputs = signature.new_outputs(operands, options, wanted)
        arguments = Arguments(op)
        arguments.fill({**operands, **outputs}, options,
                       lambda name, tensor: address_of(op, name, tensor))
        threads.context().call(lib.orchard_op_call, op.encode(), arguments.struct)
        return made

    return run


# ---- Rows for kernel.c ---------------------------------------------------------------------------

class _Argument(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("type", ctypes.c_int32), ("optional", ctypes.c_int32),
                ("kind", ctypes.c_int32), ("offset", ctypes.c_int64), ("flag", ctypes.c_int64)]


class _Output(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("required", ctypes.c_int32),
                ("layout", ctypes.c_int32), ("offset", ctypes.c_int64), ("like", ctypes.c_int64)]


class _Row(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("op", ctypes.c_char_p), ("args_size", ctypes.c_int64),
                ("argument_count", ctypes.c_int32), ("output_count", ctypes.c_int32),
                ("arguments", ctypes.POINTER(_Argument)), ("outputs", ctypes.POINTER(_Output))]


def _row(name: str, signature: Signature) -> _Row:
    operation = signature.operation
    arguments = (_Argument * len(signature.arguments))()
    for to, of in zip(arguments, signature.arguments):
        to.name, to.type, to.optional = of.name.encode(), ord(of.type), of.optional
        to.flag = -1
        if of.operand is not None:
            to.offset = of.operand.offset
        elif of.option is not None:
            to.kind, to.offset = of.option.kind, of.option.offset
            if of.option.flag:
                to.flag = operation.options[of.option.flag].offset
    outputs = (_Output * len(operation.outputs))()
    for to, output in zip(outputs, operation.outputs):
        layout = signature.layouts.get(output.name, Layout(DENSE))
        if output.name not in signature.places:
            layout = Layout(ABSENT)
        to.name, to.required, to.offset = output.name.encode(), not output.optional, output.offset
        to.layout = layout.kind
        if layout.like:
            to.like = operation.operands[layout.like].offset
    return _Row(name.encode(), signature.op.encode(), operation.args_size, len(arguments),
                len(outputs), arguments, outputs)


# ---- Registration --------------------------------------------------------------------------------

def path() -> str:
    """The file of kernel.c: what ORCHARD_TORCH_LIBRARY names, else beside liborchard; another
    liborchard may stand alone, and serves this package's own."""
    given = os.environ.get("ORCHARD_TORCH_LIBRARY")
    if given:
        return given
    name = "liborchard_torch.dylib" if sys.platform == "darwin" else "liborchard_torch.so"
    beside = pathlib.Path(_library.path()).parent / name
    return str(beside if beside.exists() else pathlib.Path(_library.__file__).parent / "lib" / name)


def _open() -> Optional[ctypes.CDLL]:
    """kernel.c with its kernels registered; None where that cannot be, `why_not` says why."""
    global why_not
    torch_library = threads.torch_library()
    if os.environ.get("ORCHARD_TORCH_KERNEL") == "python":
        why_not = "ORCHARD_TORCH_KERNEL is python"
        return None
    try:
        made = ctypes.CDLL(path())
        made.orchard_torch_open, made.orchard_torch_take_error  # another library has neither
    except (OSError, AttributeError) as why:
        why_not = str(why)
        return None
    made.orchard_torch_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p,
                                        ctypes.c_int32]
    made.orchard_torch_register.argtypes = [ctypes.POINTER(_Row)]
    made.orchard_torch_open.restype = made.orchard_torch_register.restype = ctypes.c_char_p
    made.orchard_torch_take_error.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
    made.orchard_torch_take_error.restype = ctypes.c_int32
    backends = threads.BACKENDS
    if torch_library is None:
        why_not = f"torch {torch.__version__} has no libtorch_cpu where Orchard looks for it"
        return None
    missing = made.orchard_torch_open(torch_library._handle, lib._handle,
                                      backends.encode() if backends else None, threads.forked())
    if missing:
        why_not = f"torch {torch.__version__} has no {missing.decode()}"
        return None
    return made


why_not = ""  # why the kernels are Python's
_c = _open()
_rows: List[_Row] = []  # kernel.c reads them as long as it lives


def register(library: torch.library.Library, name: str, signature: Signature) -> None:
    """Registers the kernel of orchard::name for CPU tensors."""
    if _c is None:
        library.impl(name, in_python(signature), "CPU")
        return
    _rows.append(_row(name, signature))
    missing = _c.orchard_torch_register(ctypes.byref(_rows[-1]))
    if missing:
        raise InternalError(f"torch did not take the kernel: {missing.decode()}")


def kernel() -> str:
    """Which kernels torch calls: "c" or "python"."""
    return "python" if _c is None else "c"


def translate(error: Exception) -> Exception:
    """What kernel.c raised, as the exception that Python's kernel would have raised."""
    if _c is None or type(error) is not RuntimeError:
        return error
    told = ctypes.c_char_p()
    kind = ERRORS.get(_c.orchard_torch_take_error(ctypes.byref(told)))
    message = (told.value or b"").decode("utf-8", "replace")
    return kind(message) if kind and str(error).split("\n", 1)[0] == message else error


def reraise(error: Exception) -> NoReturn:
    """Raises that; what others raised, a hook say, as it is, with its cause."""
    found = translate(error)
    if found is error:
        raise error
    raise found from None


def misused(error: Exception) -> bool:
    """Whether another call may do better, or say better what is wrong. Not where this one was right
    and failed all the same: the next would hide that, an audit's finding above all."""
    return not isinstance(error, OrchardError) or isinstance(
        error, (ArgumentError, ShapeError, DtypeError, LayoutError))
