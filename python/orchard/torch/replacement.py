"""How a room says which of torch's own operations it can compute: the list REPLACES of its file.

    REPLACES = [Replacement("aten::_softmax", group="softmax", run=softmax, faster=pays), ...]

`orchard.enable(softmax=True)` then computes aten::_softmax by `softmax`, on CPU and MPS tensors. Of
an operation that torch differentiates by a backward operation, both are listed: torch's formula of
the derivative stays and calls the backward one.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Tuple, Union


class Refusal:
    """What `run` returns, and `faster` may, where torch's own kernel must compute the call."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"Refusal({self.reason!r})"


class Replacement(NamedTuple):
    """One operation of aten, and what computes it.

    run     gets aten's arguments by position, in the order of the schema and completed by its
            defaults, and returns what aten's operation returns (several results as a tuple, with
            None where the output mask asks for none), or a Refusal. It is below autograd,
            autocast and torch.func: plain CPU or MPS tensors of any strides, dtype and size,
            no gradient to record. It never raises for what torch would accept, and refuses before
            it writes anything. Results are fresh tensors; strides as torch's own kernel gives them.
    faster  whether orchard.enable() without a word on the group takes this call: True, False, or
            the reason (a str or a Refusal) why torch's own kernel is at least as fast. It gets the
            same arguments. None: never without a word.
    """

    op: str  # "aten::_softmax", or with its overload "aten::_softmax.out"
    group: str  # the argument of orchard.enable()
    run: Callable[..., Any]
    faster: Optional[Callable[..., Union[bool, str, Refusal]]] = None
    devices: Tuple[str, ...] = ("CPU", "MPS")  # dispatch keys
