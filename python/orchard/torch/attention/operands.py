"""What attention's ops are called with, and where that is in the C library's structs."""

from __future__ import annotations

from typing import List, Optional

import torch

from ..signature import LIKE, ROWS_LIKE, Layout, Operands, Options, Signature
from . import outputs

TENSORS = 11  # how many of the arguments that the ops share are tensors: q ... seed
Q, K, V, BIAS, MASK, ALIBI, SINKS, KEY_LENGTHS, CU_SEQLENS_Q, CU_SEQLENS_K, SEED = range(TENSORS)


def new_seed(dropout: float) -> Optional[torch.Tensor]:
    """From torch's generator: torch.manual_seed repeats a run. 63 bits: torch's integers are
    signed."""
    return None if dropout == 0.0 else torch.randint(2 ** 63 - 1, (), device="cpu")


def without_options(scale: Optional[float], causal: bool, seed: Optional[torch.Tensor] = None,
                    dropout: float = 0.0) -> tuple:
    """What stands behind q, k, v in the ops' schemas, where there is nothing but these."""
    return (None,) * 7 + (seed, 0, 0, scale, causal, False, -1, -1, 0.0, dropout)


# ---- Signatures ----------------------------------------------------------------------------------

# What forward and backward share, in this order everywhere: in kernels, in function.py. No
# defaults: torch drops arguments that equal theirs before it calls a kernel.
ATTENTION = ("Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi, "
             "Tensor? sinks, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
             "Tensor? seed, SymInt max_t, SymInt max_s, float? scale, bool causal, "
             "bool bottom_right, SymInt window_left, SymInt window_right, float softcap, "
             "float dropout")
RENAMED = {"bottom_right": "align"}


class Forward(Signature):
    """out and lse; of three outputs the last is lse_rest, which only a backward reads."""

    def __init__(self, arguments: str = ATTENTION, count: int = 2) -> None:
        super().__init__("attention_forward", arguments, RENAMED, {"out": Layout(ROWS_LIKE, "q")},
                         count)

    def make(self, first: torch.Tensor, operands: Operands, options: Options, wanted: int
             ) -> List[Optional[torch.Tensor]]:
        q, v = operands["q"], operands["v"]
        packed = operands.get("cu_seqlens_q") is not None
        made = outputs.new_outputs(q, v, packed, len(self.outputs))
        if made[0] is None:
            self.complain_of_ranks(operands)
        return list(made)

    def complain_of_ranks(self, operands: Operands) -> None:
        """There are no outputs: the ranks of q and v are wrong."""
        self.complain(operands, {})
        packed = operands.get("cu_seqlens_q") is not None
        outputs.check_rank(self.op, packed, q=operands["q"], v=operands["v"])


class Backward(Signature):
    def __init__(self, arguments: str, count: int) -> None:
        super().__init__("attention_backward", arguments, RENAMED,
                         {f"d{name}": Layout(LIKE, name) for name in outputs.GRADIENTS_OF}, count)

    def make(self, first: torch.Tensor, operands: Operands, options: Options, wanted: int
             ) -> List[Optional[torch.Tensor]]:
        inputs = [operands.get(name) for name in outputs.GRADIENTS_OF]
        made = outputs.new_gradients(wanted, *inputs)
        return [x if wanted & bit and of is not None else None
                for bit, x, of, _ in zip(outputs.GRADIENTS, made, inputs, self.outputs)]


FORWARD, FORWARD_REST = Forward(), Forward(count=3)
BACKWARD = Backward("int needs, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
                    "Tensor? lse_rest, " + ATTENTION, 5)
# The same without options, CPU tensors only: so many absent arguments cost torch more than a call
# of a few microseconds should. For eager calls; no compiler, mode or transform ever sees these.
PLAIN = "Tensor q, Tensor k, Tensor v, float? scale, bool causal"
PLAIN_FORWARD, PLAIN_FORWARD_REST = Forward(PLAIN), Forward(PLAIN, 3)
PLAIN_BACKWARD = Backward("int needs, Tensor dout, Tensor out, Tensor lse, Tensor lse_rest, "
                          + PLAIN, 3)
