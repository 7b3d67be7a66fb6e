"""attn_implementation="orchard" against "eager", on tiny models with random weights."""

import contextlib
import copy
import importlib
import sys
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers_models import (LLAMA, MODELS, OTHERS, T, both_ways, cache_of, logits,
                                 padding, pair, same, tokens, watch)

import orchard.torch
import orchard.transformers as orchard_transformers
from orchard import OrchardError
from orchard.transformers import masks as orchard_masks

pytestmark = pytest.mark.usefixtures("one_thread")


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
    """Three sequences in one row: as eager masks them, and as if each were alone."""
    eager, ours = pair(name)
    lengths = [5, 8, 3]
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.tensor([0, 5, 13, 16], dtype=torch.int32)
    alone = torch.cat([logits(eager, part) for part in ids.split(lengths, dim=1)], dim=1)
    if name == "gpt_oss":  # does not tell its mask the positions: eager looks across sequences
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
    """Losses of a model that learns to count, in sequences padded on the right and on the left, or
    without padding and without a mask.

    The token before a message sees no key, for which eager invents a uniform attention: the first
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


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name, watch):
    """Of every parameter, gpt-oss' sinks among them."""
    ids, keys, found = tokens(3, 14), padding("right"), []
    for model in pair(name):
        made = model(ids, attention_mask=keys, use_cache=False).logits[keys.bool()]
        found.append(torch.autograd.grad(made.sin().sum(), list(model.parameters())))
    names = [name for name, _ in pair(name)[0].named_parameters()]
    assert sum("sinks" in one for one in names) == (2 if name == "gpt_oss" else 0)
    for one, want, have in zip(names, *found):
        assert want.abs().max() > 0 or "attn" not in one, one  # a single expert's router has none
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()),
                                   msg=lambda text: f"{one}: {text}")
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
    # One head of 400 queries that look at all 400 keys alike: so many kept of 400, over 0.9.
    module = torch.nn.Module()
    module.is_causal = False
    zero, one = torch.zeros(1, 1, 400, 8), torch.ones(1, 1, 400, 8)
    out, _ = orchard_transformers.attention(module, zero, zero, one, None, dropout=0.1)
    assert out.shape == (1, 400, 1, 8) and out.is_contiguous()
    kept = out[..., 0] * 0.9 * 400
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-2)
    assert abs(kept.mean() / 400 - 0.9) < 5 * (0.1 * 0.9 / 160000) ** 0.5


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_models_pass_their_own_rate(name, monkeypatch):
    real, rates = orchard.torch.scaled_dot_product_attention, []

    def attention(q, k, v, mask, dropout, *rest, **options):
        rates.append(dropout)
        return real(q, k, v, mask, dropout, *rest, **options)

    monkeypatch.setattr(orchard.torch, "scaled_dot_product_attention", attention)
    config = MODELS[name][1]()
    setattr(config, "attn_pdrop" if name == "gpt2" else "attention_dropout", 0.15)
    model = MODELS[name][0]._from_config(config, attn_implementation="orchard")
    for training in (True, False):
        model.train(training)(tokens(2, 7))
    assert rates == [0.15, 0.15, 0, 0]


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


# ---- Models for which Transformers does not vouch ------------------------------------------------

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
        orchard_masks._why_not_sure.cache_clear()
        same(eager(ids)[0], ours(ids)[0])
    with torch.no_grad():
        for side in ("right", "left"):
            keys = padding(side)
            same(eager(ids, attention_mask=keys)[0], ours(ids, attention_mask=keys)[0], keys)
    lines = orchard_transformers.doctor(ours, input_ids=ids)
    assert calls == ("no layer calls Orchard: this model computes its attention itself"
                     not in lines[1])


def test_a_tower_that_does_not_follow_the_interface_beside_models_that_do():
    torch.manual_seed(3)
    config = T.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    eager, ours = (T.Gemma4AudioModel._from_config(config, attn_implementation=one).eval()
                   for one in ("eager", "orchard"))
    ours.load_state_dict(eager.state_dict())
    heard = torch.randn(2, 128, 128)
    with torch.no_grad(), pytest.warns(UserWarning, match="the models of Gemma4AudioConfig"):
        orchard_masks._why_not_sure.cache_clear()
        same(eager(input_features=heard)[0], ours(input_features=heard)[0])
    assert orchard_masks._why_not_sure(T.Gemma4TextConfig) != orchard_masks._why_not_sure(T.Gemma4AudioConfig)


# ---- Encoders, and encoders with decoders --------------------------------------------------------

def test_bert(watch):
    torch.manual_seed(3)
    config = T.BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, intermediate_size=48,
                          num_attention_heads=4, attention_probs_dropout_prob=0.0,
                          hidden_dropout_prob=0.0)
    eager, ours = both_ways(T.BertForMaskedLM(config).eval(), std=None)
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
    eager, ours = both_ways(T.T5ForConditionalGeneration(config).eval(), std=None)
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


# ---- Switching, doctor ---------------------------------------------------------------------------

def test_doctor_hears_compiled_models_and_leaves_modes_alone():
    model = copy.deepcopy(pair("llama")[1]).train()
    model.model.layers[0].eval()
    model.compile(backend="aot_eager")
    assert "2 attention layers by Orchard" in orchard_transformers.doctor(model)[0]
    assert model.training and model.model.layers[1].training
    assert not model.model.layers[0].training and not model.model.layers[0].mlp.training


def test_doctors_at_once_leave_the_compiler_on():
    """Its stance is the whole process's: each would restore what it met. The first waits in its
    model until the second has had time to come in."""
    first, second = (copy.deepcopy(pair("llama")[1]) for _ in range(2))
    inside, may_go = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        may_go.wait(10)
    first.register_forward_hook(wait)
    threads = [threading.Thread(target=orchard_transformers.doctor, args=(one,),
                                kwargs={"input_ids": tokens(2, 7)}) for one in (first, second)]
    threads[0].start()
    assert inside.wait(10)
    second.register_forward_hook(lambda *_: threads[0].join(1))  # leaves after the first, if it can
    threads[1].start()
    threads[1].join(0.3)
    may_go.set()
    for thread in threads:
        thread.join()
    compiled = CompileCounter()
    torch.compile(lambda x: x + 1, backend=compiled)(torch.ones(2))
    assert compiled.frame_count == 1


@contextlib.contextmanager
def doctor_at_work(model):
    """A doctor in another thread, which waits in its model until the block ends."""
    inside, may_go = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        assert may_go.wait(10)
    waiting = model.register_forward_hook(wait)
    thread = threading.Thread(target=orchard_transformers.doctor, args=(model,),
                              kwargs={"input_ids": tokens(2, 7)})
    thread.start()
    assert inside.wait(10)
    try:
        yield
    finally:
        may_go.set()
        thread.join()
        waiting.remove()


def test_other_threads_compile_while_a_doctor_is_at_work():
    """torch's own stance would turn it off for all, and break calls with fullgraph that end when it
    is on again."""
    compiled = CompileCounter()
    call = torch.compile(lambda x: x + 1, backend=compiled, fullgraph=True)
    with doctor_at_work(copy.deepcopy(pair("llama")[1])):
        assert call(torch.ones(2)).tolist() == [2, 2]
    assert compiled.frame_count == 1


def test_a_doctor_and_anothers_stance():
    """Whichever ends first, the other's is what it was, and afterwards the compiler is on."""
    model = copy.deepcopy(pair("llama")[1])
    stance = lambda: torch._dynamo.eval_frame._stance.stance  # noqa: E731
    with contextlib.ExitStack() as other:
        with doctor_at_work(model):
            other.enter_context(torch.compiler.set_stance("fail_on_recompile"))
        assert stance() == "fail_on_recompile"
    assert stance() == "default"
    with torch.compiler.set_stance("eager_on_recompile"):
        with doctor_at_work(model):
            assert stance() == "eager_on_recompile"
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_a_doctor_that_fails_leaves_the_compiler_on():
    model = copy.deepcopy(pair("llama")[1])

    def fail(*_):
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        raise ZeroDivisionError
    model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        orchard_transformers.doctor(model, input_ids=tokens(2, 7))
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_doctor_within_doctor():
    model, other = (copy.deepcopy(pair("llama")[1]) for _ in range(2))
    model.model.layers[0].register_forward_hook(
        lambda *_: orchard_transformers.doctor(other, input_ids=tokens(2, 7)) and None)
    lines = orchard_transformers.doctor(model, input_ids=tokens(2, 7))
    assert "2 attention layers by Orchard" in lines[0] and len(lines) == 5


def test_doctor_of_a_layer_that_is_no_submodule():
    model = copy.deepcopy(pair("llama")[1])

    class Hiding(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.inside = [layer]

        def forward(self, *args, **kwargs):
            return self.inside[0](*args, **kwargs)
    model.model.layers[1].self_attn = Hiding(model.model.layers[1].self_attn)
    text = "\n".join(orchard_transformers.doctor(model))
    assert "2 attention layers" in text and "a hidden LlamaAttention  q [2, 4, 16, 8]" in text


def test_doctor_whose_inputs_do_not_suit():
    config = T.GPT2Config(n_positions=10, n_layer=1, n_embd=32, n_head=4, vocab_size=61)
    model = T.GPT2Model._from_config(config, attn_implementation="orchard")
    with pytest.raises(OrchardError, match=r"GPT2Model does not take doctor's own.*pass yours"):
        orchard_transformers.doctor(model)
    assert "1 attention layers" in orchard_transformers.doctor(model, input_ids=tokens(2, 7))[0]


def test_doctor_gives_no_reason_of_an_earlier_call():
    model = copy.deepcopy(pair("llama")[1])
    assert "(all padding is on the right)" in "\n".join(orchard_transformers.doctor(model))
    lines = orchard_transformers.doctor(model.to("meta"))
    assert sum("(padding, if any, is not known yet)" in line for line in lines) == 6


def test_a_transformers_that_is_missing_or_too_old(monkeypatch):
    for name in [one for one in sys.modules if one.startswith("orchard.transformers")]:
        monkeypatch.delitem(sys.modules, name)
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
    model = T.FalconForCausalLM(T.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                                               num_attention_heads=4))
    text = "\n".join(orchard_transformers.doctor(model))
    assert "does not follow Transformers' attention interface" in text
    assert "model.set_attn_implementation" not in text


def test_doctor_while_the_switch_is_on():
    eager, ours = pair("llama")
    model = copy.deepcopy(eager)
    model.set_attn_implementation("sdpa")
    with orchard.enable():
        lines = orchard_transformers.doctor(model)
        assert lines[:2] == ['LlamaForCausalLM: attn_implementation "sdpa"',
                             "  calls that orchard.enable() saw: 6 served by Orchard"]
        assert lines[2].endswith('by orchard.enable(), if at all: its attn_implementation is "sdpa"')
        lines = orchard_transformers.doctor(ours)
        assert lines[0].endswith("2 attention layers by Orchard") and lines[1].endswith("none")


def test_doctor_leaves_caches_and_frequencies_alone():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = T.LlamaConfig(**{**LLAMA, "max_position_embeddings": 16}, rope_parameters=rope)
    torch.manual_seed(3)
    _, model = both_ways(T.LlamaForCausalLM(config).eval())
    ids, cache = tokens(1, 10), T.DynamicCache(config=config)
    before = logits(model, ids)
    logits(model, ids[:, :6], past_key_values=cache)
    orchard_transformers.doctor(model, input_ids=ids[:, 6:], past_key_values=cache)
    assert cache.get_seq_length() == 6
    orchard_transformers.doctor(model, input_ids=tokens(1, 100))  # dynamic frequencies change
    assert torch.equal(logits(model, ids), before)
    same(before[:, 6:], logits(model, ids[:, 6:], past_key_values=cache))


def test_doctor_of_what_is_no_model():
    with pytest.raises(OrchardError, match="doctor is given a Linear, must be a model"):
        orchard_transformers.doctor(torch.nn.Linear(2, 2))


def test_doctor_asks_for_the_inputs_of_other_models():
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    model = T.ViTModel._from_config(T.ViTConfig(**small, image_size=16, patch_size=8),
                                    attn_implementation="orchard")
    with pytest.raises(OrchardError, match=r"pass those of ViTModel: doctor\(model, pixel_values="):
        orchard_transformers.doctor(model)
    lines = orchard_transformers.doctor(model, pixel_values=torch.zeros(1, 3, 16, 16))
    assert "1 attention layers by Orchard" in lines[0]
