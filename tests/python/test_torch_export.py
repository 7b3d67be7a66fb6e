"""torch.export: the program computes the same and can be trained, which takes an op with a formula for
autograd: Functions are not kept, and with them the gradients went, without a word."""

import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, vmap

import orchard
from orchard.torch.attention import operands, ops
from orchard.torch import scaled_dot_product_attention as attention

B, H, T, D = 2, 4, 6, 8


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.before = nn.Linear(D, 3 * D, dtype=torch.float64)
        self.after = nn.Linear(D, D, dtype=torch.float64)
        self.sinks = nn.Parameter(torch.randn(H, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(H, T, T, dtype=torch.float64))

    def forward(self, x):
        q, k, v = self.before(x).chunk(3, -1)
        given = {name: getattr(self, name) if value is True else value
                 for name, value in self.options.items() if name in ("sinks", "bias")}
        rest = {name: value for name, value in self.options.items() if name not in given}
        return self.after(attention(q, k, v, **given, **rest))


OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"window": (2, 1), "softcap": 3.0},
    "all": {"sinks": True, "bias": True, "is_causal": True, "scale": 0.3},
}


def gradients(model, x):
    """By name, of what takes part."""
    x = x.clone().requires_grad_()
    named = {"x": x, **dict(model.named_parameters())}
    found = torch.autograd.grad(model(x).square().sum(), named.values(), allow_unused=True)
    return {name: grad for name, grad in zip(named, found) if grad is not None}


def check_same(found, expected):
    assert found.keys() == expected.keys() and len(found) >= 5
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_exported_model_trains(name, strict):
    model, x = Model(**OPTIONS[name]), torch.randn(B, H, T, D, dtype=torch.float64)
    program = torch.export.export(model, (x,), strict=strict)
    assert ops.differentiable in {node.target for node in program.graph.nodes}
    module = program.module()
    torch.testing.assert_close(module(x), model(x))
    check_same(gradients(module, x), gradients(model, x))


def test_saved_and_loaded():
    model, x = Model(is_causal=True), torch.randn(B, H, T, D, dtype=torch.float64)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    torch.testing.assert_close(module(x), model(x))
    check_same(gradients(module, x), gradients(model, x))


def test_compiled_after_export():
    model, x = Model(bias=True, sinks=True), torch.randn(B, H, T, D, dtype=torch.float64)
    module = torch.export.export(model, (x,)).module()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    found = {name.removeprefix("_orig_mod."): x for name, x in gradients(compiled, x).items()}
    check_same(found, gradients(model, x))


def test_dropout_is_drawn_anew():
    model, x = Model(dropout_p=0.5), torch.randn(B, H, T, D, dtype=torch.float64)
    module = torch.export.export(model, (x,)).module()
    torch.manual_seed(3)
    first = module(x)
    assert not torch.equal(first, module(x))
    torch.manual_seed(3)
    assert torch.equal(first, module(x))
    torch.manual_seed(3)
    found = gradients(module, x)
    torch.manual_seed(3)
    check_same(found, gradients(model, x))


def test_the_op_itself():
    """As users of the program's graph meet it: checked by torch, differentiable twice, vmapped."""
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rest = (*(None,) * 8, 0, 0, 0.7, True, False, -1, -1, 0.0, 0.0)
    torch.library.opcheck(ops.differentiable, (q, k, v, *rest))

    def call(*x):
        return ops.differentiable(*x, *rest)[0]

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))
    many = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    found = torch.func.vmap(lambda x: ops.differentiable(x, k.detach(), v.detach(), *rest)[0])(many)
    for a, x in zip(found, many):
        torch.testing.assert_close(a, call(x, k, v).detach())


@pytest.mark.parametrize("options", [{"is_causal": True}, {"softcap": 3.0, "window": (2, 1)}])
def test_traced_modules_are_saved_and_trained(options):
    """By torch.jit.trace, whose own check runs without gradients, with gradients on and off."""
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.inner(x).view(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)
            return x + attention(q, k, v, **options).transpose(1, 2).flatten(-2)

    torch.manual_seed(1)
    block, x = Block(), torch.randn(2, 5, 8)
    parameters = list(block.parameters())
    expected = torch.autograd.grad(block(x).square().sum(), parameters)
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            traced = torch.jit.trace(block, x)
        found = torch.autograd.grad(traced(x).square().sum(), parameters)
        torch.testing.assert_close(found, expected)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        loaded = torch.jit.load(file)
        found = torch.autograd.grad(loaded(x).square().sum(), list(loaded.parameters()))
        torch.testing.assert_close(found, expected)


def test_forward_mode_is_refused_and_not_lost():
    """torch gave a tangent of zero, or none."""
    x, dx = torch.randn(2, 2, B, H, T, D, dtype=torch.float64)

    class Attention(nn.Module):
        def forward(self, y):
            return attention(y, y, y)

    program = torch.export.export(Attention(), (x[0],)).module()
    op = lambda y: ops.differentiable(y, y, y, *operands.without_options(None, False))[0]  # noqa: E731
    for call in (program, op):
        for refused in (lambda: jvp(call, (x[0],), (dx[0],)), lambda: jacfwd(call)(x[0]),
                        lambda: jvp(vmap(op), (x,), (dx,)),
                        lambda: vmap(lambda y, d: jvp(op, (y,), (d,))[1])(x, dx)):
            with pytest.raises(orchard.UnsupportedError, match="do not pass through"):
                refused()
        with forward_ad.dual_level():
            assert torch.equal(call(x[0]), attention(x[0], x[0], x[0]))
            with pytest.raises(orchard.UnsupportedError, match="do not pass through"):
                call(forward_ad.make_dual(x[0], dx[0]))
