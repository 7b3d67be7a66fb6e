"""orchard/launch.h in Python: what a GPU would run for a call, as plain data.

    plan = make_plan("attention_forward", args, device)
    plan.reason      # why the backend would not take the call, or None
    plan.launches    # kernel, text, grid; in the order in which they run

`args` is the call's args struct as bytes, filled by `Arguments`. No tensor's memory is touched: a
tensor is described by sizes, strides and a number that says where it lies beside the others.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from .._context import context
from .._library import check, lib
from .._structs import (MAX_RANK, SOURCE_PIECES, STORAGE_PRIVATE, STORAGE_SHARED,
                        AttentionBackwardArgs, AttentionForwardArgs, DeviceInfo, Launch, Launches,
                        Tensor)

# Every operation that can be launched, and its args struct.
ARGS: Dict[str, Type[ctypes.Structure]] = {
    "attention_forward": AttentionForwardArgs,
    "attention_backward": AttentionBackwardArgs,
}


# ---- Arguments -----------------------------------------------------------------------------------

_TENSOR = struct.Struct(f"=QQQii{MAX_RANK}q{MAX_RANK}q")
_PAD = (0,) * MAX_RANK
assert _TENSOR.size == ctypes.sizeof(Tensor)


def _tensor_offsets(struct_type: Type[ctypes.Structure], base: int = 0) -> Dict[str, int]:
    """Where each tensor of an args struct lies in it, by name. The call's own tensors come before
    those of the struct of options inside it: backward's `out` is its own."""
    found: Dict[str, int] = {}
    for name, kind in struct_type._fields_:
        at = base + getattr(struct_type, name).offset
        if kind.__name__ == "Tensor":
            found[name] = at
        elif issubclass(kind, ctypes.Structure):
            for inner, inner_at in _tensor_offsets(kind, at).items():
                found.setdefault(inner, inner_at)
    return found


def _option_homes(struct_type: Type[ctypes.Structure]) -> Dict[str, Optional[str]]:
    """Which inner struct each scalar of an args struct is in; None: in the args struct itself."""
    homes: Dict[str, Optional[str]] = {}
    for name, kind in struct_type._fields_:
        if not issubclass(kind, ctypes.Structure):
            homes[name] = None
        elif kind.__name__ != "Tensor":
            homes.update((inner, name) for inner, at in _option_homes(kind).items())
    return homes


class Arguments:
    """An args struct of one operation, being filled."""

    _known: Dict[str, Tuple[Dict[str, int], Dict[str, Optional[str]]]] = {}

    def __init__(self, op: str) -> None:
        kind = ARGS[op]
        if op not in self._known:
            self._known[op] = _tensor_offsets(kind), _option_homes(kind)
        self._offsets, self._homes = self._known[op]
        self.bytes = bytearray(ctypes.sizeof(kind))
        self._view = kind.from_buffer(self.bytes)

    def set_tensor(self, name: str, address: int, dtype: int, size: Sequence[int],
                   stride: Sequence[int]) -> None:
        """KeyError: there is no such operand. A rank beyond 8 is told to C, which says so."""
        rank = len(size)
        if rank > MAX_RANK:
            size, stride = size[:MAX_RANK], stride[:MAX_RANK]
        pad = _PAD[len(size):]
        _TENSOR.pack_into(self.bytes, self._offsets[name], address, 0, 0, dtype, rank, *size, *pad,
                          *stride, *pad)

    def set_option(self, name: str, value: float) -> None:
        """KeyError: the operation has no such option."""
        home = self._homes[name]
        setattr(getattr(self._view, home) if home else self._view, name, value)


# ---- Plans ---------------------------------------------------------------------------------------

class OneLaunch(NamedTuple):
    kernel: str
    text: Tuple[bytes, Tuple[int, ...]]  # the defines, and where the other pieces are in memory
    threads: List[int]                   # of the whole grid, in three dimensions
    group: List[int]
    ints: List[int]


class Plan(NamedTuple):
    reason: Optional[str]
    operands: List[str]
    launches: List[OneLaunch]
    scratch: List[int]
    floats: List[float]


def source(launch: OneLaunch) -> str:
    """The whole text of a launch's program."""
    defines, pieces = launch.text
    return b"".join([defines] + [ctypes.string_at(piece) for piece in pieces]).decode("ascii")


def _launch_of(raw: Launch) -> OneLaunch:
    # As addresses, whatever the struct calls them: copying the texts costs more than the call.
    pieces = (ctypes.c_void_p * SOURCE_PIECES).from_address(
        ctypes.addressof(raw) + Launch.source.offset)
    first, *others = pieces
    width, height, depth = raw.groups
    return OneLaunch(kernel=raw.kernel.decode(), text=(ctypes.string_at(first), tuple(others)),
                     threads=[width * raw.threads, height, depth], group=[raw.threads, 1, 1],
                     ints=raw.ints[:raw.int_count])


def make_plan(op: str, arguments: Arguments, device: DeviceInfo) -> Plan:
    """The plan for Metal; raises where the call is wrong. Of the context only the allocator is
    used, so it is one without threads and devices."""
    raw = ctypes.POINTER(Launches)()
    args = (ctypes.c_char * len(arguments.bytes)).from_buffer(arguments.bytes)
    handle = context(threads=1, backend="ref").handle
    check(lib.orchard_launches_create(handle, ctypes.byref(raw), op.encode(), args, b"metal",
                                      ctypes.byref(device)))
    try:
        told = raw.contents
        return Plan(reason=told.reason.decode() if told.reason else None,
                    operands=[name.decode() for name in told.operand[:told.operand_count]],
                    launches=[_launch_of(told.launch[i]) for i in range(told.count)],
                    scratch=told.scratch_bytes[:told.scratch_count],
                    floats=told.floats[:told.float_count])
    finally:
        lib.orchard_launches_free(raw)


# ---- Logs ----------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def logging() -> bool:
    """Whether the library's logs want to know; it does not change once it was asked."""
    return bool(lib.orchard_log_on())


def log_call(op: str, backend: str, fell_back: Optional[str] = None) -> None:
    """`backend` ran a call, which is done; `fell_back`: why another one did not."""
    lib.orchard_log_call(op.encode(), backend.encode(),
                         None if fell_back is None else fell_back.encode())


def log_bind(op: str, operand: str, itemsize: int, size: Sequence[int], stride: Sequence[int],
             shared: bool) -> None:
    """An operand, not empty, was bound where it lies."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride))
    lib.orchard_log_bind(op.encode(), operand.encode(), itemsize * extent,
                         STORAGE_SHARED if shared else STORAGE_PRIVATE)
