"""Values and gradients of orchard.torch against the explicit formula in fp64, within the error bar:
options x dtypes, layouts, shapes that torch takes, dropout's mask, large scores."""

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import orchard
import orchard_ops
from orchard.torch import scaled_dot_product_attention as attention
from torch_formula import assert_within, formula, check_values, rand, wide

B, H, T, S, D, E = 2, 4, 13, 21, 16, 24
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


OPTIONS = {
    "plain": lambda t: {},
    "causal": lambda t: {"is_causal": True},
    "causal_bottom_right": lambda t: {"is_causal": True, "causal_alignment": "bottom_right"},
    "scale": lambda t: {"scale": -0.37},
    "scale_zero": lambda t: {"scale": 0.0},
    "gqa": lambda t: {"enable_gqa": True, "G": 2},
    "mqa_causal": lambda t: {"enable_gqa": True, "G": 1, "is_causal": True},
    "mask_2d": lambda t: {"attn_mask": torch.rand(T, S) < 0.6},
    "mask_1d": lambda t: {"attn_mask": torch.rand(S) < 0.6},
    "mask_keys": lambda t: {"attn_mask": torch.rand(B, 1, 1, S) < 0.6},
    "mask_4d": lambda t: {"attn_mask": torch.rand(B, H, T, S) < 0.6},
    "mask_fully_masked_rows": lambda t: {"attn_mask": (torch.rand(B, 1, T, 1) < 0.5)},
    "mask_causal": lambda t: {"attn_mask": torch.rand(H, T, S) < 0.6, "is_causal": True},
    "float_mask_2d": lambda t: {"attn_mask": rand(T, S, dtype=t)},
    "float_mask_4d": lambda t: {"attn_mask": rand(B, H, T, S, dtype=t)},
    "float_mask_inf": lambda t: {"attn_mask": torch.zeros(T, S, dtype=t).masked_fill(
        torch.rand(T, S) < 0.4, -torch.inf)},
    "bias_and_mask": lambda t: {"attn_mask": torch.rand(B, 1, T, S) < 0.6,
                                "bias": rand(H, 1, S, dtype=t)},
    "window": lambda t: {"window": (3, 2)},
    "window_left_causal": lambda t: {"window": (4, -1), "is_causal": True},
    "window_bottom_right": lambda t: {"window": (5, 0), "causal_alignment": "bottom_right"},
    "softcap": lambda t: {"softcap": 1.5, "is_causal": True},
    "alibi": lambda t: {"alibi_slopes": torch.rand(H, dtype=wide(t))},
    "alibi_batch_bottom_right": lambda t: {"alibi_slopes": torch.rand(B, H, dtype=wide(t)),
                                           "causal_alignment": "bottom_right"},
    "sinks": lambda t: {"sinks": rand(H, dtype=t)},
    "sinks_fully_masked": lambda t: {"sinks": rand(H, dtype=wide(t)),
                              "attn_mask": (torch.rand(B, 1, T, 1) < 0.5)},
    "key_lengths": lambda t: {"key_lengths": torch.tensor([21, 6])},
    "key_lengths_bottom_right": lambda t: {"key_lengths": torch.tensor([17, 0], dtype=torch.int32),
                                           "is_causal": True, "causal_alignment": "bottom_right"},
    "everything": lambda t: {"attn_mask": torch.rand(B, 1, T, S) < 0.7, "is_causal": True,
                             "bias": rand(1, H, T, S, dtype=t), "softcap": 2.0, "G": 2,
                             "enable_gqa": True, "sinks": rand(H, dtype=t), "window": (9, 3),
                             "alibi_slopes": torch.rand(H, dtype=wide(t)), "scale": 0.3,
                             "causal_alignment": "bottom_right"},
}


def drawn(option, dtype):
    """[q, k, v] and the arguments beside them."""
    torch.manual_seed(len(option))
    options = OPTIONS[option](dtype)
    G = options.pop("G", H)
    return [rand(B, H, T, D, dtype=dtype), rand(B, G, S, D, dtype=dtype),
            rand(B, G, S, E, dtype=dtype)], options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, dtype):
    tensors, options = drawn(option, dtype)
    check_values(attention, tensors, options, option)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_lengths(length):
    torch.manual_seed(length)
    check_values(attention, [rand(1, 2, length, 8) for _ in range(3)], {"is_causal": True},
          f"length {length}")


# What torch has words for, but for queries that see no key, of which torch makes something else.
TORCHS = ["plain", "causal", "scale", "scale_zero", "gqa", "mqa_causal", "mask_2d", "mask_keys",
          "mask_4d", "float_mask_2d", "float_mask_4d", "float_mask_inf"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", TORCHS)
def test_against_torchs_math_path(option, dtype):
    """Output and all gradients; the reference in fp64 and what sets the bar are torch's own."""
    given, options = drawn(option, dtype)
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.is_floating_point():
        given.append(mask)
        mask = None
    dout = rand(B, H, T, E, dtype=dtype)

    def run(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = function(*leaves[:3], attn_mask=leaves[3] if leaves[3:] else mask, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    found = run(attention, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(F.scaled_dot_product_attention, torch.float64)
        plain = run(F.scaled_dot_product_attention, dtype)
    for name, *three in zip(("out", "dq", "dk", "dv", "dmask"), found, exact, plain):
        assert_within((f"{option} {name}", dtype), *three)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_fp32_mask_of_an_fp64_query(name):
    """Widened, which loses nothing; its gradient comes back in fp32, as that of any cast."""
    torch.manual_seed(9)
    given = [rand(B, H, n, d, dtype=torch.float64) for n, d in ((T, D), (S, D), (S, E))]
    given.append(rand(1, H, T, S, dtype=torch.float32))
    dout = rand(B, H, T, E, dtype=torch.float64)

    def run(call):
        leaves = [x.clone().requires_grad_() for x in given]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    found = run(lambda q, k, v, mask: attention(q, k, v, **{name: mask}))
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask.double()))
    assert [x.dtype for x in found] == [torch.float64] * 4 + [torch.float32]
    for a, b in zip(found[:4], exact):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found[4], exact[4], atol=1e-6, rtol=1e-6)


SHAPES = [((5, 8), (7, 8), (7, 6)),
          ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
          ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
          ((2, 1, 3, 4, 5, 8), (2, 1, 3, 4, 7, 8), (2, 1, 3, 4, 7, 8)),
          ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
          ((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)),
          ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
          ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
          ((4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8))]


def test_numbers_of_numpy():
    q, k, v = rand(1, 2, 5, 8), rand(1, 2, 7, 8), rand(1, 2, 7, 8)
    torch.testing.assert_close(attention(q, k, v, scale=numpy.float32(0.5)),
                               F.scaled_dot_product_attention(q, k, v, scale=numpy.float32(0.5)))
    found = attention(q, k, v, window=tuple(numpy.array([2, 1])), softcap=numpy.float32(2))
    assert torch.equal(found, attention(q, k, v, window=(2, 1), softcap=2.0))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_shapes_of_torch(shapes, mask):
    """2 ... n dimensions, repeated batches and heads: results and gradients are torch's."""
    torch.manual_seed(1)
    tensors = [rand(*s, dtype=torch.float64) for s in shapes]
    attn_mask = {None: None, "bool": torch.rand(5, 7) < 0.7,
                 "float": rand(5, 7, dtype=torch.float64)}[mask]
    results = []
    for function in (attention, F.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = function(*leaves, attn_mask=attn_mask)
        torch.manual_seed(2)
        grads = torch.autograd.grad(out, leaves, rand(*out.shape, dtype=torch.float64))
        results.append([out, *grads])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mask_shape", [(7,), (1, 7), (5, 1), (4, 5, 7), (3, 4, 5, 7),
                                        (3, 1, 1, 7), (2, 3, 4, 5, 7), (2, 1, 1, 5, 7),
                                        (1, 1, 1, 1, 7)], ids=str)
def test_masks_of_five_dimensions(mask_shape):
    torch.manual_seed(3)
    tensors = [rand(2, 3, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7)]
    for attn_mask in (torch.rand(mask_shape) < 0.7, rand(*mask_shape, dtype=torch.float64)):
        found = attention(*tensors, attn_mask=attn_mask)
        expected = F.scaled_dot_product_attention(*tensors, attn_mask=attn_mask)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_any_layout():
    """Transposed, sliced out of a fused qkv, repeated, negated views are read where they are."""
    torch.manual_seed(4)
    fused = rand(2, 9, 3, 4, 8)
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    assert not views[0].is_contiguous()
    found, expected = attention(*views), attention(*[x.contiguous() for x in views])
    assert torch.equal(found, expected)
    one = rand(1, 1, 1, 8).expand(2, 4, 9, 8)
    assert torch.equal(attention(one, views[1], one),
                       attention(one.contiguous(), views[1], one.contiguous()))
    negated = torch.complex(rand(2, 4, 9, 8), rand(2, 4, 9, 8)).conj().imag
    assert negated.is_neg()
    assert torch.equal(attention(negated, views[1], views[2]),
                       attention(negated.resolve_neg(), views[1], views[2]))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)],
                         ids=str)
def test_empty(shape):
    batch, heads, t, s = shape
    q, k, v = (torch.randn(batch, heads, n, 8, requires_grad=True) for n in (t, s, s))
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (batch, heads, t, 8) and lse.shape == (batch, heads, t)
    assert not out.any() and (lse == -torch.inf).all()
    for leaf, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
        assert gradient.shape == leaf.shape and not gradient.any()


def packed(lengths_t, lengths_s, G, dtype):
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32)
          for n in (lengths_t, lengths_s)]
    tensors = [rand(sum(lengths_t), H, D, dtype=dtype), rand(sum(lengths_s), G, D, dtype=dtype),
               rand(sum(lengths_s), G, E, dtype=dtype)]
    return tensors, {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1],
                     "max_seqlen_q": max(lengths_t), "max_seqlen_k": max(lengths_s)}


@pytest.mark.parametrize("options", [{}, {"is_causal": True},
                                     {"is_causal": True, "causal_alignment": "bottom_right"}],
                         ids=str)
def test_packed_is_each_sequence_alone(options):
    torch.manual_seed(5)
    lengths_t, lengths_s = [5, 0, 9, 1], [7, 3, 9, 4]
    tensors, cu = packed(lengths_t, lengths_s, 2, torch.float64)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = attention(*leaves, **cu, enable_gqa=True, return_lse=True, **options)
    dout = rand(*out.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, dout)
    copies = [x.detach().requires_grad_() for x in tensors]
    parts = []
    for q, k, v in zip(copies[0].split(lengths_t), copies[1].split(lengths_s),
                       copies[2].split(lengths_s)):
        one, _ = formula(*[x.transpose(0, 1)[None] for x in (q, k, v)], **options)
        parts.append(one[0].transpose(0, 1))
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    for a, b in zip(grads, torch.autograd.grad(expected, copies, dout)):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert lse.shape == (15, H)


def dropout_factor(seed, p, shape, **options):
    """What each probability was multiplied by, seen from outside: with v = 1, one row a key."""
    b, h, t, s = shape
    q, k = torch.zeros(b, h, t, 4, dtype=torch.float64), torch.zeros(b, h, s, 4,
                                                                     dtype=torch.float64)
    v = torch.eye(s, dtype=torch.float64).expand(b, h, s, s)
    torch.manual_seed(seed)
    return attention(q, k, v, dropout_p=p, **options) * s


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0}], ids=str)
def test_dropout(dtype, options):
    factor = dropout_factor(7, 0.3, (B, H, T, S))
    torch.testing.assert_close(factor[factor > 0], torch.full_like(factor[factor > 0], 1 / 0.7))
    assert 0.2 < (factor == 0).double().mean() < 0.4
    torch.manual_seed(6)
    tensors = [rand(B, H, n, D, dtype=dtype) for n in (T, S, S)]
    check_values(attention, tensors, {**options, "dropout_p": 0.3}, "dropout", factor=factor, seed=7)


def test_dropout_draws_from_torchs_generator():
    torch.manual_seed(0)
    q = rand(1, 2, 16, 8)
    first, second = attention(q, q, q, dropout_p=0.5), attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    rand(1, 2, 16, 8)
    again = attention(q, q, q, dropout_p=0.5)
    assert not torch.equal(first, second) and torch.equal(first, again)
    state = torch.get_rng_state()
    attention(q, q, q)
    assert torch.equal(state, torch.get_rng_state()), "no dropout, no number drawn"
    assert not attention(q, q, q, dropout_p=1.0).any()


def test_same_bits():
    """Twice the same call, any number of threads, any split of the batch."""
    torch.manual_seed(8)
    q, k, v = (rand(3, 4, 70, 32).requires_grad_() for _ in range(3))
    before = torch.get_num_threads()

    def call(*x):
        out = attention(*x, is_causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), x)]

    try:
        torch.set_num_threads(1)
        one = call(q, k, v)
        torch.set_num_threads(2)
        two = call(q, k, v)
    finally:
        torch.set_num_threads(before)
    parts = [call(*[x.detach()[i:i + 1].requires_grad_() for x in (q, k, v)]) for i in range(3)]
    for a, b, c in zip(one, two, [torch.cat(x) for x in zip(*parts)]):
        assert torch.equal(a, b) and torch.equal(a, c)


# ---- Large scores --------------------------------------------------------------------------------

def plain_gradients(q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    out = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
    return torch.autograd.grad(out, leaves, dout)


def by_grad(*arguments, **options):
    *inputs, dout = arguments
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*leaves, **options), leaves, dout)


def by_transform(*arguments):
    *inputs, dout = arguments
    return torch.func.grad(lambda *x: (attention(*x) * dout).sum(), argnums=(0, 1, 2))(*inputs)


def by_vmap(*arguments):
    made = torch.vmap(by_transform)(*(x[:, None] for x in arguments))
    return tuple(x.squeeze(1) for x in made)


def by_compiled(*arguments):
    torch._dynamo.reset()
    *inputs, dout = arguments
    leaves = [x.requires_grad_() for x in inputs]
    call = torch.compile(attention, backend="aot_eager", fullgraph=True)
    return torch.autograd.grad(call(*leaves), leaves, dout)


def by_create_graph(*arguments):
    *inputs, dout = arguments
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(attention(*leaves), leaves, dout, create_graph=True)


def by_checkpoint(*arguments):
    *inputs, dout = arguments
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(checkpoint(attention, *leaves, use_reentrant=False), leaves, dout)


def by_flash(*arguments):
    *inputs, dout = arguments
    leaves = [x.requires_grad_() for x in inputs]
    out = orchard_ops.flash_attn_fwd(*leaves, leaves[0].shape[-1] ** -0.5)[0]
    return torch.autograd.grad(out, leaves, dout)


def by_flash_bwd(*arguments):
    q, k, v, dout = arguments
    scale = q.shape[-1] ** -0.5
    return orchard_ops.flash_attn_bwd(dout, q, k, v, orchard_ops.flash_attn_fwd(q, k, v, scale)[1],
                                      scale)


def by_general(*arguments):
    """Not by the ops without options."""
    return by_grad(*arguments, attn_mask=torch.ones(3, 6, dtype=torch.bool))


def by_arrays(*arguments):
    q, k, v, dout = arguments
    rest = torch.empty(q.shape[:-1])
    out, lse = orchard.attention_forward(q, k, v, lse_rest=rest)
    found = orchard.attention_backward(dout, q, k, v, out, lse, lse_rest=rest)
    return found.dq, found.dk, found.dv


def without_rest(*arguments):
    """As callers with an lse of their own: right, but for what the rounding of lse takes."""
    q, k, v, dout = arguments
    out, lse = orchard.attention_forward(q, k, v)
    found = orchard.attention_backward(dout, q, k, v, out, lse)
    return found.dq, found.dk, found.dv


def large_scores():
    """q, k, v, dout: scores go to some hundreds, where lse is off by up to 3e-5."""
    torch.manual_seed(0)
    return [*(60 * torch.rand(4, 4, n, 8) - 30 for n in (3, 6)), torch.randn(4, 4, 6, 8),
            torch.randn(4, 4, 3, 8)]


def check_large_scores(found, given):
    """dv; dq and dk carry the rounding of out and of the scores too."""
    exact = plain_gradients(*(x.double() for x in given))[2]
    assert_within(("dv", torch.float32), found, exact, plain_gradients(*given)[2])


@pytest.mark.parametrize("way", [by_grad, by_general, by_transform, by_vmap, by_compiled,
                                 by_create_graph, by_checkpoint, by_flash, by_flash_bwd, by_arrays],
                         ids=lambda way: way.__name__)
def test_gradients_of_large_scores(way):
    given = large_scores()
    check_large_scores(way(*(x.clone() for x in given))[2], given)


def test_gradients_of_large_scores_without_lse_rest():
    """They are what the rounding of lse leaves of them: so the tests above see lse_rest."""
    given = large_scores()
    found = without_rest(*given)[2]
    with pytest.raises(AssertionError, match="dv.*error"):
        check_large_scores(found, given)
    torch.testing.assert_close(found, plain_gradients(*given)[2], rtol=1e-3, atol=1e-3)
