"""Attention in torch: the public function (function.py), the ops torch.ops.orchard.attention*."""

from __future__ import annotations

from . import flops as flops
