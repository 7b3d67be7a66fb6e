"""orchard/launch.h in Python: what a GPU would run for a call, as plain data.

    plan = make_plan(library, handle, "attention_forward", args, device)
    plan.reason      # why the backend would not take the call, or None
    plan.launches    # kernel, text, grid; in the order in which they run

`args` is the call's args struct as bytes, filled by `Arguments`. No tensor's memory is touched: a
tensor is described by sizes, strides and a number that says where it lies beside the others.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

MAX_RANK = 8
SOURCE_PIECES = 5


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("buffer", ctypes.c_void_p), ("offset", ctypes.c_size_t),
                ("dtype", ctypes.c_int), ("rank", ctypes.c_int32),
                ("size", ctypes.c_int64 * MAX_RANK), ("stride", ctypes.c_int64 * MAX_RANK)]


class Attention(ctypes.Structure):
    _fields_ = [(name, Tensor) for name in (
        "q", "k", "v", "bias", "mask", "alibi", "sinks", "key_lengths", "cu_seqlens_q",
        "cu_seqlens_k")] + [
        ("max_t", ctypes.c_int64), ("max_s", ctypes.c_int64), ("scale", ctypes.c_double),
        ("has_scale", ctypes.c_int32), ("causal", ctypes.c_int32), ("align", ctypes.c_int),
        ("has_window", ctypes.c_int32), ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
        ("dropout", ctypes.c_double), ("seed", ctypes.c_uint64),
        ("dropout_offset", ctypes.c_uint32)]


class AttentionForwardArgs(ctypes.Structure):
    _fields_ = [("out", Tensor), ("lse", Tensor), ("attention", Attention)]


class AttentionBackwardArgs(ctypes.Structure):
    _fields_ = [(name, Tensor) for name in (
        "dq", "dk", "dv", "dbias", "dsinks", "dout", "dlse", "out", "lse")] + [
        ("attention", Attention)]


class DeviceInfo(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 80), ("driver", ctypes.c_char * 80),
                ("is_cpu", ctypes.c_int32), ("group_threads", ctypes.c_int32),
                ("simd_width", ctypes.c_int32), ("matrix", ctypes.c_int32),
                ("local_bytes", ctypes.c_uint64), ("buffer_bytes", ctypes.c_uint64),
                ("memory_bytes", ctypes.c_uint64), ("wrap_alignment", ctypes.c_uint64)]


class Launch(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_char_p), ("source", ctypes.c_void_p * SOURCE_PIECES),
                ("groups", ctypes.c_int64 * 3), ("threads", ctypes.c_int32)]


class Launches(ctypes.Structure):
    _fields_ = [("reason", ctypes.c_char_p), ("count", ctypes.c_int32),
                ("operand_count", ctypes.c_int32), ("scratch_count", ctypes.c_int32),
                ("int_count", ctypes.c_int32), ("float_count", ctypes.c_int32),
                ("launch", ctypes.POINTER(Launch)), ("operand", ctypes.POINTER(ctypes.c_char_p)),
                ("scratch_bytes", ctypes.POINTER(ctypes.c_uint64)),
                ("ints", ctypes.POINTER(ctypes.c_int64)),
                ("floats", ctypes.POINTER(ctypes.c_float))]


# Every operation that can be launched, and its args struct.
ARGS: Dict[str, Type[ctypes.Structure]] = {
    "attention_forward": AttentionForwardArgs,
    "attention_backward": AttentionBackwardArgs,
}

CALLS = {
    "orchard_launches_create": (ctypes.c_int, [
        ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(Launches)), ctypes.c_char_p,
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]),
    "orchard_launches_free": (None, [ctypes.POINTER(Launches)]),
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


class Plan(NamedTuple):
    reason: Optional[str]
    operands: List[str]
    launches: List[OneLaunch]
    scratch: List[int]
    ints: List[int]
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
                     threads=[width * raw.threads, height, depth], group=[raw.threads, 1, 1])


def declare(library: ctypes.CDLL) -> None:
    """Tells ctypes the signatures of orchard/launch.h."""
    for name, (result, parameters) in CALLS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, parameters


def make_plan(library: ctypes.CDLL, context: ctypes.c_void_p, op: str, arguments: Arguments,
              device: DeviceInfo, check) -> Plan:
    """The plan for Metal; `check` raises what a bad status stands for."""
    raw = ctypes.POINTER(Launches)()
    args = (ctypes.c_char * len(arguments.bytes)).from_buffer(arguments.bytes)
    check(library.orchard_launches_create(context, ctypes.byref(raw), op.encode(), args, b"metal",
                                          ctypes.byref(device)))
    try:
        told = raw.contents
        return Plan(reason=told.reason.decode() if told.reason else None,
                    operands=[name.decode() for name in told.operand[:told.operand_count]],
                    launches=[_launch_of(told.launch[i]) for i in range(told.count)],
                    scratch=told.scratch_bytes[:told.scratch_count],
                    ints=told.ints[:told.int_count], floats=told.floats[:told.float_count])
    finally:
        library.orchard_launches_free(raw)
