"""liborchard through ctypes: the structs of orchard/core.h and attention.h, field by field."""

import ctypes
from ctypes import (POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32,
                    c_uint64, c_void_p)

HEADER_VERSION = 100  # 0.1.0
MAX_RANK = 8
F64, F32, F16, BF16, I64, I32, BOOL = 1, 2, 3, 4, 5, 6, 10


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("buffer", c_void_p),
        ("offset", c_size_t),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("size", c_int64 * MAX_RANK),
        ("stride", c_int64 * MAX_RANK),
    ]


class Attention(ctypes.Structure):
    _fields_ = (
        [(name, Tensor) for name in ("q", "k", "v", "bias", "mask", "alibi", "sinks")]
        + [(name, Tensor) for name in ("key_lengths", "cu_seqlens_q", "cu_seqlens_k")]
        + [("max_t", c_int64), ("max_s", c_int64), ("scale", c_double), ("has_scale", c_int32)]
        + [("causal", c_int32), ("align", c_int32), ("has_window", c_int32)]
        + [("window_left", c_int64), ("window_right", c_int64), ("softcap", c_double)]
        + [("dropout", c_double), ("seed", c_uint64), ("dropout_offset", c_uint32)]
    )


class ForwardArgs(ctypes.Structure):
    _fields_ = [("out", Tensor), ("lse", Tensor), ("attention", Attention)]


class BackwardArgs(ctypes.Structure):
    _fields_ = (
        [(name, Tensor) for name in ("dq", "dk", "dv", "dbias", "dsinks")]
        + [(name, Tensor) for name in ("dout", "dlse", "out", "lse")]
        + [("attention", Attention)]
    )


ALLOC = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)


class CtxOpts(ctypes.Structure):
    _fields_ = [
        ("threads", c_int32),
        ("strict", c_int32),
        ("backend", c_char_p),
        ("cpu", c_char_p),
        ("alloc", ALLOC),
        ("alloc_user", c_void_p),
        ("parallel_for", c_void_p),
    ]


class Error(Exception):
    pass


class CountingAllocator:
    """The C library's realloc, with a count of bytes held and their peak."""

    def __init__(self):
        libc = ctypes.CDLL(None)
        libc.realloc.restype, libc.realloc.argtypes = c_void_p, [c_void_p, c_size_t]
        libc.free.restype, libc.free.argtypes = None, [c_void_p]
        self.bytes = self.peak = 0

        def alloc(_user, pointer, old_size, new_size):
            held = old_size if pointer else 0
            if not new_size:
                libc.free(pointer)
                self.bytes -= held
                return None
            block = libc.realloc(pointer, new_size)
            self.bytes += new_size - held if block else 0
            self.peak = max(self.peak, self.bytes)
            return block

        self.function = ALLOC(alloc)


class Library:
    def __init__(self, path):
        self.lib = lib = ctypes.CDLL(path)
        lib.orchard_version.restype = c_char_p
        lib.orchard_last_error.restype = c_char_p
        lib.orchard_ctx_create_version.argtypes = [POINTER(c_void_p), POINTER(CtxOpts), c_int32]
        lib.orchard_ctx_free.restype, lib.orchard_ctx_free.argtypes = None, [c_void_p]
        lib.orchard_ctx_cpu.restype, lib.orchard_ctx_cpu.argtypes = c_char_p, [c_void_p]
        lib.orchard_attention_forward.argtypes = [c_void_p, POINTER(ForwardArgs)]
        lib.orchard_attention_backward.argtypes = [c_void_p, POINTER(BackwardArgs)]

    def check(self, status):
        if status:
            raise Error(self.lib.orchard_last_error().decode())

    def version(self):
        return self.lib.orchard_version().decode()

    def context(self, **options):
        return Context(self, **options)


class Context:
    """A context; `alloc` is a CountingAllocator, `parallel_for` an address."""

    def __init__(self, library, threads=0, backend=None, parallel_for=None, alloc=None):
        self.library, self.alloc, self.handle = library, alloc, c_void_p()
        opts = CtxOpts(threads=threads, parallel_for=parallel_for)
        opts.backend = backend.encode() if backend else None
        if alloc:
            opts.alloc = alloc.function
        library.check(library.lib.orchard_ctx_create_version(byref(self.handle), byref(opts),
                                                             HEADER_VERSION))

    def cpu(self):
        return self.library.lib.orchard_ctx_cpu(self.handle).decode()

    def forward(self, args):
        self.library.check(self.library.lib.orchard_attention_forward(self.handle, args))

    def backward(self, args):
        self.library.check(self.library.lib.orchard_attention_backward(self.handle, args))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.library.lib.orchard_ctx_free(self.handle)
        self.handle = None
