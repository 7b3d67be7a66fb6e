"""Softmax and log-softmax along a dimension, with a scale and a mask in the same pass.

    p = orchard.torch.softmax(scores, -1, scale=0.125, mask=allowed)      # bool: True = is seen
    p = orchard.torch.softmax(scores, -1, mask=bias)                      # or added, with gradient

Masks are broadcast to the input. A row that sees nothing is 0 (log: -inf), as are its gradients.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._library import DtypeError, OrchardError, ShapeError
from ..checks import INTEGER, check_number, check_tensor
from ..operation import Operation
from ..replacement import Refusal, Replacement

__all__ = ["softmax", "log_softmax", "Softmax", "LogSoftmax"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# ---- The formulas --------------------------------------------------------------------------------

def _forward(x: Tensor, mask: Optional[Tensor], scale: Optional[float], dim: Optional[int],
             log: bool) -> Tuple[Tensor]:
    dim = -1 if dim is None else dim
    score = x if scale is None else x * scale
    made = torch.log_softmax if log else torch.softmax
    if mask is None:
        return made(score, dim),
    score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask
    if not score.shape[dim]:
        return score,
    unseen = (score == float("-inf")).all(dim, keepdim=True)
    out = made(torch.where(unseen, 0.0, score), dim)
    return torch.where(unseen, float("-inf") if log else 0.0, out),


def _backward(dout: Tensor, out: Tensor, scale: Optional[float], dim: Optional[int],
              log: bool) -> Tuple[Tensor, Tensor]:
    dim = -1 if dim is None else dim
    if log:
        unseen = out == float("-inf")
        dout = torch.where(unseen, 0.0, dout)
        weight = torch.exp(torch.where(unseen, 0.0, out))
        ds = torch.where(unseen, 0.0, dout - weight * dout.sum(dim, keepdim=True))
    else:
        ds = out * (dout - (dout * out).sum(dim, keepdim=True))
    return ds if scale is None else ds * scale, ds


SOFTMAX = Operation("softmax", _forward, _backward, autocast="aten::softmax.int")


# ---- The functions -------------------------------------------------------------------------------

def _mask_for(op: str, mask: Tensor, input: Tensor) -> Tensor:
    check_tensor(op, "mask", mask, input.device, "input")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise DtypeError(f"{op}: mask is {mask.dtype}, must be bool or floating")
        if mask.dtype != torch.float32 or input.dtype == torch.float64:
            mask = mask.to(input.dtype)
    try:
        return mask.expand(input.shape)
    except RuntimeError:
        raise ShapeError(f"{op}: mask has shape {list(mask.shape)}, which does not broadcast to "
                         f"the input's {list(input.shape)}") from None


def _call(op: str, log: bool, input: Tensor, dim: Optional[int], stacklevel: Any,
          dtype: Optional[torch.dtype], scale: Optional[float], mask: Optional[Tensor]) -> Tensor:
    check_tensor(op, "input", input, None)
    if isinstance(stacklevel, torch.dtype):  # the third argument of torch.softmax
        dtype = stacklevel
    if dtype is not None:
        input = input.to(dtype)
    if dim is None:
        dim = F._get_softmax_dim(op, input.dim(), 4)
    dim, rank = check_number(op, "dim", dim, INTEGER), max(input.dim(), 1)
    if not -rank <= dim < rank:
        raise ShapeError(f"{op}: dim is {dim}, input has rank {input.dim()}")
    if scale is not None:
        scale = check_number(op, "scale", scale)
    if mask is not None:
        mask = _mask_for(op, mask, input)
    if not input.dim():
        made = _call(op, log, input[None], -1, None, None, scale,
                     mask if mask is None else mask[None])
        return made[0]
    # From the end: vmap adds dimensions in front.
    out, = SOFTMAX(x=input, mask=mask, scale=scale, dim=dim if dim < 0 else dim - rank, log=log)
    return out


def softmax(input: Tensor, dim: Optional[int] = None, _stacklevel: Any = 3,
            dtype: Optional[torch.dtype] = None, *, scale: Optional[float] = None,
            mask: Optional[Tensor] = None) -> Tensor:
    """torch.nn.functional.softmax of scale * input, where mask is True, or of scale * input + mask.
    """
    return _call("softmax", False, input, dim, _stacklevel, dtype, scale, mask)


def log_softmax(input: Tensor, dim: Optional[int] = None, _stacklevel: Any = 3,
                dtype: Optional[torch.dtype] = None, *, scale: Optional[float] = None,
                mask: Optional[Tensor] = None) -> Tensor:
    """torch.nn.functional.log_softmax, with scale and mask as in `softmax`."""
    return _call("log_softmax", True, input, dim, _stacklevel, dtype, scale, mask)


class Softmax(torch.nn.Softmax):
    """torch.nn.Softmax by Orchard, whose call may have a mask."""

    def forward(self, input: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return softmax(input, self.dim, mask=mask)


class LogSoftmax(torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax by Orchard, whose call may have a mask."""

    def forward(self, input: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        return log_softmax(input, self.dim, mask=mask)


# ---- In place of torch's own ---------------------------------------------------------------------

def _refusal(x: Tensor, *others: Tensor) -> Optional[Refusal]:
    if x.dtype not in FLOATS:
        return Refusal(f"its dtype is {x.dtype}")
    if not 1 <= x.dim() <= 8:
        return Refusal(f"its rank is {x.dim()}")
    if any(other.shape != x.shape or other.dtype != x.dtype for other in others):
        return Refusal("its tensors differ in shape or dtype")
    return None


def _run_forward(log: bool) -> Callable[..., Union[Tensor, Refusal]]:
    def run(self: Tensor, dim: int, half_to_float: bool) -> Union[Tensor, Refusal]:
        refusal = Refusal("half_to_float") if half_to_float else _refusal(self)
        try:
            return refusal or SOFTMAX.forward(1, self, None, None, dim, log)[0]
        except OrchardError as why:
            return Refusal(str(why))

    return run


def _run_backward(log: bool) -> Callable[..., Union[Tensor, Refusal]]:
    def run(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
            ) -> Union[Tensor, Refusal]:
        refusal = (Refusal("half_to_float") if input_dtype != output.dtype
                   else _refusal(output, grad_output))
        try:
            return refusal or SOFTMAX.backward(1, grad_output, output, None, dim, log)[0]
        except OrchardError as why:
            return Refusal(str(why))

    return run


def _faster(x: Tensor, dim: int, *_: Any) -> Union[bool, str]:
    """Measured on AVX2: bench/results.md."""
    if not x.is_cpu:
        return "not measured on this device"
    if x.dtype != torch.float32 or dim not in (-1, x.dim() - 1) or not x.is_contiguous():
        return "faster only in float32 along a dense last dimension"
    return True


REPLACES = [
    Replacement("aten::_softmax", "softmax", _run_forward(False), _faster),
    Replacement("aten::_log_softmax", "softmax", _run_forward(True)),
    Replacement("aten::_softmax_backward_data", "softmax", _run_backward(False)),
    Replacement("aten::_log_softmax_backward_data", "softmax", _run_backward(True)),
]


# ---- For the tests -------------------------------------------------------------------------------

def samples(draw: Callable[..., Tensor]) -> Iterator[Tuple[Callable, Callable, list, dict]]:
    """(ours, torch's, tensors, options); `draw` makes a tensor of a shape."""
    for ours, theirs in ((softmax, F.softmax), (log_softmax, F.log_softmax)):
        yield ours, theirs, [draw(3, 37)], dict(dim=-1)
        yield ours, theirs, [draw(4, 5, 6)], dict(dim=1)
        yield ours, theirs, [draw(31, 3)], dict(dim=0)
        yield ours, theirs, [draw(7)], dict(dim=0)
        yield ours, theirs, [draw()], dict(dim=0)
        yield ours, theirs, [draw(2, 0)], dict(dim=1)
        yield ours, theirs, [draw(2, 3, 4, 33)], dict(dim=-1)

        def masked(x: Tensor, mask: Tensor, ours: Callable = ours) -> Tensor:
            return ours(x, -1, mask=mask, scale=0.5)

        def by_hand(x: Tensor, mask: Tensor, theirs: Callable = theirs) -> Tensor:
            return theirs(0.5 * x + mask, -1)

        yield masked, by_hand, [draw(2, 3, 9), draw(3, 9)], {}
        yield masked, by_hand, [draw(2, 3, 9), draw(2, 3, 9)], {}
