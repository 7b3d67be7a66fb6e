"""The first Orchard's bridge under its old names.

    import orchard_bridge
    orchard_bridge.enable_flash(verbose=True)       # True only if Metal really runs attention
    out, mask = orchard_bridge.flash_attn(q, k, v, scale, dropout_p=0.1, causal=True)

Nothing needs enabling: flash_attn works wherever its tensors are, cpu or mps.
docs/from-the-first-orchard.md is the page to migrate by.
"""

from orchard import torch as _torch  # first: it says what is wrong with PyTorch, if anything
from orchard import version as _version

from ._enable import enable_flash, is_metal_flash_attn_available
from .flash_attn_function import FlashAttnFunction, flash_attn

enable_flash.main = enable_flash  # type: ignore[attr-defined]  # as the first Orchard's advice says

__all__ = ["FlashAttnFunction", "enable_flash", "flash_attn", "is_metal_flash_attn_available"]
__version__ = _version()
