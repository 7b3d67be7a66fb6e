"""From torch tensors to the C library's structs."""

from __future__ import annotations

from typing import Optional

import torch

from .. import _exports, _structs
from .._exports import check_storage
from .._library import DtypeError

DTYPES = {getattr(torch, of.name): dtype for dtype, of in _exports.DTYPES.items()}


def describe(target: _structs.Tensor, tensor: Optional[torch.Tensor], op: str, name: str) -> None:
    """Fills `target` with a torch tensor; the caller keeps the torch tensor alive."""
    if tensor is None:
        return
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DtypeError(f"{op}: {name} is {tensor.dtype}, which Orchard does not know")
    check_storage(op, name, tensor)
    target.data = tensor.data_ptr() or None
    target.dtype = dtype
    target.rank = tensor.dim()  # one beyond the limit is told to C, which says so
    shown = min(tensor.dim(), _structs.MAX_RANK)
    target.size[:shown] = tensor.shape[:shown]
    target.stride[:shown] = tensor.stride()[:shown]
