"""Gradients of gradients where they are easily lost: under no_grad, hooks, traces; on the edges."""

import contextlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from orchard.torch.attention import explicit
from orchard.torch import scaled_dot_product_attention as attention

pytestmark = pytest.mark.usefixtures("one_thread")


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def plain(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def second(function, *x, create_graph=False):
    """The gradient of a function of the gradient."""
    first = torch.autograd.grad(function(*x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), x, create_graph=create_graph)


def close(found, expected):
    for a, b in zip(found, expected):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# ---- no_grad inside transforms -------------------------------------------------------------------

def to_itself(function, x):
    """A loss whose target is the function's own value, held fixed."""
    with torch.no_grad():
        target = function(x, x, x)
    return (x - target).square().sum() * x.sin().sum()


def by_autograd(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), x)[0]


FUNC = torch.func
NESTED = {
    "grad of grad": lambda f, x: FUNC.grad(lambda y: FUNC.grad(f)(y).square().sum())(x),
    "autograd of grad": lambda f, x: by_autograd(FUNC.grad(f), x),
    "autograd of vmap of grad": lambda f, x: by_autograd(
        lambda y: FUNC.vmap(FUNC.grad(f))(y[None]), x),
    "autograd of jvp": lambda f, x: by_autograd(
        lambda y: FUNC.jvp(f, (y,), (x.cos(),))[1], x),
    "jacrev of jacrev": lambda f, x: FUNC.jacrev(FUNC.jacrev(f))(x),
    "hessian": lambda f, x: FUNC.hessian(f)(x),
}


@pytest.mark.parametrize("name", NESTED)
def test_no_grad_stops_every_transform(name):
    x = rand(1, 2, 3, 4)
    close(*([NESTED[name](lambda y: to_itself(function, y), x)] for function in (attention, plain)))


# ---- Hooks for saved tensors ---------------------------------------------------------------------

HOOKS = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "none": contextlib.nullcontext,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_around_both_backwards(name):
    x = [rand(1, 2, 5, 4).requires_grad_() for _ in range(3)]
    with HOOKS[name]():
        close(second(attention, *x), second(plain, *x))


def test_two_gradients_inside_a_checkpoint():
    x = rand(1, 2, 5, 4).requires_grad_()

    def third(function):
        def block(y):
            return second(lambda z: function(z, z, z), y, create_graph=True)[0].sin()

        return torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)

    close(third(attention), third(plain))


# ---- Where there are no values -------------------------------------------------------------------

def with_dropout(x):
    return attention(x, x, x, dropout_p=0.5)


def test_dropout_in_traces():
    x = rand(1, 2, 5, 4)
    torch.manual_seed(3)
    expected = torch.func.jvp(with_dropout, (x,), (x.cos(),))[1]
    _, linear = torch.func.linearize(with_dropout, x)
    torch.manual_seed(3)  # as of torch's dropout, a number is drawn by each call of it
    close([linear(x.cos())], [expected])
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    expected = second(with_dropout, leaf)
    torch.manual_seed(3)
    traced = make_fx(lambda y: second(with_dropout, y), tracing_mode="real")(leaf)
    torch.manual_seed(3)
    close(traced(leaf), expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.5}])
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_shapes_alone(kind, options):
    fake = kind == "fake"
    with FakeTensorMode() if fake else contextlib.nullcontext():
        x = torch.randn(1, 2, 5, 4, device="cpu" if fake else "meta", requires_grad=True)
        assert second(lambda y: attention(y, y, y, **options), x)[0].shape == x.shape
        if kind == "meta":
            moved = torch.func.jvp(lambda y: attention(y, y, y, **options), (x,), (x,))[1]
            assert moved.shape == x.shape and moved.is_meta


# ---- Edges ---------------------------------------------------------------------------------------

LIMITS = [((sys.maxsize, sys.maxsize), None), ((2, sys.maxsize), (2, -1)),
          ((sys.maxsize, 0), (-1, 0))]


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window, same", LIMITS)
def test_windows_that_end_nowhere(window, same, alignment):
    x, k = rand(1, 1, 6, 3).requires_grad_(), rand(1, 1, 4, 3)

    def results(limits):
        def f(y):
            return attention(y, k, k, window=limits, causal_alignment=alignment)

        return [*second(f, x), torch.func.jvp(f, (x.detach(),), (x.detach(),))[1]]

    close(results(window), results(same))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_key_lengths_beyond_the_end_of_a_packed_sequence(alignment):
    """Which has 3 keys: 4 of them are 3, in every order of differentiation."""
    x, ends = rand(7, 1, 3), torch.tensor([0, 4, 7])

    def results(lengths):
        def f(y):
            return attention(y, y, y, is_causal=alignment == "bottom_right",
                             key_lengths=torch.tensor(lengths), causal_alignment=alignment,
                             cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=4, max_seqlen_k=4)

        y = x.clone().requires_grad_()
        batched, = torch.autograd.grad(f(y), y, torch.ones(1, 7, 1, 3, dtype=torch.float64),
                                       is_grads_batched=True, create_graph=True)
        return [f(x), batched, *second(f, y), torch.func.jvp(f, (x,), (x,))[1]]

    close(results([4, 4]), results([4, 3]))
    close(results([2, 4]), results([2, 3]))


@pytest.mark.parametrize("packed", [False, True])
def test_sinks_without_keys(packed):
    """lse is the sink alone, so the second derivative of its square is 2 for each of 3 rows."""
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    if packed:
        q, k = rand(3, 2, 4), rand(0, 2, 4)
        more = {"cu_seqlens_q": torch.tensor([0, 3]), "cu_seqlens_k": torch.tensor([0, 0]),
                "max_seqlen_q": 3, "max_seqlen_k": 0}
    else:
        q, k, more = rand(1, 2, 3, 4), rand(1, 2, 0, 4), {}
    lse = attention(q, k, k, sinks=sinks, return_lse=True, **more)[1]
    first, = torch.autograd.grad(lse.square().sum(), sinks, create_graph=True)
    torch.testing.assert_close(first, 6 * sinks)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), sinks)[0],
                               torch.full_like(sinks, 6.0))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_sink_that_takes_everything(dropout):
    """out 0, lse the sink, which alone has a gradient, the sum of dlse; in every order."""
    x = [rand(1, 2, 3, 4).requires_grad_() for _ in range(3)]
    sinks = torch.tensor([torch.inf, 0.3], dtype=torch.float64, requires_grad=True)
    x, dout, dlse = [*x, sinks], rand(1, 2, 3, 4), rand(1, 2, 3).requires_grad_()
    torch.manual_seed(3)
    seed = torch.randint(2 ** 63 - 1, ())
    torch.manual_seed(3)
    made = [attention(*x[:3], sinks=sinks, return_lse=True, dropout_p=dropout),
            explicit.forward((*x[:3], None, None, None, sinks, None, None, None, seed),
                             (0, 0, None, False, False, -1, -1, 0.0, dropout))[:2]]
    for out, lse in made:
        assert not out[0, 0].any() and torch.equal(lse[0, 0], sinks[:1].expand(3))
        torch.testing.assert_close(out, made[0][0])
        first = torch.autograd.grad((out, lse), x, (dout, dlse), create_graph=True)
        assert all(not dx[0, 0].any() and dx[0, 1].all() for dx in first[:3])
        torch.testing.assert_close(first[3][0], dlse[0, 0].sum())
        *more, by_dlse = torch.autograd.grad(first, (*x, dlse), [torch.ones_like(t) for t in x])
        assert all(not dx[0, 0].any() and dx[0, 1].all() for dx in more[:3])
        assert more[3][0] == 0 and more[3][1].isfinite()
        torch.testing.assert_close(by_dlse[0, 0], torch.ones_like(by_dlse[0, 0]))


# Row 2 sees nothing, and nobody sees key 3; there each of these may hold anything, also NaN: inputs
# of backward, its cotangents (second derivatives), tangents.
ROWS, KEYS = ("q", "dout", "dlse"), ("k", "v")


def hide(way):
    """(mask, bias) of 4 queries and 5 keys."""
    seen = torch.ones(4, 5, dtype=torch.bool)
    seen[2], seen[:, 3] = False, False
    bias = rand(4, 5)
    if way == "bias":
        return None, bias.masked_fill(~seen, -torch.inf)
    return seen, bias


def fill_hidden(name, tensor, value, bias):
    if name in KEYS:
        tensor[:, :, 3] = value
    elif name in ROWS:
        tensor[:, :, 2] = value
    elif name == "bias" and not bias.isinf().any():
        tensor[2], tensor[:, 3] = value, value
    return tensor


def differentiated(way, options, filled, value):
    """Second derivatives, and tangents of backward, where some of `filled` hold the value."""
    torch.manual_seed(1)
    mask, bias = hide(way)
    x = {"q": rand(1, 2, 4, 3), "k": rand(1, 2, 5, 3), "v": rand(1, 2, 5, 3), "bias": bias,
         "sinks": rand(2), "dout": rand(1, 2, 4, 3), "dlse": rand(1, 2, 4)}
    changes = {name: torch.randn_like(t) for name, t in x.items()}
    for name in x:
        if name in filled:
            fill_hidden(name, x[name], value, bias)
        if "d " + name in filled:
            fill_hidden(name, changes[name], value, torch.zeros(()))

    def backward(*given):
        q, k, v, bias, sinks, dout, dlse = given
        torch.manual_seed(2)
        results = attention(q, k, v, mask, bias=bias, sinks=sinks, return_lse=True, **options)
        return torch.autograd.grad(results, (q, k, v, bias, sinks), (dout, dlse),
                                   create_graph=True)

    def tangent(*given):
        _, pull = torch.func.vjp(lambda *y: attention(
            *y[:3], mask, bias=y[3], sinks=y[4], return_lse=True, **options), *given[:5])
        return pull(given[5:])

    leaves = [t.requires_grad_() for t in x.values()]
    first = backward(*leaves)
    more = torch.autograd.grad(first, leaves, [changes[n] for n in list(x)[:5]])
    torch.manual_seed(2)
    moved = torch.func.jvp(tangent, tuple(t.detach() for t in leaves), tuple(changes.values()))
    return {**{"d" + n: t.detach() for n, t in zip(x, first)},
            **{"second by " + n: t for n, t in zip(x, more)},
            **{"tangent of d" + n: t for n, t in zip(x, moved[1])}}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.4}], ids=str)
@pytest.mark.parametrize("way", ["mask", "bias"])
def test_nan_where_nothing_is_seen(way, options):
    clean = differentiated(way, options, (), 0.0)
    assert all(t.isfinite().all() and t.any() for t in clean.values())
    for name in ("q", "k", "v", "bias", "dout", "dlse"):
        for filled in (name, "d " + name):
            found = differentiated(way, options, (filled,), torch.nan)
            if filled == "dlse":  # of which dsinks is a sum: the row's lse is the sink
                assert found["dsinks"].isnan().all()
            for what, expected in clean.items():
                if not (name == "dlse" and "sinks" in what):
                    assert torch.equal(found[what], expected), (filled, what)


def by_formula(x, mask, cotangents):
    """First derivatives, as a refused call on mps has them."""
    made = explicit.forward((*x[:3], x[3][None, None], mask, None, None, None, None, None, None),
                            (0, 0, None, False, False, -1, -1, 0.0, 0.0))[:2]
    return torch.autograd.grad(made, x, cotangents)


def of_tangents(x, mask, cotangents):
    """Backward over forward mode."""
    changes = [fill_hidden(name, t.detach().cos(), cotangents[0][0, 0, 2, 0], torch.zeros(()))
               for name, t in zip("qkv", x)] + [torch.zeros_like(x[3])]

    def tangent(*y):
        return torch.func.jvp(lambda *z: attention(*z[:3], mask, bias=z[3], return_lse=True), y,
                              tuple(changes))[1]

    return torch.func.vjp(tangent, *(t.detach() for t in x))[1](cotangents)


@pytest.mark.parametrize("derivatives", [by_formula, of_tangents])
@pytest.mark.parametrize("way", ["mask", "bias"])
def test_nan_that_comes_for_a_row_that_sees_nothing(way, derivatives):
    results = []
    for value in (0.0, torch.nan):
        torch.manual_seed(1)
        mask, bias = hide(way)
        x = [t.requires_grad_() for t in (rand(1, 2, 4, 3), rand(1, 2, 5, 3), rand(1, 2, 5, 3), bias)]
        dout, dlse = rand(1, 2, 4, 3), rand(1, 2, 4)
        results.append(derivatives(x, mask, (fill_hidden("dout", dout, value, bias),
                                             fill_hidden("dlse", dlse, value, bias))))
    close(*results)
