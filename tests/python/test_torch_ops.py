"""The ops themselves: opcheck, gradcheck, gradgradcheck, and fakes with the real strides."""

import pytest
import torch
from torch.library import opcheck

from orchard.torch.attention import ops, outputs
from orchard.torch import scaled_dot_product_attention as attention

NAMES = ["q", "k", "v", "bias", "mask", "alibi", "sinks", "key_lengths", "cu_seqlens_q",
         "cu_seqlens_k", "seed", "max_t", "max_s", "scale", "causal", "bottom_right",
         "window_left", "window_right", "softcap", "dropout"]
DEFAULTS = dict.fromkeys(NAMES) | {
    "max_t": 0, "max_s": 0, "causal": False, "bottom_right": False, "window_left": -1,
    "window_right": -1, "softcap": 0.0, "dropout": 0.0}


def arguments(**given):
    return tuple((DEFAULTS | given)[name] for name in NAMES)


def qkv(dtype=torch.float32, layout="contiguous", H=4, G=4, T=5, S=7, D=8, E=6):
    shapes = ((2, H, T, D), (2, G, S, D), (2, G, S, E))
    if layout == "transposed":
        return [torch.randn(b, n, h, d, dtype=dtype).transpose(1, 2) for b, h, n, d in shapes]
    if layout == "sliced":
        return [torch.randn(b, h, n + 3, d, dtype=dtype)[:, :, 1:n + 1] for b, h, n, d in shapes]
    if layout == "repeated":
        return [torch.randn(1, 1, n, d, dtype=dtype).expand(b, h, n, d) for b, h, n, d in shapes]
    if layout == "fused":
        return [torch.randn(b, n, 3, h, d, dtype=dtype)[:, :, 1].transpose(1, 2)
                for b, h, n, d in shapes]
    if layout == "turned":
        return [torch.randn(h, b, d, n, dtype=dtype).permute(1, 0, 3, 2) for b, h, n, d in shapes]
    return [torch.randn(s, dtype=dtype) for s in shapes]


def samples():
    """name -> arguments of attention_forward."""
    torch.manual_seed(0)

    def sample(tensors=None, **given):
        q, k, v = tensors or qkv()
        return arguments(q=q, k=k, v=v, **given)

    packed = [torch.randn(9, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)]
    return {
        "plain": sample(), "transposed": sample(qkv(layout="transposed"), causal=True),
        "sliced": sample(qkv(layout="sliced")), "repeated": sample(qkv(layout="repeated")),
        "fused": sample(qkv(layout="fused")), "turned": sample(qkv(layout="turned")),
        "token": sample(qkv(layout="transposed", T=1)), "ones": sample(qkv(D=1, E=1, H=1, G=1)),
        "half": sample(qkv(torch.float16), scale=0.1), "bf16": sample(qkv(torch.bfloat16)),
        "f64": sample(qkv(torch.float64), window_left=2, window_right=1, bottom_right=True),
        "gqa": sample(qkv(G=2), softcap=3.0),
        "bias": sample(bias=torch.randn(1, 4, 5, 7), mask=torch.rand(2, 1, 1, 7) < 0.8),
        "sinks": sample(sinks=torch.randn(4), alibi=torch.rand(4)),
        "lengths": sample(key_lengths=torch.tensor([3, 7])),
        "dropout": sample(seed=torch.tensor(2 ** 62 + 5), dropout=0.4),
        "packed": sample(packed, cu_seqlens_q=torch.tensor([0, 4, 9]),
                         cu_seqlens_k=torch.tensor([0, 5, 11]), max_t=5, max_s=6),
        "empty": sample(qkv(T=0)),
    }


SAMPLES = samples()


QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
WHOLE = ("transposed", "sliced", "bias", "dropout", "packed")  # all of opcheck takes seconds


def check_op(op, name, args):
    if name in WHOLE:
        opcheck(op, args)
    else:
        opcheck(op, args, test_utils=QUICK)


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_forward(name):
    check_op(ops.forward, name, SAMPLES[name])
    check_op(ops.forward_rest, name, SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("all_gradients", [True, False])
def test_opcheck_backward(name, all_gradients):
    args = SAMPLES[name]
    out, lse, lse_rest = ops.forward_rest(*args)
    needs = outputs.DQ | outputs.DK | outputs.DV if all_gradients else outputs.DV
    if all_gradients:
        needs |= (outputs.DBIAS if args[3] is not None else 0) | (
            outputs.DSINKS if args[6] is not None else 0)
    dlse = torch.randn_like(lse) if all_gradients else None
    check_op(ops.backward, name if all_gradients else "",
             (needs, torch.randn_like(out), dlse, out, lse, lse_rest if all_gradients else None,
              *args))


def steps(tensor):
    """The strides that mean something: torch's fakes of empty_like differ where a size is 1."""
    return [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1]


@pytest.mark.parametrize("name", SAMPLES)
def test_fakes_have_the_real_strides(name):
    args = SAMPLES[name]
    real = ops.forward_rest(*args)
    grads = ops.backward(7, torch.ones_like(real[0]), None, *real, *args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = ops.forward_rest(*fake_args)
        fake_grads = ops.backward(7, torch.ones_like(fake[0]), None, *fake, *fake_args)
    for a, b in zip((*real, *grads), (*fake, *fake_grads)):
        assert (a.shape, a.dtype, steps(a)) == (b.shape, b.dtype, steps(b))
    for a, b in zip(ops.forward(*args), real):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["transposed", "fused"])
def test_output_joins_heads_without_a_copy(layout):
    out = attention(*qkv(layout=layout))
    assert out.transpose(1, 2).reshape(2, 5, 24).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "repeated"])
def test_output_is_contiguous_where_the_query_is(layout):
    assert attention(*qkv(layout=layout)).is_contiguous()


def test_gradients_are_laid_out_as_their_inputs():
    leaves = [x.requires_grad_() for x in qkv(layout="transposed")]
    for leaf, grad in zip(leaves, torch.autograd.grad(attention(*leaves).sum(), leaves)):
        assert grad.stride() == leaf.stride()


def test_an_op_called_directly_has_no_gradient():
    """As torch 2.13 treats ops without a formula: the output asks for a gradient, backward warns
    and gives none. The gradient is the function's."""
    leaves = [x.requires_grad_() for x in qkv(E=8)]
    out, lse = ops.forward(*arguments(**dict(zip("qkv", leaves))))
    assert torch.equal(out, attention(*leaves)) and out.requires_grad and lse.requires_grad
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        assert torch.autograd.grad(out.sum(), leaves, allow_unused=True) == (None, None, None)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        (out.sum() + lse.sum()).backward()
    assert [x.grad for x in leaves] == [None, None, None]
    with torch.no_grad():
        assert not ops.forward(*arguments(**dict(zip("qkv", leaves))))[0].requires_grad
    attention(*leaves).sum().backward()
    assert all(x.grad is not None for x in leaves)


@pytest.mark.parametrize("op", [ops.forward, ops.forward_rest, ops.backward], ids=str)
def test_tags(op):
    """What compilers may rely on, whatever their settings say of ops without tags."""
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} == set(op.tags)


def test_only_needed_gradients_are_computed():
    args = SAMPLES["plain"]
    out, lse = ops.forward(*args)
    made = ops.backward(outputs.DK, torch.ones_like(out), None, out, lse, None, *args)
    assert [x.numel() > 0 for x in made] == [False, True, False, False, False]


# ---- Derivatives by differences ------------------------------------------------------------------

def leaves(*shapes):
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


CHECKS = {
    "plain": lambda: ({}, {}),
    "causal": lambda: ({"is_causal": True}, {}),
    "scale_window": lambda: ({"scale": 0.7, "window": (1, 1)}, {}),
    "bottom_right": lambda: ({"is_causal": True, "causal_alignment": "bottom_right"}, {}),
    "softcap": lambda: ({"softcap": 1.2}, {}),
    "bool_mask": lambda: ({"attn_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]],
                                                     dtype=torch.bool)}, {}),
    "float_mask": lambda: ({}, {"attn_mask": (1, 2, 3, 1)}),
    "bias_and_mask": lambda: ({"attn_mask": torch.tensor([True, False, True, True])},
                              {"bias": (2, 1, 3, 4)}),
    "sinks_alibi": lambda: ({"alibi_slopes": torch.rand(2, dtype=torch.float64)}, {"sinks": (2,)}),
    "lengths": lambda: ({"key_lengths": torch.tensor([2, 4]), "is_causal": True,
                         "causal_alignment": "bottom_right"}, {}),
    "dropout": lambda: ({"dropout_p": 0.4}, {}),
    "everything": lambda: ({"softcap": 2.0, "is_causal": True, "dropout_p": 0.2,
                            "window": (2, -1), "causal_alignment": "bottom_right",
                            "alibi_slopes": torch.rand(2, 2, dtype=torch.float64)},
                           {"bias": (1, 2, 3, 4), "sinks": (2,)}),
}


def case(name, G=2):
    torch.manual_seed(len(name))
    options, wanted = CHECKS[name]()
    inputs = leaves((2, 2, 3, 3), (2, G, 4, 3), (2, G, 4, 2), *wanted.values())

    def call(q, k, v, *extra):
        torch.manual_seed(9)  # the same dropout each time
        out, lse = attention(q, k, v, **options, **dict(zip(wanted, extra)), enable_gqa=True,
                             return_lse=True)
        return out, torch.where(lse.isinf(), 0.0, lse)

    return call, inputs


@pytest.mark.parametrize("name", CHECKS)
def test_gradcheck(name):
    call, inputs = case(name)
    draws = name in ("dropout", "everything")  # which gradcheck's vmap forbids
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True,
                                    check_batched_forward_grad=not draws)


@pytest.mark.parametrize("name", CHECKS)
def test_gradgradcheck(name):
    call, inputs = case(name, G=1 if name in ("causal", "everything") else 2)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_gradgradcheck_packed():
    torch.manual_seed(1)
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 6])

    def call(q, k, v):
        return attention(q, k, v, is_causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
                         max_seqlen_q=3, max_seqlen_k=3, enable_gqa=True,
                         causal_alignment="bottom_right")

    inputs = leaves((5, 2, 3), (6, 1, 3), (6, 1, 2))
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True,
                                    check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_third_order_and_constant_grad_out():
    """The trap of once_differentiable: a constant grad_out must not lose the second-order term."""
    torch.manual_seed(2)
    q, k, v = leaves((1, 1, 3, 2), (1, 1, 3, 2), (1, 1, 3, 2))

    def third(function):
        first, = torch.autograd.grad(function(q, k, v).sum(), q, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), k, create_graph=True)
        return first, second, torch.autograd.grad(second.square().sum(), v)[0]

    def plain(q, k, v):
        return torch.softmax(q @ k.mT * 2 ** -0.5, -1) @ v

    for a, b in zip(third(attention), third(plain)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_second_order_in_other_dtypes(dtype):
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=dtype, requires_grad=True) for _ in range(3))

    def second(function, *x):
        first = torch.autograd.grad(function(*x).sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = second(plain, *exact)
    for a, b in zip(second(attention, q, k, v), expected):
        assert a.dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()
