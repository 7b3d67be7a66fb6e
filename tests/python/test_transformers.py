"""attn_implementation="orchard" against "eager", on tiny models with random weights."""

import copy
import importlib
import sys

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import orchard.transformers as orchard_transformers
from orchard import OrchardError

COMMON = dict(vocab_size=61, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
              eos_token_id=None)
LLAMA = dict(COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2)
T = transformers
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
    """[B,T] of 0 and 1: the second sentence 5 shorter, the third 9."""
    keys = torch.ones(batch, length, dtype=torch.long)
    for row, missing in ((1, 5), (2, 9)):
        keys[row, -missing:] = 0
    return keys.flip(1) if side == "left" else keys


class Watch:
    """Counts masks of T x S with more than one query that are made for "orchard"."""

    def __init__(self, monkeypatch):
        self.made = 0
        real = orchard_transformers.sdpa_mask

        def counting(*args, **kwargs):
            made = real(*args, **kwargs)
            self.made += made is not None and made.shape[2] > 1
            return made
        monkeypatch.setattr(orchard_transformers, "sdpa_mask", counting)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# ---- Logits --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
def test_plain_and_padded(name, watch):
    eager, ours = pair(name)
    ids = tokens(3, 14)
    same(logits(eager, ids), logits(ours, ids))
    for side in ("right", "left"):
        keys = padding(side)
        positions = (keys.cumsum(1) - 1).clamp(min=0)
        for kwargs in ({"use_cache": True}, {"use_cache": False}, {"position_ids": positions}):
            same(logits(eager, ids, attention_mask=keys, **kwargs),
                 logits(ours, ids, attention_mask=keys, **kwargs), keys)
    assert watch.made == 0


@pytest.mark.parametrize("name", MODELS)
def test_packed(name, watch):
    """Three sentences in one row: as eager masks them, and as if each were alone."""
    eager, ours = pair(name)
    lengths = [5, 8, 3]
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.tensor([0, 5, 13, 16], dtype=torch.int32)
    alone = torch.cat([logits(eager, part) for part in ids.split(lengths, dim=1)], dim=1)
    if name == "gpt_oss":  # does not tell its mask the positions: eager looks across sentences
        same(logits(eager, ids, position_ids=positions, use_cache=False),
             logits(ours, ids, position_ids=positions, use_cache=False))
    else:
        same(alone, logits(eager, ids, position_ids=positions, use_cache=False))
        same(alone, logits(ours, ids, position_ids=positions, use_cache=False))
    assert watch.made == 0
    # With a cache, Transformers itself sees no packing in position_ids: the lengths say it.
    same(alone, logits(ours, ids, position_ids=positions, cu_seq_lens_q=starts,
                       cu_seq_lens_k=starts, max_length_q=8, max_length_k=8))
    if name != "gpt_oss":
        rows = logits(ours, ids.expand(2, -1), position_ids=positions.expand(2, -1),
                      use_cache=False)
        same(alone.expand(2, -1, -1), rows)
    assert watch.made == 0


def test_packed_training_gradients():
    eager, ours = pair("mistral")
    lengths = [9, 4, 7]
    ids = tokens(1, 20)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    found = []
    for model in (eager, ours):
        loss = model(ids, position_ids=positions, labels=ids, use_cache=False).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for want, have in zip(*found):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)


def cache_of(kind, model):
    return (T.DynamicCache(config=model.config) if kind == "dynamic" else
            T.StaticCache(config=model.config, max_cache_len=24))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill(name, kind, watch):
    """A prompt in pieces of 9, 4 and 1 tokens: the logits of eager in one piece."""
    eager, ours = pair(name)
    ids = tokens(3, 14)
    for keys in (None, torch.ones_like(ids), padding("left")):
        given = {} if keys is None else {"position_ids": (keys.cumsum(1) - 1).clamp(min=0)}
        want = logits(eager, ids, attention_mask=keys, use_cache=False, **given)
        cache = cache_of(kind, ours)
        have = []
        for begin, end in ((0, 9), (9, 13), (13, 14)):
            given = {} if keys is None else {
                "attention_mask": keys[:, :end],
                "position_ids": (keys.cumsum(1) - 1).clamp(min=0)[:, begin:end]}
            have.append(logits(ours, ids[:, begin:end], past_key_values=cache, **given))
        same(want, torch.cat(have, dim=1), keys)
    assert watch.made == 0


# ---- Generation ----------------------------------------------------------------------------------

@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_token_for_token(name, cache, watch):
    eager, ours = pair(name)
    ids = tokens(3, 14)
    for keys in (torch.ones_like(ids), padding("left")):
        made = [model.generate(ids, attention_mask=keys, max_new_tokens=6, do_sample=False,
                               cache_implementation=cache, disable_compile=True,
                               return_dict_in_generate=True, output_logits=True)
                for model in (eager, ours)]
        assert torch.equal(made[0].sequences, made[1].sequences)
        same(torch.stack(made[0].logits), torch.stack(made[1].logits))
    assert watch.made == 0


# ---- Training ------------------------------------------------------------------------------------

def train(model, steps, seed=0, padded=True, **kwargs):
    """Losses of a model that learns to count, in sentences padded on the right and on the left, or
    without padding and without a mask.

    The token before a sentence sees no key, for which eager invents a uniform attention: the first
    token is not among the labels.
    """
    model = copy.deepcopy(model).train()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = 2 + (torch.arange(14) + tokens(3, 1) + step) % 59
        if padded:
            keys = padding("right" if step % 2 else "left")
            given = dict(attention_mask=keys, labels=ids.masked_fill(
                (keys == 0) | (keys.cumsum(1) == 1), -100))
        else:
            given = dict(labels=ids)
        loss = model(ids, **given, **kwargs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2"])
def test_training(name, watch):
    eager, ours = pair(name, std=None)
    want, have = train(eager, 20), train(ours, 20)
    assert max(abs(a - b) for a, b in zip(want, have)) < 1e-5
    assert have[-1] < 0.9 * have[0]
    assert watch.made == 0


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2"])
def test_training_without_padding(name, watch):
    eager, ours = pair(name, std=None)
    want, have = train(eager, 20, padded=False), train(ours, 20, padded=False)
    assert max(abs(a - b) for a, b in zip(want, have)) < 1e-5
    assert have[-1] < 0.9 * have[0]
    assert watch.made == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    eager, ours = pair("mistral", std=None)
    ours = copy.deepcopy(ours)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    want, have = train(eager, 4, use_cache=False), train(ours, 4, use_cache=False)
    assert max(abs(a - b) for a, b in zip(want, have)) < 1e-5


def test_dropout_falls_repeats_and_has_its_rate():
    torch.manual_seed(3)
    config = MODELS["gpt2"][1]()
    config.attn_pdrop = 0.1
    model = T.GPT2LMHeadModel(config)
    model.set_attn_implementation("orchard")
    first, again, other = train(model, 20, 1), train(model, 20, 1), train(model, 20, 2)
    assert first == again and first != other
    assert first[-1] < 0.9 * first[0]
    # One head of 400 queries that look at all 400 keys alike: the mean is 1, by the rate's error.
    module = torch.nn.Module()
    module.is_causal = False
    zero, one = torch.zeros(1, 1, 400, 8), torch.ones(1, 1, 400, 8)
    out, _ = orchard_transformers.attention(module, zero, zero, one, None, dropout=0.1)
    assert out.shape == (1, 400, 1, 8) and out.is_contiguous()
    assert abs(out[..., 0].mean() - 1) < 5 * (0.1 / 0.9 / 160000) ** 0.5
    assert (out != 1).any()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_dropout_in_other_models(name):
    """Without padding: repeats by the seed, is not that without dropout, and the loss falls."""
    model_class, config = MODELS[name]
    config = config()
    config.attention_dropout = 0.1
    torch.manual_seed(3)
    model = model_class(config)
    model.set_attn_implementation("orchard")
    first, again, other = (train(model, 20, seed, padded=False) for seed in (1, 1, 2))
    assert first == again and first != other
    assert first[-1] < 0.9 * first[0]
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    assert train(model, 2, 1, padded=False) != first[:2]


# ---- Sparse attention ----------------------------------------------------------------------------

def test_keys_chosen_by_an_indexer():
    torch.manual_seed(3)
    config = T.DeepseekV32Config(**dict(LLAMA, num_key_value_heads=4), q_lora_rank=16,
                                 kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                                 v_head_dim=12, n_routed_experts=2, moe_intermediate_size=16,
                                 first_k_dense_replace=2, n_group=1, topk_group=1,
                                 num_experts_per_tok=1, index_topk=3, index_n_heads=2,
                                 index_head_dim=16)
    eager = T.DeepseekV32ForCausalLM(config).eval()
    eager, ours = both_ways(eager)
    ids = tokens(3, 14)
    for keys in (torch.ones_like(ids), padding("left")):
        same(logits(eager, ids, attention_mask=keys), logits(ours, ids, attention_mask=keys), keys)
    made = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (eager, ours)]
    assert torch.equal(*made)


# ---- Masks that were changed on their way --------------------------------------------------------

@pytest.mark.parametrize("config", [
    dict(layer_types=["sliding_attention"] * 2),
    dict(layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
         compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}),
])
def test_deepseek_v4_which_lengthens_its_masks(config):
    torch.manual_seed(3)
    config = T.DeepseekV4Config(**dict(LLAMA, num_key_value_heads=1), **config, head_dim=16,
                                q_lora_rank=16, o_lora_rank=16, o_groups=2, n_routed_experts=2,
                                num_experts_per_tok=1, moe_intermediate_size=16, index_n_heads=2,
                                index_head_dim=16, index_topk=3, sliding_window=6)
    eager = T.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    ids = tokens(3, 14)
    for keys in (None, padding("right"), padding("left")):
        same(logits(eager, ids, attention_mask=keys), logits(ours, ids, attention_mask=keys), keys)
    made = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (eager, ours)]
    assert torch.equal(*made)


def test_packed_doge_which_computes_with_its_mask():
    torch.manual_seed(3)
    eager = T.DogeForCausalLM(T.DogeConfig(**LLAMA, keep_window_size=5)).eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    ids, positions = tokens(1, 14), torch.cat([torch.arange(5), torch.arange(9)])[None]
    same(*(logits(model, ids, position_ids=positions, use_cache=False) for model in (eager, ours)))


def test_t5gemma2_which_joins_two_masks():
    torch.manual_seed(3)
    small = dict(LLAMA, head_dim=8, sliding_window=6)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        small.pop(name)
    decoder = T.T5Gemma2DecoderConfig(**small)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                  image_size=16, patch_size=8)
    encoder = T.T5Gemma2EncoderConfig(text_config=small, vision_config=vision,
                                      image_token_index=60, mm_tokens_per_image=1)
    eager = T.T5Gemma2ForConditionalGeneration(
        T.T5Gemma2Config(encoder=encoder, decoder=decoder, image_token_index=60)).eval()
    eager, ours = both_ways(eager)
    ids = tokens(3, 14).clamp(max=59)
    for keys in (torch.ones_like(ids), padding("right")):
        same(*(logits(model, ids, attention_mask=keys, decoder_input_ids=ids[:, :7])
               for model in (eager, ours)))


def described(form, window):
    """A mask of "orchard" for 2 sentences of 14 tokens, and the keys that its attention gets."""
    config = MODELS["mistral"][1]()
    config.sliding_window = window
    keys = padding("left" if form == "keys" else "right")[:2].bool()
    given = dict(batch_size=2, q_length=14, kv_length=14, config=config, local_size=window or None,
                 attention_mask=keys)
    if form == "packed":
        sequence = (torch.arange(14) > 5).long().expand(2, -1)
        mask_utils = transformers.masking_utils
        base = (mask_utils.sliding_window_causal_mask_function(window) if window else
                mask_utils.causal_mask_function)
        given.update(attention_mask=None, allow_is_causal_skip=False, mask_function=(
            mask_utils.and_masks(base, mask_utils.packed_sequence_mask_function(sequence))))
    return orchard_transformers.mask(**given)


def twice(mask):
    return torch.cat([mask, mask], dim=-1)


CHANGES = {
    "padded": lambda mask: torch.nn.functional.pad(mask, (0, 7)),
    "padded in front": lambda mask: torch.nn.functional.pad(mask, (3, 0)),
    "padded with ones": lambda mask: torch.nn.functional.pad(mask, (0, 7), value=1),
    "padded on both sides": lambda mask: torch.nn.functional.pad(mask, (0, 1, 0, 1)),
    "other keys": lambda mask: torch.nn.functional.pad(mask, (0, 0, 0, 0, 0, 2)),
    "concatenated": lambda mask: torch.cat([mask, mask.new_zeros(*mask.shape[:3], 5)], dim=-1),
    "twice": twice,
    "twice, then cut": lambda mask: twice(mask)[..., :mask.shape[3] + 1],
    "longer than before": lambda mask: mask[..., :1].expand(-1, -1, 1, mask.shape[3] + 1),
    "cut": lambda mask: mask[..., :-1],
    "cut in front": lambda mask: mask[..., 1:],
    "fewer keys": lambda mask: mask[:, 1:],
    "copied and cut": lambda mask: mask.contiguous()[..., 1:],
    "copied and padded": lambda mask: torch.nn.functional.pad(mask.contiguous(), (0, 1)),
    "one sentence": lambda mask: mask[:1, 1:],
    "added to": lambda mask: mask + 1,
    "as float": lambda mask: mask.float(),
    "as bool": lambda mask: mask.bool(),
}


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("form", ["lengths", "keys", "packed"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_changed_mask_never_passes(form, window, compiled):
    torch._dynamo.reset()
    module, mask = torch.nn.Module(), described(form, window)
    assert mask.dtype == (torch.uint8 if form == "keys" else torch.int32)
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4, 14, 8) for _ in range(3))

    def call(mask):
        return orchard_transformers.attention(module, q, k, v, mask)[0]
    run = torch.compile(call, backend="eager", fullgraph=True, dynamic=False) if compiled \
        else call
    want = call(mask)
    assert torch.equal(run(mask), want)
    assert torch.equal(run(mask.contiguous()), want)  # generate copies masks
    for name, change in CHANGES.items():
        changed = change(mask)
        if name == "one sentence" and form == "packed":
            changed = mask[:, 2:]
        torch._dynamo.reset()
        with pytest.raises(Exception) as error:
            run(changed)
        if name not in ("as float", "as bool"):
            assert "changes its masks" in str(error.value), name


def test_a_mask_for_another_number_of_keys():
    mask = described("lengths", 6)
    q = torch.randn(2, 4, 14, 8)
    k = torch.randn(2, 4, 16, 8)
    with pytest.raises(OrchardError, match="changes its masks"):
        orchard_transformers.attention(torch.nn.Module(), q, k, k, mask)
    with pytest.raises(OrchardError, match="2 sentences with 1"):
        orchard_transformers.attention(torch.nn.Module(), q[:1], q[:1], q[:1], mask)


# ---- Models for which Transformers does not vouch ------------------------------------------------

OTHERS = dict(vocab_size=61, hidden_size=32, num_hidden_layers=1, intermediate_size=48,
              num_attention_heads=4)


@pytest.mark.parametrize("name, calls, config", [
    ("BloomForCausalLM", False, lambda: T.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1,
                                                      n_head=4)),
    ("MPNetForMaskedLM", False, lambda: T.MPNetConfig(**OTHERS)),
    ("SplinterModel", True, lambda: T.SplinterConfig(**OTHERS)),  # does not say is_causal=False
])
def test_models_that_may_not_follow_the_interface(name, calls, config):
    torch.manual_seed(3)
    eager, ours = (getattr(T, name)._from_config(config(), attn_implementation=one).eval()
                   for one in ("eager", "orchard"))
    for parameter in eager.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(eager.state_dict())
    ids = tokens(3, 14)
    with torch.no_grad(), pytest.warns(UserWarning, match="does not say that the models of"):
        orchard_transformers._unsure.cache_clear()
        same(eager(ids)[0], ours(ids)[0])
    with torch.no_grad():
        for side in ("right", "left"):
            keys = padding(side)
            same(eager(ids, attention_mask=keys)[0], ours(ids, attention_mask=keys)[0], keys)
    lines = orchard_transformers.doctor(ours, input_ids=ids)
    assert calls == ("no layer calls Orchard: this model computes its attention itself"
                     not in lines[1])


# ---- Encoders, and encoders with decoders --------------------------------------------------------

def test_bert(watch):
    torch.manual_seed(3)
    config = T.BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48,
                          num_attention_heads=4, attention_probs_dropout_prob=0.0,
                          hidden_dropout_prob=0.0)
    eager = T.BertForMaskedLM(config).eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    ids = tokens(3, 14)
    same(logits(eager, ids), logits(ours, ids))
    for side in ("right", "left"):
        keys = padding(side)
        same(logits(eager, ids, attention_mask=keys), logits(ours, ids, attention_mask=keys), keys)
    assert watch.made == 0


def test_t5_with_the_gradient_of_its_position_bias(watch):
    torch.manual_seed(3)
    config = T.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                        dropout_rate=0.0, decoder_start_token_id=0)
    eager = T.T5ForConditionalGeneration(config).eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    ids, keys = tokens(3, 14), padding("right")
    found = []
    for model in (eager, ours):
        out = model(ids, attention_mask=keys, labels=tokens(3, 7))
        found.append((out.logits, torch.autograd.grad(out.loss, list(model.parameters()))))
    same(found[0][0], found[1][0])
    names = [name for name, _ in eager.named_parameters()]
    assert sum("relative_attention_bias" in name for name in names) == 2
    for name, want, have in zip(names, found[0][1], found[1][1]):
        assert want.abs().max() > 0, name
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-6, msg=name)
    made = [model.generate(ids, attention_mask=keys, max_new_tokens=6, do_sample=False)
            for model in (eager, ours)]
    assert torch.equal(*made)
    assert watch.made == 0


# ---- Compiled ------------------------------------------------------------------------------------

def test_compiled_whole():
    """No graph breaks, with a padding mask and without any."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    eager = T.MistralForCausalLM(T.MistralConfig(**dict(LLAMA, num_hidden_layers=1),
                                                 sliding_window=6)).eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("orchard")
    ids = tokens(3, 14)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for keys in (padding("left"), None):
        same(logits(eager, ids, attention_mask=keys), logits(compiled, ids, attention_mask=keys),
             keys)


def test_gradients_of_each_sample():
    """torch.func.vmap over sentences with padding of their own."""
    eager, ours = pair("mistral")
    ids, keys = tokens(3, 14), padding("right")

    def each(model):
        def loss(parameters, row, mask):
            made = torch.func.functional_call(model, parameters, (), {
                "input_ids": row[None], "attention_mask": mask[None], "use_cache": False}).logits
            return torch.where(mask[None, :, None].bool(), made, 0.0).sin().sum()

        parameters = {name: x.detach() for name, x in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, ids, keys)

    expected, found = each(eager), each(ours)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-4 * float(x.abs().max()))


def test_several_tokens_at_once_where_layers_say_that_they_are_not_causal():
    """PaliGemma's: they are causal where they get a causal mask, as behind a cache."""
    ids, made = tokens(2, 14), []
    for model in map(copy.deepcopy, pair("llama")):
        with torch.no_grad():
            cache = model(ids[:, :8], attention_mask=torch.ones(2, 8)).past_key_values
            for layer in model.model.layers:
                layer.self_attn.is_causal = False
            made.append(model(ids[:, 8:], past_key_values=cache,
                              attention_mask=torch.ones(2, 14)).logits)
    same(*made)


def test_exported_for_any_length():
    """Shorter than the sliding window, longer, and as long."""
    class Whole(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, keys):
            return self.model(input_ids=ids, attention_mask=keys, use_cache=False).logits

    eager, ours = map(Whole, pair("mistral"))
    ids, length = tokens(3, 14), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(ours, (ids, torch.ones_like(ids)),
                                  dynamic_shapes=({1: length}, {1: length})).module()
    for count in (4, 6, 30):
        ids = tokens(3, count)
        same(eager(ids, torch.ones_like(ids)), program(ids, torch.ones_like(ids)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("width", ["tokens", "cache", "between"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_chunks_in_a_static_cache(name, width, compiled, watch):
    """Prompts in pieces of 9 and 5 tokens, with a mask as long as the tokens, the cache, or so."""
    eager, ours = pair(name)
    torch._dynamo.reset()
    model = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    ids = tokens(3, 14)
    for keys in (torch.ones_like(ids), padding("left")):
        positions = (keys.cumsum(1) - 1).clamp(min=0)
        want = logits(eager, ids, attention_mask=keys, position_ids=positions, use_cache=False)
        cache, have = cache_of("static", ours), []
        for begin, end in ((0, 9), (9, 14)):
            wide = {"tokens": end, "cache": 24, "between": end + 3}[width]
            mask = torch.nn.functional.pad(keys[:, :end], (0, wide - end))
            have.append(logits(model, ids[:, begin:end], attention_mask=mask,
                               position_ids=positions[:, begin:end], past_key_values=cache))
        same(want, torch.cat(have, dim=1), keys)
    assert watch.made == 0


@pytest.mark.parametrize("name", ["gemma2"])  # layers with and without a window
def test_generation_by_a_compiled_forward(name):
    """The masks that `generate` makes and copies are inputs of the graph."""
    eager, ours = pair(name)
    torch._dynamo.reset()
    ours = copy.deepcopy(ours)
    ours.forward = torch.compile(ours.forward, backend="aot_eager")
    for batch in (3, 1):
        ids, keys = tokens(batch, 14), padding("left")[-batch:]
        for cache in ("static", "dynamic"):
            made = [model.generate(ids, attention_mask=keys, max_new_tokens=4, do_sample=False,
                                   cache_implementation=cache, disable_compile=True)
                    for model in (eager, ours)]
            assert torch.equal(*made)


# ---- Custom masks, refusals, switching -----------------------------------------------------------

@pytest.mark.parametrize("name", ["mistral", "bert"])
def test_traced_without_padding_used_with_it(name):
    """torch.jit.trace must not remember what the mask of its example looked like."""
    torch.manual_seed(3)
    model = pair(name)[1] if name in MODELS else T.BertForMaskedLM._from_config(
        T.BertConfig(**OTHERS), attn_implementation="orchard").eval()

    class Call(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, keys):
            more = {} if name == "bert" else {"use_cache": False}
            return self.model(ids, attention_mask=keys, **more).logits
    call, short, ids = Call(), tokens(3, 5), tokens(3, 14)
    with torch.no_grad():
        traced = torch.jit.trace(call, (short, torch.ones_like(short)), check_trace=False)
        for keys in (padding("right"), padding("left"), torch.ones_like(ids)):
            same(call(ids, keys), traced(ids, keys), keys)


def test_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(2, 7, dtype=torch.int64)
        model = T.LlamaForCausalLM._from_config(T.LlamaConfig(**LLAMA),
                                                attn_implementation="orchard")
        assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 7, 61)


def test_masks_of_the_users_own():
    eager, ours = pair("llama")
    ids = tokens(2, 10)
    seen = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(2)) > 0.4
    seen |= torch.eye(10, dtype=torch.bool)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    same(logits(eager, ids, attention_mask=additive), logits(ours, ids, attention_mask=seen))
    same(logits(eager, ids, attention_mask=additive), logits(ours, ids, attention_mask=additive))


def test_refusals():
    module = torch.nn.Module()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(OrchardError, match="paged cache"):
        orchard_transformers.attention(module, q, q, q, None, cache=object())
    with pytest.raises(OrchardError, match="2 dimensions"):
        orchard_transformers.attention(module, q, q, q, torch.ones(1, 4))
    two = torch.cat([q, q])
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(OrchardError, match="not the same tokens"):
        orchard_transformers.attention(module, two, two, two, None, cu_seq_lens_q=cu,
                                       cu_seq_lens_k=torch.tensor([0, 3, 8]),
                                       position_bias=torch.zeros(2, 2, 4, 4))


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_with_a_position_bias(rows):
    """Its numbers are those of the whole row: a bias that depends on the token, not on distance."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(rows, 2, 12, 8) for _ in range(3))
    bias, module = torch.randn(rows, 2, 12, 12), torch.nn.Module()
    begins = torch.tensor([0, 5] + [12 * i + j for i in range(1, rows) for j in (0, 3)] + [12 * rows],
                          dtype=torch.int32)
    found, _ = orchard_transformers.attention(module, q, k, v, None, cu_seq_lens_q=begins,
                                              cu_seq_lens_k=begins, position_bias=bias)
    for row in range(rows):
        cuts = sorted({0, 12, *(int(x) - 12 * row for x in begins if 0 <= x - 12 * row < 12)})
        for a, b in zip(cuts, cuts[1:]):
            part = [x[row, :, a:b].double() for x in (q, k, v)]
            score = part[0] @ part[1].mT / 8 ** 0.5 + bias[row, :, a:b, a:b]
            score = score.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
            exact = torch.softmax(score, -1) @ part[2]
            torch.testing.assert_close(found[row, a:b].transpose(0, 1).double(), exact, rtol=1e-4,
                                       atol=1e-5)


def test_doctor_hears_compiled_models_and_leaves_modes_alone(capsys):
    model = copy.deepcopy(pair("llama")[1]).train()
    model.model.layers[0].eval()
    model.compile(backend="aot_eager")
    assert "2 attention layers by Orchard" in orchard_transformers.doctor(model)[0]
    assert model.training and model.model.layers[1].training
    assert not model.model.layers[0].training and not model.model.layers[0].mlp.training


def test_masks_on_meta():
    model = T.LlamaForCausalLM._from_config(T.LlamaConfig(**LLAMA),
                                            attn_implementation="orchard").to("meta")
    ids = torch.zeros(2, 7, dtype=torch.int64, device="meta")
    assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 7, 61)


@pytest.mark.parametrize("words, given", [
    ("chooses blocks of keys", {"block_indices": torch.zeros(1, 1, 4, 1)}),
    ("packed sequences together with chosen keys", {
        "indices": torch.zeros(1, 4, 1, dtype=torch.int32),
        "cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, 4])})])
def test_choices_that_are_refused(words, given):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=words):
        orchard_transformers.attention(torch.nn.Module(), q, q, q, None, **given)


def test_packing_and_padding_together_are_refused():
    _, ours = pair("mistral")
    starts = torch.tensor([0, 6, 14], dtype=torch.int32)
    for side in ("left", "right"):
        with pytest.raises(OrchardError, match="together with padding"):
            logits(ours, tokens(3, 14)[1:2], attention_mask=padding(side)[1:2],
                   cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_a_transformers_that_is_missing_or_too_old(monkeypatch):
    monkeypatch.delitem(sys.modules, "orchard.transformers")
    with monkeypatch.context() as now:
        now.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position: None)
        with pytest.raises(ImportError, match=r"needs Transformers 5\.22 or later.*q_offset"):
            importlib.import_module("orchard.transformers")
    with monkeypatch.context() as now:
        now.setitem(sys.modules, "transformers", None)
        with pytest.raises(ImportError, match=r"needs Transformers 5\.22 or later"):
            importlib.import_module("orchard.transformers")


def test_there_and_back():
    eager, ours = pair("qwen3")
    model = copy.deepcopy(eager)
    ids = tokens(2, 7)
    before = logits(model, ids)
    model.set_attn_implementation("orchard")
    assert torch.equal(logits(model, ids), logits(ours, ids))
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model, ids), before)
    assert T.AutoModelForCausalLM.from_config(
        ours.config, attn_implementation="orchard").config._attn_implementation == "orchard"


# ---- doctor --------------------------------------------------------------------------------------

def test_doctor_tells_the_path_and_the_reason(capsys):
    eager, ours = pair("gemma2")
    lines = orchard_transformers.doctor(ours)
    assert capsys.readouterr().out == "\n".join(lines) + "\n"
    assert lines[0].startswith('Gemma2ForCausalLM: attn_implementation "orchard", 2 attention')
    text = "\n".join(lines)
    assert "model.layers.0.self_attn  q [2, 4, 16, 8]  k [2, 2, 16, 8]" in lines
    windowed, full = text.split("model.layers.1.self_attn")
    assert "window 6" in windowed and "window" not in full and full.count("softcap") == 3
    assert "  right padding  cpu: causal, key lengths, softcap, no mask" in full
    assert "(all padding is on the right)" in full
    assert "  left padding   cpu: causal, softcap, key mask [2, 1, 1, 16]" in full
    assert "in memory" not in text
    seen = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    text = "\n".join(orchard_transformers.doctor(ours, input_ids=tokens(2, 7), attention_mask=seen))
    assert "mask [2, 1, 7, 7] in memory" in text and "did not make" in text
    text = "\n".join(orchard_transformers.doctor(eager))
    assert 'set_attn_implementation("orchard")' in text
    assert 'model.layers.1.self_attn  not Orchard: its attn_implementation is "eager"' in text


def test_doctor_does_not_advise_what_is_not_taken():
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                                       num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    text = "\n".join(orchard_transformers.doctor(model))
    assert "does not follow Transformers' attention interface" in text
    assert "model.set_attn_implementation" not in text


def test_doctor_asks_for_the_inputs_of_other_models():
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    model = T.ViTModel._from_config(T.ViTConfig(**small, image_size=16, patch_size=8),
                                    attn_implementation="orchard")
    with pytest.raises(OrchardError, match=r"pass those of ViTModel: doctor\(model, pixel_values="):
        orchard_transformers.doctor(model)
    lines = orchard_transformers.doctor(model, pixel_values=torch.zeros(1, 3, 16, 16))
    assert "1 attention layers by Orchard" in lines[0]
