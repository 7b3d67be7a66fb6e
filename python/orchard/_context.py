"""A C context per thread and list of backends, made when first needed.

A context serves one thread at a time, so every thread has its own; it ends with its thread, when
another number of threads is asked for, or when a device of its was lost. After a fork the child
makes new ones: what the parent's other threads held at that moment is not touched.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Callable, Dict, Optional

from . import _structs
from ._library import DeviceError, check, lib


class Context:
    """Owns one orchard_ctx; `handle` is what C calls take."""

    def __init__(self, threads: int = 0, backend: Optional[str] = None,
                 parallel_for: Optional[int] = None, strict: bool = False) -> None:
        self.handle = ctypes.c_void_p()
        self.process = os.getpid()
        self.asked = threads
        opts = _structs.CtxOpts(threads=threads, parallel_for=parallel_for, strict=strict)
        opts.backend = backend.encode() if backend else None
        check(lib.orchard_ctx_create_version(ctypes.byref(self.handle), ctypes.byref(opts),
                                             _structs.HEADER_VERSION))

    @property
    def threads(self) -> int:
        return lib.orchard_ctx_threads(self.handle)

    @property
    def cpu(self) -> str:
        """The instruction set in use: "avx2", "neon" or "scalar"."""
        return lib.orchard_ctx_cpu(self.handle).decode()

    def call(self, function: Callable, *args: Any) -> None:
        """A C function with this context before its other arguments. Once a device was lost a
        context fails whatever it is asked: the next call has a new one, which takes the next
        backend."""
        try:
            check(function(self.handle, *args))
        except DeviceError:
            _contexts.made = {key: ctx for key, ctx in _contexts.made.items() if ctx is not self}
            raise

    def __del__(self) -> None:
        # Not in a forked child: the memory of the parent's devices is not the child's to free.
        if getattr(self, "handle", None) and self.process == os.getpid():
            lib.orchard_ctx_free(self.handle)


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.process = os.getpid()
        self.made: Dict[tuple, Context] = {}


_contexts = _Contexts()


def context(threads: int = 0, backend: Optional[str] = None,
            parallel_for: Optional[int] = None) -> Context:
    """This thread's context with these options."""
    if _contexts.process != os.getpid():
        _contexts.__init__()
    key = (backend, parallel_for)
    found = _contexts.made.get(key)
    if found is None or found.asked != threads:  # each keeps its largest scratch
        found = _contexts.made[key] = Context(threads, backend, parallel_for)
    return found
