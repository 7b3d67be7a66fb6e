"""Arrays of any library as operands, and new arrays of the same kind as results.

An operand is anything with the buffer protocol (NumPy, array.array, memoryview) or DLPack (torch on
the CPU, JAX on the CPU). Nothing is copied: the C library reads and writes the caller's memory by
its strides. Neither NumPy nor torch is imported here; a result is made by whichever of them the
caller's array came from, else it is an `Array`.

    with Operands("attention_forward") as operands:
        args.out = operands.output("out", out)
        args.attention.q = operands.input("q", q)
        ...the C call...
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, List, Optional, Sequence, Tuple

from . import _buffers, _dlpack, _structs
from ._exports import DTYPES, REFUSALS, SIZES, Export, check_storage
from ._library import ArgumentError, LayoutError, OrchardError, OutOfMemoryError, lib


def _is_of(module: str, name: str, array: Any) -> bool:
    """isinstance(array, module.name) without importing the module."""
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(array, kind)


def export(op: str, name: str, array: Any) -> Export:
    """Address, dtype, sizes and strides of an operand; held until its `release`."""
    if _is_of("torch", "Tensor", array):
        if array.requires_grad:
            raise ArgumentError(
                f"{op}: {name} is a torch tensor that requires grad, and orchard.{op} records no "
                "gradients: call orchard.torch.scaled_dot_product_attention, or pass "
                f"{name}.detach()")
        if array.is_neg():  # its memory holds the opposite of its values, and DLPack does not tell
            raise LayoutError(f"{op}: {name} is a negated view of other memory: pass "
                              f"{name}.resolve_neg()")
        _check_unwatched(op, name)
        if sys.modules["torch"].autograd.forward_ad.unpack_dual(array).tangent is not None:
            raise ArgumentError(f"{op}: {name} has a forward-mode derivative, which orchard.{op} "
                                "would lose")
        found = _dlpack.export(op, name, array)
        check_storage(op, name, array)
        return found
    if _is_of("numpy.ma", "MaskedArray", array):
        raise ArgumentError(f"{op}: {name} is a masked array, and its mask would be lost: pass "
                            f"{name}.filled(...), and what attention must not see as mask=")
    if isinstance(array, Array):
        return array._export()
    if _is_of("numpy", "ndarray", array) and str(array.dtype) == "bfloat16":
        return _buffers.export_bfloat16(op, name, array)
    if _buffers.has_buffer(array):
        try:
            return _buffers.export(op, name, array)
        except OrchardError:
            raise
        except REFUSALS as why:  # an exporter may refuse one protocol and offer the other
            if not hasattr(array, "__dlpack__"):
                raise ArgumentError(f"{op}: {name} cannot be read as a buffer: {why}") from why
    if hasattr(array, "__dlpack__"):
        return _dlpack.export(op, name, array)
    raise ArgumentError(f"{op}: {name} is {_article(type(array).__name__)}, which has neither "
                        "DLPack nor the buffer protocol")


def _check_unwatched(op: str, name: str) -> None:
    """A program that torch traces would hold the results' memory without the call."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = getattr(proxies, "get_proxy_mode", lambda: None)()
    if mode is not None or sys.modules["torch"].jit.is_tracing():
        raise ArgumentError(f"{op}: {name} is being traced, and orchard.{op} leaves no trace: call "
                            "orchard.torch.scaled_dot_product_attention")


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


class Operands:
    """The arrays of one call: holds their memory from first to last use."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.held: List[Export] = []
        self._outputs: List[Any] = []

    def __enter__(self) -> "Operands":
        return self

    def __exit__(self, *_: Any) -> None:
        while self.held:
            self.held.pop().release()

    def hold(self, name: str, array: Any) -> Optional[Export]:
        """The description of an array; None for None."""
        if array is None:
            return None
        found = array if isinstance(array, Export) else export(self.op, name, array)
        self.held.append(found)
        return found

    def input(self, name: str, array: Any) -> _structs.Tensor:
        """The C view of an operand that is read; None is the absent tensor."""
        found = self.hold(name, array)
        return _structs.Tensor() if found is None else found.tensor(self.op, name)

    def output(self, name: str, array: Any) -> _structs.Tensor:
        """The C view of an operand that is written: its memory must be the caller's to write."""
        found = self.hold(name, array)
        if found is None:
            return _structs.Tensor()
        if found.read_only:
            raise LayoutError(f"{self.op}: {name} is read-only, an output is written to")
        if found.copied:
            raise LayoutError(f"{self.op}: {name} was copied by its exporter: what is written "
                              "there would be lost")
        self._outputs.append(array)
        return found.tensor(self.op, name)

    def written(self) -> None:
        """Tells torch that the outputs have new values: autograd refuses gradients that were to be
        made of the old ones."""
        for array in self._outputs:
            if _is_of("torch", "Tensor", array) and not array.is_inference():
                sys.modules["torch"].autograd.graph.increment_version(array)


# ---- Results -------------------------------------------------------------------------------------


def empty_like_kind(array: Any, shape: Sequence[int], dtype: int) -> Any:
    """A new dense array of the kind of `array` (NumPy, torch, else ours); undefined elements."""
    shape = tuple(shape)
    if _is_of("torch", "Tensor", array):
        return array.new_empty(shape, dtype=getattr(sys.modules["torch"], DTYPES[dtype].name))
    if _is_of("numpy", "ndarray", array) or _is_of("numpy", "generic", array):
        numpy = sys.modules["numpy"]
        # bfloat16 is a type that ml_dtypes adds: only the array itself knows it.
        kind = array.dtype if dtype == _structs.BF16 else DTYPES[dtype].name
        return numpy.empty(shape, dtype=kind)
    return Array(shape, dtype)


class Imagined:
    """Results for a call that is only asked about: with sizes and addresses, without memory."""

    _MOST = 1 << 60  # addresses begin there, where there are none, and no result has more bytes

    def __init__(self) -> None:
        self._next = self._MOST

    def new(self, op: str, name: str, like: Any, shape: Sequence[int], dtype: int) -> Export:
        """As if empty_like_kind had made it."""
        size = math.prod(shape) * SIZES[dtype]
        if size > self._MOST:
            raise OutOfMemoryError(f"{op}: no memory for {name}, {list(shape)}")
        address = self._next
        self._next += (size + 4095) // 4096 * 4096
        return Export(address, dtype, shape, None, read_only=False)


def _nested(shape: Sequence[int]) -> List[Any]:
    """Lists of an array without elements."""
    return [_nested(shape[1:]) for _ in range(shape[0])]


class Array:
    """A dense array of Orchard's own, for callers without NumPy and torch.

    `memory()` is a memoryview with shape and format (f16 and bf16, to which memoryview cannot cast,
    as unsigned 16-bit integers; an empty array without its shape). From Python 3.12 on
    `memoryview(array)` is the same, where nothing is lost by it. Libraries take it without a copy:
    `numpy.asarray(array)` (bf16 after `import ml_dtypes`), `torch.from_dlpack(array)`.
    """

    def __init__(self, shape: Sequence[int], dtype: int) -> None:
        self.shape: Tuple[int, ...] = tuple(shape)
        self._dtype = dtype
        count = 1
        for size in self.shape:
            count *= size
        # 64-bit units: every element type is aligned.
        self._memory = (ctypes.c_uint64 * ((count * SIZES[dtype] + 7) // 8 or 1))()
        self._bytes = count * SIZES[dtype]

    @property
    def dtype(self) -> str:
        """The element type as C writes it: "f32"."""
        return lib.orchard_dtype_name(self._dtype).decode()

    def memory(self) -> memoryview:
        """Shape and format for whoever reads it with plain Python."""
        flat: Any = memoryview(self._memory).cast("B")[:self._bytes]
        if not self._bytes:
            return flat.cast(DTYPES[self._dtype].format)  # a shape with a 0 in it cannot be cast to
        return flat.cast(DTYPES[self._dtype].format, list(self.shape))

    def __buffer__(self, flags: int) -> memoryview:
        # NumPy asks here first, and would see integers, or another shape.
        if self._dtype in (_structs.F16, _structs.BF16) or not self._bytes:
            raise BufferError(f"{self!r} is nothing that a memoryview can say; see memory()")
        return self.memory()

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Any:
        """For NumPy, which takes an object that it cannot read for a single element."""
        import numpy
        try:
            kind = numpy.dtype(DTYPES[self._dtype].name)
        except TypeError:
            raise TypeError("orchard.Array: NumPy has bf16 only after `import ml_dtypes`; "
                            "torch.from_dlpack takes it as it is") from None
        memory = numpy.ndarray(self.shape, kind, self._memory)
        return numpy.array(memory, dtype=dtype, copy=copy)

    def tolist(self) -> Any:
        """Elements as nested lists (f16 and bf16 as their 16 bits)."""
        if not self._bytes:  # a memoryview has no such shape
            return _nested(self.shape)
        return self.memory().tolist()

    def _export(self) -> Export:
        return Export(ctypes.addressof(self._memory), self._dtype, self.shape, None, False,
                      owner=self)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return _dlpack.CPU, 0

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None, copy: Optional[bool] = None) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != (_dlpack.CPU, 0)):
            raise BufferError("orchard.Array: neither copied nor moved to another device")
        return _dlpack.lend(self._memory, self._dtype, self.shape, max_version)

    def __repr__(self) -> str:
        return f"orchard.Array({list(self.shape)}, {self.dtype})"
