"""FlashAttnFunction: the first Orchard's autograd function, with true gradients.

With ORCHARD_DEBUG_FLASHATN (or ORCHARD_DEBUG_FLASH_ATN) set to anything but 0 it prints the first
Orchard's lines, each only where it is true: the success line only when Metal ran the backward.
"""

from __future__ import annotations

import os
import sys
from typing import Optional, Tuple

import torch
from torch import Tensor

from orchard import UnsupportedError
from orchard.torch.attention import mps_attention
from orchard_ops import flash_ops

from . import metal

FORWARD = "[orchard][FlashAttnFunction.forward]"
BACKWARD = "[orchard][FlashAttnFunction.backward]"


def debugging() -> bool:
    """Either spelling; 0 and nothing mean off."""
    return any(os.environ.get(name, "0") not in ("", "0")
               for name in ("ORCHARD_DEBUG_FLASHATN", "ORCHARD_DEBUG_FLASH_ATN"))


def tell(text: str, file=None) -> None:
    if debugging():
        print(text, file=file or sys.stdout, flush=True)


def _ensure_shared_mps_tensor(t: Optional[Tensor]) -> Optional[Tensor]:
    """The tensor itself, never a copy.

    The first Orchard cloned here, to turn private storage into shared. Any storage can be bound as
    it is, and any strides are read as they are.
    """
    return t


@torch.compiler.allow_in_graph  # as flash_ops.Flash
class FlashAttnFunction(torch.autograd.Function):
    """FlashAttnFunction.apply(q, k, v, scale, dropout_p, causal) -> (out, mask)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float,
                causal: bool) -> Tuple[Tensor, Tensor]:
        flash_ops.check_tensors(q=q, k=k, v=v)
        check_devices(q, k, v)
        flash_ops.checked(q, k, v, scale, dropout_p, causal)
        tell(f"{FORWARD} Shapes: q={q.shape}, scale={scale}, dropout={dropout_p}, causal={causal}")
        return flash_ops.Flash.forward(ctx, q, k, v, scale, dropout_p, causal)

    @staticmethod
    def backward(ctx, grad_out: Optional[Tensor], grad_mask: Optional[Tensor] = None) -> tuple:
        return flash_ops.backward_of(ctx, grad_out, differentiate)[:6]  # forward takes no seed


def check_devices(*tensors: Tensor) -> None:
    kinds = {t.device.type for t in tensors}
    if len(kinds) > 1 or not kinds <= {"mps", "cpu"}:
        _fail("Input tensors must be on 'mps' device, got "
              f"{[str(t.device) for t in tensors]} (all on 'cpu' is served too)")


def _fail(msg: str) -> None:
    raise RuntimeError("[orchard][flash_attn_function] " + msg)


# ---- Backward, and who runs it -------------------------------------------------------------------

def on_mps(x: Tensor) -> bool:
    return x.device.type == "mps"


def differentiate(needs: int, *given) -> tuple:
    """orchard::attention_backward where the tensors are: by PyTorch if the Metal kernels refuse it,
    on the CPU if Metal fails."""
    if not on_mps(given[0]):
        tell(f"{BACKWARD} Metal kernel unavailable, attempting reference fallback.", sys.stderr)
        return flash_ops.differentiate(needs, *given)
    mps_attention.last.refusal = None  # this thread's: what others run is not ours to tell
    try:
        made = flash_ops.differentiate(needs, *given)
    except UnsupportedError:  # ORCHARD_STRICT forbids a fallback
        raise
    except RuntimeError as why:
        mps_attention.failed("attention_backward", str(why))
        tell(f"{BACKWARD} Metal bwd failed ({why}); falling back to reference attention backward.",
             sys.stderr)
        return on_cpu(needs, *given)
    why = mps_attention.last.refusal
    if why is not None:
        tell(f"{BACKWARD} Metal bwd failed ({why}); falling back to reference attention backward.",
             sys.stderr)
    elif metal.storage_is_shared():
        tell(f"{BACKWARD} Metal backward succeeded with shared storage tensors.")
    else:
        tell(f"{BACKWARD} Metal backward succeeded with private storage tensors, not copied.")
    return made


def on_cpu(needs: int, *given) -> tuple:
    """The same backward, same random numbers, on copies in host memory; results go back. Without
    lse_rest: the CPU rounds scores otherwise than the forward did."""
    device = given[0].device
    host = (x.cpu() if isinstance(x, Tensor) else x for x in (*given[:4], None, *given[5:]))
    return tuple(None if x is None else x.to(device)
                 for x in flash_ops.differentiate(needs, *host))


def flash_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float = 0.0,
               causal: bool = False) -> Tuple[Tensor, Tensor]:
    """(out, mask) of FlashAttnFunction; a pair, whatever the first Orchard's docstring showed."""
    return FlashAttnFunction.apply(q, k, v, scale, dropout_p, causal)
