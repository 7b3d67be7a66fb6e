"""`orchard::attention_forward` and `orchard::attention_backward`: schemas, kernels, fakes.

`attention_forward_rest` is the forward before a backward: it returns lse_rest too, what lse lost
when it was rounded, without which gradients are off where scores are large.

All are plain functions to torch: fresh outputs, nothing changed in place, the random seed an
operand. They have no autograd formula of their own; function.py wraps them. The seed is a tensor,
so that a compiled graph can draw a new one at each call; None where there is no dropout.
"""

from __future__ import annotations

from typing import Callable, Tuple

import torch

from ..._library import UnsupportedError
from .. import cpu, tracing as onlookers
from ..checks import check_device
from ..transforms import refuse_tangents
from . import batching, mps_attention
from .operands import (BACKWARD, FORWARD, FORWARD_REST, PLAIN_BACKWARD, PLAIN_FORWARD,
                       PLAIN_FORWARD_REST, TENSORS)
from .outputs import (Tensors, Tensors5, check_devices, check_present, check_rank, new_gradients,
                      new_outputs)

library = torch.library.Library("orchard", "FRAGMENT")
# Outputs' strides follow the inputs': a compiler must not change the inputs' strides.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides")
              if hasattr(torch.Tag, name))
library.define("attention_forward" + FORWARD.schema, tags=_TAGS)
library.define("attention_forward_rest" + FORWARD_REST.schema, tags=_TAGS)
library.define("attention_backward" + BACKWARD.schema, tags=_TAGS)
forward = torch.ops.orchard.attention_forward.default
forward_rest = torch.ops.orchard.attention_forward_rest.default
backward = torch.ops.orchard.attention_backward.default

# attention_forward_rest with a formula for autograd (autograd.py), for what is exported or
# compiled. Of a Function torch.export loses the gradients, and torch.compile the check that nobody
# changed in place what backward needs, and second order. For eager calls it would cost 10 us more.
library.define("attention" + FORWARD_REST.schema, tags=_TAGS)
differentiable = torch.ops.orchard.attention.default

library.define("_plain_forward" + PLAIN_FORWARD.schema)
library.define("_plain_forward_rest" + PLAIN_FORWARD_REST.schema)
library.define("_plain_backward" + PLAIN_BACKWARD.schema)


def _direct(op: torch._ops.OpOverload) -> Callable:
    """What an op's __call__ ends with; private, so it may be absent."""
    return getattr(op, "_op", op)


plain_forward = _direct(torch.ops.orchard._plain_forward.default)
plain_forward_rest = _direct(torch.ops.orchard._plain_forward_rest.default)
plain_backward = _direct(torch.ops.orchard._plain_backward.default)


# ---- Kernels -------------------------------------------------------------------------------------

def kernel_for(device: str) -> Tuple[Callable[..., Tensors], Callable[..., Tensors5]]:
    """The (forward, backward) kernels of a device type: parameters as in the schemas."""
    if device == "cpu":
        return cpu.in_python(FORWARD), cpu.in_python(BACKWARD)
    check_device("attention", device)
    return mps_attention.forward, mps_attention.backward


for _name, _signature in (("attention_forward", FORWARD), ("attention_forward_rest", FORWARD_REST),
                          ("attention_backward", BACKWARD),
                          ("attention", FORWARD_REST),  # above it lies a formula for autograd
                          ("_plain_forward", PLAIN_FORWARD),
                          ("_plain_forward_rest", PLAIN_FORWARD_REST),
                          ("_plain_backward", PLAIN_BACKWARD)):
    cpu.register(library, _name, _signature)
library.impl("attention_forward", mps_attention.forward, "MPS")
library.impl("attention_forward_rest", mps_attention.forward_rest, "MPS")
library.impl("attention_backward", mps_attention.backward, "MPS")
library.impl("attention", forward_rest, "CompositeExplicitAutograd")


refuse_tangents(library, differentiable, "attention",
                "orchard.torch.scaled_dot_product_attention")


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
    return _outputs_fake(3, *args)


@torch.library.register_fake("orchard::attention_forward", lib=library)
def _forward_fake(*args):
    return _outputs_fake(2, *args)


@torch.library.register_fake("orchard::attention_forward_rest", lib=library)
def _forward_rest_fake(*args):
    return _outputs_fake(3, *args)


def _outputs_fake(count, *args):
    op, (q, k, v), packed = "attention_forward", args[:3], args[8] is not None
    check_present(op, q=q, k=k, v=v)
    check_devices(op, q, args[1:TENSORS - 1], args[TENSORS - 1])
    if _on_meta(q):
        mps_attention.check_forward(*args)
    check_rank(op, packed, q=q, v=v)
    return new_outputs(q, v, packed, count)


@torch.library.register_fake("orchard::attention_backward", lib=library)
def _backward_fake(needs, dout, dlse, out, lse, lse_rest, *args):
    op, (q, k, v, bias), sinks = "attention_backward", args[:4], args[6]
    check_present(op, dout=dout, out=out, lse=lse, q=q, k=k, v=v)
    check_devices(op, q, (dout, dlse, out, lse, lse_rest, *args[1:TENSORS - 1]), args[TENSORS - 1])
    made = new_gradients(needs, q, k, v, bias, sinks)
    if _on_meta(q):
        mps_attention.check_backward(made, needs, dout, dlse, out, lse, lse_rest, *args)
    return made


# ---- vmap, for those who call the ops themselves -------------------------------------------------

@torch.library.register_vmap("orchard::attention_forward", lib=library)
def _forward_vmap(info, in_dims, *args):
    return batching.map_forward(forward, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention_forward_rest", lib=library)
def _forward_rest_vmap(info, in_dims, *args):
    return batching.map_forward(forward_rest, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention", lib=library)
def _differentiable_vmap(info, in_dims, *args):
    return batching.map_forward(differentiable, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention_backward", lib=library)
def _backward_vmap(info, in_dims, *args):
    return batching.map_backward(backward, info.batch_size, in_dims, args)
