"""`mask`: Transformers' mask interface, called once per forward and kind of layer."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any, Callable, Optional, Tuple

import torch

from .._library import ArgumentError
from ..torch import tracing
from .call_recorder import with_reason
from .interfaces import (PreTrainedModel, and_masks, bidirectional_mask_function,
                         causal_mask_function, eager_mask, is_tracing, sdpa_mask)
from .mask_encoding import encode, no_values

Tensor = torch.Tensor


def _cell(function: Any, name: str) -> Any:
    """A variable that a function made by Transformers' mask factories remembers."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents


_AND = and_masks(causal_mask_function).__code__


def _both(mask_function: Any) -> Tuple[Any, Any]:
    """The two masks that both must hold, if it is one made of two."""
    parts = _cell(mask_function, "mask_functions")
    if getattr(mask_function, "__code__", None) is _AND and len(parts) == 2:
        return parts
    return None, None


def _packed(mask_function: Any, window: int) -> Optional[Tensor]:
    """The sequence number of each token, if the mask is causal (and window) within sequences and
    each of them is in one piece."""
    base, overlay = _both(mask_function)
    if window:
        limit, inside = _both(base)
        plain = _cell(limit, "sliding_window") == window and inside is causal_mask_function
    else:
        plain = base is causal_mask_function
    numbers = _cell(overlay, "packed_sequence_mask") if plain else None
    if numbers is None or bool((numbers[:, 1:] < numbers[:, :-1]).any()):
        return None
    return numbers


def _mapped(tensor: Optional[Tensor]) -> bool:
    """Whether torch.func.vmap goes over it: its values are several then."""
    if tracing.compiling() or not tracing.functorch_active():
        return False
    inside = torch._C._functorch
    while tensor is not None and inside.is_functorch_wrapped_tensor(tensor):
        if inside.is_batchedtensor(tensor):
            return True
        tensor = inside.get_unwrapped(tensor)  # torch.func.grad's
    return False


def _boundaries(sequence: Tensor, window: int) -> Tensor:
    """[B,T] sequence numbers as the offsets where sequences begin, all rows in one line."""
    batch, length = sequence.shape
    first = torch.ones((batch, 1), dtype=torch.bool, device=sequence.device)
    begins = torch.cat([first, sequence[:, 1:] != sequence[:, :-1]], dim=1).flatten()
    ends = torch.tensor([batch * length], device=sequence.device)
    starts = torch.cat([begins.nonzero()[:, 0], ends]).to(torch.int32)
    return encode(starts[None], length, window)


def _resized(keys: Tensor, width: int) -> Tensor:
    """[B,width]: keys without a word in the mask do not count."""
    return torch.nn.functional.pad(keys[:, :width], (0, max(0, width - keys.shape[1])))


def _may_be_left_out(q_length: int, kv_length: int, config: Any) -> bool:
    """Where Transformers itself leaves a causal mask out. Elsewhere None would not do: layers that
    say is_causal=False (PaliGemma's) are causal where they get a causal mask."""
    return q_length == 1 or (q_length == kv_length and
                             not getattr(config, "use_bidirectional_attention", None))


def _key_mask(keys: Tensor, q_length: int, kv_length: int, window: int,
              config: Any) -> Optional[Tensor]:
    """The shortest form for causal attention to the keys that count, keys [B, width] bool."""
    exact = keys.shape[1] == kv_length
    form = encode(keys.view(torch.uint8), kv_length, window)
    if no_values(keys):
        return with_reason(form, "padding, if any, is not known yet")
    whole, right = torch.stack([keys.all(), (keys[:, :-1] >= keys[:, 1:]).all()]).tolist()
    if whole and exact and window == 0 and _may_be_left_out(q_length, kv_length, config):
        return None
    if exact and (whole or (right and q_length == kv_length)):
        return with_reason(encode(keys.sum(1, dtype=torch.int32)[:, None], kv_length, window),
                           "no token is padding" if whole else "all padding is on the right")
    return with_reason(form, "there is padding on the left or between" if not whole else
                       "the cache holds more keys than there are tokens")


def _follows_interface(module: Any, config_class: type) -> Optional[bool]:
    """Whether some model of this module, of this very configuration if it has one (Gemma 4's audio
    tower is not as its text model), is said to follow the attention interface; None: it makes no
    masks by Transformers' functions."""
    values = list(vars(module).values())
    if not any(inspect.isfunction(one) and one.__module__ == sdpa_mask.__module__
               for one in values):
        return None
    models = [one for one in values if inspect.isclass(one) and issubclass(one, PreTrainedModel)]
    own = [one for one in models if one.config_class is config_class]
    return any(one._supports_sdpa or one._supports_attention_backend for one in own or models)


def _changes_masks(module: Any) -> bool:
    """Whether a layer of this module makes another mask of the one it gets (DeepSeek-V4), or its
    models ask for masks that can be changed."""
    layers = [one for name, one in vars(module).items()
              if name.endswith("Attention") and one.__module__ == module.__name__]
    try:
        return "allow_is_causal_skip" in inspect.getsource(module) or any(
            re.search(r"\battention_mask = (?!(encoder_)?attention_mask( if|\n))",
                      inspect.getsource(one)) for one in layers)
    except (OSError, TypeError):  # no source: `attention` refuses what was changed
        return False


@functools.lru_cache(maxsize=None)
def _why_not_sure(config_class: type) -> str:
    """Why only the mask of "eager" is sure to be understood by the models of a configuration; "" if
    ours is. Transformers asks whether a model follows the interface only in
    set_attn_implementation, not while it is made or loaded."""
    for one in config_class.__mro__:
        package = one.__module__.rpartition(".")[0]
        if package in ("", "transformers"):
            continue
        modules = [module for name, module in list(sys.modules.items())
                   if name.startswith(package + ".modeling_")]
        found = [_follows_interface(module, one) for module in modules]
        if False in found:
            warnings.warn(f"orchard.transformers: Transformers does not say that the models of "
                          f"{one.__name__} follow its attention interface: they get the masks of "
                          '"eager"; orchard.transformers.doctor(model) tells what calls Orchard')
            return "this model may not follow Transformers' attention interface"
        if any(_changes_masks(module) for module in modules):
            return "this model changes its masks"
        if True in found:
            break
    return ""


# torch.compile looks into functions that have a cache. The answer depends on nothing but the class.
@torch.compiler.assume_constant_result
def _why_eager(config_class: type) -> str:
    return _why_not_sure(config_class)


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Optional[Tensor]:
    """Transformers' mask interface: the smallest form of mask_encoding.py that says enough."""
    given = kwargs.get("attention_mask")
    if given is not None and given.dim() != 2:  # those of 4 dimensions are the caller's own
        raise ArgumentError(f"orchard.transformers: attention_mask has {given.dim()} dimensions, "
                            "must have 2 (which tokens count) or 4 (who sees whom)")
    why_eager = "" if config is None else _why_eager(type(config))
    if why_eager:
        # Never None: some of these encoders do not say is_causal=False.
        return with_reason(eager_mask(*args, **{**kwargs, "config": config,
                                                "allow_is_bidirectional_skip": False}), why_eager)
    if torch.jit.is_tracing() or _mapped(given):
        # A trace would keep what its example's lengths and padding said; vmap has one per sample.
        return with_reason(sdpa_mask(*args, **{**kwargs, "config": config,
                                               "allow_is_causal_skip": False,
                                               "allow_is_bidirectional_skip": False}),
                           "a trace or vmap is under way")
    return _mask(*args, config=config, **kwargs)


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Callable = causal_mask_function, attention_mask: Optional[Tensor] = None,
          local_size: Optional[int] = None, allow_is_causal_skip: bool = True,
          allow_is_bidirectional_skip: bool = False, config: Any = None, device: Any = "cpu",
          **kwargs: Any) -> Optional[Tensor]:
    unknown_values = no_values(attention_mask) or (
        isinstance(q_offset, Tensor) and is_tracing(q_offset))
    window = 0
    # Other overlays than the sliding window have a local size too.
    causal = allow_is_causal_skip and getattr(config, "attention_chunk_size", None) is None
    if local_size is not None:
        causal = causal and local_size == getattr(config, "sliding_window", None)
        if unknown_values or local_size < kv_length:  # a graph for any length must not ask
            window = local_size
    if not unknown_values and attention_mask is None and kv_length == q_length:
        sequence = _packed(mask_function, local_size or 0)
        if sequence is not None:
            return with_reason(_boundaries(sequence, window),
                               "position_ids start anew: packed sequences")
    known = q_offset + q_length - kv_offset  # keys up to the last query: a tensor in static caches
    if isinstance(known, Tensor) and not unknown_values:
        known = int(known)
    if causal and attention_mask is None:
        if (not isinstance(known, Tensor) and known == kv_length and window == 0
                and _may_be_left_out(q_length, kv_length, config)):
            return None
        lengths = torch.as_tensor(known, device=device).to(torch.int32).reshape(1, 1)
        return with_reason(encode(lengths.expand(batch_size, 1), kv_length, window),
                           "no attention_mask was given" if kv_length == q_length else
                           "the cache holds more keys than there are tokens")
    if causal and isinstance(known, Tensor):  # where the queries stand is not known yet
        keys = _resized(attention_mask[:, kv_offset:], kv_length).to(torch.int64)
        lengths = known.to(torch.int64).reshape(1, 1).expand(batch_size, 1)
        return with_reason(encode(torch.cat([lengths, keys], dim=1), kv_length, window),
                           "where the tokens stand in the cache is not known yet")
    if causal and known <= kv_length:
        return _key_mask(_resized(attention_mask[:, kv_offset:], known), q_length, kv_length,
                         window, config)
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        if attention_mask.shape[1] == kv_length:
            if not unknown_values and bool(attention_mask.all()):
                return None
            return with_reason(attention_mask[:, None, None, :], "padding")
    form = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length,
                     q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                     attention_mask=attention_mask, local_size=local_size,
                     allow_is_causal_skip=False,
                     allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device,
                     **kwargs)
    return with_reason(form, "a cache of fixed size, one token at a time" if q_length == 1 else
                       "this model's mask is not causal, window or padding alone")
