"""Tiny models of Transformers with random weights, as the tests of "orchard" share them; `watch` is a fixture."""

import copy
import functools

import pytest
import torch
import transformers as T

from orchard.transformers import masks as orchard_masks

COMMON = dict(vocab_size=61, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
              eos_token_id=None)
LLAMA = dict(COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "gpt2": (T.GPT2LMHeadModel, lambda: T.GPT2Config(
        **COMMON, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        scale_attn_by_inverse_layer_idx=True)),
    "llama": (T.LlamaForCausalLM, lambda: T.LlamaConfig(**LLAMA)),
    "mistral": (T.MistralForCausalLM, lambda: T.MistralConfig(**LLAMA, sliding_window=6)),
    "qwen2": (T.Qwen2ForCausalLM, lambda: T.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": (T.Qwen3ForCausalLM, lambda: T.Qwen3Config(**LLAMA, head_dim=8)),
    "gemma2": (T.Gemma2ForCausalLM, lambda: T.Gemma2Config(
        **LLAMA, head_dim=8, sliding_window=6, attn_logit_softcapping=2.0)),
    "gpt_oss": (T.GptOssForCausalLM, lambda: T.GptOssConfig(
        **LLAMA, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"])),
    # Makes a window mask, but does not pass sliding_window on to its attention.
    "qwen2_moe": (T.Qwen2MoeForCausalLM, lambda: T.Qwen2MoeConfig(
        **LLAMA, use_sliding_window=True, sliding_window=6, max_window_layers=0, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16)),
}
OTHERS = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, intermediate_size=48,
              num_attention_heads=4)
MADE = {}


def pair(name, std=0.2):
    """(eager, orchard): the same weights, in eval mode.

    The weights are larger than Transformers makes them, so that scores differ enough for a soft
    cap, a sink or a wrong scale to show; std=None leaves them, for training.
    """
    if (name, std) not in MADE:
        torch.manual_seed(3)
        model_class, config = MODELS[name]
        MADE[name, std] = both_ways(model_class(config()).eval(), std, name == "gpt_oss")
    return MADE[name, std]


def both_ways(eager, std=0.2, vectors=False):
    """The model with weights of that size, and a copy by orchard; `vectors`: sinks count too."""
    for parameter in eager.parameters():
        if std is not None and (parameter.dim() > 1 or vectors):
            torch.nn.init.normal_(parameter, std=std)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    return eager, ours


def tokens(*shape):
    return torch.randint(2, 61, shape, generator=torch.Generator().manual_seed(sum(shape)))


def padding(side, batch=3, length=14):
    """[B,T] of 0 and 1: the second sequence 5 shorter, the third 9."""
    keys = torch.ones(batch, length, dtype=torch.long)
    for row, missing in ((1, 5), (2, 9)):
        keys[row, -missing:] = 0
    return keys.flip(1) if side == "left" else keys


class Watch:
    """Counts masks of T x S with more than one query that are made for "orchard"."""

    def __init__(self, monkeypatch):
        self.made = 0
        for name in ("sdpa_mask", "eager_mask"):
            monkeypatch.setattr(orchard_masks, name, self.counting(getattr(orchard_masks, name)))
        orchard_masks._why_not_sure.cache_clear()

    def counting(self, real):
        @functools.wraps(real)  # its module too, by which orchard knows it
        def counted(*args, **kwargs):
            made = real(*args, **kwargs)
            self.made += made is not None and made.shape[2] > 1
            return made
        return counted


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def same(want, have, where=None):
    if where is not None:
        want, have = want[where.bool()], have[where.bool()]
    assert want.abs().max() > 1e-2
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def cache_of(kind, model):
    return (T.DynamicCache(config=model.config) if kind == "dynamic" else
            T.StaticCache(config=model.config, max_cache_len=24))
