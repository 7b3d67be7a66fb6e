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
from typing import List, NamedTuple, Optional, Sequence, Tuple

from .._context import context
from .._library import check, lib
from .._structs import (SOURCE_PIECES, STORAGE_PRIVATE, STORAGE_SHARED, DeviceInfo, Launch,
                        Launches)
from .tensors import Arguments

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
    handle = context(threads=1, backend="ref").handle
    check(lib.orchard_launches_create(handle, ctypes.byref(raw), op.encode(), arguments.struct,
                                      b"metal", ctypes.byref(device)))
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
