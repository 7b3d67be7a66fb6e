"""What is active around a call: compilers, exporters, modes, autocast, transforms of torch.func.

Some of torch's names are private and may be absent: then the answer is the one that is always
right, if slow. The functions are bound to names of this module, because after a large computation
every lookup in another module is a cache miss.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

# Not is_compiling(), which says yes in every thread while one of them compiles.
compiling = torch.compiler.is_dynamo_compiling
exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # True in every thread
functorch_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: True)  # of torch.jit
# What stands for a tensor while a program is traced.
TRACED = (FakeTensor, FunctionalTensor)


def recording_graph() -> bool:
    """Whether torch.export or torch.jit.trace records the ops of this call as a program, which may
    be run where gradients are wanted although none are now."""
    return exporting() or _tracing_state() is not None


def may_redraw() -> bool:
    """Of code being compiled: whether torch's partitioner was told to keep less for backward than
    usual. It may draw random numbers once more there, since it spares only some operations of
    torch's own."""
    config, traceback = torch._functorch.config, torch.fx.traceback
    custom = getattr(traceback, "current_meta", {}).get("custom") or {}
    # What torch.autograd.graph.region_activation_memory_budget says of the operations within.
    budget = custom.get(getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None),
                        getattr(config, "activation_memory_budget", 1.0))
    return (budget < 1.0 or getattr(config, "aggressive_recomputation", False)
            or not getattr(config, "ban_recompute_not_in_allowlist", True))


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed, by torch.func or not; maybe by another
    thread: torch counts for all of them."""
    return forward_ad._current_level >= 0


def dual(*values: Any) -> bool:
    """Whether one of them is a tensor with a forward-mode derivative."""
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
               for x in values)


def innermost_is_jvp() -> bool:
    """Whether the transform of torch.func that gets a call first is jvp. It hides derivatives from
    `dual` below autograd."""
    if not functorch_active():
        return False
    return str(torch._C._functorch.peek_interpreter_stack().key()).endswith("Jvp")


def tangents(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether one of them has a forward-mode derivative, or torch.func may hide one."""
    return functorch_active() or dual(*tensors)


def observed() -> bool:
    """Whether anything active would see, or change, which ops a call runs."""
    return compiling() or any_autocast() or observed_in_backward()


def observed_in_backward() -> bool:
    """The same for a backward that autograd's engine runs: compilers do not run it, and autocast
    does not apply to gradients."""
    return bool(functorch_active() or dispatch_modes() or function_modes()
                or _tracing_state() is not None or forward_ad._current_level >= 0)
