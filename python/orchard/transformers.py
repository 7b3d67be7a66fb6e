"""Transformers: importing this module makes attn_implementation="orchard" a valid choice.

    import orchard.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="orchard")
    model.set_attn_implementation("orchard")        # or later; "sdpa" and "eager" lead back
    orchard.transformers.doctor(model)              # what each layer does, and why

Two functions are registered. `mask` is called once per forward and kind of layer, and says in as
few numbers as possible who sees whom; `attention` is called by every layer and understands it:

    None                             causal if the module is, aligned bottom-right
    [B, 1+5, 1, 2+w]   int32         causal; batch element b has that many keys
    [B, N+5, 1, 2+w]   uint8         causal; the first N keys, of which these count
    [B, 1+S+5, 1, 2+w] int64         causal; that many keys, of which these count
    [1, n+1+5, 1, 2+w] int32         causal within n packed sequences that begin there
    [B, 1|H, 1|T, S]   bool or float this mask and nothing else

The middle four describe a mask. Their last dimension is repeated without memory: its size carries
the sliding window w (0: none) through models and compilers that pass masks on without looking. They
have four dimensions because Transformers passes those on, and makes something of its own of all
others. A model that does look must not go unnoticed. So the strides say the window and the number
of keys once more (they are those of longer rows), also while compiling; and for copies, which
`generate` makes for static caches, five numbers at the end of each row say the window. What was
padded, concatenated, cut or computed with is refused.

Only the last form can cost memory of T x S, and only where a model's mask is none of the others,
where the model changes masks (DeepSeek-V4), or where Transformers does not vouch for the model:
some compute attention themselves with the mask they get (BLOOM, MPNet), some decoders say
is_causal=False (NLLB-MoE). The last two get the mask of "eager".
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import threading
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import (bidirectional_mask_function, causal_mask_function,
                                            eager_mask, sdpa_mask)
    from transformers.utils.import_utils import is_tracing
except ImportError as _why:
    raise ImportError("orchard.transformers needs Transformers 5.22 or later, whose "
                      f"mask interface cannot be imported: {_why}") from None

from . import torch as _orchard_torch
from ._library import ArgumentError, UnsupportedError
from .reports import report
from .torch import onlookers as _onlookers

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("orchard.transformers needs Transformers 5.22 or later: this "
                      "one does not tell mask functions where the queries stand (q_offset)")

Tensor = torch.Tensor
NAME = "orchard"


# ---- What doctor() listens to --------------------------------------------------------------------

class Call(NamedTuple):
    """One attention call as doctor() saw it."""
    module: torch.nn.Module
    query: Tuple[int, ...]
    key: Tuple[int, ...]
    path: str
    why: str
    backend: str


class _Listening(threading.local):
    calls: Optional[List[Call]] = None
    why: str = ""
    whys: Dict[int, Tuple[Tensor, str]] = {}  # by the mask's id; the mask is kept so that it stays
    ran: Dict[Tuple[str, str], int] = {}


_listening = _Listening()


def _because(why: str) -> None:
    """Remembers why `mask` chose its form, for doctor()."""
    if not _onlookers.compiling():
        _listening.why = why


def _ran() -> Dict[Tuple[str, str], int]:
    return {(line.op, line.backend): line.count for line in report() if line.reason is None}


def _heard(module: torch.nn.Module, query: Tensor, key: Tensor, given: Optional[Tensor],
           path: str) -> None:
    now = _ran()
    backends = [backend for (op, backend), count in now.items()
                if op == "attention_forward" and count > _listening.ran.get((op, backend), 0)]
    _listening.ran = now
    why = "every key counts" if given is None else _listening.whys.get(
        id(given), (given, "a mask that Orchard did not make"))[1]
    _listening.calls.append(Call(module, tuple(query.shape), tuple(key.shape), path, why,
                                 ", ".join(backends) or query.device.type))


# ---- Masks ---------------------------------------------------------------------------------------

def _blind(tensor: Optional[Tensor]) -> bool:
    """Whether a graph is being made or there are no values (FakeTensor): then nothing may depend on
    the values of masks."""
    return torch.compiler.is_compiling() or is_tracing(tensor) or (
        tensor is not None and tensor.is_meta)


def _mapped(tensor: Optional[Tensor]) -> bool:
    """Whether torch.func.vmap goes over it: its values are several then."""
    if _onlookers.compiling() or not _onlookers.functorch_active():
        return False
    inside = torch._C._functorch
    while tensor is not None and inside.is_functorch_wrapped_tensor(tensor):
        if inside.is_batchedtensor(tensor):
            return True
        tensor = inside.get_unwrapped(tensor)  # torch.func.grad's
    return False


def _cell(function: Any, name: str) -> Any:
    """A variable that a function made by Transformers' mask factories remembers."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents


def _packed(mask_function: Any, window: int) -> Optional[Tensor]:
    """The sequence number of each token, if the mask is causal (and window) within sequences."""
    parts = _cell(mask_function, "mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    base, overlay = parts
    if window:
        inside = _cell(base, "mask_functions")
        plain = (isinstance(inside, tuple) and len(inside) == 2
                 and _cell(inside[0], "sliding_window") == window
                 and inside[1] is causal_mask_function)
    else:
        plain = base is causal_mask_function
    return _cell(overlay, "packed_sequence_mask") if plain else None


_MARK = 85  # the last number of each description


def _description(numbers: Tensor, keys: int, window: int) -> Tensor:
    """[B,N] numbers as one of the four forms that describe a mask for so many keys."""
    end = torch.tensor([window >> shift & 127 for shift in (0, 7, 14, 21)] + [_MARK],
                       dtype=numbers.dtype, device=numbers.device)
    row = torch.cat([numbers, end.expand(numbers.shape[0], -1)], dim=1)
    longer = torch.nn.functional.pad(row, (0, keys + 1 + window))
    return longer[:, :row.shape[1], None, None].expand(-1, -1, 1, 2 + window)


def _read(description: Tensor, keys: int) -> Tuple[Tensor, int]:
    """The numbers [B,N] and the window of a description, which must be as `_description` made it,
    or a copy of that."""
    _, length, queries, columns = description.shape
    window = columns - 2
    row = description[:, :, 0, 0]
    words = (f"orchard.transformers: a mask {list(description.shape)} of {description.dtype} is "
             'not as it was made for "orchard": this model changes its masks; use "eager" or '
             '"sdpa"')
    if window < 0 or queries != 1 or length < 6:
        raise UnsupportedError(words)
    if description.stride(3) != 0:
        end = row[:, -5:].to(torch.int64)
        said = end[:, 0] + (end[:, 1] << 7) + (end[:, 2] << 14) + (end[:, 3] << 21)
        right = (description == row[:, :, None, None]).all()
        right = right & (said == window).all() & (end[:, 4] == _MARK).all()
        if _blind(description):
            torch._assert_async(right, words)
        elif not bool(right):
            raise UnsupportedError(words)
    elif description.stride()[:2] != (length + keys + 1 + window, 1):
        raise UnsupportedError(words)
    return row[:, :-5], window


def _boundaries(sequence: Tensor, window: int) -> Tensor:
    """[B,T] sequence numbers as the offsets where sequences begin, all rows in one line."""
    batch, length = sequence.shape
    first = torch.ones((batch, 1), dtype=torch.bool, device=sequence.device)
    begins = torch.cat([first, sequence[:, 1:] != sequence[:, :-1]], dim=1).flatten()
    ends = torch.tensor([batch * length], device=sequence.device)
    starts = torch.cat([begins.nonzero()[:, 0], ends]).to(torch.int32)
    return _description(starts[None], length, window)


def _resized(keys: Tensor, width: int) -> Tensor:
    """[B,width]: keys without a word in the mask do not count."""
    return torch.nn.functional.pad(keys[:, :width], (0, max(0, width - keys.shape[1])))


def _says_nothing(q_length: int, kv_length: int, config: Any) -> bool:
    """Where Transformers itself leaves a causal mask out. Elsewhere None would not do: layers that
    say is_causal=False (PaliGemma's) are causal where they get a causal mask."""
    return q_length == 1 or (q_length == kv_length and
                             not getattr(config, "use_bidirectional_attention", None))


def _key_mask(keys: Tensor, q_length: int, kv_length: int, window: int,
              config: Any) -> Optional[Tensor]:
    """The shortest form for causal attention to the keys that count, keys [B, width] bool."""
    exact = keys.shape[1] == kv_length
    form = _description(keys.view(torch.uint8), kv_length, window)
    if _blind(keys):
        return form
    whole, right = torch.stack([keys.all(), (keys[:, :-1] >= keys[:, 1:]).all()]).tolist()
    if whole and exact and window == 0 and _says_nothing(q_length, kv_length, config):
        return None
    if exact and (whole or (right and q_length == kv_length)):
        _because("no token is padding" if whole else "all padding is on the right")
        return _description(keys.sum(1, dtype=torch.int32)[:, None], kv_length, window)
    _because("there is padding on the left or between" if not whole else
             "the cache holds more keys than there are tokens")
    return form


def _vouched(module: Any) -> Optional[bool]:
    """Whether some model of this module is said to follow the attention interface; None: it makes
    no masks by Transformers' functions."""
    values = list(vars(module).values())
    if not any(inspect.isfunction(one) and one.__module__ == sdpa_mask.__module__
               for one in values):
        return None
    return any(one._supports_sdpa or one._supports_attention_backend for one in values
               if inspect.isclass(one) and issubclass(one, PreTrainedModel))


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
def _unsure(config_class: type) -> str:
    """Why only the mask of "eager" is sure to be understood by the models of a configuration; "" if
    ours is. Transformers asks whether a model follows the interface only in
    set_attn_implementation, not while it is made or loaded."""
    for one in config_class.__mro__:
        package = one.__module__.rpartition(".")[0]
        if package in ("", "transformers"):
            continue
        modules = [module for name, module in list(sys.modules.items())
                   if name.startswith(package + ".modeling_")]
        found = [_vouched(module) for module in modules]
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


@torch.compiler.assume_constant_result  # which torch.compile does not see through a cache
def _eager_masks(config_class: type) -> str:
    return _unsure(config_class)


def mask(*args: Any, config: Any = None, **kwargs: Any) -> Optional[Tensor]:
    """Transformers' mask interface: one of the forms above, the smallest that says enough."""
    unsure = "" if config is None else _eager_masks(type(config))
    if unsure:
        _because(unsure)
        # Never None: some of these encoders do not say is_causal=False.
        made = eager_mask(*args, **{**kwargs, "config": config,
                                    "allow_is_bidirectional_skip": False})
    elif torch.jit.is_tracing() or _mapped(kwargs.get("attention_mask")):
        # A trace would keep what its example's lengths and padding said; vmap has one per sample.
        made = sdpa_mask(*args, **{**kwargs, "config": config, "allow_is_causal_skip": False,
                                   "allow_is_bidirectional_skip": False})
    else:
        made = _mask(*args, config=config, **kwargs)
    if made is not None and not _onlookers.compiling() and _listening.calls is not None:
        _listening.whys[id(made)] = (made, _listening.why)
    return made


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Callable = causal_mask_function, attention_mask: Optional[Tensor] = None,
          local_size: Optional[int] = None, allow_is_causal_skip: bool = True,
          allow_is_bidirectional_skip: bool = False, config: Any = None, device: Any = "cpu",
          **kwargs: Any) -> Optional[Tensor]:
    blind = _blind(attention_mask) or (isinstance(q_offset, Tensor) and is_tracing(q_offset))
    window = 0
    # Other overlays than the sliding window have a local size too.
    causal = allow_is_causal_skip and getattr(config, "attention_chunk_size", None) is None
    if local_size is not None:
        causal = causal and local_size == getattr(config, "sliding_window", None)
        if blind or local_size < kv_length:  # a graph for any length must not ask
            window = local_size
    if not blind and attention_mask is None and kv_length == q_length:
        sequence = _packed(mask_function, local_size or 0)
        if sequence is not None:
            _because("position_ids start anew: packed sequences")
            return _boundaries(sequence, window)
    known = q_offset + q_length - kv_offset  # keys up to the last query: a tensor in static caches
    if isinstance(known, Tensor) and not blind:
        known = int(known)
    if causal and attention_mask is None:
        if (not isinstance(known, Tensor) and known == kv_length and window == 0
                and _says_nothing(q_length, kv_length, config)):
            return None
        _because("no attention_mask was given" if kv_length == q_length else
                 "the cache holds more keys than there are tokens")
        lengths = torch.as_tensor(known, device=device).to(torch.int32).reshape(1, 1)
        return _description(lengths.expand(batch_size, 1), kv_length, window)
    if causal and isinstance(known, Tensor):  # where the queries stand is not known yet
        keys = _resized(attention_mask[:, kv_offset:], kv_length).to(torch.int64)
        lengths = known.to(torch.int64).reshape(1, 1).expand(batch_size, 1)
        return _description(torch.cat([lengths, keys], dim=1), kv_length, window)
    if causal and known <= kv_length:
        return _key_mask(_resized(attention_mask[:, kv_offset:], known), q_length, kv_length,
                         window, config)
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        if attention_mask is None:
            return None
        if attention_mask.shape[1] == kv_length:
            if not blind and bool(attention_mask.all()):
                return None
            _because("padding")
            return attention_mask[:, None, None, :]
    _because("a cache of fixed size, one token at a time" if q_length == 1 else
             "this model's mask is not causal, window or padding alone")
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length,
                     q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                     attention_mask=attention_mask, local_size=local_size,
                     allow_is_causal_skip=False,
                     allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device,
                     **kwargs)


# ---- Attention -----------------------------------------------------------------------------------

def _rows(tensor: Tensor) -> Tensor:
    """[B,H,T,D] as [B*T,H,D]: a view where B is 1."""
    return tensor[0].transpose(0, 1) if tensor.shape[0] == 1 else \
        tensor.transpose(1, 2).flatten(0, 1)


def _described(attention_mask: Tensor) -> bool:
    """Whether a mask is one of the middle four forms."""
    return attention_mask.dtype in (torch.int32, torch.uint8, torch.int64)


def _options(attention_mask: Optional[Tensor], batch: int, length: int,
             keys: int) -> Dict[str, Any]:
    """The arguments of our function that a mask stands for; "crop": how many keys there are."""
    if attention_mask is None:
        return {"causal_alignment": "bottom_right"}
    if attention_mask.dim() != 4:
        raise ArgumentError(f"orchard.transformers: attention_mask has {attention_mask.dim()} "
                            'dimensions, must have 4 as all masks that are made for "orchard"; '
                            "pass it to the model, not to the attention")
    if not _described(attention_mask):
        return {"attn_mask": attention_mask}
    found: Dict[str, Any] = {"causal_alignment": "bottom_right"}
    said, window = _read(attention_mask, keys)
    if window > 0:
        found["window"] = (window - 1, -1)
    if said.dtype == torch.int32 and said.shape[1] > 1:
        found["cu_seqlens_q"] = found["cu_seqlens_k"] = said[0]
        found["max_seqlen_q"] = found["max_seqlen_k"] = length
        return found
    if said.shape[0] != batch:
        raise UnsupportedError(f"orchard.transformers: a mask for {said.shape[0]} sentences with "
                               f'{batch} of them: this model cuts its masks; use "eager" or "sdpa"')
    if said.dtype == torch.uint8:
        found["crop"] = said.shape[1]
        # Not .view: Inductor would save it for backward with the strides of the first length.
        found["attn_mask"] = said.to(torch.bool)[:, None, None, :]
        return found
    found["key_lengths"] = said[:, 0]
    if said.dtype == torch.int64:
        found["attn_mask"] = said[:, 1:].to(torch.bool)[:, None, None, :]
    if length == keys:  # padding on the right: queries keep their places
        found["causal_alignment"] = "top_left"
    return found


def _path(options: Dict[str, Any], causal: bool) -> str:
    """One line on how a call is made, for doctor()."""
    words = ["causal" if causal else "bidirectional"]
    given = options.get("attn_mask")
    if "window" in options:
        words.append(f"window {options['window'][0] + 1}")
    if "cu_seqlens_q" in options:
        words.append(f"{options['cu_seqlens_q'].shape[0] - 1} packed sequences")
    if "key_lengths" in options:
        words.append("key lengths")
    for name in ("softcap", "sinks"):
        if options.get(name) is not None:
            words.append(name)
    if options.get("bias") is not None:
        words.append(f"bias {list(options['bias'].shape)}")
    if given is None:
        words.append("no mask")
    elif given.shape[2] == 1:
        words.append(f"key mask {list(given.shape)}")
    else:
        words[0] = f"mask {list(given.shape)} in memory"
    return ", ".join(words)


def _check_unpadded(options: Dict[str, Any], keys: int) -> None:
    """Takes what says no more than "every key" out of the options; refuses what says less."""
    lengths = options.pop("key_lengths", None)
    if "attn_mask" in options or (lengths is not None and not _blind(lengths)
                                  and bool((lengths < keys).any())):
        raise ArgumentError("orchard.transformers: cu_seq_lens_q came together with padding; a "
                            "packed batch has none, so leave attention_mask out")


def _chosen(given: Optional[Tensor], indices: Tensor, keys: int, crop: int) -> Tensor:
    """A mask that leaves each query the keys of `indices` [B,T,n], that sparse attention chose."""
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    seen = seen.scatter(-1, indices.long(), True)[:, None, :, :crop]
    if given is None:
        return seen
    return given & seen if given.dtype == torch.bool else given.masked_fill(~seen, float("-inf"))


def _one_sequence(options: Dict[str, Any], rows: int, length: int, keys: int) -> Tensor:
    """For packed sequences with a position bias, whose numbers are those of the whole row: which
    token may see which, [B,1,T,T], in place of the sequences' beginnings."""
    begins, others = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    del options["max_seqlen_q"], options["max_seqlen_k"]
    if keys != length or not (others is begins or torch.equal(begins, others)):
        raise UnsupportedError("orchard.transformers: packed sequences with a position bias, whose "
                               'queries and keys are not the same tokens; use "sdpa"')
    places = torch.arange(rows * length, device=begins.device)
    number = torch.bucketize(places, begins, right=True).view(rows, 1, length)
    return number[..., :, None] == number[..., None, :]


def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
              attention_mask: Optional[Tensor], dropout: float = 0.0,
              scaling: Optional[float] = None, is_causal: Optional[bool] = None,
              position_bias: Optional[Tensor] = None, softcap: Optional[float] = None,
              s_aux: Optional[Tensor] = None, cu_seq_lens_q: Optional[Tensor] = None,
              cu_seq_lens_k: Optional[Tensor] = None, max_length_q: Optional[int] = None,
              max_length_k: Optional[int] = None, cache: Any = None,
              indices: Optional[Tensor] = None, block_indices: Optional[Tensor] = None,
              **kwargs: Any) -> Tuple[Tensor, None]:
    """Transformers' attention interface. query [B,H,T,D], key, value [B,G,S,D]; out [B,T,H,D].

    `sliding_window` is not looked at: the mask carries the window, also for models that do not pass
    it on.
    """
    if cache is not None:
        raise UnsupportedError("orchard.transformers: continuous batching hands over a paged cache "
                               '(cache=...), which "orchard" does not read; use "sdpa"')
    if block_indices is not None:
        raise UnsupportedError("orchard.transformers: this model chooses blocks of keys "
                               '(block_indices=...), which "orchard" does not read; use "sdpa"')
    length, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = _options(attention_mask, query.shape[0], length, keys)
    if attention_mask is not None:
        causal = _described(attention_mask)
    if cu_seq_lens_q is not None and (attention_mask is None or causal):
        _check_unpadded(options, keys)
        options.update(cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k,
                       max_seqlen_q=length if max_length_q is None else max_length_q,
                       max_seqlen_k=keys if max_length_k is None else max_length_k)
    crop = options.pop("crop", keys)
    if crop < keys:
        key, value = key[:, :, :crop], value[:, :, :crop]
        position_bias = None if position_bias is None else position_bias[..., :crop]
    options.update(bias=position_bias, softcap=softcap, sinks=s_aux)
    given = options.pop("attn_mask", None)
    if indices is not None:
        if "cu_seqlens_q" in options:
            raise UnsupportedError("orchard.transformers: packed sequences together with chosen "
                                   'keys (indices=...); use "sdpa"')
        given = _chosen(given, indices, keys, crop)
    if given is not None and given.dtype != torch.bool and position_bias is not None:
        options["bias"], given = position_bias + given, None  # both additive
    if "cu_seqlens_q" in options and position_bias is not None:
        given = _one_sequence(options, query.shape[0], length, keys)
    if "cu_seqlens_q" in options:
        call = (_rows(query), _rows(key), _rows(value))
    else:
        call = (query, key, value)
    out = _orchard_torch.scaled_dot_product_attention(
        *call, given, dropout, causal, scaling, query.shape[1] != key.shape[1], **options)
    if _listening.calls is not None and not _onlookers.compiling():
        _heard(module, query, key, attention_mask, _path({**options, "attn_mask": given}, causal))
    if "cu_seqlens_q" in options:
        return out.view(query.shape[0], length, *out.shape[1:]), None
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


# ---- doctor --------------------------------------------------------------------------------------

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


def _listen(model: Any, inputs: Dict[str, Any]) -> List[Call]:
    training = {module: module.training for module in model.modules()}
    _listening.calls, _listening.whys, _listening.ran = [], {}, _ran()
    # Compiled code makes its calls unheard.
    eager = getattr(torch.compiler, "set_stance", lambda stance: contextlib.nullcontext())
    try:
        model.eval()
        with torch.no_grad(), eager("force_eager"):
            model(**inputs)
        return _listening.calls
    finally:
        _listening.calls, _listening.whys = None, {}
        for module, was in training.items():
            module.training = was


def _silent(name: str, module: torch.nn.Module, heard: set) -> Optional[str]:
    """Why a module that looks like attention never called us; None for other modules."""
    if not type(module).__name__.endswith("Attention") or any(
            name == other or other.startswith(name + ".") for other in heard):
        return None
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if chosen is None:
        return None
    if chosen == NAME:
        return "not Orchard: this layer computes its attention itself, or was not reached"
    return f'not Orchard: its attn_implementation is "{chosen}"'


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
    two sentences of 16 tokens without padding, padded on the right, padded on the left.
    """
    chosen = getattr(model.config, "_attn_implementation", None)
    probes = {"your inputs": inputs} if inputs else _probes(model)
    calls = {name: _listen(model, given) for name, given in probes.items()}
    names = {module: name for name, module in model.named_modules()}
    layers: Dict[str, Dict[str, List[Call]]] = {}
    for probe, heard in calls.items():
        for call in heard:
            layers.setdefault(names[call.module], {}).setdefault(probe, []).append(call)
    lines = [f'{type(model).__name__}: attn_implementation "{chosen}", {len(layers)} attention '
             f"layers by Orchard"]
    if not layers:
        lines.append("  no layer calls Orchard: " + _advice(model, chosen))
    width = max(len(probe) for probe in probes)
    for name, module in model.named_modules():
        if name in layers:
            first = next(iter(layers[name].values()))[0]
            lines.append(f"{name}  q {list(first.query)}  k {list(first.key)}")
            for probe, heard in layers[name].items():
                for call in heard:
                    why = f"  ({call.why})" if call.why else ""
                    lines.append(f"  {probe:<{width}}  {call.backend}: {call.path}{why}")
        else:
            silent = _silent(name, module, set(layers))
            if silent is not None:
                lines.append(f"{name}  {silent}")
    print("\n".join(lines))
    return lines
