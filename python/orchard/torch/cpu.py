"""The kernels for CPU tensors: the C library on torch's memory and threads.

There are two of each, with the same results to the bit: kernel.c (liborchard_torch), which torch
calls through its stable C ABI without passing through Python, and the functions below, used where
this torch lacks what kernel.c needs, and with ORCHARD_TORCH_KERNEL=python.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from ctypes import byref
from typing import NoReturn, Optional, Tuple

import torch

from .. import _library, _structs
from .._library import (ERRORS, ArgumentError, DtypeError, LayoutError, OrchardError, ShapeError,
                        lib)
from . import threads
from .attention import operands, outputs
from .attention.outputs import GRADIENTS, Tensors2, Tensors5, check_present
from .tensors import describe


def forward(q, k, v, *rest) -> Tensors2:
    """attention_forward; parameters as in the schema."""
    check_present("attention_forward", q=q, k=k, v=v)
    op = "attention_forward"
    args = _structs.AttentionForwardArgs()
    operands.attention(args.attention, op, q, k, v, *rest)
    out, lse = outputs.new_outputs(q, v, packed=rest[5] is not None)
    describe(args.out, out, op, "out")
    describe(args.lse, lse, op, "lse")
    threads.context().call(lib.orchard_attention_forward, byref(args))
    return out, lse


def backward(needs, dout, dlse, out, lse, q, k, v, bias, mask, alibi, sinks, *rest) -> Tensors5:
    """attention_backward; parameters as in the schema."""
    check_present("attention_backward", dout=dout, out=out, lse=lse, q=q, k=k, v=v)
    op = "attention_backward"
    args = _structs.AttentionBackwardArgs()
    operands.attention(args.attention, op, q, k, v, bias, mask, alibi, sinks, *rest)
    for name, tensor in (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse)):
        describe(getattr(args, name), tensor, op, name)
    made = outputs.new_gradients(needs, q, k, v, bias, sinks)
    for bit, name, gradient, like in zip(GRADIENTS, ("dq", "dk", "dv", "dbias", "dsinks"), made,
                                         (q, k, v, bias, sinks)):
        if needs & bit and like is not None:
            describe(getattr(args, name), gradient, op, name)
    threads.context().call(lib.orchard_attention_backward, byref(args))
    return made


def plain_forward(q, k, v, scale, causal, gqa) -> Tensors2:
    """_plain_forward; parameters as in the schema."""
    if not gqa and not q.shape[1:2] == k.shape[1:2] == v.shape[1:2]:
        raise ShapeError("attention_forward: q, k and v differ in their heads")
    return forward(q, k, v, *operands.without_options(scale, causal))


def plain_backward(needs, dout, out, lse, q, k, v, scale, causal) -> Tuple[torch.Tensor, ...]:
    """_plain_backward; parameters as in the schema."""
    return backward(needs, dout, None, out, lse, q, k, v,
                    *operands.without_options(scale, causal))[:3]


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
        made.orchard_torch_register, made.orchard_torch_take_status  # another library has neither
    except (OSError, AttributeError) as why:
        why_not = str(why)
        return None
    made.orchard_torch_register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p,
                                            ctypes.c_int32]
    made.orchard_torch_register.restype = ctypes.c_char_p
    made.orchard_torch_take_status.restype = ctypes.c_int32
    backends = threads.BACKENDS
    if torch_library is None:
        why_not = f"torch {torch.__version__} has no libtorch_cpu where Orchard looks for it"
        return None
    missing = made.orchard_torch_register(torch_library._handle, lib._handle,
                                          backends.encode() if backends else None,
                                          threads.forked())
    if missing:
        why_not = f"torch {torch.__version__} has no {missing.decode()}"
        return None
    return made


why_not = ""  # why the kernels are Python's
_c: Optional[ctypes.CDLL] = None


def register(library: torch.library.Library) -> None:
    """Registers the kernels for CPU tensors."""
    global _c
    _c = _open()
    if _c is None:
        for name, kernel in (("attention_forward", forward), ("attention", forward),
                             ("attention_backward", backward), ("_plain_forward", plain_forward),
                             ("_plain_backward", plain_backward)):
            library.impl(name, kernel, "CPU")


def kernel() -> str:
    """Which kernels torch calls: "c" or "python"."""
    return "python" if _c is None else "c"


def translate(error: Exception) -> Exception:
    """What kernel.c raised, as the exception that Python's kernel would have raised."""
    if _c is None or type(error) is not RuntimeError:
        return error
    message = str(error).split("\n", 1)[0]
    kind = ERRORS.get(_c.orchard_torch_take_status())
    ours = message.startswith(("attention", "ctx_create", "opencl: ", "metal: "))
    return kind(message) if kind and ours else error


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
