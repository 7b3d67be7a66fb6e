"""Functions that torch.compile runs as they are: it neither can nor need look inside.

torch is not imported for this. A mark on the function, which torch.compiler.disable sets as well,
tells Dynamo to end its graph at a call, or with fullgraph=True to raise and say why; and while the
function runs, Dynamo's own switch keeps it from compiling what that calls.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Decorates a function of the core package."""
    disabled: Any = None

    @functools.wraps(function)
    def call(*operands: Any, **options: Any) -> Any:
        nonlocal disabled
        if disabled is None:  # torch and its compiler may be imported at any time
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return function(*operands, **options)
            disabled = disable(function)
        return disabled(*operands, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        f"orchard.{function.__name__} computes outside torch; "
        "orchard.torch.scaled_dot_product_attention compiles")
    return cast(F, call)
