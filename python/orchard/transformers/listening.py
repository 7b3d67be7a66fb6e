"""What doctor() hears in its thread: each attention call, and why its mask has the form it has."""

from __future__ import annotations

import contextlib
import threading
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from ..reports import report
from ..torch import onlookers

Tensor = torch.Tensor


class Call(NamedTuple):
    """One attention call."""
    module: torch.nn.Module
    query: Tuple[int, ...]
    key: Tuple[int, ...]
    path: str
    why: str
    backend: str


class _Ear(threading.local):
    calls: Optional[List[Call]] = None
    whys: Dict[int, Tuple[Tensor, str]] = {}  # by the mask's id; the mask is kept so that it stays
    ran: Dict[Tuple[str, str], int] = {}


_ear = _Ear()


def _ran() -> Dict[Tuple[str, str], int]:
    return {(line.op, line.backend): line.count for line in report() if line.reason is None}


@contextlib.contextmanager
def listen() -> Iterator[List[Call]]:
    """The calls made inside, in the order of their ends; not those of another listen() inside."""
    before = _ear.calls, _ear.whys
    _ear.calls, _ear.whys, _ear.ran = [], {}, _ran()
    try:
        yield _ear.calls
    finally:
        _ear.calls, _ear.whys = before


def listening() -> bool:
    return not onlookers.compiling() and _ear.calls is not None


def made(mask: Optional[Tensor], why: str) -> Optional[Tensor]:
    """The mask itself; why it has its form is remembered."""
    if mask is not None and listening():
        _ear.whys[id(mask)] = (mask, why)
    return mask


def record(module: torch.nn.Module, query: Tensor, key: Tensor, given: Optional[Tensor],
           path: str) -> None:
    now = _ran()
    backends = [backend for (op, backend), count in now.items()
                if op == "attention_forward" and count > _ear.ran.get((op, backend), 0)]
    _ear.ran = now
    why = "every key counts" if given is None else _ear.whys.get(
        id(given), (given, "a mask that Orchard did not make"))[1]
    _ear.calls.append(Call(module, tuple(query.shape), tuple(key.shape), path, why,
                           ", ".join(backends) or query.device.type))
