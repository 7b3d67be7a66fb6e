"""torch.utils.flop_counter's figures for the ops, counted as torch counts its own attention."""

from __future__ import annotations

from torch.utils.flop_counter import register_flop_formula

from . import ops


def _products(q, k, v) -> tuple:
    """Multiply-add pairs of q k^T and of p v, twice; masks are not taken off, as in torch."""
    if len(q) == 3:  # packed: as one sequence, which is what shapes alone can say
        q, k, v = ((1, x[1], x[0], x[2]) for x in (q, k, v))
    batch, heads, length, size = q
    rows = 2 * batch * heads * length * k[2]
    return rows * size, rows * v[3]


@register_flop_formula([op.overloadpacket for op in (ops.forward, ops.forward_rest,
                                                      ops.differentiable)])
def _forward(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return sum(_products(q, k, v))


@register_flop_formula(ops.backward.overloadpacket)
def _backward(needs, dout, dlse, out, lse, lse_rest, q, k, v, *args, out_shape=None,
              **kwargs) -> int:
    scores, values = _products(q, k, v)
    return 3 * scores + 2 * values  # scores again, dq, dk; dp, dv
