"""Forward mode (torch.func.jvp, jacfwd, hessian, dual numbers): right values, or a message.

Checks against differences, over all options, are in test_torch_ops.py (gradcheck's check_forward_ad and
check_fwd_over_rev). Here: torch's own math path as reference, transforms inside transforms, the dropout
that forward drew, what must not be seen, and what is refused. Exported programs: test_torch_export.py.
"""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import orchard
from orchard.torch import scaled_dot_product_attention as attention
from test_torch_traps import HIDDEN

pytestmark = pytest.mark.usefixtures("one_thread")


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def twice(*shapes, dtype=torch.float64):
    """Primals and tangents."""
    torch.manual_seed(len(shapes))
    return (tuple(rand(*s, dtype=dtype) for s in shapes),
            tuple(rand(*s, dtype=dtype) for s in shapes))


QKV = (2, 4, 5, 6), (2, 4, 7, 6), (2, 4, 7, 3)


def math(*x, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*x, **options)


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def by_difference(function, primals, tangents, step=1e-6):
    ends = [function(*(p + sign * step * t for p, t in zip(primals, tangents)))
            for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * step)


# ---- Values --------------------------------------------------------------------------------------

@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_it_is_torchs(options, recording):
    primals, tangents = twice(*QKV)
    out, exact = jvp(lambda *x: math(*x, **options), primals, tangents)
    with torch.set_grad_enabled(recording):
        close(jvp(lambda *x: attention(*x, **options), primals, tangents), (out, exact))
        with forward_ad.dual_level():
            dual = attention(*map(forward_ad.make_dual, primals, tangents), **options)
            close(forward_ad.unpack_dual(dual)[:], (out, exact))


def test_masks_groups_and_ranks_are_torchs():
    primals, tangents = twice((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3))
    for mask in (torch.rand(2, 1, 5, 7) < 0.7, torch.ones(7, dtype=torch.bool).expand(5, 7)):
        exact = jvp(lambda *x: math(*x, attn_mask=mask, enable_gqa=True), primals, tangents)
        close(jvp(lambda *x: attention(*x, mask, enable_gqa=True), primals, tangents), exact)
    primals, tangents = twice(*QKV, (4, 5, 7))
    close(jvp(attention, primals, tangents), jvp(math, primals, tangents))
    for at in (0, slice(None), (slice(None), None)):  # three, four, five dimensions
        few = [tuple(x[at] for x in given[:3]) for given in (primals, tangents)]
        close(jvp(attention, *few), jvp(math, *few))


@pytest.mark.parametrize("moving", range(5))
def test_a_tangent_for_one_operand_alone(moving):
    """Out and log-sum-exp of everything at once, by differences."""
    primals, tangents = twice((2, 4, 5, 6), (2, 2, 7, 6), (2, 2, 7, 3), (1, 4, 5, 7), (4,))

    def call(x):
        given = [*primals[:moving], x, *primals[moving + 1:]]
        out, lse = attention(*given[:3], bias=given[3], sinks=given[4], softcap=2.0,
                             is_causal=True, causal_alignment="bottom_right", window=(4, 0),
                             alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]).double(),
                             key_lengths=torch.tensor([7, 5]), enable_gqa=True, return_lse=True)
        return torch.cat([out, lse[..., None]], -1)

    found = jvp(call, (primals[moving],), (tangents[moving],))[1]
    assert found.abs().max() > 0
    close(found, by_difference(call, (primals[moving],), (tangents[moving],)), 1e-8)


def test_packed_sequences():
    """As each sequence alone."""
    primals, tangents = twice((9, 4, 6), (11, 2, 6), (11, 2, 3))
    cu_q, cu_k = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 5, 8, 11], dtype=torch.int32)

    def packed(*x):
        return attention(*x, is_causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=6,
                         max_seqlen_k=5, enable_gqa=True, return_lse=True)

    found = jvp(packed, primals, tangents)[1]
    for i in range(3):
        rows = slice(cu_q[i], cu_q[i + 1]), *[slice(cu_k[i], cu_k[i + 1])] * 2
        alone = [tuple(x[r].transpose(0, 1) for x, r in zip(given, rows))
                 for given in (primals, tangents)]
        exact = jvp(lambda *x: attention(*x, is_causal=True, enable_gqa=True, return_lse=True),
                    *alone)[1]
        close([x[rows[0]].transpose(0, 1) for x in found], list(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    primals, tangents = twice(*QKV, dtype=dtype)
    exact = jvp(math, *(tuple(x.double() for x in given) for given in (primals, tangents)))[1]
    out, found = jvp(attention, primals, tangents)
    assert found.dtype == dtype and torch.equal(out, attention(*primals))
    assert (found - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    tangents = jvp(lambda *x: attention(*x, torch.zeros(5, 7), return_lse=True),
                   primals, tangents)[1]
    assert [x.dtype for x in tangents] == [dtype, torch.float32]


def test_autocast():
    primals, tangents = twice(*QKV, dtype=torch.float32)
    with torch.autocast("cpu"):
        found = jvp(attention, primals, tangents)[1]
    exact = jvp(math, primals, tangents)[1]
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 0.02 * exact.abs().max()


def test_layouts():
    """A dual number's tangent lies in memory as its primal does, whatever those of q, k, v do."""
    primals, tangents = twice(*QKV)
    strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in primals]
    exact = jvp(math, primals, tangents)[1]
    with forward_ad.dual_level():
        out = attention(*map(forward_ad.make_dual, strange, (x.mT.clone().mT for x in tangents)))
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent.stride() == out.stride() == attention(*strange).stride()
        close(tangent, exact)


# ---- What must not be seen, and what is not there ------------------------------------------------

@pytest.mark.parametrize("name", HIDDEN)
def test_nan_in_hidden_keys_reaches_nothing(name):
    """Neither that of a key or value nor that of its tangent."""
    places, options = HIDDEN[name]
    primals, tangents = twice((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    results = []
    for anything in (0.0, torch.nan):
        for x in (*primals[1:], *tangents[1:]):
            x[1, :, places] = anything

        def tangent(*x):
            return jvp(lambda *y: attention(*y, **options, return_lse=True), x, tangents)[1]

        gradients = grad(lambda *x: attention(*x, **options).square().sum(), argnums=(0, 1, 2))
        results.append([*tangent(*primals), *jvp(gradients, primals, tangents)[1],
                        *jvp(tangent, primals, tangents)[1]])
    assert results[0][0].abs().max() > 0
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_a_bias_of_minus_infinity_does_not_move():
    primals, tangents = twice(*QKV, (5, 7))
    primals[3][1], primals[3][:, 2] = -torch.inf, -torch.inf
    expected = jvp(lambda *x: attention(*x, return_lse=True), primals, tangents)[1]
    tangents[3][1], tangents[3][:, 2] = torch.nan, torch.nan
    found = jvp(lambda *x: attention(*x, return_lse=True), primals, tangents)[1]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_queries_that_see_nothing_do_not_move():
    primals, tangents = twice(*QKV)
    lengths = torch.tensor([0, 7])
    out, lse = jvp(lambda *x: attention(*x, key_lengths=lengths, return_lse=True), primals,
                   tangents)[1]
    assert out[0].abs().max() == 0 and lse[0].abs().max() == 0
    close(out[1], jvp(math, primals, tangents)[1][1])


@pytest.mark.parametrize("B, H, T, S", [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_empty_tensors(B, H, T, S):
    primals, tangents = twice((B, H, T, 4), (B, H, S, 4), (B, H, S, 4))

    def call(*x):
        return attention(*x, return_lse=True)

    out, lse = jvp(call, primals, tangents)[1]
    assert out.shape == (B, H, T, 4) and lse.shape == (B, H, T)
    assert not out.any() and not lse.any()
    gradients = jvp(grad(lambda *x: call(*x)[0].sum(), argnums=(0, 1, 2)), primals, tangents)[1]
    assert all(x.shape == p.shape and not x.any() for x, p in zip(gradients, primals))


def test_packed_sequences_without_keys():
    q, none, cu = rand(7, 2, 6), rand(0, 2, 6), torch.tensor([0, 3, 7])
    out, lse = jvp(lambda x: attention(x, none, none, cu_seqlens_q=cu, cu_seqlens_k=0 * cu,
                                       max_seqlen_q=4, max_seqlen_k=3, return_lse=True),
                   (q,), (q,))[1]
    assert out.shape == q.shape and not out.any() and not lse.any()


# ---- Transforms inside transforms ----------------------------------------------------------------

Q, K, V, DQ, DK = (torch.randn(2, 2, 4, 3, dtype=torch.float64,
                               generator=torch.Generator().manual_seed(i)) for i in range(5))


def explicit(q, k, v):
    """Causal; torch's own softmax cannot be differentiated backward over forward (2.13)."""
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    weight = torch.exp((q @ k.mT * 3 ** -0.5).masked_fill(hidden, -torch.inf))
    return weight / weight.sum(-1, keepdim=True) @ v


def loss(function, *x):
    return function(*x).square().sum()


def derivatives_of_duals(f):
    """Backward over forward, forward over backward, without torch.func."""
    x = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(x, DQ), K, V)
        tangent = forward_ad.unpack_dual(out).tangent
        first, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return (torch.autograd.grad(tangent.square().sum(), x, retain_graph=True)[0],
                *forward_ad.unpack_dual(first))


def dual_cotangents(f):
    """Forward mode over a backward, and over a double backward, recorded without it."""
    x = Q.clone().requires_grad_()
    out = f(x, K, V)
    first, = torch.autograd.grad(out, x, K, create_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(DQ, DK)
        return [part for y in (first, out) for part in forward_ad.unpack_dual(
            torch.autograd.grad(y, x, dual, retain_graph=True)[0])]


def dual_inside(transform):
    def run(f):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(transform(f)(forward_ad.make_dual(Q, DQ)))[:]
    return run


NESTED = {
    "jvp of jvp": lambda f: jvp(lambda x: jvp(f, (x, K, V), (DQ, DK, V))[1], (Q,), (DK,)),
    "by two operands": lambda f: jvp(lambda k: jvp(lambda x: f(x, k, V), (Q,), (DQ,))[1],
                                     (K,), (DK,)),
    "third order": lambda f: jvp(lambda v: NESTED["by two operands"](
        lambda q, k, _: f(q, k, v))[1], (V,), (DQ,)),
    "grad of jvp": lambda f: grad(lambda x, y: jvp(f, (x, y, V), (DQ, DK, V))[1].square().sum(),
                                  argnums=(0, 1))(Q, K),
    "jvp of grad": lambda f: jvp(grad(lambda *x: loss(f, *x), argnums=(0, 1, 2)), (Q, K, V),
                                 (DQ, DK, V)),
    "jvp of grad of grad": lambda f: jvp(lambda k: grad(lambda x: grad(
        lambda y: loss(f, y, k, V))(x).square().sum())(Q), (K,), (DK,)),
    "hessian": lambda f: hessian(lambda x: loss(f, x, K[:1], V[:1]))(Q[:1]),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2))(Q, K, V),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(lambda x: f(x, K[:1], V[:1])))(Q[:1]),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda x: f(x, K[:1], V[:1])))(Q[:1]),
    "vmap of jvp": lambda f: vmap(lambda x, d: jvp(lambda y: f(y, K, V), (x,), (d,)))(
        torch.stack([Q, K, V]), torch.stack([DQ, DK, Q])),
    "jvp of vmap": lambda f: jvp(vmap(f), (Q[:, None], K[:, None], V[:, None]),
                                 (DQ[:, None], DK[:, None], V[:, None])),
    "duals": derivatives_of_duals,
    "dual cotangents": dual_cotangents,
    "vmap of a dual": dual_inside(lambda f: vmap(lambda x: f(x[None], K[:1], V[:1]))),
    "grad of a dual": dual_inside(lambda f: grad(lambda x: loss(f, x, K, V))),
    "functional.jacobian": lambda f: torch.autograd.functional.jacobian(
        lambda x: f(x, K, V), Q, vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(
        lambda x: loss(f, x, K, V), Q, vectorize=True, outer_jacobian_strategy="forward-mode"),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested(name):
    found, exact = (torch.utils._pytree.tree_leaves(NESTED[name](f))
                    for f in (lambda *x: attention(*x, is_causal=True), explicit))
    assert len(found) == len(exact)
    for a, b in zip(found, exact):
        assert b.abs().max() > 0
        close(a, b, 1e-11)


MAPPED = {  # operands of each sample beside q
    "lengths": lambda x, n: attention(x, x, x, key_lengths=n, is_causal=True),
    "mask": lambda x, m: attention(x, x, x, m),
    "slopes": lambda x, a: attention(x, x, x, alibi_slopes=a),
    "sinks": lambda x, s: attention(x, x, x, sinks=s),
    "packed": lambda x, c: attention(
        *[x.flatten(0, 1).transpose(0, 1)] * 3, cu_seqlens_q=c, cu_seqlens_k=c, max_seqlen_q=5,
        max_seqlen_k=5),
}
SAMPLES = {"lengths": torch.tensor([[1, 5], [0, 2]]),
           "mask": torch.stack([torch.ones(5, 5).tril(), torch.ones(5, 5).triu()]).bool(),
           "slopes": rand(2, 2).abs(), "sinks": rand(2, 2),
           "packed": torch.tensor([[0, 3, 5], [0, 0, 5]])}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_of_jvp_with_options_of_each_sample(name):
    (q,), (dq,) = twice((2, 2, 5, 4))

    def tangents(x):
        def call(y):
            return MAPPED[name](y, x)

        gradient = grad(lambda y: call(y).square().sum())
        return jvp(call, (q,), (dq,))[1], jvp(gradient, (q,), (dq,))[1]

    found = vmap(tangents)(SAMPLES[name])
    for a, *b in zip(found, *map(tangents, SAMPLES[name])):
        assert not torch.equal(*b)
        close(a, torch.stack(b))


def test_vmap_of_no_samples():
    none = rand(0, 1, 2, 5, 4)
    for options in ({}, {"dropout_p": 0.5}):
        made = vmap(lambda x: jvp(lambda y: attention(y, y, y, **options), (x,), (x,))[1],
                    randomness="different")(none)
        assert made.shape == none.shape


# ---- Dropout -------------------------------------------------------------------------------------

@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_is_the_forwards(randomness, sinks):
    """Also under vmap, which may draw once for all samples, or for each, or for all as a batch."""
    (x,), (dx,) = twice((3, 2, 2, 5, 4))
    more = {"sinks": rand(2)} if sinks else {}

    def call(y):
        return attention(y, y, y, dropout_p=0.4, **more)

    def drawn(function, *given):
        torch.manual_seed(7)
        return function(*given)

    gradient = grad(lambda y: call(y).square().sum())
    close(drawn(jvp, call, (x[0],), (dx[0],))[1],
          by_difference(lambda y: drawn(call, y), (x[0],), (dx[0],)), 1e-7)
    for function in (call, gradient):
        def mapped(y):
            return vmap(function, randomness=randomness)(y)

        exact = by_difference(lambda y: drawn(mapped, y), (x,), (dx,))
        inside = vmap(lambda y, d: jvp(function, (y,), (d,))[1], randomness=randomness)
        close(drawn(inside, x, dx), exact, 1e-6)
        close(drawn(jvp, mapped, (x,), (dx,))[1], exact, 1e-6)


@pytest.mark.parametrize("outer", ["same", "different"])
@pytest.mark.parametrize("inner", ["same", "different"])
def test_dropout_of_nested_vmaps(inner, outer):
    (x,), (dx,) = twice((2, 3, 1, 2, 5, 4))

    def mapped(function, *given):
        torch.manual_seed(7)
        return vmap(vmap(function, randomness=inner), randomness=outer)(*given)

    def call(y):
        return attention(y, y, y, dropout_p=0.4)

    close(mapped(lambda y, d: jvp(call, (y,), (d,))[1], x, dx),
          by_difference(lambda y: mapped(call, y), (x,), (dx,)), 1e-7)


# ---- Threads, compilers --------------------------------------------------------------------------

def test_duals_in_another_thread():
    primals, tangents = twice(*QKV)
    found = []
    with forward_ad.dual_level():
        duals = list(map(forward_ad.make_dual, primals, tangents))
        other = threading.Thread(target=lambda: found.append(
            forward_ad.unpack_dual(attention(*duals)).tangent))
        other.start()
        other.join()
    close(found[0], jvp(math, primals, tangents)[1])


def test_another_threads_forward_mode_changes_no_transform(forward_mode_elsewhere):
    (x,), _ = twice((3, 1, 2, 5, 4))
    gradients = vmap(grad(lambda y: attention(y, y, y).square().sum()))
    exact = gradients(x)
    with forward_mode_elsewhere():
        close(gradients(x), exact)


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [False, True])
def test_compiled_code_lets_the_call_run_uncompiled(backend, before, switched):
    """There it was lost without a word: also where the code was compiled before."""
    primals, tangents = twice(*QKV)
    out, exact = jvp(math, primals, tangents)
    given = (lambda *x: F.scaled_dot_product_attention(*x)) if switched else attention
    torch._dynamo.reset()
    function = torch.compile(given, backend=backend)
    with orchard.enable() if switched else torch.enable_grad():
        if before:
            close(function(*primals), out)
        with forward_ad.dual_level():
            close(forward_ad.unpack_dual(function(
                *map(forward_ad.make_dual, primals, tangents))).tangent, exact)
        close(jvp(function, primals, tangents)[1], exact)
        close(torch.compile(lambda *x: jvp(given, x, tangents)[1], backend=backend)(*primals),
              exact)
        torch._dynamo.reset()
        with forward_ad.dual_level(), pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(given, backend=backend, fullgraph=True)(
                *map(forward_ad.make_dual, primals, tangents))
    assert orchard.counts(reset=True) == ({"served by Orchard": 3} if switched else {})


# ---- Refused -------------------------------------------------------------------------------------

def test_slopes_have_no_tangent():
    (q, slopes), (dq, dslopes) = twice((1, 2, 5, 4), (2,))

    def call(x):
        return attention(q, q, q, alibi_slopes=x)

    message = "alibi_slopes has a forward-mode derivative"
    for refused in (lambda: jvp(call, (slopes,), (dslopes,)), lambda: jacfwd(call)(slopes),
                    lambda: vmap(lambda x: jvp(call, (x,), (x,)))(slopes.expand(3, 2))):
        with pytest.raises(orchard.UnsupportedError, match=message):
            refused()
    with forward_ad.dual_level(), pytest.raises(orchard.UnsupportedError, match=message):
        call(forward_ad.make_dual(slopes, dslopes))
