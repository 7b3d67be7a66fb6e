"""Transformers: importing this module makes attn_implementation="orchard" a valid choice.

    import orchard.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="orchard")
    model.set_attn_implementation("orchard")        # or later; "eager" leads back
    orchard.transformers.doctor(model)              # what each layer does, and why

Two functions are registered. `mask` (masks.py) is called once per forward and kind of layer, and
says in as few numbers as possible who sees whom; `attention` (calls.py) is called by every layer
and understands it. mask_encoding.py holds the masks that one hands to the other.
"""

from .. import torch as _torch  # first: it says so where torch is absent or too old
from .interfaces import NAME, AttentionInterface, AttentionMaskInterface
from .calls import attention
from .diagnosis import doctor
from .masks import mask

__all__ = ["attention", "doctor", "mask"]

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
