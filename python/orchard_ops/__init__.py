"""The first Orchard's ops under their old names, with the maths of attention.

    out, mask = orchard_ops.flash_attn_fwd(q, k, v, 1.0, 0.0, False)
    out.sum().backward()                                      # true gradients
    dq, dk, dv = orchard_ops.flash_attn_bwd(grad, q, k, v, mask, 1.0, 0.0, False)

Importing this package also registers torch.ops.flash_attn_mps._flash_attn_fwd, _flash_attn_bwd and
_flash_attn_bwd_dropout. New programs use orchard.torch.scaled_dot_product_attention.
docs/from-the-first-orchard.md says what became of everything else.
"""

from orchard import torch as _torch  # first: it says what is wrong with PyTorch, if anything

from .flash_ops import flash_attn_bwd, flash_attn_fwd

__all__ = ["flash_attn_bwd", "flash_attn_fwd"]
