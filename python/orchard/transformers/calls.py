"""`attention`: Transformers' attention interface, called by every layer."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from .. import torch as orchard_torch
from .._library import ArgumentError, UnsupportedError
from .call_recorder import record_call, recording
from .mask_encoding import decode, is_encoded, no_values

Tensor = torch.Tensor


def _rows(tensor: Tensor) -> Tensor:
    """[B,H,T,D] as [B*T,H,D]: a view where B is 1."""
    return tensor[0].transpose(0, 1) if tensor.shape[0] == 1 else \
        tensor.transpose(1, 2).flatten(0, 1)


def _options(attention_mask: Optional[Tensor], batch: int, length: int,
             keys: int) -> Dict[str, Any]:
    """The arguments of our function that a mask stands for; "crop": how many keys there are."""
    if attention_mask is None:
        return {"causal_alignment": "bottom_right"}
    if attention_mask.dim() != 4:
        raise ArgumentError(f"orchard.transformers: attention_mask has {attention_mask.dim()} "
                            'dimensions, must have 4 as all masks that are made for "orchard"; '
                            "pass it to the model, not to the attention")
    if not is_encoded(attention_mask):
        return {"attn_mask": attention_mask}
    found: Dict[str, Any] = {"causal_alignment": "bottom_right"}
    said, window = decode(attention_mask, keys)
    if window > 0:
        found["window"] = (window - 1, -1)
    if said.dtype == torch.int32 and said.shape[1] > 1:
        found["cu_seqlens_q"] = found["cu_seqlens_k"] = said[0]
        found["max_seqlen_q"] = found["max_seqlen_k"] = length
        return found
    if said.shape[0] != batch:
        raise UnsupportedError(f"orchard.transformers: a mask for {said.shape[0]} sequences, the "
                               f"batch has {batch}: attention_mask needs a row for each, or this "
                               'model changes its masks, use "eager" or "sdpa"')
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
    if "attn_mask" in options or (lengths is not None and not no_values(lengths)
                                  and bool((lengths < keys).any())):
        raise ArgumentError("orchard.transformers: cu_seq_lens_q came together with padding; a "
                            "packed batch has none, so leave attention_mask out")


def _limited(given: Optional[Tensor], seen: Tensor) -> Tensor:
    """A mask that leaves no more than `seen`."""
    if given is None:
        return seen
    return given & seen if given.dtype == torch.bool else given.masked_fill(~seen, float("-inf"))


def _chosen(given: Optional[Tensor], indices: Tensor, keys: int, crop: int) -> Tensor:
    """A mask that leaves each query the keys of `indices` [B,T,n], that sparse attention chose."""
    seen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    return _limited(given, seen.scatter(-1, indices.long(), True)[:, None, :, :crop])


def _one_sequence(options: Dict[str, Any], rows: int, length: int, keys: int) -> Tensor:
    """For packed sequences with a position bias or a mask, whose numbers are those of the whole
    row: which token may see which, [B,1,T,T], in place of the sequences' beginnings."""
    begins, others = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    del options["max_seqlen_q"], options["max_seqlen_k"]
    if keys != length or not (others is begins or torch.equal(begins, others)):
        raise UnsupportedError("orchard.transformers: packed sequences with a position bias or a "
                               "mask of this model's own, whose queries and keys are not the same "
                               "tokens; pass them padded")
    places = torch.arange(rows * length, device=begins.device)
    number = torch.bucketize(places, begins, right=True).view(rows, 1, length)
    return number[..., :, None] == number[..., None, :]


def _causal_without_mask(module: torch.nn.Module) -> bool:
    """What a layer means that gets no mask. One that does not say is causal, as "sdpa" has it, but
    for cross attention (Mllama's)."""
    return getattr(module, "is_causal", "CrossAttention" not in type(module).__name__)


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
    options = _options(attention_mask, query.shape[0], length, keys)
    if attention_mask is not None:
        causal = is_encoded(attention_mask)
    else:
        causal = _causal_without_mask(module) if is_causal is None else is_causal
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ArgumentError("orchard.transformers: of cu_seq_lens_q and cu_seq_lens_k one came "
                            "without the other")
    if cu_seq_lens_q is not None:
        if attention_mask is None or causal:
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
                                   "keys (indices=...); pass them padded")
        given = _chosen(given, indices, keys, crop)
    if given is not None and given.dtype != torch.bool and position_bias is not None:
        options["bias"], given = position_bias + given, None  # both additive
    if "cu_seqlens_q" in options and (position_bias is not None or given is not None):
        given = _limited(given, _one_sequence(options, query.shape[0], length, keys))
    if "cu_seqlens_q" in options:
        call = (_rows(query), _rows(key), _rows(value))
    else:
        call = (query, key, value)
    out = orchard_torch.scaled_dot_product_attention(
        *call, given, dropout, causal, scaling, query.shape[1] != key.shape[1], **options)
    if recording():
        record_call(module, query, key, attention_mask,
                    _path({**options, "attn_mask": given}, causal))
    if "cu_seqlens_q" in options:
        return out.view(query.shape[0], length, *out.shape[1:]), None
    return out.transpose(1, 2).contiguous(), None
