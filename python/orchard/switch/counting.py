"""How many calls the switch served and how many it left to torch, by reason."""

from __future__ import annotations

from typing import Dict

from .._locks import ProcessLock

SERVED = "served by Orchard"

lock = ProcessLock()
_counts: Dict[str, int] = {}


def count(what: str) -> None:
    with lock.here():
        _counts[what] = _counts.get(what, 0) + 1


def counts(reset: bool = False) -> Dict[str, int]:
    """How many calls were "served by Orchard", and how many were left to torch, by reason; those of
    an operation of aten behind its name, "aten::_softmax: served by Orchard".

    Attention in compiled graphs is not counted; `orchard.report()` counts what the library ran.
    """
    with lock.here():
        found = dict(_counts)
        if reset:
            _counts.clear()
    return found
