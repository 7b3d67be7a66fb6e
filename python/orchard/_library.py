"""liborchard itself: where it is, how it is called, how its failures become exceptions.

Every call of the C library returns a status and leaves a message. `check` turns the two into one
of the exceptions below: each is an OrchardError and the built-in exception that a Python programmer
expects (a wrong shape is a ValueError, a wrong dtype a TypeError).
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from typing import Dict, Type

from . import _structs


class OrchardError(Exception):
    """A call that Orchard refused or could not do; the text is the C library's message."""


class ArgumentError(OrchardError, ValueError):
    """A missing operand, or an option out of range."""


class ShapeError(OrchardError, ValueError):
    """Sizes that do not fit together."""


class DtypeError(OrchardError, TypeError):
    """An element type that this operand cannot have."""


class LayoutError(OrchardError, ValueError):
    """Strides or overlap that cannot be served."""


class UnsupportedError(OrchardError, NotImplementedError):
    """Well-formed, but no allowed backend takes it."""


class OutOfMemoryError(OrchardError, MemoryError):
    """An allocation failed; nothing was changed."""


class DeviceError(OrchardError, RuntimeError):
    """A device failed or was lost, or an array lies on another one."""


class CompileError(OrchardError, RuntimeError):
    """A device's compiler refused a kernel."""


class FileError(OrchardError, OSError):
    """A file could not be read or written."""


class InternalError(OrchardError, RuntimeError):
    """A defect of Orchard: please report it."""


ERRORS: Dict[int, Type[OrchardError]] = {
    _structs.ERROR_ARGUMENT: ArgumentError,
    _structs.ERROR_SHAPE: ShapeError,
    _structs.ERROR_DTYPE: DtypeError,
    _structs.ERROR_LAYOUT: LayoutError,
    _structs.ERROR_UNSUPPORTED: UnsupportedError,
    _structs.ERROR_MEMORY: OutOfMemoryError,
    _structs.ERROR_DEVICE: DeviceError,
    _structs.ERROR_COMPILE: CompileError,
    _structs.ERROR_IO: FileError,
    _structs.ERROR_INTERNAL: InternalError,
}


def path() -> str:
    """The library file: ORCHARD_LIBRARY if that is set, else the one inside this package."""
    given = os.environ.get("ORCHARD_LIBRARY")
    if given:
        return given
    name = "liborchard.dylib" if sys.platform == "darwin" else "liborchard.so"
    return str(pathlib.Path(__file__).parent / "lib" / name)


def _open() -> ctypes.CDLL:
    where = path()
    try:
        library = ctypes.CDLL(where)
    except OSError as why:
        raise ImportError(f"orchard: cannot load the C library {where}: {why}") from None
    for name, (result, parameters) in _structs.CALLS.items():
        try:
            call = getattr(library, name)
        except AttributeError:
            found = getattr(library, "orchard_version", None)
            if found is None:
                raise ImportError(f"orchard: {where} is not Orchard's C library") from None
            found.restype = ctypes.c_char_p
            raise ImportError(f"orchard: {where} is version {found().decode()} and has no {name}: "
                              "it does not belong to this Python package") from None
        call.restype, call.argtypes = result, parameters
    return library


lib = _open()


def check(status: int) -> None:
    """Raises what a negative status stands for, with the C library's message."""
    if status:
        raise ERRORS.get(status, InternalError)(lib.orchard_last_error().decode("utf-8", "replace"))


def version() -> str:
    """The C library's version, for example "0.3.0"."""
    return lib.orchard_version().decode()
