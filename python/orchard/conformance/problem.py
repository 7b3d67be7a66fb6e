"""One attention call to check, described by numbers, and the tensors made from it.

A Problem is data: sizes, dtype, how tensors lie in memory, masks and options. `build` makes its
tensors from a seed, so that every target and every machine is asked the same question.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Problem:
    B: int = 2
    H: int = 3
    T: int = 37
    D: int = 32
    G: Optional[int] = None  # key/value heads; None: H
    S: Optional[int] = None  # keys; None: T
    E: Optional[int] = None  # head size of v; None: D
    dtype: str = "float32"
    rank: int = 4            # 3: [B,T,D], one head
    layout: str = "contiguous"
    dout: str = "contiguous"
    size: float = 1.0        # standard deviation of q and k
    scale: Optional[float] = None
    causal: bool = False
    mask: Optional[str] = None      # see `make_mask`
    mask_shape: str = "BHTS"        # a digit 1 where a size is 1; fewer letters: lower rank
    bias: Optional[str] = None      # an additive mask beside a boolean one (argument `bias`)
    bias_shape: str = "BHTS"
    align: Optional[str] = None
    window: Optional[Tuple[int, int]] = None
    softcap: Optional[float] = None
    alibi: bool = False
    sinks: bool = False
    lengths: Optional[Tuple[int, ...]] = None           # argument key_lengths
    packed: Optional[Tuple[Tuple[int, int], ...]] = None  # (queries, keys) of each sequence
    lse: bool = False
    poison: bool = False            # NaN in every key and value that no query sees
    grads: str = "qkv"              # which of q, k, v, m(ask or bias), s(inks) require gradients
    no_grad: bool = False

    @property
    def heads(self) -> int:
        return 1 if self.rank == 3 and not self.packed else self.H

    @property
    def kv_heads(self) -> int:
        return self.heads if self.G is None else self.G

    @property
    def keys(self) -> int:
        return self.T if self.S is None else self.S

    @property
    def value_size(self) -> int:
        return self.D if self.E is None else self.E

    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def aux_dtype(self) -> torch.dtype:
        """Of lse, ALiBi slopes and sinks: float32, for float64 float64."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclasses.dataclass
class Inputs:
    """What the target gets: three tensors, keyword arguments, and the gradient that comes in."""

    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: Dict[str, Any]
    leaves: Dict[str, Tensor]   # whose gradients are checked
    dout: Tensor
    dlse: Optional[Tensor]
    clean: Dict[str, Tensor]    # k and v without the poison, for the reference


def has_float64(device: str) -> bool:
    """Metal has no double precision: such problems are left out there."""
    return not device.startswith("mps")


# ---- How a tensor lies in memory -----------------------------------------------------------------

def lay(x: Tensor, layout: str) -> Tensor:
    """The same values, another memory. x is [B,H,T,D] or of rank 3."""
    if layout == "contiguous":
        return x.contiguous()
    if layout == "permuted":            # [B,T,H,D] in memory: what a projection leaves behind
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "head-last":           # the head size is not the innermost dimension
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "every-second":        # stride 2 in the innermost dimension
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":              # starts at an odd element of a larger block
        block = x.new_full((x.numel() + 7,), math.nan)
        view = block[7:].view(x.shape)
        view.copy_(x)
        return view
    if layout == "padded-rows":         # rows lie 3 elements further apart than they are long
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)
        wide[..., :x.shape[-1]] = x
        return wide[..., :x.shape[-1]]
    if layout == "batch-inside":        # [T,B,H,D] in memory
        order = (2, 0, 1, 3)
        return x.permute(order).contiguous().permute(1, 2, 0, 3)
    raise ValueError(f"conformance: there is no layout {layout!r}")


def lay_three(q: Tensor, k: Tensor, v: Tensor, layout: str) -> Tuple[Tensor, Tensor, Tensor]:
    if layout == "one-projection":      # slices of one [B,T,3,H,D] block
        block = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2).contiguous()
        return tuple(block[:, :, i].transpose(1, 2) for i in range(3))  # type: ignore[return-value]
    if layout == "expanded-keys":       # one key/value head seen by all, stride 0
        return q.contiguous(), k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    return lay(q, layout), lay(k, layout), lay(v, layout)


# ---- Masks ---------------------------------------------------------------------------------------

def mask_size(problem: Problem, letters: str) -> Tuple[int, ...]:
    sizes = {"B": problem.B, "H": problem.heads, "T": problem.T, "S": problem.keys, "1": 1}
    return tuple(sizes[letter] for letter in letters)


def make_mask(problem: Problem, kind: str, letters: str, random: torch.Generator) -> Tensor:
    """A boolean mask (True: may see) or an additive one, by its name."""
    shape = mask_size(problem, letters)
    full = (1,) * (4 - len(shape)) + shape
    dtype = problem.torch_dtype()
    seen = torch.rand(full, generator=random) < 0.7
    seen[..., :1] = True
    if kind == "bool":
        mask = seen
    elif kind == "padding":             # the last third of the keys is hidden from everybody
        mask = torch.ones(full, dtype=torch.bool)
        mask[..., full[-1] - full[-1] // 3:] = False
    elif kind == "fully-masked-rows":          # some queries see nothing
        mask = seen
        mask[..., ::3, :] = False
    elif kind == "fully_masked":               # nobody sees anything
        mask = torch.zeros(full, dtype=torch.bool)
    elif kind == "fully-masked-batch":         # one batch element sees nothing
        mask = seen
        mask[0] = False
    elif kind == "float":
        mask = torch.randn(full, generator=random, dtype=torch.float64).to(dtype)
    elif kind == "float-wide":          # float32 beside any q: 100 and a fraction that 16 bits lack
        mask = 100 + torch.randn(full, generator=random)
    elif kind == "float-inf":           # -inf hides; some queries see nothing
        mask = torch.randn(full, generator=random, dtype=torch.float64).to(dtype)
        mask[~seen] = -math.inf
        mask[..., ::3, :] = -math.inf
    elif kind in ("float-min", "float-min-rows"):   # the lowest number hides
        mask = torch.zeros(full, dtype=dtype)
        mask[~seen] = torch.finfo(dtype).min
        if kind == "float-min-rows":                # and some rows have nothing else
            mask[..., ::3, :] = torch.finfo(dtype).min
    elif kind == "float-1e4":           # "hidden enough" by -10000, as older models write it
        mask = torch.where(seen, 0.0, -1e4).to(dtype)
    else:
        raise ValueError(f"conformance: there is no mask {kind!r}")
    return mask.reshape(shape)


# ---- The whole problem ---------------------------------------------------------------------------

def build(problem: Problem, device: str = "cpu") -> Inputs:
    random = torch.Generator().manual_seed(zlib.crc32(repr(problem).encode()))
    dtype = problem.torch_dtype()

    def normal(*shape: int, size: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return (size * torch.randn(shape, generator=random, dtype=torch.float64)).to(kind)

    shapes = shapes_of(problem)
    q = normal(*shapes["q"], size=problem.size)
    k = normal(*shapes["k"], size=problem.size)
    v = normal(*shapes["v"])
    dout, dlse = normal(*shapes["out"]), None
    q, k, v = (x.to(device) for x in (q, k, v))
    q, k, v = lay_three(q, k, v, problem.layout)
    kwargs = options(problem, normal, random, device)
    clean = {"k": k.detach().clone(), "v": v.detach().clone()}
    if problem.poison:
        k, v = poisoned(problem, k), poisoned(problem, v)
    if problem.lse:
        dlse = normal(*shapes["lse"], kind=problem.aux_dtype()).to(device)
    if problem.dout == "expanded":      # what sum().backward() hands over
        dout = torch.ones(1).to(dtype).expand(shapes["out"]).to(device)
    else:
        dout = lay(dout.to(device), problem.dout)
    tensors = {"q": q, "k": k, "v": v, "mask": kwargs.get("bias", kwargs.get("attn_mask")),
               "sinks": kwargs.get("sinks")}
    wanted = {"q": "q", "k": "k", "v": "v", "m": "mask", "s": "sinks"}
    leaves = {}
    for letter in "" if problem.no_grad else problem.grads:
        name = wanted[letter]
        leaves[name] = tensors[name].detach().requires_grad_(True)
    q, k, v = leaves.get("q", q), leaves.get("k", k), leaves.get("v", v)
    if "mask" in leaves:
        kwargs["bias" if "bias" in kwargs else "attn_mask"] = leaves["mask"]
    if "sinks" in leaves:
        kwargs["sinks"] = leaves["sinks"]
    return Inputs(q, k, v, kwargs, leaves, dout, dlse, clean)


def shapes_of(problem: Problem) -> Dict[str, Tuple[int, ...]]:
    p = problem
    if p.packed:
        t, s = (sum(pair[i] for pair in p.packed) for i in (0, 1))
        return {"q": (t, p.H, p.D), "k": (s, p.kv_heads, p.D), "v": (s, p.kv_heads, p.value_size),
                "out": (t, p.H, p.value_size), "lse": (t, p.H)}
    head, group = ((), ()) if p.rank == 3 else ((p.H,), (p.kv_heads,))
    return {"q": (p.B, *head, p.T, p.D), "k": (p.B, *group, p.keys, p.D),
            "v": (p.B, *group, p.keys, p.value_size),
            "out": (p.B, *head, p.T, p.value_size), "lse": (p.B, *head, p.T)}


def options(problem: Problem, normal: Any, random: torch.Generator, device: str) -> Dict[str, Any]:
    """Keyword arguments of the call: only those that are not at their default."""
    p, kwargs = problem, {}
    if p.mask:
        kwargs["attn_mask"] = make_mask(p, p.mask, p.mask_shape, random).to(device)
    if p.bias:
        kwargs["bias"] = make_mask(p, p.bias, p.bias_shape, random).to(device)
    if p.causal:
        kwargs["is_causal"] = True
    if p.kv_heads != p.heads:
        kwargs["enable_gqa"] = True
    for name, value in (("scale", p.scale), ("window", p.window), ("softcap", p.softcap),
                        ("causal_alignment", p.align)):
        if value is not None:
            kwargs[name] = value
    if p.alibi:
        slopes = 2.0 ** -(8.0 * torch.arange(1, p.H + 1) / p.H)
        kwargs["alibi_slopes"] = slopes.to(p.aux_dtype()).to(device)
    if p.sinks:
        kwargs["sinks"] = normal(p.H, kind=p.aux_dtype()).to(device)
    if p.lengths:
        kwargs["key_lengths"] = torch.tensor(p.lengths, device=device)
    if p.packed:
        for i, letter in enumerate("qk"):
            sums = torch.tensor([0] + [pair[i] for pair in p.packed]).cumsum(0)
            kwargs[f"cu_seqlens_{letter}"] = sums.to(torch.int32).to(device)
            kwargs[f"max_seqlen_{letter}"] = max(pair[i] for pair in p.packed)
    if p.lse:
        kwargs["return_lse"] = True
    return kwargs


def poisoned(problem: Problem, x: Tensor) -> Tensor:
    """NaN in the keys (or values) that a padding mask or a key length hides from every query."""
    x = x.clone()
    if problem.lengths:
        for b, length in enumerate(problem.lengths):
            x[b, ..., length:, :] = math.nan
    else:
        x[..., problem.keys - problem.keys // 3:, :] = math.nan
    return x
