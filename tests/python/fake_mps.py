"""torch.mps on a machine without Metal: tensors that say they are on mps, and a compile_shader that
compiles and runs MSL on the Metal stand-in (tests/metal).

    fake_mps.install()                 # once: torch.mps.compile_shader works from here on
    q = fake_mps.tensor(cpu_tensor)    # shares its memory; q.device is mps:0

The public `torch.mps.compile_shader` itself runs, header embedding included; what is replaced is
the C++ behind it, `torch._C._mps_compileShader`. Its rules are enforced here as torch 2.13's source
and documents have them, with the same exceptions. Where the real one would go on with undefined
behaviour (an index that nobody bound, an empty storage, a grid of broken groups), the fake refuses.

Not exercised: PyTorch's C++ binder and its stream, dispatch to the MPS key by a real tensor, GPU
memory, Apple's compiler and hardware.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from typing import Any, List, Optional, Tuple

import torch

MAX_BUFFERS, MAX_BYTES, WHY = 31, 4096, 16384
MPS = torch.device("mps", 0)


# ---- Tensors -------------------------------------------------------------------------------------

class MpsTensor(torch.Tensor):
    """A CPU tensor whose device is mps. Views and results of operations are MpsTensors as well;
    `orchard::` operations go to the kernels that were registered for MPS. Its class stands for what
    is a plain tensor in PyTorch: `plain_to_the_switch` tells `orchard.enable()` so."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            plain = torch.Tensor._make_subclass(torch.Tensor, self)
            return plain.clone(memory_format=torch.preserve_format)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"mps {self.cpu()!r}"

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is not torch._C._nn.scaled_dot_product_attention:
            return super().__torch_function__(function, types, arguments, keywords)
        # Its C++ makes masks and zeros on the device that it sees, the CPU.
        _refuse_mixtures(function, (arguments, keywords))
        _inside_torch.calls += 1
        try:
            return super().__torch_function__(function, types, arguments, keywords)
        finally:
            _inside_torch.calls -= 1

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if function.namespace in ("orchard", "flash_attn_mps"):
            kernel = torch.library.get_kernel(function, "MPS")
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.MPS)
            return kernel.call_boxed(keys, *arguments, **keywords)
        if function not in _MAY_MIX and not _inside_torch.calls:
            _refuse_mixtures(function, (arguments, keywords))
        if isinstance(keywords.get("device"), torch.device) and keywords["device"].type == "mps":
            keywords["device"] = torch.device("cpu")
        with torch._C._DisableTorchDispatch():
            result = function(*arguments, **keywords)
        return torch.utils._pytree.tree_map_only(torch.Tensor, tensor, result)


class _InsideTorch(threading.local):
    calls = 0


_inside_torch = _InsideTorch()
_MAY_MIX = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def _refuse_mixtures(function: Any, given: Any) -> None:
    """As PyTorch does: of CPU tensors only those without dimensions may meet one on mps. (CPU
    indices of a tensor on mps, which PyTorch copies there, are refused too.)"""
    for one in torch.utils._pytree.tree_leaves(given):
        if isinstance(one, torch.Tensor) and not isinstance(one, MpsTensor) and one.dim():
            raise RuntimeError("Expected all tensors to be on the same device, but found at least "
                               f"two devices, mps:0 and {one.device}! (in {function})")


def tensor(cpu: torch.Tensor) -> MpsTensor:
    """The same memory, on mps. A leaf that requires grad stays one."""
    if isinstance(cpu, MpsTensor):
        return cpu
    return torch.Tensor._make_subclass(MpsTensor, cpu.detach(), cpu.requires_grad)


def plain_to_the_switch(monkeypatch: Any) -> None:
    """The switch leaves subclasses of tensors alone; a real tensor on mps is none."""
    from orchard.switch import sdpa
    monkeypatch.setattr(sdpa, "_PLAIN", (*sdpa._PLAIN, MpsTensor))


_installed: List[torch.library.Library] = []


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return tensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return tensor(torch.empty_strided(size, stride, dtype=dtype))


# ---- The stand-in --------------------------------------------------------------------------------

class _Storage(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


class _Argument(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("offset", ctypes.c_int64),
                ("storage", ctypes.c_int32)]


class _Grid(ctypes.Structure):
    _fields_ = [("groups", ctypes.c_int64 * 3), ("threads", ctypes.c_int64 * 3)]


_shim: ctypes.CDLL


def library(name: str) -> str:
    """A file of tests/metal in ORCHARD_BUILD, a build directory with ORCHARD_TESTS=ON."""
    build = os.environ.get("ORCHARD_BUILD")
    if not build:
        raise RuntimeError("fake_mps: ORCHARD_BUILD is not set; it must name a build directory made "
                           "with -DORCHARD_TESTS=ON, which has the Metal stand-in")
    path = os.path.join(build, "tests", "metal", name)
    if not os.path.exists(path):
        raise RuntimeError(f"fake_mps: there is no {path}; build it: cmake --build {build} --target "
                           "metal_standin shader_shim")
    return path


def fail(what: str, nth: int) -> None:
    """Makes the nth next such act of the stand-in fail: "compile", ... ."""
    ctypes.CDLL(library("libmetal_standin.so")).metal_standin_fail(what.encode(), ctypes.c_long(nth))


def install() -> None:
    """Once is enough; RuntimeError where the stand-in is missing."""
    global _shim
    if _installed:
        return
    _shim = ctypes.CDLL(library("libshader_shim.so"))
    for name in ("shim_library", "shim_kernel"):
        getattr(_shim, name).restype = ctypes.c_void_p
    _shim.shim_property.restype = ctypes.c_int64
    why = ctypes.create_string_buffer(WHY)
    standin = library("libmetal_standin.so").encode()
    if not _shim.shim_open(standin, why, ctypes.c_size_t(WHY)):
        raise RuntimeError(why.value.decode())
    torch._C._mps_compileShader = ShaderLibrary
    torch._C._mps_deviceSynchronize = _synchronize
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "MPS")
    aten.impl("empty_strided", _empty_strided, "MPS")
    _installed.append(aten)


class Counts:
    """What was asked of Metal."""

    compiles = 0
    dispatches = 0
    waits = 0
    private = False  # whether storages are private: seen by kernels and blits alone
    last_names: List[str] = []
    last_addresses: List[int] = []  # where each tensor begins that a launch has bound


def _synchronize() -> None:
    """Kernels of the stand-in are done when they come back."""
    Counts.waits += 1


# ---- compile_shader ------------------------------------------------------------------------------

class ShaderLibrary:
    """torch._C._mps_compileShader(source)."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise TypeError("compile_shader(): incompatible function arguments")
        try:
            text = source.encode("ascii")  # NSASCIIStringEncoding: anything else becomes nil
        except UnicodeEncodeError as why:
            raise SyntaxError(f"Failed to create metal library: not ASCII: {why}") from None
        if re.search(rb"\[\[\s*threadgroup\s*\(", text):
            raise RuntimeError("compile_shader has no way to set the length of [[threadgroup(n)]]")
        why = ctypes.create_string_buffer(WHY)
        Counts.compiles += 1
        self._handle = _shim.shim_library(text, why, ctypes.c_size_t(WHY))
        if not self._handle:
            raise SyntaxError(f"Failed to create metal library, error: {why.value.decode()}")

    def __getattr__(self, name: str) -> "ShaderKernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return ShaderKernel(self, name)


def _vector(what: str, value: Any) -> Optional[List[int]]:
    """An int, or one to three of them; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (int, list, tuple)):
        raise RuntimeError(f"Unable to cast {what} to std::vector<uint64_t>: {value}")
    values = [value] if isinstance(value, int) else list(value)
    if not 0 < len(values) < 4:
        raise RuntimeError(f"Expected vec.size() > 0 && vec.size() < 4: {what} has {len(values)}")
    if any(type(v) is not int or v < 0 or v >= 1 << 64 for v in values):
        raise RuntimeError(f"Unable to cast {what} to std::vector<uint64_t>: {values}")
    return values


_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32, "int16": torch.int16,
          "int8": torch.int8, "uint8": torch.uint8}


class _Binder:
    """Arguments as they come to the encoder: memory of storages, or bytes."""

    def __init__(self, casts: Any) -> None:
        if casts is not None and not isinstance(casts, (str, dict)):
            raise RuntimeError(f"Unexpected caster arg type {type(casts).__name__}")
        self.casts = casts
        self.storages: List[Tuple[int, int]] = []
        self.arguments: List[_Argument] = []
        self.kept: List[Any] = []
        self.first_numel: Optional[int] = None

    def _cast(self) -> Optional[str]:
        if isinstance(self.casts, dict):
            return self.casts.get(len(self.arguments))
        return self.casts

    def _bytes(self, values: torch.Tensor) -> None:
        size = values.numel() * values.element_size()
        if size > MAX_BYTES:
            raise RuntimeError(f"setBytes of {size} bytes: Metal's limit is {MAX_BYTES}")
        self.kept.append(values)
        self.arguments.append(_Argument(values.data_ptr(), size, 0, -1))

    def _scalars(self, values: List[Any], dtype: torch.dtype) -> None:
        cast = self._cast()
        if cast and cast not in _CASTS:
            raise RuntimeError(f"Unsupported cast instruction {cast}")
        if dtype == torch.int64 and any(not isinstance(v, int) or not -2**63 <= v < 2**63 for v in values):
            raise RuntimeError("Unable to cast Python instance to C++ type std::vector<int64_t>")
        if dtype == torch.float32 and any(not isinstance(v, (int, float)) for v in values):
            raise RuntimeError("Unable to cast Python instance to C++ type std::vector<float>")
        numbers = torch.tensor(values, dtype=dtype)
        self._bytes(numbers.to(_CASTS[cast]) if cast else numbers)

    def _tensor(self, t: torch.Tensor) -> None:
        if self.first_numel is None:
            self.first_numel = t.numel()
        if not isinstance(t, MpsTensor):
            if t.dim() != 0:
                raise RuntimeError("Passed CPU tensor to MPS op")
            self._bytes((t.float() if t.dtype == torch.float64 else t.clone()).reshape(1))
            return
        storage = t.untyped_storage()
        if storage.nbytes() == 0:
            raise RuntimeError("an empty storage has no MTLBuffer: nil would be bound")
        place = (storage.data_ptr(), storage.nbytes())
        if place not in self.storages:
            self.storages.append(place)
        self.arguments.append(_Argument(None, 0, t.storage_offset() * t.element_size(),
                                        self.storages.index(place)))
        Counts.last_addresses.append(t.data_ptr())

    def bind(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, (list, tuple)):
            if not value:
                raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
            if isinstance(value[0], int):
                self._scalars(list(value), torch.int64)
            elif isinstance(value[0], float):
                self._scalars(list(value), torch.float32)
            elif isinstance(value[0], torch.Tensor):
                raise RuntimeError("a list of tensors becomes addresses: not in this fake")
            else:
                raise RuntimeError("Unexpected argument types")
        elif isinstance(value, float):
            self._scalars([value], torch.float32)
        elif isinstance(value, int):
            self._scalars([int(value)], torch.int64)
        else:
            raise RuntimeError("Unsupported argument type")
        if len(self.arguments) > MAX_BUFFERS:
            raise RuntimeError(f"more than {MAX_BUFFERS} buffers")


class ShaderKernel:
    """library.name"""

    def __init__(self, library: ShaderLibrary, name: str) -> None:
        why = ctypes.create_string_buffer(WHY)
        self._name, self._library = name, library
        self._handle = _shim.shim_kernel(ctypes.c_void_p(library._handle), name.encode(), why,
                                         ctypes.c_size_t(WHY))
        if not self._handle:
            raise RuntimeError(f"Failed to create function state object for: {name}: {why.value.decode()}")

    def _property(self, which: int) -> int:
        return _shim.shim_property(ctypes.c_void_p(self._handle), which)

    max_threads_per_threadgroup = property(lambda self: self._property(0))
    thread_execution_width = property(lambda self: self._property(1))
    static_thread_group_memory_length = property(lambda self: self._property(2))

    def _grid(self, threads: List[int], group: Optional[List[int]]) -> _Grid:
        most = self.max_threads_per_threadgroup
        if group is None:
            group = [min(threads[0], most)] if len(threads) == 1 else [most] + [1] * (len(threads) - 1)
        if len(group) != len(threads):
            raise RuntimeError("Expected threads->size() == group_size->size()")
        size = 1
        for n in group:
            size *= n
        if size > most:
            raise ValueError(f"Threadgroup size exceeds {most} limit")
        if 0 in threads or 0 in group:
            raise RuntimeError("Metal refuses a grid without threads")
        if any(n >= 1 << 32 for n in threads):
            raise RuntimeError("Metal counts the threads of a dimension with 32 bits")
        if any(n % g for n, g in zip(threads, group)):
            raise RuntimeError(f"{threads} threads are not whole groups of {group}: `threads` is the "
                               "whole grid's, and the stand-in has no broken groups")
        wide = [n // g for n, g in zip(threads, group)] + [1, 1]
        return _Grid(groups=tuple(wide[:3]), threads=tuple((group + [1, 1])[:3]))

    def __call__(self, *values: Any, threads: Any = None, group_size: Any = None,
                 arg_casts: Any = None, error_buf_idx: Any = None) -> None:
        grid_threads, group = _vector("threads", threads), _vector("group_size", group_size)
        binder = _Binder(arg_casts)
        for value in values:
            binder.bind(value)
        if error_buf_idx is not None:
            raise RuntimeError("error_buf_idx: not in this fake")
        if grid_threads is None:
            if binder.first_numel is None:
                raise RuntimeError("Number of threads is undefined or has wrong dimension")
            grid_threads = [binder.first_numel]
        grid = self._grid(grid_threads, group)
        storages = (_Storage * max(1, len(binder.storages)))(*(_Storage(*s) for s in binder.storages))
        arguments = (_Argument * max(1, len(binder.arguments)))(*binder.arguments)
        why = ctypes.create_string_buffer(WHY)
        Counts.dispatches += 1
        Counts.last_names.append(self._name)
        if not _shim.shim_run(ctypes.c_void_p(self._handle), storages, len(binder.storages),
                              arguments, len(binder.arguments), ctypes.byref(grid),
                              int(Counts.private), why, ctypes.c_size_t(WHY)):
            raise RuntimeError(why.value.decode())
