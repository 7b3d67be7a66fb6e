"""torch.compile off in one thread: torch.compiler.set_stance turns it off in all of them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

import torch


class _Stance:
    """For the thread that made it "force_eager", while its block runs; otherwise the stance before
    it. So another thread that saved this one may put it back later and changes nothing."""

    def __init__(self, before: Any) -> None:
        self.before, self.thread = before, threading.get_ident()

    @property
    def stance(self) -> str:
        return "force_eager" if self.thread == threading.get_ident() else self.before.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


@contextlib.contextmanager
def compile_off() -> Iterator[None]:
    """Compiled code runs as it was written, in this thread."""
    from torch._dynamo import eval_frame

    put = getattr(eval_frame, "_set_stance", None)
    if put is None or not hasattr(eval_frame, "_stance"):  # private, so they may be absent
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    mine = _Stance(eval_frame._stance)
    mine.before = put(mine)
    try:
        yield
    finally:
        mine.thread = 0
        if eval_frame._stance is mine:  # else another block has set its own and will put it back
            put(mine.before)
