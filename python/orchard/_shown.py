"""A caller's value in an error message."""

from __future__ import annotations

from typing import Any

from ._exports import REFUSALS


def shown(value: Any) -> str:
    """One line: an array by its type and shape, which may hold millions of numbers, anything else
    as repr has it."""
    kind = f"a {type(value).__name__}"
    try:
        if hasattr(value, "shape"):
            return f"{kind} of shape {list(value.shape)}"
        text = " ".join(repr(value).split())
    except REFUSALS:  # an int of thousands of digits; a class with a mistake in its __repr__
        return kind
    return text if len(text) <= 100 else text[:97] + "..."
