"""RMS norm and layer norm over the last dimensions, with a residual added first in the same pass.

    y = orchard.torch.rms_norm(x, (768,), weight, 1e-6)
    y, stream = orchard.torch.rms_norm(x, (768,), weight, 1e-6, residual=stream)
    norm = orchard.torch.nn.RMSNorm(2304, 1e-6, weight_offset=1.0)    # Gemma's 1 + weight

With a residual the call returns (out, input + residual). weight and bias are of the input's dtype
or float32.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._library import ArgumentError, OrchardError, ShapeError
from ..checks import INTEGER, check_number, check_tensor
from ..operation import HALVES, Operation
from ..replacement import Refusal, Replacement

__all__ = ["rms_norm", "layer_norm", "RMSNorm", "LayerNorm"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Maybe = Optional[Tensor]
Shape = Union[int, Sequence[int]]


# ---- The formulas --------------------------------------------------------------------------------

def _last(dims: Optional[int]) -> Tuple[int, ...]:
    return tuple(range(-(dims or 1), 0))


def _per_row(x: Tensor, dims: Optional[int]) -> Tensor:
    """[*, 1, ...] of [*]."""
    return x[(...,) + (None,) * (dims or 1)]


def _centred(x: Tensor, last: Tuple[int, ...]) -> Tuple[Tensor, Tensor]:
    """(the mean, the differences from it), of which rows without columns have 0."""
    mean = x.mean(last, keepdim=True) if x.numel() else x.sum(last, keepdim=True)
    return mean, x - mean


def _scaled(normal: Tensor, weight: Maybe, offset: float, bias: Maybe) -> Tensor:
    if weight is not None:
        normal = normal * (weight + offset)
    return normal if bias is None else normal + bias


def _rms_forward(x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: Optional[float],
                 dims: Optional[int], weight_offset: float) -> Tuple[Tensor, ...]:
    last, total = _last(dims), x if residual is None else x + residual
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (total.square().mean(last, keepdim=True) + eps).rsqrt()
    return _scaled(total * rstd, weight, weight_offset, bias), total, _without(rstd, last)


def _layer_forward(x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: Optional[float],
                   dims: Optional[int], weight_offset: float) -> Tuple[Tensor, ...]:
    last, total = _last(dims), x if residual is None else x + residual
    mean, from_mean = _centred(total, last)
    eps = 1e-5 if eps is None else eps
    rstd = (from_mean.square().mean(last, keepdim=True) + eps).rsqrt()
    return (_scaled(from_mean * rstd, weight, weight_offset, bias), total,
            _without(mean, last), _without(rstd, last))


def _without(x: Tensor, last: Tuple[int, ...]) -> Tensor:
    for _ in last:
        x = x.squeeze(-1)
    return x


def _gradients(dout: Tensor, dsum: Maybe, values: Tensor, centred: bool, weight: Maybe,
               rstd: Tensor, dims: Optional[int], offset: float) -> Tuple[Tensor, ...]:
    """`values`: what is squared for the variance. rstd is forward's number, and a function of the
    values for derivatives of these gradients: backward is not told eps."""
    last = _last(dims)
    variance, rstd = values.square().mean(last, keepdim=True), _per_row(rstd, dims).detach()
    rstd = rstd * (1 + rstd.square() * (variance - variance.detach())).rsqrt()
    normal = values * rstd
    inner = dout if weight is None else dout * (weight + offset)
    dx = inner - normal * (inner * normal).mean(last, keepdim=True)
    if centred:
        dx = dx - inner.mean(last, keepdim=True)
    dx = rstd * dx if dsum is None else rstd * dx + dsum
    rows = tuple(range(dout.dim() - len(last)))
    dweight = dout * normal
    return (dx, dweight.sum(rows), dout.sum(rows)) if rows else (dx, dweight, dout.clone())


def _rms_backward(dout: Tensor, dsum: Maybe, x: Tensor, weight: Maybe, rstd: Tensor,
                  dims: Optional[int], weight_offset: float) -> Tuple[Tensor, ...]:
    return _gradients(dout, dsum, x, False, weight, rstd, dims, weight_offset)


def _layer_backward(dout: Tensor, dsum: Maybe, x: Tensor, weight: Maybe, mean: Tensor,
                    rstd: Tensor, dims: Optional[int], weight_offset: float) -> Tuple[Tensor, ...]:
    # Centred anew: a mean that was rounded is not quite the mean.
    from_mean = _centred(x - _per_row(mean, dims).detach(), _last(dims))[1]
    return _gradients(dout, dsum, from_mean, True, weight, rstd, dims, weight_offset)


def _normalised(given: Sequence[str]) -> str:
    return "sum" if "residual" in given else "x"


RMS_NORM = Operation("rms_norm", _rms_forward, _rms_backward, operands={"x": _normalised},
                     gradients={"residual": "dx"}, autocast="aten::rms_norm")
LAYER_NORM = Operation("layer_norm", _layer_forward, _layer_backward, operands={"x": _normalised},
                       gradients={"residual": "dx"}, autocast="aten::layer_norm")


# ---- The functions -------------------------------------------------------------------------------

def _dims(of: Operation, input: Tensor, normalized_shape: Shape) -> int:
    """How many dimensions make a row."""
    if isinstance(normalized_shape, INTEGER):
        normalized_shape = (normalized_shape,)
    try:
        shape = tuple(normalized_shape)
    except TypeError:
        raise ArgumentError(f"{of.name}: normalized_shape is a {type(normalized_shape).__name__}, "
                            "must be a sequence of integers") from None
    if not shape or tuple(input.shape[-len(shape):]) != shape:
        of.forward.signature.complain({"x": input}, {})  # of its dtype or rank, if they are wrong
        raise ShapeError(f"{of.name}: normalized_shape is {list(shape)}, which input of shape "
                         f"{list(input.shape)} does not end in")
    return len(shape)


def _call(of: Operation, input: Tensor, normalized_shape: Shape, weight: Maybe, bias: Maybe,
          eps: Optional[float], residual: Maybe, weight_offset: float
          ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    check_tensor(of.name, "input", input, None)
    dims = _dims(of, input, normalized_shape)
    if eps is not None:
        eps = check_number(of.name, "eps", eps)
    made = of(("out",) if residual is None else ("out", "sum"), x=input, residual=residual,
              weight=weight, bias=bias, eps=eps, dims=dims,
              weight_offset=check_number(of.name, "weight_offset", weight_offset))
    return made[0] if residual is None else (made[0], made[1])


def rms_norm(input: Tensor, normalized_shape: Shape, weight: Optional[Tensor] = None,
             eps: Optional[float] = None, *, residual: Optional[Tensor] = None,
             weight_offset: float = 0.0, bias: Optional[Tensor] = None) -> Any:
    """torch.nn.functional.rms_norm of input + residual, times weight + weight_offset, plus bias.
    """
    return _call(RMS_NORM, input, normalized_shape, weight, bias, eps, residual, weight_offset)


def layer_norm(input: Tensor, normalized_shape: Shape, weight: Optional[Tensor] = None,
               bias: Optional[Tensor] = None, eps: float = 1e-5, *,
               residual: Optional[Tensor] = None, weight_offset: float = 0.0) -> Any:
    """torch.nn.functional.layer_norm of input + residual, with weight + weight_offset for weight.
    """
    return _call(LAYER_NORM, input, normalized_shape, weight, bias, eps, residual, weight_offset)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm by Orchard, whose call may have a residual. Its weights begin as
    1 - weight_offset: what is multiplied with is 1."""

    def __init__(self, normalized_shape: Any, eps: Optional[float] = None,
                 elementwise_affine: bool = True, device: Any = None, dtype: Any = None, *,
                 weight_offset: float = 0.0) -> None:
        self.weight_offset = weight_offset
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Any:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, residual=residual,
                        weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm by Orchard, whose call may have a residual."""

    def forward(self, input: Tensor, residual: Optional[Tensor] = None) -> Any:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps,
                          residual=residual)


# ---- In place of torch's own ---------------------------------------------------------------------

def _refusal(x: Tensor, shape: Sequence[int], *parameters: Maybe) -> Optional[Refusal]:
    if x.dtype not in FLOATS or x.dim() > 8:
        return Refusal(f"its dtype is {x.dtype}, its rank {x.dim()}")
    if not shape or tuple(x.shape[-len(shape):]) != tuple(shape):
        return Refusal("normalized_shape does not fit")
    dtypes = {p.dtype for p in parameters if p is not None}
    if len(dtypes) > 1 or dtypes - {x.dtype, torch.float32 if x.dtype in HALVES else x.dtype}:
        return Refusal("weight or bias differ in dtype")
    return None


def _run_layer_norm(input: Tensor, normalized_shape: List[int], weight: Maybe, bias: Maybe,
                    eps: float) -> Union[Tuple[Tensor, ...], Refusal]:
    refusal = _refusal(input, normalized_shape, weight, bias)
    if refusal:
        return refusal
    try:
        out, _, mean, rstd = LAYER_NORM.forward(_OUT_MEAN_RSTD, input, None, weight, bias, eps,
                                                len(normalized_shape), 0.0)
    except OrchardError as why:
        return Refusal(str(why))
    like = next((p for p in (weight, bias) if p is not None), input)
    sizes = (*mean.shape, *(1 for _ in normalized_shape))
    return out, mean.view(sizes).to(like.dtype), rstd.view(sizes).to(like.dtype)


_OUT_MEAN_RSTD = LAYER_NORM.forward.bits(["out", "mean", "rstd"])


def _run_layer_norm_backward(grad_out: Tensor, input: Tensor, normalized_shape: List[int],
                             mean: Tensor, rstd: Tensor, weight: Maybe, bias: Maybe,
                             output_mask: List[bool]) -> Union[Tuple[Maybe, ...], Refusal]:
    refusal = _refusal(input, normalized_shape, weight, bias)
    if refusal or grad_out.dtype != input.dtype or grad_out.shape != input.shape:
        return refusal or Refusal("grad_out differs from input in shape or dtype")
    if (output_mask[1] and weight is None) or (output_mask[2] and bias is None):
        return Refusal("gradients of absent tensors")
    rows = input.shape[:input.dim() - len(normalized_shape)]
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    wanted = LAYER_NORM._wanted((output_mask[0], False, output_mask[1], output_mask[2]),
                                [None if x is None else x.dtype
                                 for x in (input, None, weight, bias)])
    try:
        made = LAYER_NORM.backward(
            wanted, grad_out, None, input, weight, mean.reshape(rows).to(wide),
            rstd.reshape(rows).to(wide), len(normalized_shape), 0.0)
    except (OrchardError, RuntimeError) as why:
        return Refusal(str(why))
    return tuple(x if asked else None for x, asked in zip(made, output_mask))


def _run_rms_norm(input: Tensor, normalized_shape: List[int], weight: Maybe, eps: Optional[float]
                  ) -> Union[Tensor, Refusal]:
    try:
        return (_refusal(input, normalized_shape, weight)
                or rms_norm(input, normalized_shape, weight, eps))
    except OrchardError as why:
        return Refusal(str(why))


REPLACES = [
    Replacement("aten::native_layer_norm", "normalization", _run_layer_norm),
    Replacement("aten::native_layer_norm_backward", "normalization", _run_layer_norm_backward),
    Replacement("aten::rms_norm", "normalization", _run_rms_norm),
]


# ---- For the tests -------------------------------------------------------------------------------

def samples(draw: Callable[..., Tensor]) -> Iterator[Tuple[Callable, Callable, list, dict]]:
    """(ours, torch's, tensors, options); `draw` makes a tensor of a shape. The rows are the last
    `dims` dimensions, whatever their sizes."""
    def plain(norm: Callable, dims: int, **options: Any) -> Callable:
        return lambda x, *parameters: norm(x, x.shape[-dims:], *parameters, **options)

    def by_hand(norm: Callable, dims: int, offset: float) -> Callable:
        def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tuple:
            total = x + residual
            return norm(total, x.shape[-dims:], weight + offset) + bias, total
        return call

    def fused(norm: Callable, dims: int, offset: float) -> Callable:
        return lambda x, residual, weight, bias: norm(
            x, x.shape[-dims:], weight, residual=residual, bias=bias, weight_offset=offset)

    for ours, theirs, count in ((layer_norm, F.layer_norm, 2), (rms_norm, F.rms_norm, 1)):
        for size, dims in (((3, 37), 1), ((4, 5, 6), 2), ((7,), 1), ((2, 3, 4, 33), 1),
                           ((0, 5), 1)):
            yield plain(ours, dims), plain(theirs, dims), [draw(*size)], {}
        for size, dims in (((3, 5), 1), ((2, 33, 129), 1), ((2, 3, 5, 4), 3)):
            parameters = [draw(*size[-dims:]) for _ in range(count)]
            yield (plain(ours, dims, eps=1e-3), plain(theirs, dims, eps=1e-3),
                   [draw(*size), *parameters], {})
        yield (fused(ours, 1, 1.0), by_hand(theirs, 1, 1.0),
               [draw(3, 9), draw(3, 9), draw(9), draw(9)], {})
        yield (fused(ours, 2, 0.0), by_hand(theirs, 2, 0.0),
               [draw(2, 3, 4), draw(2, 3, 4), draw(3, 4), draw(3, 4)], {})
