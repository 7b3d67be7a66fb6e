"""attn_implementation="orchard" in compiled, exported, traced and mapped models."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers_models import (LLAMA, MODELS, OTHERS, T, both_ways, cache_of, logits, padding,
                                 pair, same, tokens, watch)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_compiled_whole():
    """No graph breaks, with a padding mask and without any."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    eager, ours = both_ways(T.MistralForCausalLM(T.MistralConfig(
        **dict(LLAMA, num_hidden_layers=1), sliding_window=6)).eval())
    ids = tokens(3, 14)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for keys in (padding("left"), None):
        same(logits(eager, ids, attention_mask=keys), logits(compiled, ids, attention_mask=keys),
             keys)


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


def test_training_by_inductor_at_another_length():
    """What its code saves for backward has the strides of the length at hand."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    eager, ours = both_ways(T.LlamaForCausalLM(T.LlamaConfig(**dict(LLAMA, num_hidden_layers=1))))
    compiled = torch.compile(ours, dynamic=True)
    for length in (12, 17):
        ids, keys, found = tokens(3, length), padding("left", length=length), []
        for model, call in ((eager, eager), (ours, compiled)):
            made = call(ids, attention_mask=keys, use_cache=False).logits[keys.bool()]
            found.append(torch.autograd.grad(made.sin().sum(), list(model.parameters())))
        for want, have in zip(*found):
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_gradients_of_each_sample():
    """torch.func.vmap over sequences with padding of their own."""
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


def test_fake_tensors():
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(2, 7, dtype=torch.int64)
        model = T.LlamaForCausalLM._from_config(T.LlamaConfig(**LLAMA),
                                                attn_implementation="orchard")
        assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 7, 61)


def test_masks_on_meta():
    model = T.LlamaForCausalLM._from_config(T.LlamaConfig(**LLAMA),
                                            attn_implementation="orchard").to("meta")
    ids = torch.zeros(2, 7, dtype=torch.int64, device="meta")
    assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (2, 7, 61)
