"""Records one thread's attention calls for doctor(), with the reason for each mask's form."""

from __future__ import annotations

import contextlib
import threading
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from ..reports import report
from ..torch import tracing

Tensor = torch.Tensor


class Call(NamedTuple):
    """One attention call."""
    module: torch.nn.Module
    query: Tuple[int, ...]
    key: Tuple[int, ...]
    path: str
    reason: str
    backend: str


class _Recorder(threading.local):
    calls: Optional[List[Call]] = None
    reasons: Dict[int, Tuple[Tensor, str]] = {}  # by the mask's id; holds the mask
    ran: Dict[Tuple[str, str], int] = {}


_recorder = _Recorder()


def _ran() -> Dict[Tuple[str, str], int]:
    return {(line.op, line.backend): line.count for line in report() if line.reason is None}


@contextlib.contextmanager
def record_calls() -> Iterator[List[Call]]:
    """The calls made inside, in the order of their ends; not those of a nested record_calls()."""
    before = _recorder.calls, _recorder.reasons
    _recorder.calls, _recorder.reasons, _recorder.ran = [], {}, _ran()
    try:
        yield _recorder.calls
    finally:
        _recorder.calls, _recorder.reasons = before


def recording() -> bool:
    return not tracing.compiling() and _recorder.calls is not None


def with_reason(mask: Optional[Tensor], reason: str) -> Optional[Tensor]:
    """The mask itself; the reason for its form is remembered."""
    if mask is not None and recording():
        _recorder.reasons[id(mask)] = (mask, reason)
    return mask


def record_call(module: torch.nn.Module, query: Tensor, key: Tensor, given: Optional[Tensor],
                path: str) -> None:
    now = _ran()
    backends = [backend for (op, backend), count in now.items()
                if op == "attention_forward" and count > _recorder.ran.get((op, backend), 0)]
    _recorder.ran = now
    reason = "every key counts" if given is None else _recorder.reasons.get(
        id(given), (given, "a mask that Orchard did not make"))[1]
    _recorder.calls.append(Call(module, tuple(query.shape), tuple(key.shape), path, reason,
                           ", ".join(backends) or query.device.type))
