"""Attention written out in NumPy fp64, the whole contract of include/orchard/attention.h, slowly.

Shares no line with the library: the matrix [B,H,T,S] is made, masks are matrices, dropout draws
Philox4x32-10 for every element. Gradients are the derivatives by hand of this formula.
"""
import numpy as np

NO_LIMIT = 1 << 62


def philox(counter, key):
    """Philox4x32-10: counter [..., 4] and key (2 words) -> [..., 4], all uint64 holding 32 bits."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [np.uint64(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low,
             (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, -1)


def kept(B, H, T, S, dropout, seed, offset):
    """[B,H,T,S]: 0 where dropped, 1 / (1 - dropout) elsewhere."""
    if not dropout:
        return np.ones((B, H, T, S))
    b, h, i, j = np.meshgrid(*(np.arange(n) for n in (B, H, T, S)), indexing="ij")
    words = philox(np.stack([j // 4, i, b * H + h, np.full_like(j, offset)], -1),
                   (seed & 0xFFFFFFFF, seed >> 32))
    word = np.take_along_axis(words, (j % 4)[..., None], -1)[..., 0]
    keep = word >= np.uint64(min(round(dropout * 2.0**32), 2**32))
    return keep / (1 - dropout) if dropout < 1 else np.zeros(keep.shape)


class Formula:
    """One call on [B,H,T,D] fp64 arrays; `out` and `lse` at once, `gradients` on demand."""

    def __init__(self, q, k, v, bias=None, mask=None, alibi=None, sinks=None, key_lengths=None,
                 scale=None, causal=False, align="top_left", window=None, softcap=0.0, dropout=0.0,
                 seed=0, dropout_offset=0):
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        (B, H, T, D), (G, S) = self.q.shape, self.k.shape[1:3]
        self.group, self.G = H // G, G
        k_h, v_h = (np.repeat(x, self.group, 1) for x in (self.k, self.v))
        self.scale = 1 / np.sqrt(D) if scale is None else scale
        s = self.scale * np.einsum("bhtd,bhsd->bhts", self.q, k_h)
        self.cap = np.ones_like(s)
        if softcap:
            s = softcap * np.tanh(s / softcap)
            self.cap = 1 - (s / softcap) ** 2
        lengths = np.full(B, S) if key_lengths is None else np.asarray(key_lengths)
        shift = lengths - T if align == "bottom_right" else np.zeros(B, np.int64)
        p = (np.arange(T)[None, :] + shift[:, None])[:, None, :, None]
        j = np.arange(S)[None, None, None, :]
        if alibi is not None:
            slopes = np.asarray(alibi, np.float64)
            slopes = slopes[None, :] if slopes.ndim == 1 else slopes
            s = s - slopes[:, :, None, None] * np.abs(p - j)
        self.bias_shape = None if bias is None else np.shape(bias)
        if bias is not None:
            s = s + np.asarray(bias, np.float64)
        see = j < lengths[:, None, None, None]
        see = np.broadcast_to(see, s.shape)
        if causal:
            see = see & (j <= p)
        if window is not None:
            left, right = (NO_LIMIT if x is None or x < 0 else x for x in window)
            see = see & (j >= p - left) & (j <= p + right)
        if mask is not None:
            see = see & np.asarray(mask)
        s = np.where(see, s, -np.inf)
        top = s.max(-1, keepdims=True) if S else np.full((B, H, T, 1), -np.inf)
        if sinks is not None:
            sink = np.asarray(sinks, np.float64)[None, :, None, None]
            top = np.maximum(top, sink)
        top = np.where(np.isfinite(top), top, 0)
        total = np.exp(s - top).sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sink - top)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.log(total) + top
            self.P = np.where(see & (total > 0), np.exp(s - np.where(total > 0, lse, 0)), 0)
        self.sink_weight = None if sinks is None else np.exp(sink - lse)
        self.keep = kept(B, H, T, S, dropout, seed, dropout_offset)
        self.v_h, self.k_h = v_h, k_h
        self.out = np.einsum("bhts,bhse->bhte", self.P * self.keep, v_h)
        self.lse = lse[..., 0]

    def _sum_groups(self, x):
        B, H = x.shape[:2]
        return x.reshape(B, self.G, self.group, *x.shape[2:]).sum(2)

    def gradients(self, dout, dlse=None):
        """{dq, dk, dv, dbias, dsinks} of sum(dout * out) + sum(dlse * lse)."""
        dout = np.asarray(dout, np.float64)
        through_lse = 0 if dlse is None else np.asarray(dlse, np.float64)[..., None]
        delta = (dout * self.out).sum(-1, keepdims=True) - through_lse
        dP = np.einsum("bhte,bhse->bhts", dout, self.v_h) * self.keep
        ds = self.P * (dP - delta)
        raw = ds * self.cap * self.scale
        found = {
            "dq": np.einsum("bhts,bhsd->bhtd", raw, self.k_h),
            "dk": self._sum_groups(np.einsum("bhts,bhtd->bhsd", raw, self.q)),
            "dv": self._sum_groups(np.einsum("bhts,bhte->bhse", self.P * self.keep, dout)),
        }
        if self.bias_shape is not None:
            axes = tuple(i for i in range(4) if self.bias_shape[i] == 1 != ds.shape[i])
            found["dbias"] = ds.sum(axes, keepdims=True) if axes else ds
        if self.sink_weight is not None:
            found["dsinks"] = (-self.sink_weight * delta).sum((0, 2, 3))
        return found
