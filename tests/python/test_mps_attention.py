"""Who takes a call on mps, and that PyTorch's own attention means the same where it stands in."""

from __future__ import annotations

import ctypes

import pytest
import torch

import attention_formula
import fake_mps
from orchard.torch.mps import Unsupported
from orchard.torch.mps_attention import fall_back, refusal
from test_mps import draw, make_launcher, on_mps, operands_of, standin


def test_forward_and_backward_are_asked_together():
    launcher = make_launcher()
    inputs = on_mps(dict(draw(), bias=torch.randn(1, 4, 37, 53)))
    compiles = fake_mps.Counts.compiles
    assert refusal(launcher, inputs, {}, ("q", "k", "v", "bias")) is None
    # the probe; forward; delta of both kinds, dq, dkv, dbias
    assert fake_mps.Counts.compiles - compiles == 7
    assert launcher.report() == []


def test_a_backward_that_does_not_compile_refuses_the_forward_too():
    launcher, inputs = make_launcher(), on_mps(draw())
    launcher.device()
    standin.metal_standin_fail(b"compile", ctypes.c_long(3))
    reason = refusal(launcher, inputs, {}, ("q",))
    assert reason.startswith("the device's compiler refused a kernel: attention_dq_matrix")
    assert launcher.report() == [("attention_backward", reason, 1)]
    assert refusal(launcher, inputs, {}) is None  # without gradients it goes on


def test_no_output_is_made_to_ask():
    launcher, inputs = make_launcher(), on_mps(draw(dtype=torch.float64))
    assert refusal(launcher, inputs, {}).startswith("f64 tensors")
    with pytest.raises(ValueError, match="out is on meta, must be on mps"):
        launcher.run("attention_forward", dict(operands_of(), out=torch.empty(2, 4, 37, 16, device="meta")))
    with pytest.raises(ValueError, match="v has 2 heads and 52 rows"):
        refusal(launcher, dict(inputs, v=inputs["v"][:, :, 1:]), {})


@pytest.mark.parametrize("options", [
    {}, dict(causal=1), dict(causal=1, align=1), dict(has_scale=1, scale=0.7),
    dict(has_window=1, window_left=5, window_right=3), dict(has_window=1, window_left=-1, window_right=2),
    dict(causal=1, align=1, has_window=1, window_left=9, window_right=-1)])
@pytest.mark.parametrize("extra", ["none", "bias", "mask", "alibi", "key_lengths", "all"])
def test_pytorchs_own_attention_means_the_same(options, extra):
    torch.manual_seed(8)
    others = dict(bias=torch.randn(1, 4, 37, 53), mask=torch.rand(2, 1, 37, 53) < 0.7, alibi=torch.rand(4),
                  key_lengths=torch.tensor([53, 40]))
    inputs = dict(draw(), **{n: x for n, x in others.items() if extra in (n, "all")})
    true, lse = attention_formula.attention(inputs, options, torch.float64)
    live = torch.isfinite(lse)  # what PyTorch gives a row that sees nothing is its own affair
    assert live.sum() > 100
    torch.testing.assert_close(fall_back(inputs, options)[live].double(), true[live], rtol=1e-4, atol=1e-5)


def test_one_head_without_its_dimension():
    inputs = {n: x[:, 0] for n, x in draw(H=1, G=1).items()}
    true, _ = attention_formula.attention({n: x[:, None] for n, x in inputs.items()}, dict(causal=1), torch.float64)
    torch.testing.assert_close(fall_back(inputs, dict(causal=1)).double(), true[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs, options, word", [
    ({}, dict(softcap=2.0), "softcap"), (dict(sinks=torch.zeros(4)), {}, "sinks"),
    (dict(cu_seqlens_q=torch.zeros(2)), {}, "cu_seqlens_q")])
def test_what_pytorch_has_no_word_for(inputs, options, word):
    with pytest.raises(Unsupported, match=f"PyTorch's own attention has no {word}"):
        fall_back(dict(draw(), **inputs), options)
