"""Whoever calls the ops on mps without the public function's question: graphs that torch traced,
torch.func's transforms, callers of torch.ops.orchard. Served by the Metal kernels; what these refuse
by the explicit formula, counted, with the same values.

PyTorch without Metal cannot record gradients of a traced tensor on mps: it ends the process. So
inference is traced on mps (torch.export, with Dynamo and without), training on the CPU (torch.compile
up to the graphs that a compiler would get), and what was traced runs on the stand-in.
"""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fake_mps
import orchard
from orchard.torch import scaled_dot_product_attention as attention
from test_mps import counted, draw, launcher  # noqa: F401 (launcher is a fixture)
from test_torch_values import OPTIONS
from torch_formula import rand

F64 = "f64 tensors: no GPU backend has double precision"
FORWARD = torch.ops.orchard.attention_forward.default
DIFFERENTIABLE = torch.ops.orchard.attention.default
BACKWARD = torch.ops.orchard.attention_backward.default
PLAIN = (*[None] * 8, 0, 0, None, True, False, -1, -1, 0.0, 0.0)  # causal, nothing else


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(found, wanted, tolerance=2e-4):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=tolerance, atol=tolerance)


def who(launcher, op="attention_forward"):  # noqa: F811
    """(backend, reason) of every line of the report about the op."""
    return [(line.backend, line.reason) for line in launcher.report() if line.op == op]


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


# ---- Traced on mps -------------------------------------------------------------------------------

class Model(torch.nn.Module):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, q, k, v, tensors):
        return self.function(2 * q, k, v, **self.options, **tensors)


def exported(model, q, k, v, tensors, strict):
    """The model as torch.export traced it for tensors on mps, of which only the shapes are known."""
    def shape_of(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="mps")

    with FakeTensorMode():
        shapes = [shape_of(x) for x in (q, k, v)], {n: shape_of(x) for n, x in tensors.items()}
        return torch.export.export(model, (*shapes[0], shapes[1]), strict=strict)


def check_export(options, dtype=torch.float32, strict=False, function=attention):
    G = options.pop("G", 4)
    q, k, v = (rand(2, h, n, 16, dtype=dtype) for h, n in ((4, 13), (G, 21), (G, 21)))
    tensors = {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    model = Model(function, **{n: x for n, x in options.items() if n not in tensors})
    traced = exported(model, q, k, v, tensors, strict)
    assert DIFFERENTIABLE in targets(traced.graph)
    torch.manual_seed(3)
    wanted = model(q, k, v, tensors)
    torch.manual_seed(3)
    place = fake_mps.tensor
    found = traced.module()(place(q), place(k), place(v), {n: place(x) for n, x in tensors.items()})
    if isinstance(found, torch.Tensor):
        found, wanted = [found], [wanted]
    assert [x.stride() for x in found] == [x.stride() for x in wanted]
    same(found, wanted)


@pytest.mark.parametrize("option", ["plain", "gqa", "mask_keys", "float_mask_4d", "everything"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported(launcher, option, strict):  # noqa: F811
    check_export(OPTIONS[option](torch.float32), strict=strict)
    assert who(launcher) == [("mps", None)]


def test_exported_with_more(launcher):  # noqa: F811
    check_export({"dropout_p": 0.4, "is_causal": True})  # the seed is drawn in the graph
    check_export({"return_lse": True})
    check_export({"key_lengths": torch.tensor([21, 6])})
    check_export({}, torch.bfloat16)
    with pytest.raises(orchard.ArgumentError, match="key_lengths.1. is 22"):
        check_export({"key_lengths": torch.tensor([21, 22])})
    assert who(launcher) == [("mps", None)]


@pytest.mark.parametrize("option", ["causal", "everything", "key_lengths_bottom_right"])
def test_exported_and_refused(launcher, option, monkeypatch):  # noqa: F811
    check_export(OPTIONS[option](torch.float64), torch.float64)
    assert who(launcher) == [("mps", F64), ("pytorch", None)]
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    with pytest.raises(orchard.UnsupportedError, match="strict forbids a fallback"):
        check_export({"return_lse": True}, torch.float64)


# ---- Traced for training -------------------------------------------------------------------------

class Traced:
    """A graph that torch.compile hands to a compiler; what it was run with, and what came out."""

    def __init__(self, graph):
        self.graph = graph

    def __call__(self, *given):
        self.given, self.made = given, self.graph(*given)
        return self.made

    def on_mps(self):
        """(found, wanted): run with the same on mps. Seeds and sizes are no tensors of a device."""
        given = [fake_mps.tensor(x.detach()) if isinstance(x, torch.Tensor) and x.dim() else x
                 for x in self.given]
        with torch.no_grad():
            pairs = [(found, wanted) for found, wanted in zip(self.graph(*given), self.made)
                     if isinstance(wanted, torch.Tensor)]
        return zip(*pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_of_training(launcher, dtype, dynamic):  # noqa: F811
    leaves = [x.requires_grad_() for x in draw(G=4, T=13, S=13, dtype=dtype).values()]
    leaves.append(torch.randn(4, 13, 13, dtype=dtype, requires_grad=True))
    traced = []

    def keep(graph, _):
        traced.append(Traced(graph))
        return make_boxed_func(traced[-1])

    @torch.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True,
                   dynamic=dynamic)
    def function(q, k, v, bias):
        return attention(2 * q, k, v, bias, is_causal=True, softcap=3.0, dropout_p=0.2)

    torch.autograd.grad(function(*leaves).square().sum(), leaves)
    forward, backward = traced
    assert DIFFERENTIABLE in targets(forward.graph.graph)
    assert BACKWARD in targets(backward.graph.graph)
    torch.manual_seed(4)
    forward(*forward.given)  # with this seed, which a graph draws itself
    torch.manual_seed(4)
    same(*forward.on_mps())
    same(*backward.on_mps())
    lines = [("mps", None)] if dtype == torch.float32 else [("mps", F64), ("pytorch", None)]
    assert who(launcher) == who(launcher, "attention_backward") == lines


# ---- torch.func, and the ops themselves ----------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_transforms(launcher, dtype):  # noqa: F811
    inputs = list(draw(B=3, G=4, T=9, S=14, dtype=dtype).values())

    def loss(q, k, v):
        return attention(q[None], k[None], v[None], is_causal=True).square().sum()

    over_samples = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))
    same(over_samples(*map(fake_mps.tensor, inputs)), over_samples(*inputs))
    lines = [("mps", None)] if dtype == torch.float32 else [("mps", F64), ("pytorch", None)]
    assert who(launcher) == who(launcher, "attention_backward") == lines


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_forward_mode(launcher, dtype):  # noqa: F811
    """The tangents are PyTorch's operations on the same device, with the dropout of the kernel. Not
    by torch.func, whose wrappers lose the fake tensors' device."""
    inputs = tuple(draw(G=4, T=9, S=14, dtype=dtype).values())

    def tangents(place):
        torch.manual_seed(4)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(place(x), place(x + 1)) for x in inputs]
            made = attention(*duals, dropout_p=0.3, softcap=2.0, return_lse=True)
            return [forward_ad.unpack_dual(x).tangent for x in made]

    same(tangents(fake_mps.tensor), tangents(lambda x: x))
    assert who(launcher) == ([("mps", None)] if dtype == torch.float32 else
                             [("mps", F64), ("pytorch", None)])


def test_the_ops_themselves(launcher, monkeypatch):  # noqa: F811
    inputs = [rand(2, h, n, 16, dtype=torch.float64).transpose(1, 2).contiguous().transpose(1, 2)
              for h, n in ((4, 13), (2, 21), (2, 21))]
    placed = [fake_mps.tensor(x) for x in inputs]
    wanted = FORWARD(*inputs, *PLAIN)
    found = FORWARD(*placed, *PLAIN)
    dout = torch.randn_like(wanted[0])
    for needs in (7, 2):
        gradients = BACKWARD(needs, dout, None, *wanted, None, *inputs, *PLAIN)
        made = BACKWARD(needs, fake_mps.tensor(dout), None, *found, None, *placed, *PLAIN)
        assert [x.stride() for x in made] == [x.stride() for x in gradients]
        same([*found, *made], [*wanted, *gradients], 1e-10)
    assert counted(launcher) == [("attention_forward", F64, 1), ("attention_forward", None, 1),
                                 ("attention_backward", F64, 2), ("attention_backward", None, 2)]
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    with pytest.raises(orchard.UnsupportedError, match="attention_forward: mps cannot run this call.*strict"):
        FORWARD(*placed, *PLAIN)
    with pytest.raises(orchard.UnsupportedError, match="attention_backward: mps cannot run this call.*strict"):
        BACKWARD(7, found[0], None, *found, None, *placed, *PLAIN)


def test_a_backward_that_does_not_compile(launcher):  # noqa: F811
    """The forward has been Orchard's when it turns out: the same dropout is drawn again."""
    inputs = list(draw(G=4, T=9, S=14).values())
    rest = (*PLAIN[:7], torch.tensor(17), *PLAIN[8:-1], 0.4)
    wanted = FORWARD(*inputs, *rest)
    placed = [fake_mps.tensor(x) for x in inputs]
    found = FORWARD(*placed, *rest)
    fake_mps.fail("compile", 1)
    made = BACKWARD(7, found[0], None, *found, None, *placed, *rest)
    same(made, BACKWARD(7, wanted[0], None, *wanted, None, *inputs, *rest))
    assert who(launcher) == [("mps", None)]
    (_, reason), served = who(launcher, "attention_backward")
    assert reason.startswith("the device's compiler refused a kernel") and served == ("pytorch", None)


@pytest.mark.parametrize("sizes", [dict(B=0), dict(T=0), dict(S=0)], ids=str)
def test_refused_and_empty(launcher, sizes):  # noqa: F811
    inputs = list(draw(G=4, dtype=torch.float64, **sizes).values())
    placed = [fake_mps.tensor(x) for x in inputs]
    wanted, found = FORWARD(*inputs, *PLAIN), FORWARD(*placed, *PLAIN)
    same(found, wanted)
    same(BACKWARD(7, found[0], None, *found, None, *placed, *PLAIN),
         BACKWARD(7, wanted[0], None, *wanted, None, *inputs, *PLAIN))


def test_sinks_without_keys_of_a_refused_call(launcher):  # noqa: F811
    """lse is the sink alone, so that what comes to lse goes on to the sinks."""
    rest = (None,) * 3 + (rand(4, dtype=torch.float64),) + (None,) * 4 + PLAIN[8:]
    q, k = rand(2, 4, 5, 6, dtype=torch.float64), rand(2, 4, 0, 6, dtype=torch.float64)
    inputs = [fake_mps.tensor(x) if torch.is_tensor(x) else x for x in (q, k, k, *rest)]
    out, lse = FORWARD(*inputs)
    dlse = rand(2, 4, 5, dtype=torch.float64)
    found = BACKWARD(16, fake_mps.tensor(torch.zeros_like(q)), fake_mps.tensor(dlse), out, lse,
                     None, *inputs)[4]
    torch.testing.assert_close(found.cpu(), dlse.sum((0, 2)))
