"""vmap, torch.func, checkpointing, autocast, inference mode, export, flop counts, DDP's hooks."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import checkpoint as ckpt
from torch.utils.flop_counter import (FlopCounterMode, sdpa_backward_flop_count,
                                      sdpa_flop_count)

from orchard import ShapeError
from orchard.torch.attention import ops
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch.attention.operands import without_options


def rand(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def by_loop(function, in_dims, args):
    count = next(a.shape[d] for a, d in zip(args, in_dims) if d is not None)
    outs = [function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims)))
            for i in range(count)]
    if isinstance(outs[0], tuple):
        return tuple(torch.stack(x) for x in zip(*outs))
    return torch.stack(outs)


N = 3
VMAPS = {
    # name: (function, in_dims, arguments)
    "all": lambda: (attention, (0, 0, 0), (rand(N, 2, 4, 5, 6), rand(N, 2, 4, 7, 6),
                                           rand(N, 2, 4, 7, 3))),
    "dims": lambda: (attention, (1, 4, 2), (rand(2, N, 4, 5, 6), rand(2, 4, 7, 6, N),
                                            rand(2, 4, N, 7, 3))),
    "query_alone": lambda: (attention, (0, None, None), (rand(N, 2, 4, 5, 6), rand(2, 4, 7, 6),
                                                         rand(2, 4, 7, 3))),
    "two_dimensions": lambda: (attention, (0, 0, 0), (rand(N, 5, 6), rand(N, 7, 6), rand(N, 7, 6))),
    "bias": lambda: (attention, (0, 0, 0, 0), (rand(N, 2, 4, 5, 6), rand(N, 2, 4, 7, 6),
                                               rand(N, 2, 4, 7, 3), rand(N, 4, 5, 7))),
    "bias_shared": lambda: (attention, (0, 0, 0, None), (rand(N, 2, 4, 5, 6), rand(N, 2, 4, 7, 6),
                                                         rand(N, 2, 4, 7, 3), rand(2, 1, 5, 7))),
    "mask_alone": lambda: (lambda q, m: attention(q, q, q, m), (None, 0),
                           (rand(2, 4, 5, 6), torch.rand(N, 5, 5) < 0.8)),
    "sinks": lambda: (lambda q, s: attention(q, q, q, sinks=s), (0, 0),
                      (rand(N, 2, 4, 5, 6), rand(N, 4))),
    "alibi": lambda: (lambda q, s: attention(q, q, q, alibi_slopes=s), (0, 0),
                      (rand(N, 2, 4, 5, 6), rand(N, 4))),
    "lengths": lambda: (lambda q, n: attention(q, q, q, key_lengths=n), (0, 0),
                        (rand(N, 2, 4, 5, 6), torch.tensor([[1, 5], [0, 2], [3, 4]]))),
    "lengths_shared": lambda: (lambda q, n, a: attention(q, q, q, key_lengths=n, alibi_slopes=a),
                               (0, None, None),
                               (rand(N, 1, 4, 5, 6), torch.tensor([3]), rand(1, 4))),
    "packed": lambda: (lambda q: attention(q, q, q, cu_seqlens_q=torch.tensor([0, 3, 7]),
                                           cu_seqlens_k=torch.tensor([0, 3, 7]), max_seqlen_q=4,
                                           max_seqlen_k=4), (0,), (rand(N, 7, 2, 6),)),
    "lse": lambda: (lambda q, k: attention(q, k, k, return_lse=True, is_causal=True), (0, None),
                    (rand(N, 2, 4, 5, 6), rand(2, 4, 5, 6))),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap(name):
    torch.manual_seed(0)
    function, in_dims, args = VMAPS[name]()
    found, expected = torch.vmap(function, in_dims)(*args), by_loop(function, in_dims, args)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["all", "dims", "query_alone", "bias", "bias_shared", "sinks"])
def test_vmap_of_grad(name):
    """Per-sample gradients, also of what the samples share."""
    torch.manual_seed(1)
    function, in_dims, args = VMAPS[name]()

    def gradient(*x):
        return torch.func.grad(lambda *y: function(*y).square().sum(),
                               argnums=tuple(range(len(x))))(*x)

    found, expected = torch.vmap(gradient, in_dims)(*args), by_loop(gradient, in_dims, args)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_vmap_of_no_samples():
    q, k = rand(0, 2, 4, 5, 6), rand(2, 4, 7, 6)
    assert torch.vmap(lambda x: attention(x, k, k))(q).shape == (0, 2, 4, 5, 6)
    gradient = torch.func.grad(lambda x, y: attention(x, y, y).sum(), argnums=(0, 1))
    dq, dk = torch.vmap(gradient, (0, None))(q, k)
    assert dq.shape == (0, 2, 4, 5, 6) and dk.shape == (0, 2, 4, 7, 6)


def test_vmap_of_no_samples_one_by_one():
    """Where the samples cannot join the batch there is none to tell the shapes."""
    q, sinks = rand(2, 4, 5, 6, grad=True), rand(0, 4, grad=True)
    out = torch.vmap(lambda s: attention(q, q, q, sinks=s))(sinks)
    assert out.shape == (0, 2, 4, 5, 6)
    dq, dsinks = torch.autograd.grad(out.sum(), (q, sinks))
    assert dq.abs().max() == 0 and dsinks.shape == (0, 4)
    gradient = torch.func.grad(lambda x, s: attention(x, x, x, sinks=s).sum(), argnums=(0, 1))
    dq, dsinks = torch.vmap(gradient, (None, 0))(q.detach(), sinks.detach())
    assert dq.shape == (0, 2, 4, 5, 6) and dsinks.shape == (0, 4)
    for randomness in ("same", "different"):
        out = torch.vmap(lambda x: attention(x, x, x, dropout_p=0.5), randomness=randomness)(
            rand(0, 2, 4, 5, 6))
        assert out.shape == (0, 2, 4, 5, 6)
    mask = torch.ones(0, 5, 5, dtype=torch.bool)
    lengths = torch.ones(0, 2, dtype=torch.int32)
    out = torch.vmap(lambda m, n: attention(q, q, q, m, key_lengths=n))(mask, lengths)
    assert out.shape == (0, 2, 4, 5, 6)


RAISED = RuntimeError, ShapeError  # by kernel.c, or by the kernel in Python


@pytest.mark.parametrize("samples", [(4, 5, 6), (5, 6), (1, 2, 4, 5, 6), (3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("wrong", ["q", "k", "bias", "key_lengths", "dout"])
def test_samples_of_a_wrong_shape_are_as_wrong_as_without_vmap(wrong, samples):
    """The ops' own callers: nothing is repeated, and nothing becomes a batch that is none."""
    right = rand(2, 4, 5, 6)
    given = {"q": right, "k": right, "bias": rand(2, 4, 5, 5), "key_lengths": torch.tensor([3, 5]),
             "dout": right}
    if wrong == "key_lengths":
        given[wrong] = torch.ones(samples[:1 if len(samples) == 4 else 2], dtype=torch.int64)
    else:
        given[wrong] = rand(*samples[:-1], 5) if wrong == "bias" else rand(*samples)

    def call(q, k, bias, key_lengths, dout):
        rest = bias, None, None, None, key_lengths, *without_options(None, False)[5:]
        if wrong != "dout":
            return ops.forward(q, k, right, *rest)
        return ops.backward(7, dout, None, right, right[..., 0], None, q, k, right, *rest)

    with pytest.raises(RAISED) as alone:
        call(**given)
    for mapped in (wrong, "q"):
        args = [x.expand(N, *x.shape) if name in (wrong, mapped) else x
                for name, x in given.items()]
        dims = tuple(0 if name in (wrong, mapped) else None for name in given)
        with pytest.raises(RAISED) as found:
            torch.vmap(call, dims)(*args)
        assert str(found.value) == str(alone.value)


def test_the_gradient_of_a_repeated_bias_under_vmap():
    """It has the bias's batch of one, also where q's batch is none: autograd would hide it."""
    for batch in (0, 1, 2):
        q, lse, bias = rand(N, batch, 4, 5, 6), rand(N, batch, 4, 5), rand(N, 1, 4, 5, 5)

        def gradient(x, y, b):
            return ops.backward(8, x, None, x, y, None, x, x, x, b, *without_options(None, False)[1:])[3]

        for dim, b in ((0, bias), (None, bias[0])):
            found = torch.vmap(gradient, (0, 0, dim))(q, lse, b)
            torch.testing.assert_close(found, by_loop(gradient, (0, 0, dim), (q, lse, b)))
            assert found.shape == bias.shape


def test_grad_of_vmap_and_nested_vmap():
    torch.manual_seed(2)
    q, k, v = (rand(N, 2, 2, 4, 5, 6) for _ in range(3))
    nested = torch.vmap(torch.vmap(attention))(q, k, v)
    torch.testing.assert_close(nested, attention(*(x.flatten(0, 2) for x in (q, k, v))).unflatten(
        0, (N, 2, 2)))
    found = torch.func.grad(lambda x: torch.vmap(attention)(x, k, v).square().sum())(q)
    expected = torch.func.grad(lambda x: attention(x, k, v).square().sum())(q)
    torch.testing.assert_close(found, expected)


def test_hessian_by_reverse_mode():
    torch.manual_seed(3)
    q, k = rand(1, 1, 2, 2), rand(1, 1, 3, 2)

    def plain(x):
        return (torch.softmax(x @ k.mT * 2 ** -0.5, -1) @ k).square().sum()

    found = torch.func.jacrev(torch.func.jacrev(lambda x: attention(x, k, k).square().sum()))(q)
    torch.testing.assert_close(found, torch.func.jacrev(torch.func.jacrev(plain))(q))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_dropout(randomness):
    torch.manual_seed(4)
    q = torch.ones(N, 1, 2, 8, 4)
    out = torch.vmap(lambda x: attention(x, x, torch.eye(8).expand(1, 2, 8, 8), dropout_p=0.5),
                     randomness=randomness)(q)
    equal = torch.equal(out[0], out[1]) and torch.equal(out[1], out[2])
    assert equal == (randomness == "same")
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(lambda x: attention(x, x, x, dropout_p=0.5))(q)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("wanted", [(0,), (0, 1)], ids=["dq", "dq, dsinks"])
def test_vmap_of_dropouts_gradient_with_sinks(randomness, wanted):
    """The dropout of backward is forward's, whatever gradients are asked for."""
    q, sinks, step = rand(3, 1, 2, 6, 8), rand(2), torch.zeros(3, 1, 2, 6, 8, dtype=torch.float64)

    def loss(x, s):
        return attention(x, x, x, sinks=s, dropout_p=0.5).square().sum()

    def mapped(function, *args):
        torch.manual_seed(1)
        return torch.vmap(function, (0, None), randomness=randomness)(*args)

    found = mapped(torch.func.grad(loss, argnums=wanted), q, sinks)
    for at in ((0, 0, 0, 0, 0), (1, 0, 1, 2, 3), (2, 0, 1, 5, 7)):
        step.zero_()[at] = 1e-6
        exact = (mapped(loss, q + step, sinks) - mapped(loss, q - step, sinks))[at[0]] / 2e-6
        torch.testing.assert_close(found[0][at], exact, rtol=1e-5, atol=1e-7)
    if len(wanted) > 1:
        step = torch.tensor([1e-6, 0.0], dtype=torch.float64)
        exact = (mapped(loss, q, sinks + step) - mapped(loss, q, sinks - step)) / 2e-6
        torch.testing.assert_close(found[1][:, 0], exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_replays_dropout(reentrant):
    q, k, v = (rand(2, 4, 9, 8, grad=True) for _ in range(3))
    results = []
    for wrap in (False, True):
        torch.manual_seed(5)

        def call(*x):
            return attention(*x, dropout_p=0.4, is_causal=True)

        out = ckpt.checkpoint(call, q, k, v, use_reentrant=reentrant) if wrap else call(q, k, v)
        torch.rand(3)  # the generator moves on before backward
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
                       if not (wrap and reentrant) else [out, *backward(out, (q, k, v))])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def backward(out, leaves):
    """Reentrant checkpoints know backward() only."""
    out.square().sum().backward()
    return [x.grad for x in leaves]


def test_selective_checkpoint_sees_the_op():
    seen = []

    def policy(_ctx, op, *args, **kwargs):
        seen.append(op)
        return ckpt.CheckpointPolicy.MUST_SAVE if op is ops.forward_rest else \
            ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = (rand(1, 2, 5, 4, grad=True) for _ in range(3))
    out = ckpt.checkpoint(lambda *x: attention(*x).sin(), q, k, v, use_reentrant=False,
                          context_fn=lambda: ckpt.create_selective_checkpoint_contexts(policy))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert ops.forward_rest in seen
    for a, b in zip(grads, torch.autograd.grad(attention(q, k, v).sin().sum(), (q, k, v))):
        assert torch.equal(a, b)


def test_inference_mode():
    q, k, v = (rand(1, 2, 5, 4, grad=True) for _ in range(3))
    with torch.inference_mode():
        out = attention(q, k, v)
    assert out.is_inference() and not out.requires_grad
    assert torch.equal(out, attention(q, k, v))


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_export():
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in ("q", "k", "v")}
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=shapes)
    assert "orchard.attention.default" in program.graph_module.code
    longer = [torch.randn(2, 4, 17, 8) for _ in range(3)]
    assert torch.equal(program.module()(*longer), Model()(*longer))


PACKED = {"cu_seqlens_q": torch.tensor([0, 5, 16]), "cu_seqlens_k": torch.tensor([0, 9, 20]),
          "max_seqlen_q": 11, "max_seqlen_k": 11}


@pytest.mark.parametrize("heads, options", [
    (4, {}), (2, {"enable_gqa": True}), (4, {"is_causal": True}), (4, {"softcap": 2.0}),
    (2, {"enable_gqa": True, **PACKED})], ids=["plain", "gqa", "causal", "softcap", "packed"])
def test_flops_are_torchs(heads, options):
    """Packed sequences count as a single one: the counter is told shapes alone."""
    shapes = (2, 4, 16, 8), (2, 4, 20, 8), (2, 4, 20, 6)  # E is not D; older torch knows no groups
    q, k, v = (torch.randn(2, h, *shape[2:]) for h, shape in zip((4, heads, heads), shapes))
    if "cu_seqlens_q" in options:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        shapes = [(1, *shape[1:]) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        out = attention(*(x.requires_grad_() for x in (q, k, v)), **options)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == sdpa_flop_count(*shapes)
    backward = sdpa_backward_flop_count((*shapes[0][:3], 6), *shapes)
    assert counter.get_total_flops() == forward + backward


def test_partial_gradients():
    """Each subset of operands that may require a gradient."""
    torch.manual_seed(6)
    base = {"query": rand(2, 2, 5, 4), "key": rand(2, 2, 5, 4), "value": rand(2, 2, 5, 4),
            "attn_mask": rand(1, 2, 5, 5), "sinks": rand(2)}
    full = {n: x.clone().requires_grad_() for n, x in base.items()}
    expected = dict(zip(full, torch.autograd.grad(attention(**full).square().sum(),
                                                  list(full.values()))))
    for bits in range(1, 32):
        names = [n for i, n in enumerate(base) if bits >> i & 1]
        given = {n: base[n].clone().requires_grad_(n in names) for n in base}
        found = torch.autograd.grad(attention(**given).square().sum(), [given[n] for n in names])
        for name, gradient in zip(names, found):
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)


def test_only_lse_is_used():
    q, k = rand(1, 2, 5, 4, grad=True), rand(1, 2, 5, 4, grad=True)
    _, lse = attention(q, k, k, return_lse=True)
    expected = torch.logsumexp(q @ k.mT / 2, -1)
    torch.testing.assert_close(lse, expected)
    for a, b in zip(torch.autograd.grad(lse.square().sum(), (q, k)),
                    torch.autograd.grad(expected.square().sum(), (q, k))):
        torch.testing.assert_close(a, b)


def test_causal_bias_objects():
    """torch.nn.attention.bias: its two kinds are our two alignments."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    for make in (causal_lower_right, causal_upper_left):
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=make(5, 9))
        torch.testing.assert_close(attention(q, k, k, attn_mask=make(5, 9)), expected)
