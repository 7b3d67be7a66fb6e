"""Who takes a call on mps, what users are told of it, and that PyTorch's own attention means the same
where it stands in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import fake_mps
import orchard
import orchard_bridge
import orchard_ops
import test_mps_smoke_training as smoke
from orchard import switch
from orchard.torch import mps
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch.attention import mps_launch
from orchard.torch.attention.mps_attention import fall_back, refusal
from orchard.torch.attention.operands import without_options
from orchard.torch.attention.outputs import DBIAS, DK, DQ, DSINKS, DV
from orchard_bridge import metal
from test_mps import NoCompiler, counted, draw, launcher, on_mps  # noqa: F401 (a fixture)
from test_torch_values import OPTIONS
from torch_formula import formula, check_values, rand

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
    assert str(caught.value) == (f"attention_forward: mps cannot run this call: {F64}; strict "
                                 "forbids a fallback")
    assert counted(launcher) == [("attention_forward", F64, 1)]
    attention(*[x.float() for x in placed])  # what is served is served
    monkeypatch.setenv("ORCHARD_STRICT", "0")
    attention(*placed)
    assert counted(launcher)[-1] == ("attention_forward", None, 1)


@pytest.mark.parametrize("option", OPTIONS)
def test_what_pytorch_has_no_word_for(launcher, option):  # noqa: F811
    """With the log-sum-exp, which PyTorch's own attention does not give: by the explicit formula."""
    torch.manual_seed(len(option))
    options = OPTIONS[option](torch.float64)
    G = options.pop("G", 4)
    tensors = [rand(2, 4, 13, 16), rand(2, G, 21, 16), rand(2, G, 21, 24)]
    dispatches = fake_mps.Counts.dispatches
    check_values(attention, [x.double() for x in tensors], options, option, place=fake_mps.tensor)
    assert fake_mps.Counts.dispatches == dispatches
    assert counted(launcher) == [("attention_forward", F64, 1), ("attention_forward", None, 1)]


@pytest.mark.parametrize("lse", [False, True])  # by PyTorch's own attention; by the explicit formula
@pytest.mark.parametrize("options", [{"key_lengths": torch.tensor([21, 13])}, {"is_causal": True}],
                         ids=str)
def test_padding_of_a_refused_call_may_hold_anything(launcher, options, lse):  # noqa: F811
    q, k, v = (torch.randn(2, 4, n, 16, dtype=torch.float64) for n in (13, 21, 21))
    results = []
    for anything in (0.0, torch.nan):
        k[1, :, 13:] = v[1, :, 13:] = anything
        leaves = [fake_mps.tensor(x.clone()).requires_grad_() for x in (q, k, v)]
        placed = {n: fake_mps.tensor(x) if isinstance(x, torch.Tensor) else x
                  for n, x in options.items()}
        out = attention(*leaves, **placed, return_lse=lse)
        out = out[0] if lse else out
        grads = torch.autograd.grad(out.square().sum(), leaves)
        results.append([x.detach().cpu() for x in (out, *grads)])
    assert counted(launcher) == [("attention_forward", F64, 2), ("attention_forward", None, 2)]
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_halves_packed_sequences_and_dropout_of_a_refused_call(launcher):  # noqa: F811
    """What the CPU gives, for the same seed."""
    cu = torch.tensor([0, 5, 5, 13], dtype=torch.int32)
    inputs = [rand(13, 4, 16), rand(13, 2, 16), rand(13, 2, 16)]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 5e-2)):
        found = []
        for place in (lambda x: x, fake_mps.tensor):
            fake_mps.fail("compile", 1 if dtype == torch.bfloat16 else 0)
            torch.manual_seed(3)
            leaves = [place(x.to(dtype)).requires_grad_() for x in inputs]
            out = attention(*leaves, dropout_p=0.4, enable_gqa=True, cu_seqlens_q=place(cu),
                            cu_seqlens_k=place(cu), max_seqlen_q=8, max_seqlen_k=8)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            found.append([x.detach().cpu() for x in (out, *grads)])
        for cpu, other in zip(*found):
            torch.testing.assert_close(other, cpu, rtol=tolerance, atol=tolerance)
    wrong = fake_mps.tensor(torch.tensor([0, 5, 4, 13]))
    with pytest.raises(orchard.ArgumentError, match="cu_seqlens_q.2. is 4"):
        attention(*[fake_mps.tensor(x.double()) for x in inputs], enable_gqa=True, max_seqlen_q=9,
                  cu_seqlens_q=wrong, cu_seqlens_k=wrong, max_seqlen_k=9)
    assert [line.backend for line in launcher.report() if line.reason is None] == ["pytorch"]


@pytest.mark.parametrize("options", [
    {"bias": lambda: 40 + torch.rand(2, 4, 13, 201)}, {"alibi_slopes": lambda: -0.3 * torch.ones(4)},
    {"attn_mask": lambda: 40 + torch.rand(13, 201)}], ids=lambda options: list(options)[0])
def test_biases_of_a_refused_call_are_not_rounded(launcher, options):  # noqa: F811
    """To bfloat16, where 40.01 and 40.1 are the same."""
    options = {name: make() for name, make in options.items()}
    inputs = [rand(2, 4, n, 16).bfloat16() for n in (13, 201, 201)]
    true, _ = formula(*(x.double() for x in inputs), **options, dtype=torch.float64)
    launcher.device()  # compiles a probe: the kernel shall fail
    fake_mps.fail("compile", 1)
    out = attention(*map(fake_mps.tensor, inputs),
                    **{name: fake_mps.tensor(x) for name, x in options.items()})
    torch.testing.assert_close(out.cpu().double(), true, rtol=2 ** -8, atol=2 ** -8)
    assert [line.backend for line in launcher.report() if line.reason is None] == ["pytorch"]


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["torch", "explicit"])
def test_a_refused_call_without_heads(launcher, options):  # noqa: F811
    q = fake_mps.tensor(torch.zeros(2, 0, 5, 8, dtype=torch.float64))
    slopes = fake_mps.tensor(torch.zeros(0, dtype=torch.float64))
    found = attention(q, q, q, alibi_slopes=slopes, **options)
    assert (found[0] if options else found).shape == (2, 0, 5, 8)


def test_empty_sequences_of_a_refused_call_have_a_gradient(launcher):  # noqa: F811
    q, k, v = (fake_mps.tensor(torch.zeros(0, 2, 4, dtype=torch.float64)) for _ in range(3))
    k.requires_grad_()
    ends = fake_mps.tensor(torch.zeros(1, dtype=torch.int32))
    out = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=0, max_seqlen_k=0)
    assert torch.autograd.grad(out.sum(), k)[0].shape == k.shape


@pytest.mark.parametrize("compiles", [True, False])
def test_wrong_calls_are_errors_whoever_would_take_them(launcher, compiles, monkeypatch):  # noqa: F811
    if not compiles:
        monkeypatch.setattr(mps, "launcher", mps.Launcher(NoCompiler()))
    for dtype in (torch.float32, torch.float64):
        placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=dtype).values()]
        with pytest.raises(orchard.ArgumentError, match="key_lengths.1. is 99"):
            attention(*placed, key_lengths=fake_mps.tensor(torch.tensor([5, 99])))
        with pytest.raises(orchard.ShapeError, match="key_lengths"):
            attention(*placed, key_lengths=fake_mps.tensor(torch.tensor([5])))


def test_the_switch_does_not_lead_back(launcher):  # noqa: F811
    placed = [fake_mps.tensor(x) for x in draw(G=4, dtype=torch.float64).values()]
    orchard.enable(softmax=False)
    try:
        attention(*placed)
    finally:
        orchard.disable()
    assert counted(launcher) == [("attention_forward", F64, 1), ("attention_forward", None, 1)]


def test_a_refused_backward_of_a_part_of_the_keys():
    """out and lse are those of all keys, as in ring attention: so are the gradients."""
    torch.manual_seed(4)
    q, k, v, dout = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 9, 9, 5))
    op = torch.ops.orchard
    for sinks in (None, torch.randn(4, dtype=torch.float64)):
        rest = None, None, None, sinks, *without_options(None, False)[4:]
        out, lse = op.attention_forward(q, k, v, *rest)
        tensors = dout, None, out, lse, None, q, k[:, :, :4], v[:, :, :4], *rest[:4]
        needs = DQ | DK | DV | (0 if sinks is None else DSINKS)
        exact = op.attention_backward(needs, *tensors, *rest[4:])
        found = op.attention_backward(needs, *(x if x is None else fake_mps.tensor(x.clone())
                                               for x in tensors), *rest[4:])
        for want, have in zip(exact, found):
            torch.testing.assert_close(have.cpu(), want)


def test_the_seed_of_a_refused_call_may_lie_anywhere():
    torch.manual_seed(6)
    q, seed = fake_mps.tensor(torch.randn(1, 2, 5, 8, dtype=torch.float64)), torch.tensor(2 ** 40 + 3)
    op, needs, results = torch.ops.orchard, DQ | DK | DV, []
    for place in (seed, fake_mps.tensor(seed)):
        rest = without_options(None, False, place, 0.4)
        out, lse = op.attention_forward(q, q, q, *rest)
        results.append((out, lse, *op.attention_backward(needs, q, None, out, lse, None, q, q, q, *rest)))
    for a, b in zip(*results):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0], dtype=torch.float64)],
                         ids=["", "sinks"])
def test_a_refused_backward_of_rows_that_see_nothing(sinks):
    """Row 0 here, but not of the larger softmax; rows 2 (lse -inf) and 3 (+inf) the other way
    round: they hold what would spread."""
    torch.manual_seed(5)
    q, k, v, dout = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 6, 6, 5))
    mask = torch.rand(1, 1, 5, 6) < 0.8
    mask[:, :, 0] = False
    op, dlse = torch.ops.orchard, torch.randn(1, 2, 5, dtype=torch.float64)
    rest = None, mask, None, sinks, *without_options(None, False)[4:]
    out, lse = op.attention_forward(q, k, v, *rest)
    out[:, :, 0, 3], lse[:, :, 0] = 0.75, 1.0
    if sinks is not None:  # out is 0 there
        dout[:, :, 0, 4] = torch.nan
    lse[:, :, 2], lse[:, :, 3] = -torch.inf, torch.inf
    for x in (q, dout, dlse, out):
        x[:, :, 2] = torch.nan
    tensors = dout, dlse, out, lse, None, q, k, v, *rest[:4]
    needs = DQ | DK | DV | (0 if sinks is None else DSINKS)
    exact = op.attention_backward(needs, *tensors, *rest[4:])
    assert all(x.isfinite().all() for x in exact)
    found = op.attention_backward(needs, *(x if x is None else fake_mps.tensor(x.clone())
                                           for x in tensors), *rest[4:])
    for want, have in zip(exact, found):
        torch.testing.assert_close(have.cpu(), want)


# ---- orchard.enable() ----------------------------------------------------------------------------

@pytest.fixture
def switched(launcher, monkeypatch):  # noqa: F811
    """F.scaled_dot_product_attention is Orchard's."""
    fake_mps.plain_to_the_switch(monkeypatch)
    switch.counts(reset=True)
    with orchard.enable(softmax=False):
        yield launcher
    switch.counts(reset=True)


def through_the_switch(dtype=torch.float32, **options):
    """out, and that it and its gradients are the formula's; by F.scaled_dot_product_attention."""
    inputs = draw(G=4, dtype=dtype)
    leaves = [fake_mps.tensor(x).requires_grad_() for x in inputs.values()]
    out = F.scaled_dot_product_attention(*leaves, **options)
    assert type(out) is fake_mps.MpsTensor
    out.square().sum().backward()
    copies = [x.requires_grad_() for x in inputs.values()]
    true, _ = formula(*copies, dtype=torch.float64, **options)
    torch.testing.assert_close(out.detach().cpu(), true.detach(), rtol=1e-4, atol=1e-5)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.square().sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-3, atol=1e-4)


def test_the_switch_leads_to_the_metal_kernels(switched):
    dispatches = fake_mps.Counts.dispatches
    through_the_switch(is_causal=True, scale=0.3)
    assert fake_mps.Counts.dispatches > dispatches + 1
    assert orchard.counts() == {switch.SERVED: 1}
    assert counted(switched) == [("attention_forward", None, 1), ("attention_backward", None, 1)]


def test_the_switch_falls_back_and_says_why(switched):
    dispatches = fake_mps.Counts.dispatches
    through_the_switch(torch.float64, is_causal=True)
    assert fake_mps.Counts.dispatches == dispatches
    assert orchard.counts(reset=True) == {F64: 1}
    assert [(x.op, x.backend, x.reason) for x in mps.report()] == [
        ("attention_forward", "mps", F64), ("attention_forward", "pytorch", None)]
    fake_mps.fail("compile", 1)
    through_the_switch()
    (reason,) = orchard.counts(reset=True)
    assert reason.startswith("the device's compiler refused a kernel: attention_")
    through_the_switch(is_causal=True, scale=0.2)  # the same kernel: not compiled again
    assert orchard.counts() == {reason: 1}


def test_the_switch_passes_on_what_torch_shall_do(switched):
    placed = [fake_mps.tensor(x) for x in draw(G=4).values()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(*placed)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(placed[0], placed[1].cpu(), placed[2])
    mask = torch.zeros(placed[0].shape[-2], placed[1].shape[-2])
    with pytest.raises(RuntimeError, match="on the same device"):
        F.scaled_dot_product_attention(*placed, mask)
    assert orchard.counts() == {
        "sdpa_kernel without FLASH_ATTENTION": 1, "a device that Orchard does not serve": 1,
        "an attn_mask that is nested, not strided or on another device": 1}
    assert counted(switched) == []


def test_strict_and_the_switch(switched, monkeypatch):
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    with pytest.raises(orchard.UnsupportedError, match="strict forbids a fallback"):
        through_the_switch(torch.float64)
    assert orchard.counts() == {F64: 1}
    through_the_switch()


# ---- The first Orchard's names -------------------------------------------------------------------

WAYS = {"orchard_ops": orchard_ops.flash_attn_fwd, "orchard_bridge": orchard_bridge.flash_attn,
        "torch.ops": torch.ops.flash_attn_mps._flash_attn_fwd}
BWD = torch.ops.flash_attn_mps._flash_attn_bwd


def first_orchard(way, place, dtype, create_graph):
    """out, gradients, those by hand and, if asked for, of second order; on the CPU."""
    torch.manual_seed(6)
    leaves = [place(x).requires_grad_() for x in draw(dtype=dtype, T=9, S=14).values()]
    out, state = WAYS[way](*leaves, 0.3, 0.4, True)
    dout = place(torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape))
    grads = torch.autograd.grad(out, leaves, dout, create_graph=create_graph)
    by_hand = [BWD(dout, *leaves, state, 0.3, 0.4, True)]
    if way == "orchard_ops":
        by_hand.append(orchard_ops.flash_attn_bwd(dout, *leaves, state, 0.3, 0.4, True))
    second = torch.autograd.grad(sum(x.square().sum() for x in grads), leaves) if create_graph else ()
    return [x.detach().cpu() for x in (out, *grads, *second, *sum(by_hand, ()))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_orchards_names(launcher, way, dtype):  # noqa: F811
    """Served by the kernels, or refused and then PyTorch's: what the CPU gives, dropout included."""
    for create_graph in (False, True):
        cpu = first_orchard(way, lambda x: x, dtype, create_graph)
        found = first_orchard(way, fake_mps.tensor, dtype, create_graph)
        tolerance = 1e-10 if dtype == torch.float64 else 2e-4
        for one, other in zip(cpu, found):
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
    lines = {(x.op, x.backend, x.reason) for x in launcher.report()}
    ops = ("attention_forward", "attention_backward")
    assert lines == ({(op, "mps", None) for op in ops} if dtype == torch.float32 else
                     {(op, *how) for op in ops for how in (("mps", F64), ("pytorch", None))})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_default_device_is_for_others(launcher, way, dtype):  # noqa: F811
    leaves = [fake_mps.tensor(x).requires_grad_() for x in draw(dtype=dtype).values()]
    dout, found = fake_mps.tensor(torch.ones(2, 4, 37, 16, dtype=dtype)), []
    for default in ("cpu", "meta"):
        torch.manual_seed(4)
        with torch.device(default):
            out, state = WAYS[way](*leaves, 0.3, 0.4, True)
            grads = torch.autograd.grad(out, leaves, dout)
            by_hand = BWD(dout, *leaves, state, 0.3, 0.4, True)
        found.append([x.detach().cpu() for x in (out, state, *grads, *by_hand)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_lengths_are_checked_under_a_default_device(launcher):  # noqa: F811
    inputs = on_mps(dict(draw(), out=torch.empty(2, 4, 37, 16)))
    lengths = fake_mps.tensor(torch.tensor([53, 9, 99, 9]))[::2]
    with torch.device("meta"), pytest.raises(orchard.ArgumentError, match="key_lengths.1. is 99"):
        launcher.run("attention_forward", dict(inputs, key_lengths=lengths))


def test_the_first_orchards_names_when_strict(launcher, monkeypatch):  # noqa: F811
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    for way in ("orchard_ops", "orchard_bridge"):
        with pytest.raises(orchard.UnsupportedError, match="strict forbids"):
            first_orchard(way, fake_mps.tensor, torch.float64, False)
    leaves = [fake_mps.tensor(x).requires_grad_() for x in draw(dtype=torch.float64).values()]
    monkeypatch.setenv("ORCHARD_STRICT", "0")
    out, _ = orchard_bridge.flash_attn(*leaves, 0.3)
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    with pytest.raises(orchard.UnsupportedError, match="attention_backward: mps cannot run this call.*strict"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_bridge_says_who_ran_the_backward(launcher, dtype, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("ORCHARD_DEBUG_FLASHATN", "1")
    leaves = [fake_mps.tensor(x).requires_grad_() for x in draw(dtype=dtype).values()]
    orchard_bridge.flash_attn(*leaves, 0.3)[0].sum().backward()
    told, begin = capsys.readouterr(), "[orchard][FlashAttnFunction.backward] Metal "
    if dtype == torch.float32:
        assert told.out.endswith(f"{begin}backward succeeded with shared storage tensors.\n")
        assert told.err == ""
    else:
        assert "succeeded" not in told.out
        assert told.err == (f"{begin}bwd failed ({F64}); falling back to reference attention "
                            "backward.\n")


@pytest.fixture
def metal_is_there(monkeypatch):
    """torch says that there is Metal, and moves tensors to the fake's."""
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *how, **more: (
        fake_mps.tensor(self) if how == ("mps",) else plain(self, *how, **more)))
    monkeypatch.setenv("USE_FLASH_ATTN", "0")
    metal.probed.cache_clear()
    yield
    metal.probed.cache_clear()


def test_enable_flash_where_the_kernels_run(launcher, metal_is_there):  # noqa: F811
    assert metal.why_not() is None
    assert orchard_bridge.enable_flash(strict=True) is True
    assert orchard_bridge.is_metal_flash_attn_available() is True
    assert os.environ["USE_FLASH_ATTN"] == "2"
    assert counted(launcher) == [("attention_forward", None, 1), ("attention_backward", None, 1)]


@pytest.mark.parametrize("probe", [True, False], ids=["probe compiles", "nothing compiles"])
def test_enable_flash_where_no_kernel_compiles(metal_is_there, probe, monkeypatch, capsys):
    """PyTorch computes the step in their place, and rightly: that is not Metal's doing."""
    monkeypatch.setattr(mps, "launcher", mps.Launcher(NoCompiler(probe)))
    assert metal.why_not().startswith("the device's compiler refused a kernel: ")
    assert orchard_bridge.enable_flash(verbose=True) is False
    told = capsys.readouterr().err
    assert "FlashAttention does not run on Metal: the device's compiler refused a kernel: " in told
    assert orchard_bridge.is_metal_flash_attn_available() is False
    assert os.environ["USE_FLASH_ATTN"] == "0"
    with pytest.raises(RuntimeError, match="does not run on Metal: the device's compiler"):
        orchard_bridge.enable_flash(strict=True)
    out, _ = orchard_bridge.flash_attn(*[fake_mps.tensor(torch.randn(1, 2, 9, 16))] * 3, 0.3)
    assert out.is_mps  # works all the same


def test_a_backward_of_another_thread_is_not_ours(launcher, monkeypatch, capsys):  # noqa: F811
    """While Metal runs ours, another thread trains on the CPU, and a third one is refused."""
    monkeypatch.setenv("ORCHARD_DEBUG_FLASHATN", "1")
    run = mps_launch.backward

    def step(place, dtype):
        leaves = [place(x).requires_grad_() for x in draw(G=4, T=4, S=4, dtype=dtype).values()]
        torch.autograd.grad(attention(*leaves, return_lse=True)[0].sum(), leaves)

    def while_others_train(*arguments):
        monkeypatch.setattr(mps_launch, "backward", run)
        for others in ((lambda x: x, torch.float32), (fake_mps.tensor, torch.float64)):
            thread = threading.Thread(target=step, args=others)
            thread.start()
            thread.join()
        return run(*arguments)

    leaves = [fake_mps.tensor(x).requires_grad_() for x in draw().values()]
    out, _ = orchard_bridge.flash_attn(*leaves, 0.3)
    monkeypatch.setattr(mps_launch, "backward", while_others_train)
    out.sum().backward()
    told = capsys.readouterr()
    assert told.out.endswith("Metal backward succeeded with shared storage tensors.\n")
    assert told.err == ""


class ToMps(torch.autograd.Function):
    """To the fake's mps, or back to the CPU; gradients the other way."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x.cpu() if back else fake_mps.tensor(x.clone())

    @staticmethod
    def backward(ctx, dx):
        return fake_mps.tensor(dx.clone()) if ctx.back else dx.cpu(), None


def on_the_fake(module, query, key, value, attention_mask, **options):
    placed = [ToMps.apply(x, False) for x in (query, key, value)]
    out, _ = smoke.first_orchard(module, *placed, attention_mask, **options)
    return ToMps.apply(out, True), None


smoke.AttentionInterface.register("on_the_fake", on_the_fake)
smoke.AttentionMaskInterface.register("on_the_fake", lambda *args, **kwargs: None)


def test_the_smoke_test_sees_who_ran(launcher, monkeypatch):  # noqa: F811
    """Its 30 steps with attention on the fake's mps: by Orchard's kernels; and by PyTorch's
    operations in their place, which lead to the same loss and must be noticed."""
    before, right = smoke.report(), smoke.train(smoke.tiny_gpt2("eager"))
    losses = smoke.train(smoke.tiny_gpt2("on_the_fake"))
    smoke.check_backend(smoke.ran_since(before), "mps")
    assert losses[-1] < 0.5 * losses[0]
    assert max(abs(a - b) for a, b in zip(losses, right)) < 1e-2

    monkeypatch.setattr(mps, "launcher", mps.Launcher(NoCompiler()))
    before = smoke.report()
    losses = smoke.train(smoke.tiny_gpt2("on_the_fake"))
    assert max(abs(a - b) for a, b in zip(losses, right)) < 1e-2
    smoke.check_backend(smoke.ran_since(before), "pytorch")
    with pytest.raises(AssertionError):
        smoke.check_backend(smoke.ran_since(before), "mps")


# ---- The logs ------------------------------------------------------------------------------------

def logs_of(tmp_path, code, **switches):
    """What a process of its own leaves in the two logs, and how often it waited for the GPU."""
    begin = ("import torch, fake_mps, orchard_bridge\n"
             "from orchard.torch import scaled_dot_product_attention as attention\n"
             "fake_mps.install()\n"
             "def leaves(dtype=torch.float32, place=fake_mps.tensor):\n"
             "    made = torch.randn(2, 4, 9, 16).to(dtype)\n"
             "    return [place(made.clone()).requires_grad_() for _ in range(3)]\n")
    paths = [tmp_path / "calls.log", tmp_path / "profile.log"]
    found = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": found, "ORCHARD_DEBUG_FLASH_ATN_LOG": str(paths[0]),
           "ORCHARD_TENSOR_PROFILE_LOG": str(paths[1])}
    for name in ("ORCHARD_DEBUG_FLASH_ATN", "ORCHARD_DEBUG_FLASHATN", "ORCHARD_TENSOR_PROFILE"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, "-c", begin + code + "print(fake_mps.Counts.waits)"],
                          env={**env, **switches}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = [path.read_text() if path.exists() else None for path in paths]
    return (*told, int(done.stdout.splitlines()[-1]))


TRAIN = "orchard_bridge.flash_attn(*leaves(), 0.25)[0].sum().backward()\n"


def test_the_log_of_calls(tmp_path):
    """Every backend counts with the same counters; Metal is named where its kernels ran."""
    calls, profile, waits = logs_of(
        tmp_path, TRAIN
        + "orchard_bridge.flash_attn(*leaves(place=lambda x: x), 0.25)[0].sum().backward()\n"
        + "orchard_bridge.flash_attn(*leaves(torch.float64), 0.25)[0].sum().backward()\n"
        + "attention(*leaves()).sum().backward()\n",
        ORCHARD_DEBUG_FLASH_ATN="1", ORCHARD_BACKEND="cpu")

    def lines(n, backend, done, instead=""):
        return "".join(f"[flashattn.mm] {short} call={n} backend={backend}\n{instead}"
                       + done.format(short.lower(), word) + "\n"
                       for short, word in (("FWD", "forward"), ("BWD", "backward")))
    metal = "[flashattn.mm] Metal {1} succeeded"
    assert calls == (lines(1, "metal", metal)
                     + lines(2, "cpu", "flash_attn_{0}: cpu {1} done")
                     + lines(3, "pytorch", "flash_attn_{0}: pytorch {1} done",
                             f"[flashattn.mm] falling back to pytorch: {F64}\n")
                     + lines(4, "metal", metal))
    assert profile is None
    assert waits == 6  # what the log calls a success is done


def test_the_profile_has_a_line_for_every_operand(tmp_path):
    calls, profile, _ = logs_of(tmp_path, TRAIN, ORCHARD_TENSOR_PROFILE="1")
    assert calls is None
    told = [line.split() for line in profile.splitlines()]
    assert {tuple(words[4:]) for words in told} == {("direct", "shared")}
    assert [words[:4] for words in told] == (
        [["bind", "attention_forward", *words] for words in (
            ("out", "4608"), ("lse", "288"), ("lse_rest", "288"), ("q", "4608"), ("k", "4608"),
            ("v", "4608"))]
        + [["bind", "attention_backward", *words] for words in (
            ("dq", "4608"), ("dk", "4608"), ("dv", "4608"), ("dout", "4"), ("out", "4608"),
            ("lse", "288"), ("lse_rest", "288"), ("q", "4608"), ("k", "4608"), ("v", "4608"))])
    private = "torch.__version__ = '2.11.0'\nwide = fake_mps.tensor(torch.randn(2, 4, 9, 48))\n"
    (tmp_path / "profile.log").unlink()
    _, profile, _ = logs_of(tmp_path, private + "attention(*wide.split(16, -1))\n",
                            ORCHARD_TENSOR_PROFILE="1")
    # from the first element of a view to its last
    assert profile.count(f" {4 * (71 * 48 + 16)} direct private\n") == 3


def test_without_logs_nothing_is_written_and_nobody_waits(tmp_path):
    assert logs_of(tmp_path, TRAIN) == (None, None, 0)


# ---- Wrong calls ---------------------------------------------------------------------------------

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


def test_lengths_that_changed_their_places_are_checked_again():
    """Forward found each right in its own."""
    cu_q, cu_k = (fake_mps.tensor(torch.tensor(ends)) for ends in ([0, 2, 7], [0, 4, 9]))
    q, k = (fake_mps.tensor(torch.randn(n, 2, 16)) for n in (7, 9))

    def rest(*lengths):
        return *[None] * 5, *lengths, None, 5, 5, *without_options(None, False)[10:]

    out, lse = torch.ops.orchard.attention_forward(q, k, k, *rest(cu_q, cu_k))
    with pytest.raises(Exception, match=r"cu_seqlens_q\[2\] is 9"):
        torch.ops.orchard.attention_backward(7, out, None, out, lse, None, q, k, k, *rest(cu_k, cu_q))


def test_without_the_standin_these_tests_fail_with_a_message():
    for build, words in (("", "ORCHARD_BUILD is not set"), ("/nonexistent", "--target metal_standin")):
        child = subprocess.run([sys.executable, "-c", "import fake_mps; fake_mps.install()"],
                               env=dict(os.environ, ORCHARD_BUILD=build, PYTHONPATH=HERE),
                               capture_output=True, text=True, timeout=200)
        assert child.returncode and words in child.stderr


# ---- PyTorch's own attention ---------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {}, dict(is_causal=True), dict(is_causal=True, causal_alignment="bottom_right"), dict(scale=0.7),
    dict(is_causal=True, scale=0.0), dict(is_causal=True, scale=-0.7),
    dict(window=(5, 3)), dict(window=(-1, 2)), dict(window=(5, sys.maxsize)),
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
    inputs, named = mps_launch.named(
        *draw().values(), others.get("bias"), others.get("attn_mask"), others.get("alibi_slopes"), None,
        others.get("key_lengths"), None, None, None, 0, 0, options.get("scale"),
        options.get("is_causal", False), "causal_alignment" in options, left, right, 0.0, 0.0)
    torch.testing.assert_close(fall_back(inputs, named)[live], true[live], rtol=1e-4, atol=1e-5)
