"""`doctor`: how each attention layer of a model is computed, and why."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, Iterator, List, Optional

import torch

from .. import switch
from .._library import ArgumentError, OrchardError
from .._locks import ProcessLock
from .call_recorder import Call, record_calls
from .interfaces import NAME, Cache, PreTrainedConfig
from .no_compile import compile_off

Tensor = torch.Tensor


def _probes(model: Any) -> Dict[str, Dict[str, Tensor]]:
    """Small inputs for a text model: plain, and with padding on either side."""
    words = getattr(model.config.get_text_config(), "vocab_size", None)
    if words is None or model.main_input_name != "input_ids":
        raise ArgumentError(f"orchard.transformers: doctor makes inputs for text models only; pass "
                            f"those of {type(model).__name__}: doctor(model, "
                            f"{model.main_input_name}=...)")
    ids = torch.arange(2 * 16, device=model.device).reshape(2, 16) % words
    keys = torch.ones_like(ids)
    right, left = keys.clone(), keys.clone()
    right[1, 11:] = 0
    left[1, :5] = 0
    decoder = {"decoder_input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {}
    return {name: {"input_ids": ids, "attention_mask": mask, **decoder} for name, mask in
            (("plain", keys), ("right padding", right), ("left padding", left))}


# Modes of models are the whole process's: one doctor at a time.
_lock = ProcessLock()


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Puts back what a forward leaves behind in modules: modes, lengths, rotary frequencies."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for now, was in ((vars(module), attributes), (module._buffers, buffers)):
                for name in now.keys() - was.keys():
                    del now[name]
                now.update(was)


def _calls(model: Any, inputs: Dict[str, Any]) -> List[Call]:
    # A forward appends to caches.
    inputs = {name: copy.deepcopy(x) if isinstance(x, Cache) else x for name, x in inputs.items()}
    # Compiled calls would not be recorded.
    with _unchanged(model), torch.no_grad(), compile_off(), record_calls() as calls:
        model.eval()(**inputs)
        return calls


def _why_not_called(name: str, module: torch.nn.Module, called: set) -> Optional[str]:
    """Why a module that looks like attention never called Orchard; None for other modules."""
    if not type(module).__name__.endswith("Attention") or any(
            name == other or other.startswith(name + ".") for other in called):
        return None
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen is None:
        return None
    if chosen == NAME:
        return "not Orchard: this layer computes its attention itself, or was not reached"
    if switch.active():
        return f'by orchard.enable(), if at all: its attn_implementation is "{chosen}"'
    return f'not Orchard: its attn_implementation is "{chosen}"'


def _switched(before: Dict[str, int]) -> str:
    """What orchard.enable() did with the calls of attention since; "" if it is off."""
    if not switch.active():
        return ""
    made = {what: count - before.get(what, 0) for what, count in switch.counts().items()}
    words = [f"{count} {what}" for what, count in made.items()
             if count and not what.startswith("aten::")]
    return "  calls that orchard.enable() saw: " + (", ".join(words) or "none")


def _advice(model: Any, chosen: Optional[str]) -> str:
    """To somebody whose model never calls Orchard."""
    if chosen == NAME:
        return "this model computes its attention itself"
    can_be_set = getattr(type(model), "_can_set_attn_implementation", lambda: True)
    if not can_be_set():  # private, so it may be absent
        return (f"this model does not follow Transformers' attention interface, so "
                f'set_attn_implementation("{NAME}") is not taken')
    return f'model.set_attn_implementation("{NAME}")'


def doctor(model: Any, **inputs: Any) -> List[str]:
    """Prints, layer by layer, how each attention is computed and why; returns the lines.

    Runs the model forward without gradients: on `inputs` (input_ids=..., attention_mask=...), or on
    two sequences of 16 tokens without padding, padded on the right, padded on the left.
    """
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise ArgumentError(f"orchard.transformers: doctor is given a {type(model).__name__}, must "
                            "be a model of Transformers")
    chosen = getattr(model.config, "_attn_implementation", None)
    probes = {"your inputs": inputs} if inputs else _probes(model)
    try:
        with _lock.here():
            counted = switch.counts()
            calls = {name: _calls(model, given) for name, given in probes.items()}
    except Exception as why:
        if inputs or isinstance(why, OrchardError):
            raise
        raise ArgumentError(f"orchard.transformers: {type(model).__name__} does not take doctor's "
                            f"own inputs, two sequences of 16 tokens ({why}); pass yours: "
                            "doctor(model, input_ids=..., ...)") from why
    names = {module: name for name, module in model.named_modules()}
    layers: Dict[torch.nn.Module, Dict[str, List[Call]]] = {}
    for probe, found in calls.items():
        for call in found:
            layers.setdefault(call.module, {}).setdefault(probe, []).append(call)
            names.setdefault(call.module, f"a hidden {type(call.module).__name__}")
    switched = _switched(counted)
    found = "" if switched and not layers else f", {len(layers)} attention layers by Orchard"
    lines = [f'{type(model).__name__}: attn_implementation "{chosen}"{found}']
    if switched:
        lines.append(switched)
    elif not layers:
        lines.append("  no layer calls Orchard: " + _advice(model, chosen))
    width = max(len(probe) for probe in probes)
    for module, name in names.items():
        if module in layers:
            first = next(iter(layers[module].values()))[0]
            lines.append(f"{name}  q {list(first.query)}  k {list(first.key)}")
            for probe, found in layers[module].items():
                for call in found:
                    why = f"  ({call.reason})" if call.reason else ""
                    lines.append(f"  {probe:<{width}}  {call.backend}: {call.path}{why}")
        else:
            reason = _why_not_called(name, module, {names[one] for one in layers})
            if reason is not None:
                lines.append(f"{name}  {reason}")
    print("\n".join(lines))
    return lines
