"""What the ops return, made by the same lines for kernels and fakes."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import torch

from ..._library import ArgumentError, ShapeError

Tensors = Tuple[torch.Tensor, ...]
Tensors5 = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Bits of `needs`: which gradients backward is asked for. The others come back empty.
DQ, DK, DV, DBIAS, DSINKS = GRADIENTS = (1, 2, 4, 8, 16)
GRADIENTS_OF = ("q", "k", "v", "bias", "sinks")


def needed(*inputs: Optional[torch.Tensor]) -> int:
    """`needs` for q, k, v, bias, sinks: those that require a gradient."""
    return sum(bit for bit, tensor in zip(GRADIENTS, inputs)
               if tensor is not None and tensor.requires_grad)


def check_devices(op: str, q: torch.Tensor, others: Sequence[Optional[torch.Tensor]],
                  seed: Optional[torch.Tensor]) -> None:
    """One operand on meta, and torch asks for shapes only, whatever the others are: results would
    be memory that nobody wrote to. The seed is a number, which may lie on the CPU."""
    for x in others:
        if x is not None and x.device != q.device:
            raise ArgumentError(f"{op}: q is on {q.device}, another operand on {x.device}")
    if seed is not None and seed.device != q.device and seed.device.type != "cpu":
        raise ArgumentError(f"{op}: q is on {q.device}, the seed on {seed.device}")


def check_present(op: str, **operands: Optional[torch.Tensor]) -> None:
    """torch hands an absent tensor on as None, whatever the schema says."""
    for name, tensor in operands.items():
        if tensor is None:
            raise ArgumentError(f"{op}: {name} is missing")


def check_rank(op: str, packed: bool, **operands: torch.Tensor) -> None:
    """For those without a C library behind them that would say it."""
    for name, tensor in operands.items():
        if tensor.dim() != (3 if packed else 4):
            raise ShapeError(f"{op}: {name} has rank {tensor.dim()}, must be "
                             f"{'3 (packed [total,heads,size])' if packed else 4}")


def new_outputs(q: torch.Tensor, v: torch.Tensor, packed: bool,
                count: int = 2) -> Tuple[Optional[torch.Tensor], ...]:
    """out and lse, with a `count` of 3 lse_rest. out's rows lie in the order of q's, as torch's own
    flash kernel has it: joining the heads afterwards costs no copy where splitting them cost none.
    None where q or v has a wrong rank: without an output the C library looks at the inputs, and
    says so."""
    if not q.dim() == v.dim() == (3 if packed else 4):
        return (None,) * count
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    *size, _ = q.shape
    values = v.shape[-1]
    wide = [q.new_empty(size, dtype=lse_dtype) for _ in range(1, count)]
    if packed:
        return (q.new_empty((*size, values)), *wide)
    rows = torch.empty_like(torch.empty_strided(size, q.stride()[:-1], device="meta"))
    stride = (*(step * max(values, 1) for step in rows.stride()), 1)
    return (q.new_empty_strided((*size, values), stride), *wide)


def new_gradients(needs: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  bias: Optional[torch.Tensor], sinks: Optional[torch.Tensor]) -> Tensors5:
    """Each laid out as its input; an empty tensor where it is not needed."""
    return tuple(torch.empty_like(tensor) if needs & bit and tensor is not None else q.new_empty(0)
                 for bit, tensor in zip(GRADIENTS, (q, k, v, bias, sinks)))
