"""orchard::attention_forward and orchard::attention_backward on MPS tensors by Orchard's kernels.

`forward` and `backward` do what the ops do, or raise `mps.Refused`. mps_attention.py asks before
and knows what to do then.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from .. import mps
from ..signature import ALL, Operands, Options
from .operands import FORWARD, Forward
from .outputs import GRADIENTS, GRADIENTS_OF, Tensors, Tensors5, check_present, new_gradients


# Lengths, whose numbers the C library checks if it is given them.
LENGTHS = mps.host_read("attention_forward")


def named(*arguments: Any) -> Tuple[Operands, Options]:
    """The arguments of the ops' schemas by the names of the C struct orchard_attention; options
    that say nothing are left out."""
    inputs, options, _ = FORWARD.named(arguments)
    if inputs["cu_seqlens_q"] is None and inputs["cu_seqlens_k"] is None:
        del options["max_t"], options["max_s"]
    if (options["window_left"], options["window_right"]) == (-1, -1):
        del options["window_left"], options["window_right"], options["has_window"]
    if not options["dropout"]:
        options.pop("seed", None)
    else:
        options.setdefault("seed", 0)
    for name in ("causal", "align", "softcap", "dropout"):
        if not options[name]:
            del options[name]
    return inputs, options


def backward_operands(needs: int, inputs: Operands, dout: torch.Tensor,
                      dlse: Optional[torch.Tensor], out: torch.Tensor, lse: torch.Tensor,
                      lse_rest: Optional[torch.Tensor], made: Tensors5) -> Operands:
    """All of backward's operands: the gradients that are needed are among `made`."""
    operands = dict(inputs, dout=dout, dlse=dlse, out=out, lse=lse, lse_rest=lse_rest)
    for bit, name, gradient in zip(GRADIENTS, GRADIENTS_OF, made):
        if needs & bit and inputs[name] is not None:
            operands["d" + name] = gradient
    return operands


def _limits(name: str, inputs: Operands, options: Options) -> tuple:
    """What lengths were right for, and that nobody has written to them since; whose they are, for
    a deep copy has its original's, and counts its versions from 0."""
    lengths = inputs[name]
    return (name, id(lengths), lengths._version, inputs["q"].shape, inputs["k"].shape,
            options.get("max_t"), options.get("max_s"))


def _given_lengths(inputs: Operands) -> List[str]:
    return [name for name in LENGTHS if inputs[name] is not None]


def _remember_lengths(inputs: Operands, options: Options) -> None:
    """They were checked, which waited for the GPU: backward need not do so again."""
    for name in _given_lengths(inputs):
        if not inputs[name].is_inference():  # these count no versions
            inputs[name]._orchard_limits = _limits(name, inputs, options)  # type: ignore


def _lengths_are_known(inputs: Operands, options: Options) -> bool:
    return all(not inputs[name].is_inference() and getattr(inputs[name], "_orchard_limits", None)
               == _limits(name, inputs, options) for name in _given_lengths(inputs))


def forward(signature: Forward, q, k, v, *rest) -> Tensors:
    """The signature's attention_forward; parameters as in its schema."""
    check_present("attention_forward", q=q, k=k, v=v)
    operands, options = named(q, k, v, *rest)
    made, outputs = signature.new_outputs(operands, options, ALL)
    mps.launcher.run("attention_forward", {**operands, **outputs}, options)
    _remember_lengths(operands, options)
    return made


def backward(needs, dout, dlse, out, lse, lse_rest, q, k, v, bias, mask, alibi, sinks,
             *rest) -> Tensors5:
    """attention_backward; parameters as in the schema."""
    check_present("attention_backward", q=q, k=k, v=v)
    inputs, options = named(q, k, v, bias, mask, alibi, sinks, *rest)
    made = new_gradients(needs, q, k, v, bias, sinks)
    operands = backward_operands(needs, inputs, dout, dlse, out, lse, lse_rest, made)
    mps.launcher.run("attention_backward", operands, options,
                 check_lengths=not _lengths_are_known(inputs, options))
    return made
