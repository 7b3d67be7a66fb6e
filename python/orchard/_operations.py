"""The library's description of its operations (orchard/ops.h): nobody here keeps a list of them.

    operation = describe("softmax_forward")
    operation.operands["x"].shape        # "*"
    operation.options["scale"].flag      # the option has_scale, which says that scale counts
"""

from __future__ import annotations

import functools
from typing import Dict, List, NamedTuple, Optional

from . import _structs
from ._library import lib


class Operand(NamedTuple):
    name: str
    role: int
    optional: bool
    offset: int           # of its tensor in the args struct
    shape: Optional[str]  # in letters
    dtype: str            # the rule
    ulps: int             # the error bound of an output

    @property
    def is_output(self) -> bool:
        return self.role == _structs.OUT


class Option(NamedTuple):
    name: str
    kind: int
    offset: int
    low: float
    high: float
    flag: Optional[str]  # the option that says whether this one counts

    @property
    def is_switch(self) -> bool:
        return (self.kind, self.low, self.high) == (_structs.OPTION_I32, 0, 1)


class Operation(NamedTuple):
    name: str
    args_size: int
    operands: Dict[str, Operand]  # in the order of the kernels' buffers, outputs first
    options: Dict[str, Option]

    @property
    def inputs(self) -> List[Operand]:
        return [x for x in self.operands.values() if not x.is_output]

    @property
    def outputs(self) -> List[Operand]:
        return [x for x in self.operands.values() if x.is_output]


def _text(raw: Optional[bytes]) -> Optional[str]:
    return None if raw is None else raw.decode()


def _listed(ask, op: bytes) -> List:
    found: List = []
    while ask(op, len(found)):
        found.append(ask(op, len(found)).contents)
    return found


@functools.lru_cache(maxsize=None)
def describe(op: str) -> Operation:
    """KeyError: there is no such operation."""
    raw = op.encode()
    size = lib.orchard_op_args_size(raw)
    if not size:
        raise KeyError(op)
    operands = {x.name.decode(): Operand(x.name.decode(), x.role, bool(x.optional), x.offset,
                                         _text(x.shape), x.dtype.decode(), x.ulps)
                for x in _listed(lib.orchard_op_operand, raw)}
    told = _listed(lib.orchard_op_option, raw)
    flags = [x.name.decode() for x in told if x.name.startswith(b"has_")]

    def flag_of(name: str) -> Optional[str]:
        # has_scale is that of scale, has_window that of window_left and window_right.
        return next((f for f in flags if f"{name}_".startswith(f[4:] + "_")), None)

    options = {x.name.decode(): Option(x.name.decode(), x.kind, x.offset, x.low, x.high,
                                       flag_of(x.name.decode())) for x in told}
    return Operation(op, size, operands, options)
