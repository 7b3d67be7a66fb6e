"""The smoke test that the first Orchard's documents name, with something to prove.

    pytest tests/python/test_mps_smoke_training.py::test_flash_attention_backward

A tiny GPT-2 as theirs (vocabulary 128, 64 positions, 64 channels, 2 layers, 4 heads; q is
[2,4,32,16]) trains by orchard_bridge.flash_attn, on mps where there is one, else on the CPU. Theirs
looked at one loss before backward; this one compares every gradient with torch's own attention,
sees the loss fall over 30 steps, and asks the report which backend ran.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

import orchard
import orchard_bridge

DEVICE = "mps" if torch.backends.mps.is_available() else "cpu"  # and the report's name for it
STEPS = 30


def first_orchard(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Transformers' signature to the first Orchard's."""
    assert attention_mask is None and list(query.shape) == [2, 4, 32, 16]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _ = orchard_bridge.flash_attn(query, key, value, scale, dropout, True)
    return out.transpose(1, 2), None


AttentionInterface.register("first_orchard", first_orchard)
AttentionMaskInterface.register("first_orchard", lambda *args, **kwargs: None)


def tiny_gpt2(attention, dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4,
                        attn_pdrop=dropout, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_implementation=attention)
    return GPT2LMHeadModel(config).to(DEVICE).train()


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(128, (2, 32), generator=generator).to(DEVICE)


def report():
    """How often each backend ran each operation, in this process: {(op, backend): count}. On mps
    that is "mps", Orchard's kernels, or "pytorch", whose operations took what they refused."""
    return {(line.op, line.backend): line.count for line in orchard.report() if line.reason is None}


def ran_since(before):
    after = report()
    return {key: after[key] - before.get(key, 0) for key in after
            if key[0].startswith("attention") and after[key] != before.get(key, 0)}


def check_backend(ran, backend):
    """It ran each layer of each step of `train`, forward and backward, and no other ran any."""
    assert ran == {("attention_forward", backend): 2 * STEPS,
                   ("attention_backward", backend): 2 * STEPS}


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_flash_attention_backward():
    # Every gradient of every parameter is that of torch's own explicit attention.
    loss, found = gradients(tiny_gpt2("first_orchard"))
    right_loss, right = gradients(tiny_gpt2("eager"))
    assert abs(loss - right_loss) < 1e-5
    assert len(found) == len(right) == 28
    for name, grad in right.items():
        assert grad.abs().max() > 0, name
        apart = (found[name] - grad).abs().max() / grad.abs().max()
        assert apart < 1e-4, f"{name} is off by {apart:.2g}"

    # The loss falls, step for step as with torch's attention.
    before = report()
    losses = train(tiny_gpt2("first_orchard"))
    ran = ran_since(before)
    assert losses[-1] < 0.5 * losses[0]
    assert max(abs(a - b) for a, b in zip(losses, train(tiny_gpt2("eager")))) < 1e-2

    check_backend(ran, DEVICE)
    assert orchard_bridge.is_metal_flash_attn_available() is (DEVICE == "mps")


def test_training_with_dropout_repeats_and_falls():
    """Forward's and backward's masks agree, so the loss falls; one seed gives one run."""
    runs = []
    for _ in range(2):
        model = tiny_gpt2("first_orchard", dropout=0.2)
        torch.manual_seed(3)
        runs.append(train(model))
    assert runs[0] == runs[1] or DEVICE == "mps"
    assert runs[0][-1] < 0.6 * runs[0][0]
    assert runs[0] != train(tiny_gpt2("first_orchard"))


def test_it_says_what_ran(monkeypatch, capsys):
    assert orchard_bridge.enable_flash() is (DEVICE == "mps")
    monkeypatch.setenv("ORCHARD_DEBUG_FLASH_ATN", "1")
    gradients(tiny_gpt2("first_orchard"))
    told = capsys.readouterr()
    assert told.out.count("[orchard][FlashAttnFunction.forward] Shapes: q=torch.Size([2, 4, 32, "
                          "16]), scale=0.25, dropout=0.0, causal=True\n") == 2
    on_cpu = told.err.count("Metal kernel unavailable, attempting reference fallback.\n")
    on_metal = told.out.count("[orchard][FlashAttnFunction.backward] Metal backward succeeded with")
    assert (on_cpu, on_metal) == ((0, 2) if DEVICE == "mps" else (2, 0))
