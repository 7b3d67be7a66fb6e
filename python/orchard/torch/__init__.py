"""Attention for PyTorch: `scaled_dot_product_attention`, and the ops `torch.ops.orchard.*`."""

from __future__ import annotations

_NEEDS = (2, 10)

try:
    import torch as _torch
except ImportError as _why:
    raise ImportError(f"orchard.torch needs PyTorch {_NEEDS[0]}.{_NEEDS[1]} or later, which cannot "
                      f"be imported: {_why}") from None

if tuple(int(_n) for _n in _torch.__version__.split("+")[0].split(".")[:2]) < _NEEDS:
    raise ImportError(f"orchard.torch needs PyTorch {_NEEDS[0]}.{_NEEDS[1]} or later, this is "
                      f"{_torch.__version__}")

from .attention.function import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
