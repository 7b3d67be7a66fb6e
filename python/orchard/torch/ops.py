"""`orchard::attention_forward` and `orchard::attention_backward`: schemas, kernels, fakes.

Both are plain functions to torch: fresh outputs, nothing changed in place, the random seed an
operand. They have no autograd formula of their own; function.py wraps them. The seed is a tensor,
so that a compiled graph can draw a new one at each call; None where there is no dropout.
"""

from __future__ import annotations

import importlib
from ctypes import byref
from typing import Callable, Optional, Tuple

import torch

from .. import _structs
from .._library import UnsupportedError, check, lib
from . import batching, operands, threads

Tensors2 = Tuple[torch.Tensor, torch.Tensor]
Tensors5 = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# What forward and backward share, in this order everywhere: here, in kernels, in function.py.
# No defaults: torch drops arguments that equal theirs before it calls a kernel.
ATTENTION = ("Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi, "
             "Tensor? sinks, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
             "Tensor? seed, SymInt max_t, SymInt max_s, float? scale, bool causal, "
             "bool bottom_right, SymInt window_left, SymInt window_right, float softcap, "
             "float dropout")

# Bits of `needs`: which gradients backward is asked for. The others come back empty.
DQ, DK, DV, DBIAS, DSINKS = 1, 2, 4, 8, 16

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


# ---- Outputs: made by the same lines for kernels and fakes ---------------------------------------

def new_outputs(q: torch.Tensor, v: torch.Tensor, packed: bool) -> Tensors2:
    """out and lse. out lies in memory as [B,T,H,E]: joining the heads afterwards costs no copy."""
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if packed:
        total, heads, _ = q.shape
        return q.new_empty((total, heads, v.shape[-1])), q.new_empty((total, heads),
                                                                    dtype=lse_dtype)
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=lse_dtype)


def new_gradients(needs: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  bias: Optional[torch.Tensor], sinks: Optional[torch.Tensor]) -> Tensors5:
    """Each laid out as its input; an empty tensor where it is not needed."""
    made = []
    for bit, tensor in ((DQ, q), (DK, k), (DV, v), (DBIAS, bias), (DSINKS, sinks)):
        made.append(torch.empty_like(tensor) if needs & bit and tensor is not None
                    else q.new_empty(0))
    return tuple(made)


# ---- Kernels -------------------------------------------------------------------------------------

def forward_cpu(q, k, v, *rest) -> Tensors2:
    """The CPU kernel: the C library on torch's memory and threads."""
    args = _structs.AttentionForwardArgs()
    operands.attention(args.attention, "attention_forward", q, k, v, *rest)
    out, lse = new_outputs(q, v, rest[5] is not None)
    operands.describe(args.out, out, "attention_forward", "out")
    operands.describe(args.lse, lse, "attention_forward", "lse")
    check(lib.orchard_attention_forward(threads.context().handle, byref(args)))
    return out, lse


def backward_cpu(needs, dout, dlse, out, lse, q, k, v, bias, mask, alibi, sinks,
                 *rest) -> Tensors5:
    """The CPU kernel of the backward."""
    op = "attention_backward"
    args = _structs.AttentionBackwardArgs()
    operands.attention(args.attention, op, q, k, v, bias, mask, alibi, sinks, *rest)
    for name, tensor in (("dout", dout), ("dlse", dlse), ("out", out), ("lse", lse)):
        operands.describe(getattr(args, name), tensor, op, name)
    made = new_gradients(needs, q, k, v, bias, sinks)
    for bit, name, gradient in zip((DQ, DK, DV, DBIAS, DSINKS),
                                   ("dq", "dk", "dv", "dbias", "dsinks"), made):
        if needs & bit:
            operands.describe(getattr(args, name), gradient, op, name)
    check(lib.orchard_attention_backward(threads.context().handle, byref(args)))
    return made


def kernel_for(device: str) -> Tuple[Callable[..., Tensors2], Callable[..., Tensors5]]:
    """The (forward, backward) kernels of a device type: parameters as in the schemas.

    The seam for other devices: `orchard.torch.mps` provides `forward` and `backward` for "mps".
    """
    if device == "cpu":
        return forward_cpu, backward_cpu
    if device == "mps":
        try:
            module = importlib.import_module("orchard.torch.mps")
        except ModuleNotFoundError:
            raise UnsupportedError("attention: this build of Orchard has no launcher for "
                                   "device mps") from None
        return module.forward, module.backward
    raise UnsupportedError(f"attention: tensors are on device {device}, Orchard serves cpu and mps")


def _forward_mps(*args) -> Tensors2:
    return kernel_for("mps")[0](*args)


def _backward_mps(*args) -> Tensors5:
    return kernel_for("mps")[1](*args)


library.impl("attention_forward", forward_cpu, "CPU")
library.impl("attention_backward", backward_cpu, "CPU")
library.impl("attention_forward", _forward_mps, "MPS")
library.impl("attention_backward", _backward_mps, "MPS")


# ---- Fakes: shapes and strides without memory ----------------------------------------------------

@torch.library.register_fake("orchard::attention_forward", lib=library)
def _forward_fake(q, k, v, bias, mask, alibi, sinks, key_lengths, cu_seqlens_q, *rest):
    return new_outputs(q, v, cu_seqlens_q is not None)


@torch.library.register_fake("orchard::attention_backward", lib=library)
def _backward_fake(needs, dout, dlse, out, lse, q, k, v, bias, mask, alibi, sinks, *rest):
    return new_gradients(needs, q, k, v, bias, sinks)


# ---- vmap, for those who call the ops themselves -------------------------------------------------

@torch.library.register_vmap("orchard::attention_forward", lib=library)
def _forward_vmap(info, in_dims, *args):
    return batching.map_forward(forward, info.batch_size, in_dims, args)


@torch.library.register_vmap("orchard::attention_backward", lib=library)
def _backward_vmap(info, in_dims, *args):
    return batching.map_backward(backward, info.batch_size, in_dims, args)
