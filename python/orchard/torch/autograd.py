"""The ops of ops.py inside autograd Functions: first and second order.

Three classes, because torch wants it so:
  AttentionFast      keeps what backward needs in `forward`: fastest, compiles everywhere;
  Attention          the same with a separate `setup_context`, which torch.func's transforms demand;
  AttentionBackward  makes backward itself differentiable (create_graph=True): its own backward
                     recomputes the explicit formula (second.py).
All take the arguments of the op's schema, in its order.
"""

from __future__ import annotations

import torch

from .._library import UnsupportedError
from . import batching, ops, second

TENSORS = 11  # how many of the arguments are tensors: q ... seed
DIFFERENTIABLE = ((0, ops.DQ), (1, ops.DK), (2, ops.DV), (3, ops.DBIAS), (6, ops.DSINKS))
NO_FORWARD_MODE = ("attention has no forward-mode derivative (torch.func.jvp, forward AD); "
                   "use reverse mode: torch.func.vjp or backward()")


def _keep(ctx, args, out, lse) -> None:
    ctx.save_for_backward(*args[:TENSORS], out, lse)
    ctx.options = args[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    gradients = [None] * (TENSORS + len(ctx.options))
    needs = sum(bit for at, bit in DIFFERENTIABLE if ctx.needs_input_grad[at])
    if not needs or (dout is None and dlse is None):
        return tuple(gradients)
    *tensors, out, lse = ctx.saved_tensors
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    call = AttentionBackward.apply if torch.is_grad_enabled() else ops.backward
    made = call(needs, dout, dlse, out, lse, *tensors, *ctx.options)
    for (at, bit), gradient in zip(DIFFERENTIABLE, made):
        if needs & bit:
            gradients[at] = gradient
    return tuple(gradients)


def _refuse_forward_mode(ctx, *tangents):
    raise UnsupportedError(NO_FORWARD_MODE)


class AttentionFast(torch.autograd.Function):
    """(out, lse) of orchard::attention_forward."""

    @staticmethod
    def forward(ctx, *args):
        out, lse = ops.forward(*args)
        _keep(ctx, args, out, lse)
        return out, lse

    backward = staticmethod(_backward)  # and no jvp: a class that has one cannot be compiled


class Attention(torch.autograd.Function):
    """The same for torch.func."""

    @staticmethod
    def forward(*args):
        return ops.forward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, inputs, *output)

    backward = staticmethod(_backward)
    jvp = staticmethod(_refuse_forward_mode)
    vmap = staticmethod(batching.forward)


class AttentionBackward(torch.autograd.Function):
    """(dq, dk, dv, dbias, dsinks) of orchard::attention_backward, differentiable once more.

    The gradients are functions of dout, dlse, q, k, v, bias and sinks; out and lse, which the op
    takes to save work, depend on those and so carry no derivative of their own.
    """

    @staticmethod
    def forward(*args):
        return ops.backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        needs, dout, dlse, _, _ = inputs[:5]
        ctx.save_for_backward(dout, dlse, *inputs[5:5 + TENSORS])
        ctx.needs, ctx.options = needs, inputs[5 + TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[made for (_, bit), made in zip(DIFFERENTIABLE, output)
                                      if not needs & bit])

    @staticmethod
    def backward(ctx, *cotangents):
        dout, dlse, *tensors = ctx.saved_tensors
        found = second.backward(ctx.needs, cotangents, dout, dlse, tensors, ctx.options)
        ddout, ddlse, dq, dk, dv, dbias, dsinks = found
        return (None, ddout, ddlse, None, None, dq, dk, dv, dbias, None, None, dsinks,
                *[None] * (TENSORS - 7 + len(ctx.options)))

    vmap = staticmethod(batching.backward)
