"""Activations with a bias in the same pass, and gated ones, which multiply two tensors in one.

    h = orchard.torch.gelu(x, "tanh", bias=b)      # gelu(x + b)
    h = orchard.torch.swiglu(gate, up)             # silu(gate) * up
    h = orchard.torch.swiglu(gate_up)              # of the halves of one tensor, the gate first

A bias has the size of the last dimension. Infinite inputs give the limits, where torch gives NaN.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._library import ArgumentError, OrchardError, ShapeError
from ..checks import INTEGER, check_flag, check_number, check_tensor
from ..operation import Operation
from ..replacement import Refusal, Replacement

__all__ = ["gelu", "silu", "relu2", "swiglu", "geglu", "GELU", "SiLU", "ReLU2", "SwiGLU", "GeGLU"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GELU_ERF, GELU_TANH, SILU, RELU2 = range(4)  # orchard_activation_kind


# ---- The formulas: backward's are their derivatives ----------------------------------------------

def _activate(x: Tensor, kind: int) -> Tensor:
    if kind == RELU2:
        return torch.relu(x).square()
    far = x.abs() > 1e4  # where infinities would meet a factor of 0
    near = torch.where(far, 0.0, x)
    if kind == GELU_ERF:
        out = near * torch.erfc(near * -0.5 ** 0.5) / 2
    else:
        z = near if kind == SILU else 1.5957691216057308 * (near + 0.044715 * near ** 3)
        e = torch.exp(torch.where(z < 0, z, -z))  # torch's slope of sigmoid has 1 - sigmoid
        out = near * torch.where(z < 0, e, 1.0) / (1 + e)
    return torch.where(far, torch.relu(x), out)


def _forward(x: Tensor, bias: Optional[Tensor], kind: int) -> Tuple[Tensor]:
    return _activate(x if bias is None else x + bias, kind),


def _gated(gate: Tensor, up: Tensor, kind: int) -> Tuple[Tensor]:
    return _activate(gate, kind) * up,


ACTIVATION = Operation("activation", _forward)
GATED = Operation("gated", _gated)


# ---- The functions -------------------------------------------------------------------------------

def _gelu_kind(op: str, approximate: str) -> int:
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"{op}: approximate is {approximate!r:.40}, must be 'none' or 'tanh'")
    return GELU_TANH if approximate == "tanh" else GELU_ERF


def _call_gated(op: str, gate: Tensor, up: Optional[Tensor], dim: int, kind: int) -> Tensor:
    if up is None:
        check_tensor(op, "gate", gate, None)
        dim = check_number(op, "dim", dim, INTEGER)
        if not -gate.dim() <= dim < gate.dim() or gate.shape[dim] % 2:
            raise ShapeError(f"{op}: gate of shape {list(gate.shape)} has no halves along "
                             f"dimension {dim}")
        half = gate.shape[dim] // 2
        gate, up = gate.split([half, half], dim)
    return GATED(gate=gate, up=up, kind=kind)[0]


def gelu(input: Tensor, approximate: str = "none", *, bias: Optional[Tensor] = None) -> Tensor:
    """torch.nn.functional.gelu of input + bias."""
    return ACTIVATION(x=input, bias=bias, kind=_gelu_kind("gelu", approximate))[0]


def silu(input: Tensor, inplace: bool = False, *, bias: Optional[Tensor] = None) -> Tensor:
    """torch.nn.functional.silu of input + bias; in place, it is written into input."""
    if not check_flag("silu", "inplace", inplace):
        return ACTIVATION(x=input, bias=bias, kind=SILU)[0]
    check_tensor("silu", "input", input, None)
    kept = input.clone() if torch.is_grad_enabled() else input  # for backward
    return input.copy_(ACTIVATION(x=kept, bias=bias, kind=SILU)[0])


def relu2(input: Tensor, *, bias: Optional[Tensor] = None) -> Tensor:
    """The square of torch.nn.functional.relu of input + bias."""
    return ACTIVATION(x=input, bias=bias, kind=RELU2)[0]


def swiglu(gate: Tensor, up: Optional[Tensor] = None, *, dim: int = -1) -> Tensor:
    """silu(gate) * up. Without `up`: of the halves of gate along `dim`, the first is the gate."""
    return _call_gated("swiglu", gate, up, dim, SILU)


def geglu(gate: Tensor, up: Optional[Tensor] = None, *, approximate: str = "none",
          dim: int = -1) -> Tensor:
    """gelu(gate) * up. Without `up`: of the halves of gate along `dim`, the first is the gate."""
    return _call_gated("geglu", gate, up, dim, _gelu_kind("geglu", approximate))


class GELU(torch.nn.GELU):
    """torch.nn.GELU by Orchard, whose call may have a bias."""

    def forward(self, input: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return gelu(input, self.approximate, bias=bias)


class SiLU(torch.nn.SiLU):
    """torch.nn.SiLU by Orchard, whose call may have a bias."""

    def forward(self, input: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return silu(input, self.inplace, bias=bias)


class ReLU2(torch.nn.Module):
    """`relu2`."""

    def forward(self, input: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return relu2(input, bias=bias)


class SwiGLU(torch.nn.Module):
    """`swiglu`; called with one tensor, of its halves."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, gate: Tensor, up: Optional[Tensor] = None) -> Tensor:
        return swiglu(gate, up, dim=self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class GeGLU(SwiGLU):
    """`geglu`; called with one tensor, of its halves."""

    def __init__(self, approximate: str = "none", dim: int = -1) -> None:
        super().__init__(dim)
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Optional[Tensor] = None) -> Tensor:
        return geglu(gate, up, approximate=self.approximate, dim=self.dim)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, dim={self.dim}"


# ---- In place of torch's own ---------------------------------------------------------------------

def _compute(call: Callable, kind: int, *tensors: Tensor) -> Union[Tensor, Refusal]:
    """In memory as torch's elementwise operations leave it: of permuted inputs permuted."""
    x = tensors[-1]
    if x.dtype not in FLOATS:
        return Refusal(f"its dtype is {x.dtype}")
    if x.dim() > 8:
        return Refusal(f"its rank is {x.dim()}")
    if tensors[0].shape != x.shape or tensors[0].dtype != x.dtype:
        return Refusal("its tensors differ in shape or dtype")
    try:
        if all(one.is_contiguous() for one in tensors):
            return call(1, *tensors, None, kind)[0]
        told = [torch.empty_strided(one.shape, one.stride(), device="meta") for one in tensors]
        stride = (torch.neg if len(told) == 1 else torch.add)(*told).stride()
        order = sorted(range(x.dim()), key=lambda d: -stride[d])
        made = call(1, *(one.permute(order) for one in tensors), None, kind)[0]
        return made.as_strided(x.shape, stride)
    except OrchardError as why:
        return Refusal(str(why))


def _gelu(self: Tensor, approximate: str) -> Union[Tensor, Refusal]:
    if approximate not in ("none", "tanh"):
        return Refusal("an approximation that torch refuses")
    return _compute(ACTIVATION.forward, _gelu_kind("gelu", approximate), self)


def _gelu_backward(dout: Tensor, self: Tensor, approximate: str) -> Union[Tensor, Refusal]:
    if approximate not in ("none", "tanh"):
        return Refusal("an approximation that torch refuses")
    return _compute(ACTIVATION.backward, _gelu_kind("gelu", approximate), dout, self)


def _silu(self: Tensor) -> Union[Tensor, Refusal]:
    return _compute(ACTIVATION.forward, SILU, self)


def _silu_backward(dout: Tensor, self: Tensor) -> Union[Tensor, Refusal]:
    return _compute(ACTIVATION.backward, SILU, dout, self)


def _in_place(run: Callable) -> Callable[..., Union[Tensor, Refusal]]:
    def written(self: Tensor, *options: Any) -> Union[Tensor, Refusal]:
        made = run(self, *options)
        return made if isinstance(made, Refusal) else self.copy_(made)

    return written


def _faster(least: int) -> Callable[..., Union[bool, str]]:
    """From so many elements on; what without AVX-512 is faster is not so beside it."""
    capability = torch.backends.cpu.get_cpu_capability()

    def pays(x: Tensor, *options: Any) -> Union[bool, str]:
        if not x.is_cpu or capability not in ("AVX2", "AVX512"):
            return "not measured on this device"
        if capability == "AVX512" and options[-1:] != ("tanh",):
            return "torch is as fast with AVX-512"
        return x.numel() >= least or "too small to gain"

    return pays


REPLACES = [
    Replacement("aten::gelu", "activations", _gelu, _faster(2 ** 14)),
    Replacement("aten::gelu_", "activations", _in_place(_gelu), _faster(2 ** 14)),
    Replacement("aten::gelu_backward", "activations", _gelu_backward, _faster(2 ** 14)),
    Replacement("aten::silu", "activations", _silu, _faster(2 ** 15)),
    Replacement("aten::silu_", "activations", _in_place(_silu), _faster(2 ** 18)),
    Replacement("aten::silu_backward", "activations", _silu_backward, _faster(2 ** 16)),
]


# ---- For the tests -------------------------------------------------------------------------------

def samples(draw: Callable[..., Tensor]) -> Iterator[Tuple[Callable, Callable, list, dict]]:
    """(ours, torch's, tensors, options); `draw` makes a tensor of a shape."""
    def square(x: Tensor) -> Tensor:
        return F.relu(x).square()

    for ours, theirs, options in ((gelu, F.gelu, {}), (gelu, F.gelu, dict(approximate="tanh")),
                                  (silu, F.silu, {}), (relu2, square, {})):
        for shape in ((3, 37), (2, 3, 5), (7,), (), (2, 0)):
            yield ours, theirs, [draw(*shape)], options
        yield (lambda x, bias, ours=ours, **o: ours(x, bias=bias, **o),
               lambda x, bias, theirs=theirs, **o: theirs(x + bias, **o),
               [draw(2, 3, 9), draw(9)], options)
    for gated, theirs, options in ((swiglu, F.silu, {}), (geglu, F.gelu, {}),
                                   (geglu, F.gelu, dict(approximate="tanh"))):
        yield (gated, lambda gate, up, theirs=theirs, **o: theirs(gate, **o) * up,
               [draw(3, 37), draw(3, 37)], options)
        for dim, shape in ((-1, (3, 6)), (0, (4, 5, 3)), (1, (2, 0))):
            yield (lambda x, gated=gated, dim=dim, **o: gated(x, dim=dim, **o),
                   lambda x, theirs=theirs, dim=dim, **o:
                   theirs(x.chunk(2, dim)[0], **o) * x.split((x.shape[dim] + 1) // 2, dim)[-1],
                   [draw(*shape)], options)
