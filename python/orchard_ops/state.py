"""The second result of flash_attn_fwd: a small tensor that backward needs, opaque to the caller.

The first Orchard returned a mask of the output's shape. This one returns what redraws the mask:

    int32 [28 + n]     28 words: 14 numbers of 64 bits (FIELDS), which say what call it was, and the
                       seed of its dropout; n words: the bits of the log-sum-exp of every query
                       (float64 tensors: two words each)

That is O(N) memory: nothing T x S, nothing of the head size. Being bits in an integer tensor, it
survives torch.save, clone, detach and moves between devices unchanged, and autocast leaves it
alone. Backward draws the same numbers from (seed, batch, head, query, key), on whatever device it
runs.
"""

from __future__ import annotations

import struct
from typing import Dict, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

# In 64-bit numbers. The first identifies the format: "ORCHSTA" and its version.
MAGIC = int.from_bytes(b"ORCHSTA\x01", "big")
FIELDS = ("magic", "rank", "B", "H", "G", "T", "S", "D", "E", "dtype", "causal", "dropout_p",
          "scale", "seed")
HEADER = 2 * len(FIELDS)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Call(NamedTuple):
    """A call of flash_attn_fwd, as far as backward must repeat it; q, k, v are [B,H,T,D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout_p: float
    causal: bool
    rank: int

    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def numbers(self) -> Dict[str, int]:
        """What identifies the call, as whole numbers; real ones by their bits."""
        B, H, T, D = self.q.shape
        G, S, E = self.k.shape[1], self.k.shape[2], self.v.shape[3]
        return {"magic": MAGIC, "rank": self.rank, "B": B, "H": H, "G": G, "T": T, "S": S, "D": D,
                "E": E, "dtype": DTYPES.index(self.q.dtype), "causal": int(self.causal),
                "dropout_p": bits(self.dropout_p), "scale": bits(self.scale)}


def bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def real(number: int) -> float:
    return struct.unpack("<d", struct.pack("<q", number))[0]


def pack(call: Call, lse: Tensor, seed: Optional[Tensor]) -> Tensor:
    """The state of a call: its numbers, its seed, its log-sum-exp."""
    numbers = torch.tensor(list(call.numbers().values()), dtype=torch.int64, device="cpu")
    seed = torch.zeros((), dtype=torch.int64, device="cpu") if seed is None else seed
    head = torch.cat([numbers, seed.reshape(1).to("cpu", torch.int64)]).view(torch.int32)
    tail = lse.detach().contiguous().view(torch.int32).flatten()
    return torch.cat([head.to(tail.device), tail])


def words(call: Call) -> int:
    """How long the state of this call is."""
    B, H, T, _ = call.q.shape
    return HEADER + B * H * T * (2 if call.q.dtype == torch.float64 else 1)


class State(NamedTuple):
    lse: Tensor             # [B,H,T]
    seed: Optional[Tensor]  # None where nothing is dropped


def unpack(state: Tensor, call: Call) -> State:
    """The state of exactly this call, or a message that says whose it is."""
    check(state, call)
    seed = header(state)[-1] if call.dropout_p > 0 else None
    lse = fresh(state[HEADER:].to(call.q.device)).view(call.lse_dtype())
    return State(lse.view(call.q.shape[:3]), seed)


def fresh(x: Tensor) -> Tensor:
    """Dense, from the start of its storage: only so can bits be seen as another dtype."""
    return x.clone(memory_format=torch.contiguous_format)


def header(state: Tensor) -> Tensor:
    """The 64-bit numbers, on the CPU."""
    return fresh(state[:HEADER].cpu()).view(torch.int64)


# ---- Whose state is it? --------------------------------------------------------------------------

def check(state: Tensor, call: Call) -> None:
    told = "flash_attn_bwd: mask"
    if not isinstance(state, Tensor):
        raise TypeError(f"{told} is a {type(state).__name__}, must be the tensor that "
                        "flash_attn_fwd returned")
    if state.dtype != torch.int32 or state.dim() != 1:
        raise ValueError(
            f"{told} is {dtype_name(state.dtype)} of shape {list(state.shape)}, must be the int32 "
            "vector that flash_attn_fwd returned: it is an opaque state, not the mask of the first "
            "Orchard, and must not be cast or reshaped")
    if state.numel() < HEADER:
        raise ValueError(f"{told} has {state.numel()} numbers, too few for a state of "
                         "flash_attn_fwd")
    found = dict(zip(FIELDS, header(state).tolist()))
    if found["magic"] != MAGIC:
        raise ValueError(f"{told} was not made by this version's flash_attn_fwd: its first word "
                         "is not the mark of a state; call flash_attn_fwd again")
    wanted = call.numbers()
    sizes = ("rank", "B", "H", "G", "T", "S", "D", "E", "dtype")
    if any(found[name] != wanted[name] for name in sizes):
        raise ValueError(f"{told} belongs to a call with {shape_text(found)}; this call has "
                         f"{shape_text(wanted)}")
    for name in ("causal", "dropout_p", "scale"):
        if found[name] != wanted[name]:
            show = bool if name == "causal" else real
            raise ValueError(f"{told} belongs to a call with {name}={show(found[name])}, this call "
                             f"says {name}={show(wanted[name])}")
    if state.numel() != words(call):
        raise ValueError(f"{told} has {state.numel()} numbers, the state of this call has "
                         f"{words(call)}")


def check_same_scores(kept: Tensor, again: Tensor) -> None:
    """The log-sum-exp that forward left must be that of these q and k, up to rounding."""
    apart = (kept - again).abs()
    apart = apart[(kept != again) & ~(kept.isnan() & again.isnan())]
    if not apart.numel():
        return
    largest = again.abs().nan_to_num(posinf=0.0).max().item()
    if not apart.max().item() <= 1e-3 * (1.0 + largest):
        raise ValueError("flash_attn_bwd: mask belongs to a call with other q and k: their "
                         f"log-sum-exp differs by {apart.max().item():.3g}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def shape_text(numbers: Dict[str, int]) -> str:
    def shape(names: Sequence[str]) -> list:
        kept = [name for name in names if numbers["rank"] == 4 or name not in "HG"]
        return [numbers[name] for name in kept]

    known = 0 <= numbers["dtype"] < len(DTYPES)
    return (f"{dtype_name(DTYPES[numbers['dtype']]) if known else 'unknown'} q {shape('BHTD')}, "
            f"k {shape('BGSD')}, v {shape('BGSE')}")
