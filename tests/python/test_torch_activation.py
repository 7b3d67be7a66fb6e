"""What only activations have: limits at infinity, digits of the tail, halves, writing in place, how
results lie in memory in torch's stead; and, by name, what other libraries got wrong there. The rest
is in test_torch_rooms.py and test_switch_samples.py.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import orchard
from orchard import switch
from orchard.torch import geglu, gelu, nn, relu2, silu, swiglu
from orchard.torch.rooms.activation import ACTIVATION, GATED

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = math.inf, math.nan
EACH = {"gelu": (gelu, F.gelu), "tanh": (lambda x, **o: gelu(x, "tanh", **o),
                                         lambda x: F.gelu(x, approximate="tanh")),
        "silu": (silu, F.silu), "relu2": (relu2, lambda x: F.relu(x).square())}
each = pytest.mark.parametrize("name", EACH)


def on():
    return orchard.enable(attention=False, activations=True)


def derive(function, *tensors, dout=None):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    dout = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape) \
        if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


# ---- Values --------------------------------------------------------------------------------------

@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_infinite_inputs_give_the_limits(name, dtype):
    """Of kernels and formulas; torch gives NaN at -inf."""
    x = torch.tensor([INF, -INF, NAN, -1e4, 1e4, 0.0], dtype=dtype)
    ones = torch.ones_like(x)
    kind = list(EACH).index(name)
    positive = [INF, 0, NAN, 0, 1e8 if name == "relu2" else 1e4, 0]
    slopes = [INF if name == "relu2" else 1, 0, NAN, 0, 2e4 if name == "relu2" else 1,
              0 if name == "relu2" else 0.5]
    out, dx = derive(EACH[name][0], x, dout=ones)
    for made in (out, *ACTIVATION.forward.by_formula(1, x, None, kind)):
        torch.testing.assert_close(made, torch.tensor(positive).to(dtype), equal_nan=True)
    for made in (dx, ACTIVATION.backward.by_formula(1, ones, x, None, kind)[0]):
        torch.testing.assert_close(made.detach(), torch.tensor(slopes).to(dtype), equal_nan=True)
    for made in derive(lambda x: nn.SwiGLU()(x, ones), x, dout=ones) if name == "silu" else ():
        assert made.isnan().tolist() == [False, False, True, False, False, False]
    made = GATED.backward.by_formula(3, ones, x, ones, kind)[0].detach()
    torch.testing.assert_close(made, torch.tensor(slopes).to(dtype), equal_nan=True)


def test_the_tail_of_gelu_keeps_its_digits():
    """torch's 1 + erf is 0 from -5.5 on in float32."""
    x = torch.linspace(-12, -3, 500)
    right = x.double() * torch.special.erfc(-x.double() / 2 ** 0.5) / 2
    assert ((gelu(x) - right) / right).abs().max() < 1e-5
    assert (((gelu(x.double()) - right) / right).abs().max()) < 1e-13


def test_gelu_is_exact_unless_tanh_is_asked_for():
    """metalcore (M14) sold the tanh form as the exact one, clamped its input and left the tail of
    backward unwritten."""
    for size in range(1, 40):
        x = torch.linspace(-9, 9, size)
        for options in ({}, {"approximate": "tanh"}):
            right = derive(lambda x: F.gelu(x, **options), x.double())
            for found, exact in zip(derive(lambda x: gelu(x, **options), x), right):
                torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-6)
    x = torch.tensor([-2.0])
    assert abs(gelu(x) - gelu(x, "tanh")) > 5e-5
    with pytest.raises(orchard.ArgumentError, match="approximate is 'exact', must be 'none' or"):
        gelu(x, "exact")


@each
def test_biases_of_any_size_and_their_gradients(name):
    """metalcore (M15) took sizes of 4 only, and had no gradient."""
    ours, theirs = EACH[name]
    for size in (1, 2, 3, 5, 6, 7, 9, 31):
        x, bias = torch.randn(3, 2, size).double(), torch.randn(size).double()
        torch.testing.assert_close(derive(lambda x, b: ours(x, bias=b), x, bias),
                                   derive(lambda x, b: theirs(x + b), x, bias))
    with pytest.raises(orchard.ShapeError, match="bias has size 4 in dimension 0, must be 3"):
        ours(torch.randn(2, 3), bias=torch.randn(4))


@pytest.mark.parametrize("module, theirs", [
    (nn.GELU(), torch.nn.GELU()), (nn.GELU("tanh"), torch.nn.GELU("tanh")),
    (nn.SiLU(), torch.nn.SiLU()), (nn.SiLU(True), torch.nn.SiLU(True)),
    (nn.ReLU2(), lambda x: F.relu(x) ** 2),
    (nn.SwiGLU(1), lambda x: F.silu(x[:, :2]) * x[:, 2:]),
    (nn.GeGLU("tanh"), lambda x: F.gelu(x[..., :3], approximate="tanh") * x[..., 3:])], ids=str)
def test_training_through_modules(module, theirs):
    """metalcore (M2): backward on the CPU raised."""
    x = torch.randn(5, 4, 6)
    for found, right in zip(derive(lambda x: module(x * 1), x), derive(lambda x: theirs(x * 1), x)):
        torch.testing.assert_close(found, right)


# ---- Halves, in place ----------------------------------------------------------------------------

@pytest.mark.parametrize("gated", [swiglu, geglu])
def test_halves_are_two_tensors(gated):
    x = torch.randn(4, 6, 10)
    for dim in (0, 1, 2, -1):
        gate, up = x.chunk(2, dim)
        out, dx = derive(lambda x: gated(x, dim=dim), x)
        right = derive(gated, gate.contiguous(), up.contiguous())
        assert torch.equal(out, right[0]) and torch.equal(dx, torch.cat(right[1:], dim))
    for wrong, dim in ((torch.randn(4, 5), -1), (torch.randn(4), 1), (torch.tensor(1.0), 0)):
        with pytest.raises(orchard.ShapeError, match="has no halves along dimension"):
            gated(wrong, dim=dim)
    with pytest.raises(orchard.ShapeError):
        gated(torch.randn(2, 3), torch.randn(2, 4))


def test_silu_in_place():
    x = torch.randn(3, 5)
    right, before = silu(x), x._version
    assert silu(x, True) is x and torch.equal(x, right) and x._version > before
    leaf = torch.randn(3, 5, requires_grad=True)
    assert torch.equal(*(torch.autograd.grad(silu(leaf * 2, inplace).sin().sum(), leaf)[0]
                         for inplace in (False, True)))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        silu(leaf, True)


# ---- In torch's stead ----------------------------------------------------------------------------

def layouts():
    x = torch.randn(4, 6, 5, 3)
    yield from (x.permute(order) for order in itertools.permutations(range(4)))
    yield x[:, ::2]
    yield x.transpose(0, 2)[..., 1:]
    yield x[:1].expand(4, -1, -1, -1)
    yield x[:, :1, :, :].transpose(1, 3)
    yield x.to(memory_format=torch.channels_last)
    yield torch.randn(3, 1).t().as_strided((1, 3), (7, 1))


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_results_lie_as_torchs(name):
    """torch on MPS was wrong for permuted tensors (pytorch #175188)."""
    aten = torch.ops.aten
    forward, backward = getattr(aten, name), getattr(aten, name + "_backward")
    for x in layouts():
        cases = [(forward, x)] + [(backward, dout, x) for dout in (
            torch.randn(x.shape), torch.randn(x.shape).expand_as(x), torch.randn_like(x),
            torch.randn(x.shape[::-1]).permute(*range(x.dim())[::-1]))]
        for op, *tensors in cases:
            right = op(*tensors)
            with on():
                switch.counts(reset=True)
                found = op(*tensors)
                assert list(switch.counts().values()) == [1]
                assert [what[-17:] for what in switch.counts()] == ["served by Orchard"]
            assert found.stride() == right.stride()
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["gelu_", "silu_"])
def test_variants_in_place(name):
    op = getattr(torch.ops.aten, name)
    for x in (torch.randn(4, 5), torch.randn(5, 4).t(), torch.randn(4, 9)[:, ::2]):
        right, given = op(x.clone()), x.clone()
        with on():
            switch.counts(reset=True)
            assert op(given) is given and given._version == 1
            assert switch.counts() == {f"aten::{name}: served by Orchard": 1}
        torch.testing.assert_close(given, right)
    with on(), pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        op(torch.randn(1, 3).expand(2, 3))


@pytest.mark.parametrize("module", [torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(),
                                    torch.nn.SiLU(inplace=True)], ids=str)
def test_torchs_modules_keep_their_gradients_and_options(module):
    """metalcore cut gradients (M3), changed options and could not be undone (M5)."""
    x = torch.randn(7, 9)
    right = derive(lambda x: module(x * 2), x)
    switch.counts(reset=True)
    with on(), on():
        found = derive(lambda x: module(x * 2), x)
    assert sum(switch.counts(reset=True).values()) == 2
    for one, other in zip(found, right):
        torch.testing.assert_close(one, other)
    assert all(map(torch.equal, derive(lambda x: module(x * 2), x), right))
    assert not switch.counts()


def test_what_torch_has_and_orchard_lacks_is_torchs():
    aten = torch.ops.aten
    x = torch.randn(3, 4)
    for call in (lambda: F.silu(torch.randn(3, dtype=torch.complex64)),
                 lambda: aten.gelu_backward(x.double(), x), lambda: F.silu(torch.arange(3)),
                 lambda: F.gelu(x, approximate="exact"), lambda: F.silu(torch.randn((1,) * 9)),
                 lambda: aten.silu_backward(x[0], x), lambda: aten.gelu_(torch.arange(3))):
        results = []
        for wanted in (False, True):
            torch.manual_seed(1)
            with orchard.enable(attention=False, activations=wanted):
                try:
                    results.append(call())
                except RuntimeError as why:
                    results.append(str(why))
        if isinstance(results[0], torch.Tensor):
            torch.testing.assert_close(*results)
        else:
            assert results[0] == results[1]


def test_without_a_word_the_faster_calls():
    switch.counts(reset=True)
    with orchard.enable(attention=False):
        for size in (8, 2 ** 16):
            F.gelu(torch.randn(size), approximate="tanh")
    measured = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert switch.counts() == ({"aten::gelu: too small to gain": 1,
                                "aten::gelu: served by Orchard": 1} if measured else
                               {"aten::gelu: not measured on this device": 2})
