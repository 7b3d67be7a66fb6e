"""A function to check: a name, and a function with scaled_dot_product_attention's signature."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Optional, Set

import torch
import torch.nn.functional as F

# What torch.nn.functional.scaled_dot_product_attention takes; being a builtin, it does not tell.
TORCH_ARGUMENTS = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}


class Target:
    """A function to check; `accepts` says which keyword arguments it offers."""

    def __init__(self, name: str, function: Callable[..., Any],
                 arguments: Optional[Set[str]] = None, version: str = "") -> None:
        self.name, self.function, self.version = name, function, version
        self.arguments = arguments if arguments is not None else arguments_of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def accepts(self, name: str) -> bool:
        return self.arguments is None or name in self.arguments


def arguments_of(function: Callable[..., Any]) -> Optional[Set[str]]:
    """The names of a function's parameters; None if it takes any (**kwargs) or does not tell."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return set(parameters)


def torch_with(backend: str) -> Callable[..., Any]:
    """torch's function, held to one of its backends, in backward as well as in forward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    chosen = getattr(SDPBackend, backend)

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(*args, **kwargs)

    return scaled_dot_product_attention


def find(name: str) -> Target:
    """The target of a name: torch, torch-math, torch-flash, orchard, or module:function."""
    if name == "torch":
        return Target(name, F.scaled_dot_product_attention, TORCH_ARGUMENTS,
                      f"torch {torch.__version__}")
    if name in ("torch-math", "torch-flash"):
        backend = "MATH" if name == "torch-math" else "FLASH_ATTENTION"
        return Target(name, torch_with(backend), TORCH_ARGUMENTS,
                      f"torch {torch.__version__}, sdpa_kernel({backend})")
    if name == "orchard":
        orchard = importlib.import_module("orchard")
        ours = importlib.import_module("orchard.torch")
        return Target(name, ours.scaled_dot_product_attention,
                      version=f"orchard {orchard.version()}, torch {torch.__version__}")
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"target {name!r} is none of torch, torch-math, torch-flash, orchard, and "
                         "not module:function")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"target {name!r} is {found!r}, not a function")
    version = getattr(importlib.import_module(module.split(".")[0]), "__version__", "")
    return Target(name, found, version=f"{module} {version}".strip() +
                  f", torch {torch.__version__}")
