"""`orchard::attention_forward` and `orchard::attention_backward`: schemas, kernels, fakes.

Both are plain functions to torch: fresh outputs, nothing changed in place, the random seed an
operand. They have no autograd formula of their own; function.py wraps them. The seed is a tensor,
so that a compiled graph can draw a new one at each call; None where there is no dropout.
"""

from __future__ import annotations

from typing import Callable, Tuple

import torch

from ..._library import UnsupportedError
from .. import cpu, tracing as onlookers
from . import batching, mps_attention
from .operands import TENSORS
from .outputs import (Tensors2, Tensors5, check_devices, check_present, check_rank, new_gradients,
                      new_outputs)

# What forward and backward share, in this order everywhere: here, in kernels, in function.py.
# No defaults: torch drops arguments that equal theirs before it calls a kernel.
ATTENTION = ("Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi, "
             "Tensor? sinks, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
             "Tensor? seed, SymInt max_t, SymInt max_s, float? scale, bool causal, "
             "bool bottom_right, SymInt window_left, SymInt window_right, float softcap, "
             "float dropout")

library = torch.library.Library("orchard", "FRAGMENT")
# Outputs' strides follow the inputs': a compiler must not change the inputs' strides.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides")
              if hasattr(torch.Tag, name))
library.define(f"attention_forward({ATTENTION}) -> (Tensor out, Tensor lse)", tags=_TAGS)
library.define(f"attention_backward(int needs, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
               f"{ATTENTION}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
               tags=_TAGS)
forward = torch.ops.orchard.attention_forward.default
backward = torch.ops.orchard.attention_backward.default

# attention_forward with a formula for autograd (autograd.py), for what is exported or compiled. Of
# a Function torch.export loses the gradients, and torch.compile the check that nobody changed in
# place what backward needs, and second order. For eager calls it would cost 10 us more.
library.define(f"attention({ATTENTION}) -> (Tensor out, Tensor lse)", tags=_TAGS)
differentiable = torch.ops.orchard.attention.default

# The same without options, CPU tensors only: so many absent arguments cost torch more than a call
# of a few microseconds should. For eager calls; no compiler, mode or transform ever sees these.
library.define("_plain_forward(Tensor q, Tensor k, Tensor v, float? scale, bool causal, bool gqa) "
               "-> (Tensor out, Tensor lse)")
library.define("_plain_backward(int needs, Tensor dout, Tensor out, Tensor lse, Tensor q, "
               "Tensor k, Tensor v, float? scale, bool causal) "
               "-> (Tensor dq, Tensor dk, Tensor dv)")


def _direct(op: torch._ops.OpOverload) -> Callable:
    """What an op's __call__ ends with; private, so it may be absent."""
    return getattr(op, "_op", op)


plain_forward = _direct(torch.ops.orchard._plain_forward.default)
plain_backward = _direct(torch.ops.orchard._plain_backward.default)


# ---- Kernels -------------------------------------------------------------------------------------

def kernel_for(device: str) -> Tuple[Callable[..., Tensors2], Callable[..., Tensors5]]:
    """The (forward, backward) kernels of a device type: parameters as in the schemas."""
    if device == "cpu":
        return cpu.forward, cpu.backward
    if device == "mps":
        return mps_attention.forward, mps_attention.backward
    raise UnsupportedError(f"attention: tensors are on device {device}, Orchard serves cpu and mps")


cpu.register(library)
library.impl("attention_forward", mps_attention.forward, "MPS")
library.impl("attention_backward", mps_attention.backward, "MPS")
library.impl("attention", forward, "CompositeExplicitAutograd")


def refuse_tangents(to: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Makes an op raise where torch would lose a forward-mode derivative without a word. Not for
    the ops of eager calls: it costs some microseconds, and autograd.py knows what to do there."""
    below = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)  # private, as the next
    after = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
    if below is None or after is None:
        return

    def kernel(keyset, *args):
        if onlookers.forward_mode() and (onlookers.innermost_is_jvp() or onlookers.dual(*args)):
            raise UnsupportedError(f"attention: forward-mode derivatives do not pass through {op}; "
                                   "call orchard.torch.scaled_dot_product_attention")
        with below():
            return op.redispatch(keyset & after, *args)

    to.impl(op._schema.name.split("::")[1], kernel, "ADInplaceOrView", with_keyset=True)


refuse_tangents(library, differentiable)


# ---- Fakes: shapes and strides without memory ----------------------------------------------------

def _on_meta(q: torch.Tensor) -> bool:
    """Whether this is all that happens: no kernel will look at the sizes later."""
    return q.is_meta and not isinstance(q, onlookers.TRACED)


def refuse_redrawn_dropout(dropout: float) -> None:
    """For code that is being compiled and wants gradients."""
    if dropout > 0 and onlookers.may_redraw():
        raise UnsupportedError(
            f"attention: dropout is {dropout} in code compiled to keep less for backward than "
            "usual (an activation_memory_budget below 1, aggressive_recomputation): backward could "
            "draw another mask than forward")


@torch.library.register_fake("orchard::attention", lib=library)
def _attention_fake(*args):
    refuse_redrawn_dropout(args[-1])
    return _forward_fake(*args)


@torch.library.register_fake("orchard::attention_forward", lib=library)
def _forward_fake(*args):
    op, (q, k, v), packed = "attention_forward", args[:3], args[8] is not None
    check_present(op, q=q, k=k, v=v)
    check_devices(op, q, args[1:TENSORS - 1], args[TENSORS - 1])
    if _on_meta(q):
        mps_attention.check_forward(*args)
    check_rank(op, packed, q=q, v=v)
    return new_outputs(q, v, packed)


@torch.library.register_fake("orchard::attention_backward", lib=library)
def _backward_fake(needs, dout, dlse, out, lse, *args):
    op, (q, k, v, bias), sinks = "attention_backward", args[:4], args[6]
    check_present(op, dout=dout, out=out, lse=lse, q=q, k=k, v=v)
    check_devices(op, q, (dout, dlse, out, lse, *args[1:TENSORS - 1]), args[TENSORS - 1])
    made = new_gradients(needs, q, k, v, bias, sinks)
    if _on_meta(q):
        mps_attention.check_backward(made, needs, dout, dlse, out, lse, *args)
    return made


# ---- vmap, for those who call the ops themselves -------------------------------------------------

@torch.library.register_vmap("orchard::attention_forward", lib=library)
def _forward_vmap(info, in_dims, *args):
    return batching.map_forward(forward, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention", lib=library)
def _differentiable_vmap(info, in_dims, *args):
    return batching.map_forward(differentiable, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention_backward", lib=library)
def _backward_vmap(info, in_dims, *args):
    return batching.map_backward(backward, info.batch_size, in_dims, args)
