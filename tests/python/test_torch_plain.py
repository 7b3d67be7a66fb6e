"""Calls without options take ops made for that: to the bit what the general ones give, and only where
nobody looks on."""

import warnings

import numpy as np
import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import orchard
from orchard.torch import cpu, tracing
from orchard.torch.attention import autograd, operands, ops
from orchard.torch import scaled_dot_product_attention as attention

Tensor = torch.Tensor


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True)
            for shape in shapes or [(2, 4, 9, 8)] * 3]


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel(), dtype=out.dtype)
                               .view(out.shape))


@pytest.fixture
def served(monkeypatch):
    """How often each of the two ops was called."""
    counts = {"forward": 0, "backward": 0}

    def counting(name, op):
        def call(*args):
            counts[name] += 1
            return op(*args)
        return call

    for name in ("plain_forward", "plain_forward_rest"):
        monkeypatch.setattr(ops, name, counting("forward", getattr(ops, name)))
    monkeypatch.setattr(ops, "plain_backward", counting("backward", ops.plain_backward))
    return counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3},
                                     {"is_causal": True, "scale": -2.0}], ids=str)
def test_same_bits_as_the_general_ops(served, monkeypatch, dtype, options):
    for G, gqa in ((4, False), (2, True), (1, True)):
        inputs = leaves((2, 4, 9, 8), (2, G, 7, 8), (2, G, 7, 5), dtype=dtype)
        served.update(forward=0, backward=0)
        out = attention(*inputs, enable_gqa=gqa, **options)
        grads = gradients(out, inputs)
        with torch.no_grad():
            unrecorded = attention(*inputs, enable_gqa=gqa, **options)
        assert served == {"forward": 2, "backward": 1}
        with monkeypatch.context() as patch:
            patch.setattr(tracing, "dispatch_modes", lambda: 1)  # as where torch cannot say
            general = attention(*inputs, enable_gqa=gqa, **options)
            general_grads = gradients(general, inputs)
        assert served == {"forward": 2, "backward": 1}
        assert torch.equal(out, general) and torch.equal(unrecorded, general)
        assert out.stride() == general.stride() == unrecorded.stride()
        for a, b in zip(grads, general_grads):
            assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("which", range(1, 8))
def test_only_what_is_needed(served, which):
    inputs = leaves()
    wanted = [x for i, x in enumerate(inputs) if which >> i & 1]
    full = gradients(attention(*inputs), inputs)
    for i, x in enumerate(inputs):
        x.requires_grad_(bool(which >> i & 1))
    part = gradients(attention(*inputs), wanted)
    assert served == {"forward": 2, "backward": 2}
    for a, b in zip(part, [g for i, g in enumerate(full) if which >> i & 1]):
        assert torch.equal(a, b)


def test_python_kernels_give_the_same():
    inputs = [x.detach() for x in leaves((2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 5))]
    out, lse, lse_rest = ops.plain_forward_rest(*inputs, 0.5, True)
    for signature in (operands.PLAIN_FORWARD, operands.PLAIN_FORWARD_REST):
        for a, b in zip((out, lse, lse_rest), cpu.in_python(signature)(*inputs, 0.5, True)):
            assert torch.equal(a, b)
    for needs in range(1, 8):
        args = needs, torch.ones_like(out), out, lse, lse_rest, *inputs, 0.5, True
        made = ops.plain_backward(*args)
        assert len(made) == 3
        for a, b in zip(made, cpu.in_python(operands.PLAIN_BACKWARD)(*args)):
            assert a.shape == b.shape and torch.equal(a, b)
    with pytest.raises(orchard.ShapeError, match="grouped heads are used only with enable_gqa"):
        attention(*inputs)


# ---- Where they do not serve ---------------------------------------------------------------------

class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op)
        return op(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_function_modes_see_the_public_ops(served):
    inputs = leaves()
    with WatchFunctions() as watch:
        out = attention(*inputs)
    assert ops.forward_rest in watch.seen and served["forward"] == 0
    assert torch.equal(out, attention(*inputs))
    with WatchFunctions() as watch:  # torch shows it nothing of backward
        gradients(out, inputs)
    assert not any("orchard" in str(one) for one in watch.seen)


def test_modes_see_the_public_ops(served):
    inputs = leaves()
    with Watch() as watch:
        out = attention(*inputs)
    assert ops.forward_rest in watch.seen and served["forward"] == 0
    with Watch() as watch:
        gradients(out, inputs)
    assert ops.backward in watch.seen
    out = attention(*inputs)  # recorded unseen, a mode looks on at backward only
    assert served == {"forward": 1, "backward": 0}
    with Watch() as watch:
        seen = gradients(out, inputs)
    assert ops.backward in watch.seen and served["backward"] == 0
    for a, b in zip(seen, gradients(attention(*inputs), inputs)):
        assert torch.equal(a, b)
    assert served["backward"] == 1
    with FlopCounterMode(display=False) as flops:
        gradients(attention(*inputs), inputs)
    assert flops.get_total_flops() == 14 * 2 * 4 * 9 * 9 * 8


def test_compiled_graphs_hold_the_public_ops(served):
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    inputs = [x.detach() for x in leaves()]
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), backend=keep, fullgraph=True)
    assert torch.equal(compiled(*inputs), attention(*inputs, is_causal=True))
    assert served["forward"] == 1
    assert ops.forward in {node.target for node in graphs[0].graph.nodes}


def test_compiled_autograd_takes_an_eager_forward(served):
    torch._dynamo.reset()
    inputs = leaves()
    expected = torch.autograd.grad(attention(*inputs).square().sum(), inputs)
    loss = attention(*inputs).square().sum()
    assert served == {"forward": 2, "backward": 1}
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager",
                                                               fullgraph=True)):
        loss.backward()
    assert served["backward"] == 1
    for x, grad in zip(inputs, expected):
        torch.testing.assert_close(x.grad, grad)


class Marked(Tensor):
    pass


@pytest.mark.filterwarnings("ignore")
def test_traced_programs_hold_the_public_ops(served):
    inputs = [x.detach() for x in leaves()]
    traced = torch.jit.trace(lambda *x: attention(*x), inputs, check_trace=False)
    assert "orchard::attention(" in str(traced.graph)  # the one with a formula
    graph = make_fx(lambda *x: attention(*x), pre_dispatch=True)(*inputs).graph
    assert ops.forward in {node.target for node in graph.nodes}
    assert served["forward"] == 0
    assert torch.equal(traced(*inputs), attention(*inputs))


class Dispatched(Tensor):
    """A subclass that sees every op, as a gradient."""
    seen = []

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        cls.seen.append(op)
        with torch._C._DisableTorchDispatch():
            return op(*args, **(kwargs or {}))


def test_gradients_that_are_more_than_tensors(served):
    inputs = leaves()
    expected = torch.autograd.grad(attention(*inputs), inputs, torch.ones(2, 4, 9, 8))
    dout = torch.ones(2, 4, 9, 8).as_subclass(Dispatched)
    found = torch.autograd.grad(attention(*inputs), inputs, dout)
    assert ops.backward in Dispatched.seen and served["backward"] == 1
    for a, b in zip(found, expected):
        assert torch.equal(a.as_subclass(Tensor), b)


@pytest.mark.parametrize("count", [0, 3])
def test_vmap_over_backward(served, count):
    """By the public op, which has a rule for it."""
    inputs = leaves()
    out = attention(*inputs)
    many = torch.randn(count, *out.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(lambda d: torch.autograd.grad(out, inputs, d, retain_graph=True))(
            many)
    assert served["backward"] == 0
    for at in range(count):
        for a, b in zip(found, torch.autograd.grad(out, inputs, many[at], retain_graph=True)):
            torch.testing.assert_close(a[at], b)
    assert all(len(x) == count for x in found)


def test_errors_of_others_are_not_taken_for_refusals(served):
    calls = []

    def full(x):
        calls.append(x)
        if len(calls) == 3:
            raise RuntimeError("disk full")
        return x

    with torch.autograd.graph.saved_tensors_hooks(full, lambda x: x):
        with pytest.raises(RuntimeError, match="disk full"):
            attention(*leaves())
    assert len(calls) == 3 and served["forward"] == 1


def test_what_else_is_left_to_the_general_path(served):
    q, k, v = leaves()
    first = attention(q, k, v).detach()
    assert served["forward"] == 1
    calls = {
        "a subclass": lambda: attention(q.detach().as_subclass(Marked), k, v).as_subclass(Tensor),
        "three dimensions": lambda: torch.stack([attention(*(x[i] for x in (q, k, v)))
                                                 for i in range(2)]),
        "the lse": lambda: attention(q, k, v, return_lse=True)[0],
        "NumPy's number": lambda: attention(q, k, v, scale=np.float32(8 ** -0.5)),
        "torch.func": lambda: torch.func.vmap(attention)(q, k, v),
        "a window that hides nothing": lambda: attention(q, k, v, window=(-1, -1)),
    }
    for name, call in calls.items():
        torch.testing.assert_close(call().detach(), first, msg=lambda text: f"{name}: {text}")
        assert served["forward"] == 1, name
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16
    assert served["forward"] == 1


def test_what_they_refuse_the_general_path_makes_fit_or_explains(served):
    q, k, v = leaves()
    one = k[:, :1].detach()
    torch.testing.assert_close(attention(q, one, one),
                               attention(q, one.expand_as(k), one.expand_as(k)))
    torch.testing.assert_close(attention(q, k[:1], v[:1]),
                               attention(q, k[:1].expand_as(k), v[:1].expand_as(v)))
    assert served["forward"] == 3  # heads that differ are not asked, batches are
    with pytest.raises(orchard.ShapeError, match="key has 2 heads, query has 4; grouped heads"):
        attention(q, k[:, :2], v[:, :2])
    with pytest.raises(orchard.ShapeError, match="k has"):
        attention(q, k[..., :4], v)
    with pytest.raises(orchard.DtypeError):
        attention(q, k.double(), v)
    with pytest.raises(orchard.ArgumentError, match="key is on meta, query is on cpu"):
        attention(q, k.to("meta"), v)
    with pytest.raises(orchard.ArgumentError, match="scale"):
        attention(q, k, v, scale=float("nan"))


def test_nothing_private_is_needed(monkeypatch):
    """Without what torch keeps private the general ops do it all."""
    inputs = leaves()
    first = attention(*inputs)
    grads = gradients(first, inputs)
    monkeypatch.setattr(autograd, "_unwrap_if_dead", None)
    second = attention(*inputs)
    assert torch.equal(first, second)
    for a, b in zip(grads, gradients(second, inputs)):
        assert torch.equal(a, b)
    monkeypatch.setattr(tracing, "any_autocast", lambda: True)
    third = attention(*inputs)
    assert torch.equal(first, third)
    for a, b in zip(grads, gradients(third, inputs)):
        assert torch.equal(a, b)


def test_the_schemas_say_the_same():
    """What without_options fills in, at the places of the general schema."""
    names = [a.name for a in ops.forward._schema.arguments][3:]
    values = dict(zip(names, operands.without_options(0.25, True)))
    assert len(names) == len(values) == len(operands.without_options(0.25, True))
    assert values.pop("scale") == 0.25 and values.pop("causal") is True
    assert values.pop("window_left") == values.pop("window_right") == -1
    assert not any(values.values())
