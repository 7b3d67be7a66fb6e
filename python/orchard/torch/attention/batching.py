"""torch.func.vmap: the mapped dimension joins the batch.

Where it cannot (sinks have no batch dimension, packed sequences, one dropout mask for all samples)
the samples are computed one after the other.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Tuple

import torch

from ..transforms import one_by_one
from .operands import ALIBI, BIAS, CU_SEQLENS_Q, KEY_LENGTHS, MASK, SEED, SINKS, K, Q, V
from .outputs import DBIAS, DSINKS

DROPOUT = -1  # its place among the arguments of ops.ATTENTION

# The operands with a batch, first in each sample, and their ranks; those of which 1 element may
# serve the whole batch.
RANKS = {Q: 4, K: 4, V: 4, BIAS: 4, MASK: 4, ALIBI: 2, KEY_LENGTHS: 1}
OWN_RANKS = (4, 3, 4, 3, 3)  # backward's own: dout, dlse, out, lse, lse_rest
OWN = slice(1, 1 + len(OWN_RANKS))
MAY_REPEAT = (BIAS, MASK)


def _sample_shape(tensor: torch.Tensor, dim: Optional[int]) -> Sequence[int]:
    return tensor.shape if dim is None else tensor.movedim(dim, 0).shape[1:]


def _fits(batch: int, tensor: Optional[torch.Tensor], dim: Optional[int], rank: int,
          may_repeat: bool) -> bool:
    """Whether each sample has the batch that it should have; the C library says it if not."""
    if tensor is None:
        return True
    shape = _sample_shape(tensor, dim)
    if rank == 2 and len(shape) == 1:  # slopes [H]
        return True
    return len(shape) == rank and (shape[0] == batch or (may_repeat and shape[0] == 1))


def _fold(count: int, batch: int, tensor: Optional[torch.Tensor], dim: Optional[int],
          rank: int, split: bool) -> Optional[torch.Tensor]:
    """[count,batch,...] as [count*batch,...]; a tensor without batch that all share stays so."""
    if tensor is None:
        return None
    if dim is None:
        if tensor.dim() < rank or (tensor.shape[0] == 1 and not split):
            return tensor
        tensor = tensor.expand(count, *tensor.shape)
    else:
        tensor = tensor.movedim(dim, 0)
        if tensor.dim() == rank:  # slopes [H] of each sample
            tensor = tensor.unsqueeze(1)
    return tensor.expand(count, batch, *tensor.shape[2:]).flatten(0, 1)


def _fold_attention(count: int, in_dims: Sequence, args: Sequence,
                    split_bias: bool) -> Tuple[List, int]:
    """The arguments for count * batch elements at once, and batch."""
    batch = _sample_shape(args[Q], in_dims[Q])[0]
    folded = list(args)
    for i, rank in RANKS.items():
        split = i not in MAY_REPEAT or (i == BIAS and split_bias)  # which nothing else repeats
        folded[i] = _fold(count, batch, args[i], in_dims[i], rank, split)
    if in_dims[SEED] is not None:  # batch elements differ already
        folded[SEED] = args[SEED].select(in_dims[SEED], 0)
    return folded, batch


def _unfoldable(in_dims: Sequence, args: Sequence, own_dims: Sequence = (),
                own: Sequence = ()) -> bool:
    """Whether the samples cannot be one batch. `own`: backward's own operands. Forward and backward
    must say the same where there is dropout: of samples one by one it is another than of a batch.
    So sinks count there even if all share them: each sample may want its own gradient."""
    if (in_dims[SINKS] is not None or args[CU_SEQLENS_Q] is not None
            or (args[DROPOUT] > 0 and (in_dims[SEED] is None or args[SINKS] is not None))):
        return True
    shape = _sample_shape(args[Q], in_dims[Q])
    operands = [(args[i], in_dims[i], rank, i in MAY_REPEAT) for i, rank in RANKS.items()]
    operands += [(x, dim, rank, False) for x, dim, rank in zip(own, own_dims, OWN_RANKS)]
    return not shape or not all(_fits(shape[0], *operand) for operand in operands)


def map_forward(call: Callable, count: int, in_dims: Sequence, args: Sequence):
    """vmap's rule for a call with the arguments of attention_forward."""
    if not count or _unfoldable(in_dims, args):
        return one_by_one(call, count, in_dims, args)
    folded, batch = _fold_attention(count, in_dims, args, False)
    made = tuple(x.unflatten(0, (count, batch)) for x in call(*folded))
    return made, (0,) * len(made)


def map_backward(call: Callable, count: int, in_dims: Sequence, args: Sequence):
    """vmap's rule for a call with the arguments of attention_backward."""
    needs, own, own_dims = args[0], args[OWN], in_dims[OWN]
    shared, dims = args[OWN.stop:], in_dims[OWN.stop:]
    if not count or _unfoldable(dims, shared, own_dims, own) or needs & DSINKS:
        return one_by_one(call, count, in_dims, args)
    folded, batch = _fold_attention(count, dims, shared, True)
    own = [_fold(count, batch, x, d, r, True) for x, d, r in zip(own, own_dims, OWN_RANKS)]
    made = list(call(needs, *own, *folded))
    for i, gradient in enumerate(made):
        if needs >> i & 1:
            made[i] = gradient.unflatten(0, (count, batch))
    if needs & DBIAS and batch != 1 and _sample_shape(shared[BIAS], dims[BIAS])[0] == 1:
        made[3] = made[3].sum(1, keepdim=True)
    dims = tuple(0 if needs >> i & 1 else None for i in range(5))
    return tuple(made), dims


# Not compiled: Dynamo (2.13) fails on a Function with setup_context where nothing needs a gradient.

@torch.compiler.disable
def forward(info, in_dims, *args):
    """Attention's vmap."""
    from . import autograd
    return map_forward(autograd.Attention.apply, info.batch_size, in_dims, args)


@torch.compiler.disable
def backward(info, in_dims, *args):
    """AttentionBackward's vmap."""
    from . import autograd
    return map_backward(autograd.AttentionBackward.apply, info.batch_size, in_dims, args)
