"""Locks that no forked child waits for in vain."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """`with lock.here():`. After a fork the child has another one: a thread that held the parent's
    is not there to give it back; the thread that forked gives back the one it took."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def here(self) -> threading.RLock:
        return self._lock

    def _renew(self) -> None:
        self._lock = threading.RLock()


_all: "weakref.WeakSet[ProcessLock]" = weakref.WeakSet()


def _in_forked_child() -> None:
    for one in list(_all):
        one._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
