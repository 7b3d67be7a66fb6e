"""The ops of ops.py inside autograd Functions: first and second order, and forward mode.

Four classes, because torch wants it so:
  AttentionPlain     without options, by the ops made for that: for eager calls, fastest;
  AttentionFast      keeps what backward needs in `forward`: for other eager calls, fast;
  Attention          the same with a separate `setup_context`, which torch.func's transforms demand,
                     and with a forward-mode derivative, by the explicit formula (explicit.py);
  AttentionBackward  makes backward itself differentiable (create_graph=True): its own backward
                     recomputes the explicit formula.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch.autograd import forward_ad

from ..._library import OrchardError, UnsupportedError
from .. import cpu, tracing as onlookers
from . import batching, explicit, operands, ops, outputs
from ..tracing import compiling, observed_in_backward as onlooker_of_engine
from ..transforms import grads_batched, no_autocast
from .operands import BIAS, SINKS, TENSORS, K, Q, V

NOT_COMPILED = ("attention: torch.func's transforms and forward-mode derivatives cannot be "
                "compiled; apply them outside torch.compile")

# Function.apply itself uses this; private, so it may be absent.
_unwrap_if_dead = getattr(torch._C._functorch, "unwrap_if_dead", None)
def _backward(*args):
    """orchard::attention_backward, with Orchard's exceptions."""
    try:
        return ops.backward(*args)
    except RuntimeError as error:
        cpu.reraise(error)


def gradients(needs: int, dout, dlse, out, lse, lse_rest, tensors, options):
    """dq ... dsinks, None where not needed; differentiable if gradients are being recorded."""
    if not needs or (dout is None and dlse is None):
        return (None,) * 5
    forward = onlookers.forward_mode() and onlookers.tangents(dout, dlse, out, lse, *tensors)
    if forward and compiling():
        raise UnsupportedError(NOT_COMPILED)
    if dout is None:
        dout = out.new_zeros(()).expand(out.shape)
    if forward or (torch.is_grad_enabled() and grads_batched(dout, dlse)):
        q, k, v, bias, _, _, sinks = tensors[:7]
        with no_autocast(q):
            made = explicit.gradients(tensors, options, dout, dlse, q, k, v, bias, sinks)
    elif torch.is_grad_enabled():
        made = AttentionBackward.apply(needs, dout, dlse, out, lse, lse_rest, *tensors, *options)
    else:
        made = _backward(needs, dout, dlse, out, lse, lse_rest, *tensors, *options)
    return tuple(x if needs >> i & 1 else None for i, x in enumerate(made))


class Refused(Exception):
    """orchard::_plain_forward_rest did not take its arguments. Not its own error: around it others'
    code may raise too."""


class AttentionPlain(torch.autograd.Function):
    """out of orchard::_plain_forward_rest, for callers who know that nobody looks on."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        scale, causal = options
        try:
            out, lse, lse_rest = ops.plain_forward_rest(q, k, v, scale, causal)
        except (RuntimeError, OrchardError) as error:
            found = cpu.translate(error)
            raise (Refused if cpu.misused(found) else found) from None
        ctx.save_for_backward(out, lse, lse_rest, q, k, v)
        ctx.options = scale, causal
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        """Whoever looks on."""
        q, k, v, _ = ctx.needs_input_grad
        out, lse, lse_rest, *tensors = (*ctx.saved_tensors,
                                        *operands.without_options(*ctx.options))
        return (*gradients(q | k << 1 | v << 2, dout, None, out, lse, lse_rest, tensors[:TENSORS],
                           tensors[TENSORS:])[:3], None)


def _plain_backward(ctx, dout):
    """AttentionPlain.backward where nobody looks on."""
    q, k, v, _ = ctx.needs_input_grad
    needs = q | k << 1 | v << 2
    if (not needs or type(dout) is not torch.Tensor or torch.is_grad_enabled()
            or onlooker_of_engine()):
        return AttentionPlain.backward(ctx, dout)
    try:
        dq, dk, dv = ops.plain_backward(needs, dout, *ctx.saved_tensors, *ctx.options)
    except RuntimeError as error:
        cpu.reraise(error)
    return dq if q else None, dk if k else None, dv if v else None, None


# The engine calls a node's `apply`. torch's own finds out anew each time what the backward is, some
# 10 us where a large computation has had the caches. Private: where it is absent, all is slower.
if hasattr(AttentionPlain, "_backward_cls"):
    AttentionPlain._backward_cls.apply = _plain_backward


class AttentionFast(torch.autograd.Function):
    """out, or (out, lse), of orchard::attention_forward_rest. What takes no gradient comes in two
    tuples, an lse that nobody wants is no output: each saves microseconds."""

    @classmethod
    def apply(cls, q, k, v, bias, sinks, others, options, with_lse):
        """Function.apply without its questions, to which function.py knows the answers: they cost
        as much as its checks."""
        if _unwrap_if_dead is None:
            return super().apply(q, k, v, bias, sinks, others, options, with_lse)
        # A tensor that outlived its transform of torch.func hides the one that has a history.
        q, k, v = _unwrap_if_dead(q), _unwrap_if_dead(k), _unwrap_if_dead(v)
        bias = bias if bias is None else _unwrap_if_dead(bias)
        sinks = sinks if sinks is None else _unwrap_if_dead(sinks)
        return _record(q, k, v, bias, sinks, others, options, with_lse)

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, others, options, with_lse):
        mask, alibi, key_lengths, cu_q, cu_k, seed = others
        tensors = q, k, v, bias, mask, alibi, sinks, key_lengths, cu_q, cu_k, seed
        out, lse, lse_rest = ops.forward_rest(*tensors, *options)
        ctx.save_for_backward(out, lse, lse_rest, *tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        q, k, v, bias, sinks, _, _, _ = ctx.needs_input_grad
        needs = q | k << 1 | v << 2 | bias << 3 | sinks << 4
        out, lse, lse_rest, *tensors = ctx.saved_tensors
        return (*gradients(needs, dout, dlse, out, lse, lse_rest, tensors, ctx.options),
                None, None, None)


# What Function.apply ends with.
_record_plain = super(torch.autograd.Function, AttentionPlain).apply
_record = super(torch.autograd.Function, AttentionFast).apply


def record_plain(q, k, v, scale, causal) -> Optional[torch.Tensor]:
    """AttentionPlain.apply, as AttentionFast's; a plain function, which costs less to find. None:
    the op refused."""
    try:
        if _unwrap_if_dead is None:
            return AttentionPlain.apply(q, k, v, (scale, causal))
        return _record_plain(_unwrap_if_dead(q), _unwrap_if_dead(k), _unwrap_if_dead(v),
                             (scale, causal))
    except Refused:
        return None


class Attention(torch.autograd.Function):
    """The same for torch.func, with the arguments and results of the op's schema."""

    @staticmethod
    def forward(*args):
        return ops.forward_rest(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output, *inputs[:TENSORS])
        ctx.save_for_forward(*inputs[:TENSORS])
        ctx.options = inputs[TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, dout, dlse, _):
        out, lse, lse_rest, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        needs = sum(bit for at, bit in zip((Q, K, V, BIAS, SINKS), outputs.GRADIENTS) if wanted[at])
        dq, dk, dv, dbias, dsinks = gradients(needs, dout, dlse, out, lse, lse_rest, tensors,
                                              ctx.options)
        return (dq, dk, dv, dbias, None, None, dsinks,
                *[None] * (TENSORS - 7 + len(ctx.options)))

    @staticmethod
    def jvp(ctx, dq, dk, dv, dbias, _dmask, dalibi, dsinks, *_):
        if dalibi is not None:
            raise UnsupportedError("attention: alibi_slopes has a forward-mode derivative, which "
                                   "Orchard does not follow; detach it")
        # torch turns forward mode off here, also for transforms around this one (jvp of jvp). So it
        # is turned on, and the operands are rid of the tangents that are this one's.
        with forward_ad._set_fwd_grad_enabled(True):
            tensors = [x if x is None or not x.is_floating_point()
                       else forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]
            return (*explicit.tangents(tensors, ctx.options, dq, dk, dv, dbias, dsinks), None)

    vmap = staticmethod(batching.forward)


torch.library.register_autograd("orchard::attention", Attention.backward,
                                setup_context=Attention.setup_context, lib=ops.library)


class AttentionBackward(torch.autograd.Function):
    """(dq, dk, dv, dbias, dsinks) of orchard::attention_backward, differentiable once more.

    The gradients are functions of dout, dlse, q, k, v, bias and sinks; out, lse and lse_rest, which
    the op takes to save work, depend on those and so carry no derivative of their own.
    """

    @staticmethod
    def forward(*args):
        return _backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        needs, dout, dlse, _, _, _ = inputs[:6]
        ctx.save_for_backward(dout, dlse, *inputs[6:6 + TENSORS])
        ctx.needs, ctx.options = needs, inputs[6 + TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[made for bit, made in zip(outputs.GRADIENTS, output)
                                      if not needs & bit])

    @staticmethod
    def backward(ctx, *cotangents):
        dout, dlse, *tensors = ctx.saved_tensors
        found = explicit.second_order(ctx.needs, cotangents, dout, dlse, tensors, ctx.options)
        ddout, ddlse, dq, dk, dv, dbias, dsinks = found
        return (None, ddout, ddlse, None, None, None, dq, dk, dv, dbias, None, None, dsinks,
                *[None] * (TENSORS - 7 + len(ctx.options)))

    vmap = staticmethod(batching.backward)
