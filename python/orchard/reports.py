"""Which backend would take a call, which did, and how operands came to it."""

from __future__ import annotations

import ctypes
import inspect
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from . import _structs, attention
from ._context import Context
from ._library import ArgumentError, check, lib
from ._shown import shown
from ._uncompiled import uncompiled
from .arrays import Imagined, Operands


def _text(value: Optional[bytes]) -> Optional[str]:
    return None if value is None else value.decode("utf-8", "replace")


# ---- Before a call -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """Who would take a call, and why those asked before would not."""

    op: str
    backend: Optional[str]  #: the backend that would run; None if none would
    cpu: Optional[str]  #: its instruction set, None where there is none
    scratch_bytes: int  #: memory that it needs beside inputs and outputs
    asked: Tuple[Tuple[str, Optional[str]], ...]  #: (backend, why not; None: it would), in order

    def __str__(self) -> str:
        on = f" ({self.cpu})" if self.cpu else ""
        first = (f"{self.op}: {self.backend}{on}, {self.scratch_bytes} bytes of scratch"
                 if self.backend else f"{self.op}: no backend takes this call")
        rest = [f"  {name}: {'yes' if why is None else 'no, ' + why}" for name, why in self.asked]
        return "\n".join([first, *rest])


def _explain(ctx: Context, operands: Operands, args: Any) -> Explanation:
    op, found = operands.op, _structs.Explanation()
    ctx.call(lib.orchard_explain, op.encode(), ctypes.byref(args), ctypes.byref(found))
    asked = tuple((_text(found.name[i]) or "", _text(found.reason[i])) for i in range(found.asked))
    return Explanation(op, _text(found.backend), _text(found.cpu), found.scratch_bytes, asked)


def _explain_forward(**call: Any) -> Explanation:
    own = {name: call.pop(name) for name in ("q", "k", "v", "out", "lse", "lse_rest",
                                             "backend", "threads")}
    return attention.forward(_explain, Imagined().new, options=call, **own)[2]


def _explain_backward(**call: Any) -> Explanation:
    own = {name: call.pop(name) for name in ("dout", "q", "k", "v", "out", "lse", "lse_rest",
                                             "dlse", "want", "backend", "threads")}
    given = {name: call.pop(name) for name in ("dq", "dk", "dv", "dbias", "dsinks")}
    return attention.backward(_explain, Imagined().new, given=given, options=call, **own)[1]


_EXPLAINED: Dict[str, Tuple[Callable[..., Any], Callable[..., Explanation]]] = {
    "attention_forward": (attention.attention_forward, _explain_forward),
    "attention_backward": (attention.attention_backward, _explain_backward),
}


@uncompiled
def explain(op: str, *operands: Any, **options: Any) -> Explanation:
    """Asks, without computing anything or memory for results, who would take a call; print()
    shows it.

    `op` is the function's name ("attention_forward", "attention_backward"), the rest are that
    function's arguments: explain("attention_forward", q=q, k=k, v=v, causal=True). The answer comes
    from the plan that the call itself uses; a call that would be refused is refused here too, with
    the same message.
    """
    if not isinstance(op, str):
        raise ArgumentError(f"explain: op is {shown(op)}, must be the name of an operation: "
                            f"{', '.join(_EXPLAINED)}")
    if op not in _EXPLAINED:
        raise ArgumentError(f"explain: there is no operation {shown(op)}; there are: "
                            f"{', '.join(_EXPLAINED)}")
    function, ask = _EXPLAINED[op]
    call = inspect.signature(function).bind(*operands, **options)
    call.apply_defaults()
    return ask(**call.arguments)


# ---- After calls ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportLine:
    """How often a backend ran an operation (reason None), or could not run a call, and why; or what
    audits found ("audit: ...") and a tune file wished ("tune file ...")."""

    op: str
    backend: str
    reason: Optional[str]
    count: int


def _what(reason: Optional[str]) -> str:
    if reason is None:
        return "ran"
    return reason if reason.startswith(("audit:", "tune file")) else "did not: " + reason


class Report(List[ReportLine]):
    """Lines of the process-wide report; print() shows them as a table."""

    def __str__(self) -> str:
        if not self:
            return "no calls yet"
        rows = [("op", "backend", "calls", "")]
        rows += [(line.op, line.backend, str(line.count), _what(line.reason)) for line in self]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{op:<{widths[0]}}  {backend:<{widths[1]}}  {calls:>{widths[2]}}  {what}"
                         .rstrip() for op, backend, calls, what in rows)


# Who else counts calls: the C library does not see what others launch for it (orchard.torch.mps).
_others: List[Callable[[], List[ReportLine]]] = []


def also(lines: Callable[[], List[ReportLine]]) -> None:
    """Makes these lines a part of every report from now on."""
    _others.append(lines)


def report() -> Report:
    """What ran where in this process so far, fallbacks with their reasons included."""
    capacity = max(lib.orchard_report(None, 0), 0) + 16  # other threads may add lines meanwhile
    lines = (_structs.ReportLine * capacity)()
    count = min(lib.orchard_report(lines, capacity), capacity)
    made = Report(ReportLine(_text(line.op) or "", _text(line.backend) or "", _text(line.reason),
                             line.count) for line in lines[:count])
    for other in _others:
        made += other()
    return made


class MemoryReport(NamedTuple):
    """Operands that devices bound where they are, wrapped without a copy, or copied."""

    direct: int
    wrapped: int
    staged: int
    staged_bytes: int


def memory_report() -> MemoryReport:
    """How operands came to the devices in this process so far."""
    counts = _structs.MemoryCounts()
    lib.orchard_memory_report(ctypes.byref(counts))
    return MemoryReport(counts.direct, counts.wrapped, counts.staged, counts.staged_bytes)
