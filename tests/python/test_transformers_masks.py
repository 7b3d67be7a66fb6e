"""Masks on their way to attn_implementation="orchard": changed, the user's own, packed, refused."""

import copy

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (create_causal_mask, create_sliding_window_causal_mask,
                                        packed_sequence_mask_function)
from transformers_models import (LLAMA, MODELS, OTHERS, T, both_ways, logits, padding, pair, same,
                                 tokens)

import orchard.transformers as orchard_transformers
from orchard import OrchardError

pytestmark = pytest.mark.usefixtures("one_thread")


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
    eager, ours = both_ways(T.DeepseekV4ForCausalLM(config).eval())
    ids = tokens(3, 14)
    for keys in (None, padding("right"), padding("left")):
        same(logits(eager, ids, attention_mask=keys), logits(ours, ids, attention_mask=keys), keys)
    made = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (eager, ours)]
    assert torch.equal(*made)


def test_packed_doge_which_computes_with_its_mask():
    torch.manual_seed(3)
    eager, ours = both_ways(T.DogeForCausalLM(T.DogeConfig(**LLAMA, keep_window_size=5)).eval(),
                            vectors=True)
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
    """A mask of "orchard" for 2 sequences of 14 tokens."""
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
    "one message": lambda mask: mask[:1, 1:],
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
        if name == "one message" and form == "packed":
            changed = mask[:, 2:]
        torch._dynamo.reset()
        with pytest.raises(Exception) as error:
            run(changed)
        cast = name in ("as float", "as bool")  # no longer known for ours, but for its shape
        assert ("heads, must be 1 or 4" if cast else "changes its masks") in str(error.value), name


def test_a_mask_for_another_number_of_keys():
    mask = described("lengths", 6)
    q = torch.randn(2, 4, 14, 8)
    k = torch.randn(2, 4, 16, 8)
    with pytest.raises(OrchardError, match="changes its masks"):
        orchard_transformers.attention(torch.nn.Module(), q, k, k, mask)
    with pytest.raises(OrchardError, match="2 sequences, the batch has 1"):
        orchard_transformers.attention(torch.nn.Module(), q[:1], q[:1], q[:1], mask)


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


def test_masks_of_the_users_own():
    eager, ours = pair("llama")
    ids = tokens(2, 10)
    seen = torch.rand(2, 1, 10, 10, generator=torch.Generator().manual_seed(2)) > 0.4
    seen |= torch.eye(10, dtype=torch.bool)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    same(logits(eager, ids, attention_mask=additive), logits(ours, ids, attention_mask=seen))
    same(logits(eager, ids, attention_mask=additive), logits(ours, ids, attention_mask=additive))


@pytest.mark.parametrize("mask, words", [
    (torch.ones(2, 1, 10, 10, dtype=torch.int64), "your own, then it must be bool"),
    (torch.ones(2, 10, 10), "has 3 dimensions, must have 2"),
    (torch.arange(13).expand(2, -1) > 1, "a mask for more than the 10 keys"),
])
def test_malformed_masks(mask, words):
    with pytest.raises(OrchardError, match=words):
        logits(pair("llama")[1], tokens(2, 10), attention_mask=mask, use_cache=False)


def test_a_mask_of_one_row_for_several_sequences():
    with pytest.raises(OrchardError, match="1 sequences, the batch has 2: attention_mask needs a"):
        logits(pair("llama")[1], tokens(2, 10), attention_mask=torch.arange(10)[None] > 1)


@pytest.mark.parametrize("shape", [(10,), (2, 10, 10)])
def test_malformed_masks_for_encoders(shape):
    model = T.BertModel._from_config(T.BertConfig(**OTHERS), attn_implementation="orchard")
    with pytest.raises(OrchardError, match=f"has {len(shape)} dimensions, must have 2"):
        model(tokens(2, 10), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("states", [10, 14])
def test_cross_attention_that_does_not_say_whether_it_is_causal(states):
    """Mllama's, where no mask comes with the image: "eager" sees all of it, and so do we."""
    config = T.MllamaConfig(text_config=dict(LLAMA, cross_attention_layers=[1])).text_config
    torch.manual_seed(3)
    model = T.MllamaTextModel(config).eval()
    torch.nn.init.ones_(model.layers[1].cross_attn_attn_gate)
    image = torch.randn(2, states, 32)
    with torch.no_grad():
        same(*(one(tokens(2, 10), cross_attention_states=image).last_hidden_state
               for one in both_ways(model)))


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_with_a_position_bias(rows):
    """Its numbers are those of the whole row: a bias that depends on the token, not on distance."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(rows, 2, 12, 8) for _ in range(3))
    bias, module = torch.randn(rows, 2, 12, 12), torch.nn.Module()
    begins = torch.tensor([0, 5] + [12 * i + j for i in range(1, rows) for j in (0, 3)]
                          + [12 * rows], dtype=torch.int32)
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


PACKED = {  # models whose layers, or some of them, get a mask in memory
    "llama4": lambda: T.Llama4ForCausalLM(T.Llama4TextConfig(
        **LLAMA, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48, head_dim=8)),
    "modernbert": lambda: T.ModernBertForMaskedLM(T.ModernBertConfig(
        **{**OTHERS, "num_hidden_layers": 4}, local_attention=6, pad_token_id=0)),
    "doge": lambda: T.DogeForCausalLM(T.DogeConfig(**LLAMA)),
    "own mask": lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_with_a_mask_in_memory(name):
    """What the first sequence holds must not be seen in the others."""
    torch.manual_seed(3)
    _, ours = both_ways(PACKED[name]().eval(), vectors=name == "doge")
    lengths = 5, 7, 9
    begins = torch.tensor([0, 5, 12, 21], dtype=torch.int32)
    packing = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 9,
               "max_length_k": 9, "position_ids": torch.cat([*map(torch.arange, lengths)])[None]}
    if name == "own mask":
        packing["attention_mask"] = torch.ones(1, 1, 21, 21, dtype=torch.bool).tril()
    ids = tokens(1, 21)
    other = torch.cat([tokens(1, 5).flip(1), ids[:, 5:]], 1)
    made = [logits(ours, x, **packing)[:, 5:] for x in (ids, other)]
    assert torch.equal(*made)
    assert not torch.equal(*(logits(ours, x, **packing)[:, :5] for x in (ids, other)))
    if name != "llama4":  # whose chunks are those of the whole row
        same(torch.cat([logits(ours, x) for x in ids.split(lengths, 1)], 1)[:, 5:], made[0])


def number(*of_tokens):
    return packed_sequence_mask_function(torch.tensor([of_tokens]))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("overlay", [
    {"and_mask_function": number(0, 0, 0, 1, 1, 1, 2, 2)},
    {"and_mask_function": number(0, 0, 1, 1, 0, 0, 1, 1)},  # in several pieces
    {"or_mask_function": number(0, 0, 0, 1, 1, 1, 2, 2)}])
def test_masks_made_of_two(overlay, window):
    """What looks like packed sequences, but need not be."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 2, 8, 8) for _ in range(3))
    module = torch.nn.Module()
    results = []
    for name in ("sdpa", "orchard"):
        config = T.MistralConfig(sliding_window=window)
        config._attn_implementation = name
        make = create_sliding_window_causal_mask if window else create_causal_mask
        mask = make(config, inputs_embeds=torch.zeros(1, 8, 4), attention_mask=None,
                    past_key_values=None, position_ids=None, **overlay)
        attend = sdpa_attention_forward if name == "sdpa" else orchard_transformers.attention
        results.append(attend(module, q, k, v, mask)[0])
    same(*results)


def test_packing_and_padding_together_are_refused():
    _, ours = pair("mistral")
    starts = torch.tensor([0, 6, 14], dtype=torch.int32)
    for side in ("left", "right"):
        with pytest.raises(OrchardError, match="together with padding"):
            logits(ours, tokens(3, 14)[1:2], attention_mask=padding(side)[1:2],
                   cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_refusals():
    module = torch.nn.Module()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(OrchardError, match="paged cache"):
        orchard_transformers.attention(module, q, q, q, None, cache=object())
    with pytest.raises(OrchardError, match="one came without the other"):
        orchard_transformers.attention(module, q, q, q, None, cu_seq_lens_k=torch.tensor([0, 4]))
    with pytest.raises(OrchardError, match="2 dimensions"):
        orchard_transformers.attention(module, q, q, q, torch.ones(1, 4))
    two = torch.cat([q, q])
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(OrchardError, match="not the same tokens"):
        orchard_transformers.attention(module, two, two, two, None, cu_seq_lens_q=cu,
                                       cu_seq_lens_k=torch.tensor([0, 3, 8]),
                                       position_bias=torch.zeros(2, 2, 4, 4))


@pytest.mark.parametrize("words, given", [
    ("chooses blocks of keys", {"block_indices": torch.zeros(1, 1, 4, 1)}),
    ("packed sequences together with chosen keys", {
        "indices": torch.zeros(1, 4, 1, dtype=torch.int32),
        "cu_seq_lens_q": torch.tensor([0, 4]), "cu_seq_lens_k": torch.tensor([0, 4])})])
def test_choices_that_are_refused(words, given):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=words):
        orchard_transformers.attention(torch.nn.Module(), q, q, q, None, **given)
