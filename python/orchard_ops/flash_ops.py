"""flash_attn_fwd, flash_attn_bwd, and the dispatcher's ops torch.ops.flash_attn_mps.*.

Signatures are the first Orchard's; what they compute is attention and its true gradients, by
orchard.torch. Tensors may be on the CPU or on mps, [B,S,D] or [B,H,S,D], of any strides.
"""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from orchard.torch import cpu, tracing
from orchard.torch.attention import autograd, ops
from orchard.torch.attention.operands import TENSORS, new_seed, without_options
from orchard.torch.attention.outputs import DK, DQ, DV
from orchard.torch.transforms import one_by_one, refuse_tangents

from . import state as states
from .state import Call


def flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float = 0.0,
                   causal: bool = False) -> Tuple[Tensor, Tensor]:
    """(out, mask): attention of [B,S,D] or [B,H,S,D] tensors; `out` carries gradients.

    `mask` is an opaque O(N) state (state.py): hand it to flash_attn_bwd with the same arguments, or
    forget it if autograd runs the backward. Dropout acts on the attention probabilities. Causal is
    aligned at the top left, as in torch.
    """
    return Flash.apply(q, k, v, scale, dropout_p, causal)


def flash_attn_bwd(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float,
                   dropout_p: float = 0.0, causal: bool = False) -> Tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): the gradients of flash_attn_fwd's `out`, given its `mask`.

    The state does not hold `out`, so it is computed again; autograd's own backward, which keeps it,
    is faster.
    """
    call = checked(q, k, v, scale, dropout_p, causal)
    check_tensors(grad_out=grad_out)
    if grad_out.shape != out_shape(q, v):
        raise ValueError(f"flash_attn_bwd: grad_out has shape {list(grad_out.shape)}, out has "
                         f"{list(out_shape(q, v))}")
    kept = states.unpack(mask, call)
    given = arguments(call, kept.seed)
    with torch.no_grad():
        out, lse, lse_rest = attend(*given)
        states.check_same_scores(kept.lse, lse)
        made = differentiate(DQ | DK | DV, folded(grad_out), None, out, lse, lse_rest, *given)
    return made[0].view(q.shape), made[1].view(k.shape), made[2].view(v.shape)


# ---- Autograd ------------------------------------------------------------------------------------

# Compiled code calls it as it is: a Function that torch.compile looks into loses autograd's check
# for changes in place, and gradients would be wrong.
@torch.compiler.allow_in_graph
class Flash(torch.autograd.Function):
    """(out, mask) with gradients, of second order too."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float,
                causal: bool, seed: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        call = checked(q, k, v, scale, dropout_p, causal)
        if isinstance(q, tracing.TRACED) and any(ctx.needs_input_grad):
            ops.refuse_redrawn_dropout(dropout_p)
        seed = new_seed(dropout_p) if seed is None else seed
        out, lse, lse_rest = attend(*arguments(call, seed))
        mask = states.pack(call, lse, seed)
        # No view: torch lets nobody change in place what is one. What is saved is what the caller
        # has, so that torch notices such a change.
        out = torch.ops.aten._unsafe_view.default(out, out_shape(q, v))
        ctx.save_for_backward(q, k, v, out, lse, lse_rest, seed)
        ctx.options = (scale, dropout_p, causal)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return out, mask

    @staticmethod
    def backward(ctx, grad_out: Optional[Tensor], grad_mask: Optional[Tensor] = None) -> tuple:
        return backward_of(ctx, grad_out, differentiate)


def backward_of(ctx, grad_out: Optional[Tensor], run: Callable[..., tuple]) -> tuple:
    """Gradients of Flash.forward's arguments; `run` has attention_backward's parameters."""
    needs = needed(ctx)
    if grad_out is None or not needs:
        return (None,) * 7
    q, k, v, out, lse, lse_rest, seed = ctx.saved_tensors
    call = checked(q, k, v, *ctx.options)
    made = run(needs, folded(grad_out), None, folded(out), lse, lse_rest, *arguments(call, seed))
    grads = [None if x is None else x.view(of.shape) for x, of in zip(made, (q, k, v))]
    return (*grads, None, None, None, None)


def needed(ctx) -> int:
    """The bits of the gradients that a Function is asked for."""
    return sum(bit for wanted, bit in zip(ctx.needs_input_grad, (DQ, DK, DV)) if wanted)


def attend(*given) -> Tuple[Tensor, Tensor, Tensor]:
    """orchard::attention_forward_rest, with Orchard's exceptions."""
    try:
        return ops.forward_rest(*given)
    except RuntimeError as error:
        cpu.reraise(error)


def differentiate(needs: int, dout: Tensor, dlse: Optional[Tensor], out: Tensor, lse: Tensor,
                  lse_rest: Optional[Tensor], *arguments) -> tuple:
    """orchard::attention_backward, None where not needed; itself differentiable where gradients are
    being recorded."""
    return autograd.gradients(needs, dout, dlse, out, lse, lse_rest, arguments[:TENSORS],
                              arguments[TENSORS:])


# ---- Between the two signatures ------------------------------------------------------------------

def check_tensors(**given: object) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.is_nested:
            kind = "nested tensor" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"flash_attn: {name} is a {kind}, must be a dense tensor")


def checked(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float,
            causal: bool) -> Call:
    check_tensors(q=q, k=k, v=v)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0,1), got {dropout_p}")
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError("flash_attn: scale requires grad, and gets none: pass float(scale)")
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        raise ValueError(f"flash_attn: q, k and v have {q.dim()}, {k.dim()} and {v.dim()} "
                         "dimensions, must all have 3, [B,S,D], or 4, [B,H,S,D]")
    if not q.device == k.device == v.device:
        raise ValueError(f"flash_attn: q, k and v are on {q.device}, {k.device} and {v.device}, "
                         "must be on one device")
    if q.dtype not in states.DTYPES:
        raise TypeError(f"flash_attn: q is {states.dtype_name(q.dtype)}, must be float64, "
                        "float32, float16 or bfloat16")
    return Call(folded(q), folded(k), folded(v), float(scale), float(dropout_p), bool(causal),
                q.dim())


def folded(x: Tensor) -> Tensor:
    """[B,S,D] is one head."""
    return x.unsqueeze(1) if x.dim() == 3 else x


def out_shape(q: Tensor, v: Tensor) -> torch.Size:
    return torch.Size((*q.shape[:-1], v.shape[-1]))


def arguments(call: Call, seed: Optional[Tensor]) -> tuple:
    """In the order of orchard::attention_forward's schema."""
    return (call.q, call.k, call.v,
            *without_options(call.scale, call.causal, seed, call.dropout_p))


# ---- The dispatcher's names ----------------------------------------------------------------------

FORWARD = "_flash_attn_fwd"
BACKWARDS = ("_flash_attn_bwd", "_flash_attn_bwd_dropout")

library = torch.library.Library("flash_attn_mps", "FRAGMENT")
library.define(f"{FORWARD}(Tensor q, Tensor k, Tensor v, float scale, float dropout_p, bool causal)"
               " -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))
# Composite: torch sees through it to orchard's own ops and their gradients.
library.impl(FORWARD, flash_attn_fwd, "CompositeImplicitAutograd")
for _name in BACKWARDS:
    library.define(f"{_name}(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor dropout_mask, "
                   "float scale, float dropout_p, bool causal) -> (Tensor, Tensor, Tensor)")
    library.impl(_name, flash_attn_bwd, "CompositeExplicitAutograd")
    refuse_tangents(library, getattr(torch.ops.flash_attn_mps, _name).default,
                    "attention", "orchard.torch.scaled_dot_product_attention")

    @torch.library.register_fake(f"flash_attn_mps::{_name}", lib=library)
    def _fake(grad_out, q, k, v, dropout_mask, scale, dropout_p, causal):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


# ---- vmap ----------------------------------------------------------------------------------------

# The forward with a seed that is drawn already. vmap calls it for one sample after the other, since
# each has a state of its own.
library.define("_seeded_fwd(Tensor q, Tensor k, Tensor v, float scale, float dropout_p, "
               "bool causal, Tensor? seed) -> (Tensor, Tensor)")
library.impl("_seeded_fwd", Flash.apply, "CompositeImplicitAutograd")
seeded = torch.ops.flash_attn_mps._seeded_fwd.default


def _forward_vmap(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float,
                  causal: bool) -> Tuple[Tensor, Tensor]:
    """Draws the seed where torch's own random operations heed vmap's `randomness`: one for all
    samples, or one each, or an error."""
    return seeded(q, k, v, scale, dropout_p, causal, new_seed(dropout_p))


library.impl(FORWARD, _forward_vmap, "FuncTorchVmapMode")


@torch.library.register_vmap("flash_attn_mps::_seeded_fwd", lib=library)
def _seeded_vmap(info, in_dims, *given):
    return one_by_one(seeded, info.batch_size, in_dims, given)
