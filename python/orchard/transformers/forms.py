"""How a mask travels from `mask` through the model to `attention`: one of

    None                             causal if the module is, aligned bottom-right
    [B, 1+5, 1, 2+w]   int32         causal; batch element b has that many keys
    [B, N+5, 1, 2+w]   uint8         causal; the first N keys, of which these count
    [B, 1+S+5, 1, 2+w] int64         causal; that many keys, of which these count
    [1, n+1+5, 1, 2+w] int32         causal within n packed sequences that begin there
    [B, 1|H, 1|T, S]   bool or float this mask and nothing else

The middle four describe a mask. Their last dimension is repeated without memory: its size carries
the sliding window w (0: none) through models and compilers that pass masks on without looking. They
have four dimensions because Transformers passes those on, and makes something of its own of all
others. A model that does look must not go unnoticed. So the strides say the window and the number
of keys once more (they are those of longer rows), also while compiling; and for copies, which
`generate` makes for static caches, five numbers at the end of each row say the window. What was
padded, concatenated, cut or computed with is refused.

Only the last form can cost memory of T x S, and only where a model's mask is none of the others,
where the model changes masks (DeepSeek-V4), or where Transformers does not vouch for the model:
some compute attention themselves with the mask they get (BLOOM, MPNet), some decoders say
is_causal=False (NLLB-MoE). The last two get the mask of "eager".
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from .._library import UnsupportedError
from ..torch import onlookers
from .interfaces import is_tracing

Tensor = torch.Tensor


def no_values(tensor: Optional[Tensor]) -> bool:
    """Whether a graph is being made or there are no values (FakeTensor): then nothing may depend on
    the values of masks."""
    return torch.compiler.is_compiling() or is_tracing(tensor) or (
        tensor is not None and tensor.is_meta)


def mapped(tensor: Optional[Tensor]) -> bool:
    """Whether torch.func.vmap goes over it: its values are several then."""
    if onlookers.compiling() or not onlookers.functorch_active():
        return False
    inside = torch._C._functorch
    while tensor is not None and inside.is_functorch_wrapped_tensor(tensor):
        if inside.is_batchedtensor(tensor):
            return True
        tensor = inside.get_unwrapped(tensor)  # torch.func.grad's
    return False


_MARK = 85  # the last number of each description


def describe(numbers: Tensor, keys: int, window: int) -> Tensor:
    """[B,N] numbers as one of the four forms that describe a mask for so many keys."""
    end = torch.tensor([window >> shift & 127 for shift in (0, 7, 14, 21)] + [_MARK],
                       dtype=numbers.dtype, device=numbers.device)
    row = torch.cat([numbers, end.expand(numbers.shape[0], -1)], dim=1)
    longer = torch.nn.functional.pad(row, (0, keys + 1 + window))
    return longer[:, :row.shape[1], None, None].expand(-1, -1, 1, 2 + window)


def read(description: Tensor, keys: int) -> Tuple[Tensor, int]:
    """The numbers [B,N] and the window of a description, which must be as `describe` made it,
    or a copy of that."""
    _, length, queries, columns = description.shape
    window = columns - 2
    row = description[:, :, 0, 0]
    words = (f"orchard.transformers: a mask {list(description.shape)} of {description.dtype} is "
             'not as it was made for "orchard": this model changes its masks, use "eager" or '
             '"sdpa"; or it is your own, then it must be bool (True: this key counts) or floating '
             "point (added)")
    if window < 0 or queries != 1 or length < 6:
        raise UnsupportedError(words)
    if description.stride(3) != 0:
        end = row[:, -5:].to(torch.int64)
        said = end[:, 0] + (end[:, 1] << 7) + (end[:, 2] << 14) + (end[:, 3] << 21)
        right = (description == row[:, :, None, None]).all()
        right = right & (said == window).all() & (end[:, 4] == _MARK).all()
        if no_values(description):
            torch._assert_async(right, words)
        elif not bool(right):
            raise UnsupportedError(words)
    elif description.stride()[:2] != (length + keys + 1 + window, 1):
        meant = description.stride(0) - length - 1 - window
        if meant > keys and description.stride(1) == 1:
            words = (f"orchard.transformers: a mask for {meant} keys with {keys} of them: "
                     "attention_mask has more columns than there are tokens, or this model changes "
                     'its masks, use "eager" or "sdpa"')
        raise UnsupportedError(words)
    return row[:, :-5], window


def described(attention_mask: Tensor) -> bool:
    """Whether a mask is one of the middle four forms."""
    return attention_mask.dtype in (torch.int32, torch.uint8, torch.int64)
