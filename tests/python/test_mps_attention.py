"""Who takes a call on mps, what users are told of it, and that PyTorch's own attention means the same
where it stands in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fake_mps
import orchard
from orchard.torch import mps
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch.mps_attention import fall_back, refusal
from orchard.torch.outputs import DBIAS, DK, DQ, DV
from test_mps import counted, draw, launcher, on_mps  # noqa: F401 (launcher is a fixture)
from torch_formula import formula

HERE = os.path.dirname(os.path.abspath(__file__))
F64 = "f64 tensors: no GPU backend has double precision"


# ---- Asking --------------------------------------------------------------------------------------

def test_forward_and_backward_are_asked_together(launcher):  # noqa: F811
    inputs = on_mps(dict(draw(), bias=torch.randn(1, 4, 37, 53), sinks=None))
    compiles = fake_mps.Counts.compiles
    assert refusal(launcher, inputs, {}, DQ | DK | DV | DBIAS) is None
    # the probe; forward; delta of both kinds, dq, dkv, dbias
    assert fake_mps.Counts.compiles - compiles == 7
    assert counted(launcher) == []
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    out, lse = attention(*leaves[:3], bias=leaves[3], enable_gqa=True, return_lse=True)
    for wanted in (out, lse, out.square().sum() + lse.square().sum()):
        torch.autograd.grad(wanted.sum(), leaves, retain_graph=True)
    assert fake_mps.Counts.compiles - compiles == 7  # nothing was left to compile
    assert counted(launcher) == [("attention_forward", None, 1), ("attention_backward", None, 3)]


def test_a_backward_that_does_not_compile_refuses_the_forward_too(launcher):  # noqa: F811
    inputs = draw(G=4)
    leaves = [fake_mps.tensor(x).requires_grad_() for x in inputs.values()]
    with torch.no_grad():  # without gradients Orchard's kernels do it
        attention(*leaves)
    fake_mps.fail("compile", 2)
    out = attention(*leaves)
    forward, (_, reason, _), by_pytorch = counted(launcher)
    assert forward == ("attention_forward", None, 1)
    assert reason.startswith("the device's compiler refused a kernel: attention_dq_matrix")
    assert by_pytorch == ("attention_forward", None, 1)
    out.sum().backward()  # PyTorch's own
    copies = [x.requires_grad_() for x in inputs.values()]
    true, _ = formula(*copies, dtype=torch.float64)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert [(x.op, x.backend, x.reason) for x in mps.report()] == [
        ("attention_forward", "mps", None), ("attention_backward", "mps", reason),
        ("attention_forward", "pytorch", None)]


def test_no_output_is_made_to_ask(launcher):  # noqa: F811
    inputs = on_mps(draw(dtype=torch.float64))
    assert refusal(launcher, inputs, {}) == F64
    out = torch.empty(2, 4, 37, 16, device="meta")
    with pytest.raises(ValueError, match="out is on meta, must be on mps"):
        launcher.run("attention_forward", dict(on_mps(draw()), out=out))
    with pytest.raises(ValueError, match="v has 2 heads and 52 rows"):
        refusal(launcher, dict(inputs, v=inputs["v"][:, :, 1:]), {})


# ---- A refused call ------------------------------------------------------------------------------

def test_a_refused_call_is_served_by_pytorch_and_counted(launcher):  # noqa: F811
    inputs = draw(G=4, dtype=torch.float64)
    leaves = [fake_mps.tensor(x).requires_grad_() for x in inputs.values()]
    dispatches = fake_mps.Counts.dispatches
    out = attention(*leaves, is_causal=True)
    out.sum().backward()
    assert fake_mps.Counts.dispatches == dispatches
    copies = [x.requires_grad_() for x in inputs.values()]
    true, _ = formula(*copies, is_causal=True)
    torch.testing.assert_close(out.detach().cpu(), true.detach())
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted)
    lines = [("attention_forward", "mps", F64, 1), ("attention_forward", "pytorch", None, 1)]
    assert [(x.op, x.backend, x.reason, x.count) for x in mps.report()] == lines
    told = orchard.report()
    assert told[-2:] == mps.report()
    assert f"did not: {F64}" in str(told) and "pytorch" in str(told)


def test_strict_makes_it_an_error(launcher, monkeypatch):  # noqa: F811
    placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=torch.float64).values()]
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    with pytest.raises(orchard.UnsupportedError) as caught:
        attention(*placed)
    assert str(caught.value) == (f"attention_forward: mps did not take the call ({F64}) and strict "
                                 "forbids a fallback")
    assert counted(launcher) == [("attention_forward", F64, 1)]
    attention(*[x.float() for x in placed])  # what is served is served
    monkeypatch.setenv("ORCHARD_STRICT", "0")
    attention(*placed)
    assert counted(launcher)[-1] == ("attention_forward", None, 1)


@pytest.mark.parametrize("options, word", [
    (dict(softcap=2.0), "softcap"), (dict(sinks=torch.zeros(4, dtype=torch.float64)), "sinks"),
    (dict(return_lse=True), "lse")])
def test_what_pytorch_has_no_word_for(launcher, options, word):  # noqa: F811
    placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=torch.float64).values()]
    options = {n: fake_mps.tensor(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(orchard.UnsupportedError, match=f"f64.*and PyTorch's own attention has no {word}$"):
        attention(*placed, **options)
    assert counted(launcher) == [("attention_forward", F64, 1)]


def test_the_ops_themselves_do_not_ask(launcher):  # noqa: F811
    placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=torch.float64).values()]
    rest = (*[None] * 8, 0, 0, None, False, False, -1, -1, 0.0, 0.0)
    with pytest.raises(orchard.UnsupportedError, match="mps did not take the call .f64"):
        torch.ops.orchard.attention_forward(*placed, *rest)
    out, lse = torch.ops.orchard.attention_forward(*[x.float() for x in placed], *rest)
    with pytest.raises(orchard.UnsupportedError, match="attention_backward: mps did not take"):
        torch.ops.orchard.attention_backward(7, out.double(), None, out.double(), lse.double(), *placed,
                                             *rest)
    assert counted(launcher) == [("attention_forward", F64, 1), ("attention_forward", None, 1),
                                 ("attention_backward", F64, 1)]


def test_wrong_lengths_are_an_error_whoever_would_take_the_call(launcher):  # noqa: F811
    for dtype in (torch.float32, torch.float64):
        placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=dtype).values()]
        with pytest.raises(orchard.ArgumentError, match="key_lengths.1. is 99"):
            attention(*placed, key_lengths=fake_mps.tensor(torch.tensor([5, 99])))


def test_the_switch_does_not_lead_back(launcher):  # noqa: F811
    placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=torch.float64).values()]
    orchard.enable()
    try:
        attention(*placed)
    finally:
        orchard.disable()
    assert counted(launcher) == [("attention_forward", F64, 1), ("attention_forward", None, 1)]


@pytest.mark.parametrize("mistake, error, words", [
    (lambda q: dict(key=q.cpu()), ValueError, "key is on cpu, query is on mps:0"),
    (lambda q: dict(key=q[..., :8]), ValueError, "k"),
    (lambda q: dict(key=q.half()), TypeError, "k is f16, must be f32"),
    (lambda q: dict(softcap=-1.0), ValueError, "softcap is -1"),
    (lambda q: dict(window=(-2, 0)), ValueError, "window is .-2, 0."),
    (lambda q: dict(dropout_p=1.5), ValueError, "dropout is 1.5"),
])
def test_wrong_calls_are_orchards_exceptions(mistake, error, words):
    q = fake_mps.tensor(torch.randn(1, 2, 5, 16))
    with pytest.raises(orchard.OrchardError, match=words) as caught:
        attention(**{"query": q, "key": q, "value": q, **mistake(q)})
    assert isinstance(caught.value, error)


def test_without_the_standin_these_tests_fail_with_a_sentence():
    for build, words in (("", "ORCHARD_BUILD is not set"), ("/nonexistent", "--target metal_standin")):
        child = subprocess.run([sys.executable, "-c", "import fake_mps; fake_mps.install()"],
                               env=dict(os.environ, ORCHARD_BUILD=build, PYTHONPATH=HERE),
                               capture_output=True, text=True, timeout=200)
        assert child.returncode and words in child.stderr


# ---- PyTorch's own attention ---------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {}, dict(is_causal=True), dict(is_causal=True, causal_alignment="bottom_right"), dict(scale=0.7),
    dict(window=(5, 3)), dict(window=(-1, 2)),
    dict(is_causal=True, causal_alignment="bottom_right", window=(9, -1))], ids=str)
@pytest.mark.parametrize("extra", ["none", "bias", "attn_mask", "alibi_slopes", "key_lengths", "all"])
def test_pytorchs_own_attention_means_the_same(options, extra):
    torch.manual_seed(8)
    others = dict(bias=torch.randn(1, 4, 37, 53), attn_mask=torch.rand(2, 1, 37, 53) < 0.7,
                  alibi_slopes=torch.rand(4), key_lengths=torch.tensor([53, 40]))
    others = {n: x for n, x in others.items() if extra in (n, "all")}
    true, lse = formula(*draw().values(), **options, **others, dtype=torch.float64)
    live = torch.isfinite(lse)  # what PyTorch gives a row that sees nothing is its own affair
    assert live.sum() > 100
    left, right = options.get("window", (-1, -1))
    inputs, named = mps.named(
        *draw().values(), others.get("bias"), others.get("attn_mask"), others.get("alibi_slopes"), None,
        others.get("key_lengths"), None, None, None, 0, 0, options.get("scale"),
        options.get("is_causal", False), "causal_alignment" in options, left, right, 0.0, 0.0)
    torch.testing.assert_close(fall_back(inputs, named)[live], true[live], rtol=1e-4, atol=1e-5)
