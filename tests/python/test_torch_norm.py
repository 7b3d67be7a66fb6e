"""Norms in torch: mistakes that others made, and what the tests of all rooms do not ask."""

import copy

import pytest
import torch
import torch.nn.functional as F

import orchard
import orchard.torch as ot
from orchard import switch
from orchard.switch import kernels

pytestmark = pytest.mark.usefixtures("one_thread")
NORMS = [pytest.param(ot.rms_norm, F.rms_norm, id="rms_norm"),
         pytest.param(ot.layer_norm, F.layer_norm, id="layer_norm")]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def gradients(function, x, weight, *rest):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
              for t in (x, weight)]
    out = function(leaves[0], leaves[1].shape, leaves[1], *rest)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("ours, theirs", NORMS)
@pytest.mark.parametrize("size", [(2, 3, 64), (2, 3, 4, 33), (64,), (5, 9)])
def test_m1_m2_rows_are_the_last_dimension_at_any_rank(ours, theirs, size):
    x, weight = torch.randn(size), torch.randn(size[-1:])
    torch.testing.assert_close(gradients(ours, x, weight), gradients(theirs, x, weight),
                               rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_m3_the_switch_keeps_gradients(name):
    function = getattr(F, name)
    x, weight = torch.randn(4, 5, 33), torch.randn(33)
    want = gradients(function, x, weight)
    switch.counts(reset=True)
    with switch.enable(normalization=True):
        have = gradients(function, x, weight)
    assert any(what.endswith(switch.SERVED) for what in switch.counts(reset=True))
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_m5_the_switch_keeps_modules_and_their_eps_and_is_undone():
    norms = [torch.nn.RMSNorm(8, eps=0.5), torch.nn.LayerNorm(8, eps=0.25, bias=False)]
    before, x = copy.deepcopy(norms), torch.randn(3, 8)
    want = [norm(x) for norm in norms]
    with switch.enable(normalization=True), switch.enable(normalization=True):
        torch.testing.assert_close([norm(x) for norm in norms], want)
    assert [(type(n), n.eps) for n in norms] == [(type(n), n.eps) for n in before]
    assert all(map(torch.equal, [norm(x) for norm in norms], want))
    assert switch.active() == []


@pytest.mark.parametrize("ours, theirs", NORMS)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_permuted_tensors_and_gradients(ours, theirs, order):
    """As pytorch #175188 and #181133 had it wrong, for elementwise operations and attention."""
    x = torch.randn([(6, 5, 33)[i] for i in order]).permute([order.index(i) for i in range(3)])
    weight = torch.randn(x.shape[-1])
    found = gradients(ours, x, weight)
    torch.testing.assert_close(found, gradients(theirs, x, weight), rtol=1e-4, atol=1e-5)
    assert found[0].is_contiguous()
    dout = torch.randn(x.shape[::-1]).permute(2, 1, 0)
    leaves = [x.detach().requires_grad_(), x.detach().requires_grad_()]
    made = [torch.autograd.grad(f(leaf, (33,)), leaf, dout)[0]
            for f, leaf in zip((ours, theirs), leaves)]
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours, theirs", NORMS)
def test_16_bits_with_parameters_in_float32(ours, theirs):
    x, weight = torch.randn(9, 33).bfloat16(), torch.randn(33)
    have, want = gradients(ours, x, weight), gradients(theirs, x, weight)
    assert [t.dtype for t in have] == [t.dtype for t in want]
    torch.testing.assert_close(have, want, rtol=0.02, atol=0.05)


def test_a_bias_without_a_weight():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 7).bfloat16()
        bias = torch.randn(7).to(dtype).requires_grad_()
        out = ot.layer_norm(x, (7,), None, bias)
        found, = torch.autograd.grad(out, bias, torch.ones_like(out))
        assert found.dtype == dtype and torch.equal(found, torch.full_like(found, 4))


def test_gemma_and_module_state():
    gemma = ot.nn.RMSNorm(16, 1e-6, weight_offset=1.0)
    assert torch.equal(gemma.weight, torch.zeros(16)) and "weight_offset=1.0" in repr(gemma)
    x = torch.randn(3, 16)
    torch.testing.assert_close(gemma(x), F.rms_norm(x, (16,), None, 1e-6))
    for module in (ot.nn.RMSNorm, ot.nn.LayerNorm):
        norm = module((4, 4))
        assert list(norm.state_dict()) == list(module.__mro__[1]((4, 4)).state_dict())
        out, total = norm(x.view(3, 4, 4), x.view(3, 4, 4))
        assert torch.equal(total, 2 * x.view(3, 4, 4)) and out.shape == total.shape


@pytest.mark.parametrize("call, message", [
    (lambda f, x: f(x, (5,)), "does not end in"),
    (lambda f, x: f(x, ()), "must be a sequence of integers"),
    (lambda f, x: f(x, 1.5), "must be a sequence of integers"),
    (lambda f, x: f(x, (4,), weight_offset=1.0), "there is no weight"),
    (lambda f, x: f(x, (4,), torch.ones(4).double()), "weight is f64"),
    (lambda f, x: f(x, (4,), residual=x[:1]), "residual has size 1"),
])
@pytest.mark.parametrize("norm", [ot.rms_norm, ot.layer_norm])
def test_misuse(norm, call, message):
    with pytest.raises(orchard.OrchardError, match=message):
        call(norm, torch.randn(3, 4))


@pytest.mark.parametrize("size, dtype, takes", [
    ((1024, 768), torch.float32, {"native_layer_norm", "native_layer_norm_backward", "rms_norm"}),
    ((1024, 768), torch.bfloat16, {"native_layer_norm_backward", "rms_norm"}),
    ((8, 768), torch.float32, set()), ((8192, 64), torch.float32, set())])
def test_what_measures_faster(size, dtype, takes):
    x = torch.empty(size, dtype=dtype)
    arguments = {"native_layer_norm": (x, size[1:], None, None, 1e-5),
                 "native_layer_norm_backward": (x, x, size[1:], x, x, None, None, [True] * 3),
                 "rms_norm": (x, size[1:], None, None)}
    replaced = {one.op[6:]: one for one in kernels.replacements() if one.group == "normalization"}
    assert set(replaced) == set(arguments)
    assert {name for name, one in replaced.items() if one.faster(*arguments[name]) is True} == takes
