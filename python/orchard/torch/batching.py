"""torch.func.vmap: the mapped dimension joins the batch.

Where it cannot (sinks have no batch dimension, packed sequences, one dropout mask for all samples)
the samples are computed one after the other.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence, Tuple

import torch

from .outputs import DBIAS, DSINKS

SINKS, CU_SEQLENS, SEED, DROPOUT = 6, 8, 10, 19  # places among the arguments of ops.ATTENTION


def one_by_one(call: Callable, count: int, in_dims: Sequence, args: Sequence):
    """vmap's rule for any call: its results stacked."""
    def sample(i: int) -> List:
        return [a if d is None else a.select(d, i) for a, d in zip(args, in_dims)]

    if not count:  # one of zeros tells the shapes, and keeps the results within autograd
        zeros = [a if d is None else a.sum(d, dtype=a.dtype) for a, d in zip(args, in_dims)]
        made = call(*zeros)
        return tuple(x[None][:0] for x in made), (0,) * len(made)
    samples = [call(*sample(i)) for i in range(count)]
    return tuple(torch.stack(column) for column in zip(*samples)), (0,) * len(samples[0])


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
    q, q_dim = args[0], in_dims[0]
    batch = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
    ranks = (4, 4, 4, 4, 4, 2, None, 1)
    folded = list(args)
    for i, rank in enumerate(ranks):
        if rank is not None:
            split = i < 3 or (i == 3 and split_bias) or rank < 4  # which nothing else repeats
            folded[i] = _fold(count, batch, args[i], in_dims[i], rank, split)
    if in_dims[SEED] is not None:  # batch elements differ already
        folded[SEED] = args[SEED].select(in_dims[SEED], 0)
    return folded, batch


def _unfoldable(in_dims: Sequence, args: Sequence) -> bool:
    """Forward and backward must say the same where there is dropout: of samples one by one it is
    another than of a batch. So sinks count there even if all share them: each sample may want its
    own gradient."""
    return (in_dims[SINKS] is not None or args[CU_SEQLENS] is not None
            or (args[DROPOUT] > 0 and (in_dims[SEED] is None or args[SINKS] is not None)))


def map_forward(call: Callable, count: int, in_dims: Sequence, args: Sequence):
    """vmap's rule for a call with the arguments of attention_forward."""
    if not count or _unfoldable(in_dims, args):
        return one_by_one(call, count, in_dims, args)
    folded, batch = _fold_attention(count, in_dims, args, False)
    out, lse = call(*folded)
    return (out.unflatten(0, (count, batch)), lse.unflatten(0, (count, batch))), (0, 0)


def map_backward(call: Callable, count: int, in_dims: Sequence, args: Sequence):
    """vmap's rule for a call with the arguments of attention_backward."""
    needs, own, rest = args[0], args[1:5], args[5:]
    if not count or _unfoldable(in_dims[5:], rest) or needs & DSINKS:
        return one_by_one(call, count, in_dims, args)
    folded, batch = _fold_attention(count, in_dims[5:], rest, True)
    ranks = (4, 3, 4, 3)
    own = [_fold(count, batch, x, d, r, True) for x, d, r in zip(own, in_dims[1:5], ranks)]
    made = list(call(needs, *own, *folded))
    for i, gradient in enumerate(made):
        if needs >> i & 1:
            made[i] = gradient.unflatten(0, (count, batch))
    bias, dim = rest[3], in_dims[5 + 3]
    if needs & DBIAS and batch > 1:
        if (bias if dim is None else bias.movedim(dim, 0)[0]).shape[0] == 1:
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
