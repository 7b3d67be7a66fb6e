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
padded, concatenated, cut or computed with is refused; if it is no longer of integers, for its
shape.

Only the last form can cost memory of T x S: where a model's mask is none of the others; where a
trace, vmap or a compiler without a mask to look at leaves no choice; where the model changes masks
(DeepSeek-V4); and where Transformers does not say that the model follows its interface: some
compute attention themselves with the mask they get (BLOOM, MPNet), some decoders say
is_causal=False (NLLB-MoE). The last two kinds get the mask of "eager". (`attention` itself makes
such masks of keys that an indexer chose, and of packed sequences with a position bias.)
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from .._library import UnsupportedError
from .interfaces import is_tracing

Tensor = torch.Tensor


def no_values(tensor: Optional[Tensor]) -> bool:
    """Whether a graph is being made or there are no values (FakeTensor): then nothing may depend on
    the values of masks."""
    return torch.compiler.is_compiling() or is_tracing(tensor) or (
        tensor is not None and tensor.is_meta)


# At the end of each row of a description stand _END numbers: the window, 7 bits in each so that
# uint8 holds them, and a mark.
_BITS, _MARK = 7, 85
_SHIFTS = (0, _BITS, 2 * _BITS, 3 * _BITS)
_END = len(_SHIFTS) + 1


def encode(numbers: Tensor, keys: int, window: int) -> Tensor:
    """[B,N] numbers as one of the four forms that describe a mask for so many keys."""
    end = torch.tensor([window >> shift & (1 << _BITS) - 1 for shift in _SHIFTS] + [_MARK],
                       dtype=numbers.dtype, device=numbers.device)
    row = torch.cat([numbers, end.expand(numbers.shape[0], -1)], dim=1)
    longer = torch.nn.functional.pad(row, (0, keys + 1 + window))
    return longer[:, :row.shape[1], None, None].expand(-1, -1, 1, 2 + window)


def decode(description: Tensor, keys: int) -> Tuple[Tensor, int]:
    """The numbers [B,N] and the window of a description, which must be as `encode` made it,
    or a copy of that."""
    _, length, queries, columns = description.shape
    window = columns - 2
    step = length + keys + 1 + window  # from row to row
    row = description[:, :, 0, 0]
    words = (f"orchard.transformers: a mask {list(description.shape)} of {description.dtype} is "
             'not as it was made for "orchard": this model changes its masks, use "eager" or '
             '"sdpa"; or it is your own, then it must be bool (True: this key counts) or floating '
             "point (added)")
    if window < 0 or queries != 1 or length <= _END:
        raise UnsupportedError(words)
    if description.stride(3) != 0:
        end = row[:, -_END:].to(torch.int64)
        said = sum(end[:, at] << shift for at, shift in enumerate(_SHIFTS))
        right = (description == row[:, :, None, None]).all()
        right = right & (said == window).all() & (end[:, -1] == _MARK).all()
        if no_values(description):
            torch._assert_async(right, words)
        elif not bool(right):
            raise UnsupportedError(words)
    elif description.stride()[:2] != (step, 1):
        if description.stride(0) > step and description.stride(1) == 1:
            words = (f"orchard.transformers: a mask for more than the {keys} keys that there are: "
                     "attention_mask has more columns than there are tokens, or this model changes "
                     'its masks, use "eager" or "sdpa"')
        raise UnsupportedError(words)
    return row[:, :-_END], window


def is_encoded(attention_mask: Tensor) -> bool:
    """Whether a mask is one of the middle four forms."""
    return attention_mask.dtype in (torch.int32, torch.uint8, torch.int64)
