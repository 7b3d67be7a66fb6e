"""What every operation needs for torch.func, forward mode and gradients of gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

import torch

from .._library import UnsupportedError
from . import tracing

# Private. The answer must be yes then: what it leads to is right for all, and slow.
_is_legacy_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: True)


def grads_batched(*tensors: Optional[torch.Tensor]) -> bool:
    """Whether autograd.grad(is_grads_batched=True) runs this backward: a Function inside it would
    record nothing."""
    return not tracing.compiling() and any(
        x is not None and _is_legacy_batched(x) for x in tensors)


def no_autocast(operand: torch.Tensor) -> ContextManager:
    """A formula's sums are in the precision that it says."""
    device = operand.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def pull(function: Callable[..., Tuple[torch.Tensor, ...]], at: Sequence[torch.Tensor],
         cotangents: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, ...]:
    """The vector-Jacobian product of a function, differentiable if gradients are being recorded."""
    if tracing.functorch_active():
        return torch.func.vjp(function, *at)[1](cotangents)
    # torch.func would refuse where hooks for saved tensors are set (save_on_cpu, checkpoints).
    record = torch.is_grad_enabled()
    with torch.enable_grad():
        at = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in at]
        return torch.autograd.grad(function(*at), at, cotangents, create_graph=record,
                                   materialize_grads=True)


def with_autograd() -> ContextManager:
    """For formulas that differentiate inside a kernel: below torch's autograd nothing is recorded,
    whatever the mode says."""
    guard = getattr(torch._C, "_ForceDispatchKeyGuard", None)  # private
    if guard is None:
        return nullcontext()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradCPU", "AutogradMPS", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return guard(torch._C._dispatch_tls_local_include_set(), excluded)


def one_by_one(call: Callable, count: int, in_dims: Sequence, args: Sequence) -> Tuple:
    """vmap's rule for any call: its results stacked."""
    def sample(i: int) -> List:
        return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims)]

    if not count:  # one of zeros tells the shapes, and keeps the results within autograd
        zeros = [a if d is None else a.sum(d, dtype=a.dtype) for a, d in zip(args, in_dims)]
        made = call(*zeros)
        return tuple(x[None][:0] for x in made), (0,) * len(made)
    samples = [call(*sample(i)) for i in range(count)]
    return tuple(torch.stack(column) for column in zip(*samples)), (0,) * len(samples[0])


def refuse_tangents(to: torch.library.Library, op: torch._ops.OpOverload, call: str,
                    instead: str) -> None:
    """Makes an op raise where torch would lose a forward-mode derivative without a word. Not for
    the ops of eager calls: it costs some microseconds, and those who call them know what to do."""
    below = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)  # private, as the next
    after = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
    if below is None or after is None:
        return

    def kernel(keyset: Any, *args: Any) -> Any:
        if tracing.forward_mode() and (tracing.innermost_is_jvp() or tracing.dual(*args)):
            raise UnsupportedError(f"{call}: forward-mode derivatives do not pass through {op}; "
                                   f"call {instead}")
        with below():
            return op.redispatch(keyset & after, *args)

    to.impl(op._schema.name.split("::")[1], kernel, "ADInplaceOrView", with_keyset=True)
