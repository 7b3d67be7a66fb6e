"""Attention on MPS tensors: shall Orchard's kernels do it, or PyTorch itself?

The public function asks once, before the forward, for forward and backward together: what is
refused is then PyTorch's own scaled_dot_product_attention, gradients included, or, where that has
no word for an option, the formula (explicit.py) in PyTorch's operations on the same device.
Whoever cannot ask (compiled code, torch.func's transforms, callers of the ops) meets the refusal in
the ops' kernels, which go on with the explicit formula, forward and backward each for itself.

A refusal is counted (`orchard.report()`); with ORCHARD_STRICT=1 it is an error instead.
`inputs` and `options` have the names of the C struct orchard_attention.
"""

from __future__ import annotations

import threading
from typing import Any, Mapping, Optional, Tuple

import torch

from .. import mps
from ..signature import Operands, Options
from ..tracing import TRACED, compiling
from ..transforms import no_autocast
from . import explicit, mps_launch
from .operands import FORWARD, FORWARD_REST, TENSORS, Forward
from .outputs import GRADIENTS, GRADIENTS_OF, Tensors, Tensors5, new_gradients, new_outputs

# What PyTorch's scaled_dot_product_attention has no word for.
NO_WORD = ("softcap", "sinks", "cu_seqlens_q")


class _Last(threading.local):
    refusal: Optional[str] = None


last = _Last()  # why this thread's last refused call was; who asks about a call clears it before


def asks(query: torch.Tensor) -> bool:
    """Whether a call with this query is asked about: compiled code and fakes are not."""
    return query.is_mps and not compiling() and not isinstance(query, TRACED)


def _meta(like: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Shape and strides without memory."""
    return None if like is None else torch.empty_strided(like.shape, like.stride(),
                                                         dtype=like.dtype, device="meta")


def _outputs(inputs: Operands) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
    """out and lse without memory."""
    made = new_outputs(_meta(inputs["q"]), _meta(inputs["v"]),
                       packed=inputs.get("cu_seqlens_q") is not None)
    if made[0] is None:
        FORWARD.complain_of_ranks(inputs)
    return made


def _refusal_of_backward(launcher: mps.Launcher, inputs: Operands, options: Mapping[str, Any],
                         needs: int, out: torch.Tensor, lse: torch.Tensor,
                         count: bool) -> Optional[str]:
    made = new_gradients(needs, *(_meta(inputs.get(n)) for n in GRADIENTS_OF))
    # Without dlse: the kernels are the same with it.
    operands = mps_launch.backward_operands(needs, inputs, _meta(out), None, out, lse, _meta(lse),
                                            made)
    return launcher.supported("attention_backward", operands, options, check_lengths=False,
                              count=count)


def refusal(launcher: mps.Launcher, inputs: Operands, options: Mapping[str, Any],
            needs: int = 0, *, check_lengths: bool = False, count: bool = True) -> Optional[str]:
    """None: the launcher takes the forward, and the backward for the gradients of `needs` (bits as
    in outputs.py). Otherwise why not; counted. Raises where the call is wrong; the numbers of
    lengths are looked at only if asked for."""
    asked = (needs, tuple(options.items()), tuple(
        (name, x.dtype, x.shape, x.stride(), x.storage_offset())
        for name, x in inputs.items() if x is not None))
    if not check_lengths and asked in launcher.agreed:
        return None
    out, lse = _outputs(inputs)
    asked_for = dict(inputs, out=out, lse=lse, lse_rest=_meta(lse) if needs else None)
    reason = launcher.supported("attention_forward", asked_for, options,
                                check_lengths=check_lengths, count=count)
    if reason is None and needs:
        reason = _refusal_of_backward(launcher, inputs, options, needs, out, lse, count)
    if reason is None:
        launcher.agree(asked)
    return reason


def fall_back(inputs: Mapping[str, Optional[torch.Tensor]], options: Mapping[str, Any]
              ) -> torch.Tensor:
    """`out` by torch.nn.functional.scaled_dot_product_attention, differentiable by PyTorch's rules.
    Dropout draws PyTorch's random numbers, not those of the seed."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    only_causal = options.get("causal") and not (
        options.get("align") or options.get("has_window")
        or options.get("has_scale") and options["scale"] <= 0  # torch multiplies its -inf by it
        or any(inputs.get(n) is not None for n in ("bias", "mask", "alibi", "key_lengths")))
    mask: Optional[torch.Tensor] = None
    if only_causal:
        k, v = k[:, :, :q.shape[2]], v[:, :, :q.shape[2]]  # nobody sees the rest
    else:
        seen, at, keys = explicit.visible(
            q.shape[-2], k.shape[-2], q.device, options.get("causal"), options.get("align"),
            options.get("window_left", -1), options.get("window_right", -1), None,
            inputs.get("key_lengths"))
        given = inputs.get("mask")
        if given is not None:
            seen = given if seen is None else seen & given
        mask = inputs.get("bias")
        shown = explicit.not_left_out(seen, mask)
        if shown is not None:
            k, v = explicit.hide(shown, k, v)
        if inputs.get("alibi") is not None:
            slopes = inputs["alibi"][..., None, None] * -(at - keys).abs()
            mask = slopes if mask is None else mask + slopes
        if mask is not None:
            mask = mask if seen is None else mask.masked_fill(~seen, float("-inf"))
        else:
            mask = seen
    # Not F's, nor a name of this module: `orchard.enable()` leads both back here.
    return torch._C._nn.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=options.get("dropout", 0.0), is_causal=bool(only_causal),
        scale=options["scale"] if options.get("has_scale") else None,
        enable_gqa=q.shape[1] != k.shape[1])


def _has_words(inputs: Operands, options: Options) -> bool:
    """Whether PyTorch's scaled_dot_product_attention can be told all of the call. It takes a bias
    of q's dtype only: a wider one, and ALiBi's penalties, would be rounded."""
    return not any(options.get(name) or inputs.get(name) is not None for name in NO_WORD) and all(
        inputs.get(name) is None or inputs[name].dtype == inputs["q"].dtype
        for name in ("bias", "alibi"))


def _record_refusal(op: str, reason: str) -> None:
    """For all who read `last`; raises where no fallback is allowed."""
    last.refusal = reason
    if mps.strict():
        raise mps.Refused(op, reason, mps.STRICT)


def failed(op: str, why: str) -> None:
    """Orchard's kernels took a call and broke off: counted; an error where no fallback may be."""
    mps.launcher.count(op, why)
    _record_refusal(op, why)


def _by_pytorch(op: str) -> None:
    """PyTorch's operations ran a call that was refused."""
    mps.launcher.ran(op, "pytorch", last.refusal)


def _check_lengths(inputs: Operands, options: Options) -> None:
    """PyTorch would not say that a length is wrong."""
    if any(inputs[name] is not None for name in mps_launch.LENGTHS):
        refusal(mps.launcher, inputs, options, check_lengths=True, count=False)


def _explicit(arguments: Tuple[Any, ...]) -> Tensors:
    made = explicit.forward(arguments[:TENSORS], arguments[TENSORS:])
    _by_pytorch("attention_forward")
    return made


def instead(with_lse: bool, needs: int, *arguments: Any
            ) -> Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """None: Orchard's kernels take the call. Otherwise (out, lse) by PyTorch, which differentiates
    it too; lse only if asked for. Arguments as in the ops' schemas."""
    inputs, options = mps_launch.named(*arguments)
    inputs = {name: x if x is None else x.resolve_neg() for name, x in inputs.items()}
    options.pop("seed", None)  # the answer is the same for all of them, and kept
    reason = refusal(mps.launcher, inputs, options, needs)
    if reason is None:
        return None
    _record_refusal("attention_forward", reason)
    _check_lengths(inputs, options)
    if with_lse or not _has_words(inputs, options):
        return _explicit(arguments)[:2]
    out = fall_back(inputs, options)
    _by_pytorch("attention_forward")
    return out, None


# ---- Calls on meta tensors: nothing to compute, but as wrong as any other ------------------------

def _named_on_meta(arguments: Tuple[Any, ...]) -> Tuple[Operands, Options]:
    """mps_launch.named, with a seed that nobody can read."""
    return mps_launch.named(*arguments[:TENSORS - 1], None, *arguments[TENSORS:])


def check_forward(*arguments: Any) -> None:
    inputs, options = _named_on_meta(arguments)
    out, lse = _outputs(inputs)
    mps.launcher.check("attention_forward", dict(inputs, out=out, lse=lse), options)


def check_backward(made: Tensors5, needs: int, dout: torch.Tensor, dlse: Optional[torch.Tensor],
                   out: torch.Tensor, lse: torch.Tensor, lse_rest: Optional[torch.Tensor],
                   *arguments: Any) -> None:
    inputs, options = _named_on_meta(arguments)
    mps.launcher.check("attention_backward", mps_launch.backward_operands(
        needs, inputs, dout, dlse, out, lse, lse_rest, made), options)


# ---- The kernels of the ops for MPS tensors ------------------------------------------------------

def forward(*arguments: Any) -> Tensors:
    """attention_forward; parameters as in the schema. If refused: with the dropout of the seed."""
    return _forward(FORWARD, arguments)


def forward_rest(*arguments: Any) -> Tensors:
    """attention_forward_rest; parameters as in the schema."""
    return _forward(FORWARD_REST, arguments)


def _forward(signature: Forward, arguments: Tuple[Any, ...]) -> Tensors:
    try:
        return mps_launch.forward(signature, *arguments)
    except mps.Refused as refused:
        _record_refusal("attention_forward", refused.reason)
    inputs, _ = mps_launch.named(*arguments)
    made = new_outputs(inputs["q"], inputs["v"], inputs["cu_seqlens_q"] is not None,
                       len(signature.outputs))
    for fresh, x in zip(made, _explicit(arguments)):
        fresh.copy_(x)
    return made


def backward(needs: int, dout: torch.Tensor, dlse: Optional[torch.Tensor], out: torch.Tensor,
             lse: torch.Tensor, lse_rest: Optional[torch.Tensor], *arguments: Any) -> Tensors5:
    """attention_backward; parameters as in the schema."""
    op = "attention_backward"
    try:
        return mps_launch.backward(needs, dout, dlse, out, lse, lse_rest, *arguments)
    except mps.Refused as refused:
        _record_refusal(op, refused.reason)
    by_name, _ = mps_launch.named(*arguments)
    inputs = [by_name[name] for name in GRADIENTS_OF]
    made = new_gradients(needs, *inputs)
    with no_autocast(dout):
        found = explicit.gradients(arguments[:TENSORS], arguments[TENSORS:], dout, dlse, *inputs,
                                   known=(out, lse))
    for bit, fresh, x in zip(GRADIENTS, made, found):
        if needs & bit and x is not None:
            fresh.copy_(x)
    _by_pytorch(op)
    return made
