"""The first Orchard's names do what its documents said: values and gradients of attention.

Values and gradients are compared with the formula written out in float64 below; log lines and
errors with the words of the old documents.
"""

import copy
import io
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import orchard
import orchard_bridge
import orchard_ops
from orchard.reports import ReportLine
from orchard_bridge import flash_attn_function, metal
from orchard_ops import flash_ops, state

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORWARD = "[orchard][FlashAttnFunction.forward]"
BACKWARD = "[orchard][FlashAttnFunction.backward]"
OPS = torch.ops.flash_attn_mps


def formula(q, k, v, scale, causal, keep=None):
    """Attention in float64, every step written out; [B,S,D] or [B,H,S,D]."""
    score = scale * (q @ k.transpose(-1, -2))
    if causal:
        t, s = score.shape[-2:]
        score = score.masked_fill(torch.ones(t, s).triu(1).bool(), -math.inf)
    weight = torch.softmax(score, -1)
    return (weight if keep is None else weight * keep) @ v


def true_gradients(tensors, dout, scale, causal, keep=None):
    leaves = [x.detach().double().requires_grad_(True) for x in tensors]
    out = formula(*leaves, scale, causal, keep)
    return out.detach(), torch.autograd.grad(out, leaves, dout.double())


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(*shape, dtype=torch.float32):
    return [random(*shape, dtype=dtype, seed=i).requires_grad_(True) for i in range(3)]


def close(found, exact, dtype=torch.float32):
    tolerance = {torch.float64: 1e-12, torch.float32: 6e-6, torch.float16: 4e-3,
                 torch.bfloat16: 3e-2}[dtype]
    assert found.shape == exact.shape and found.dtype == dtype
    apart = (found.detach().double() - exact).abs().max().item()
    assert apart <= tolerance * max(1.0, exact.abs().max().item())


WAYS = {
    "orchard_ops": orchard_ops.flash_attn_fwd,
    "orchard_bridge": orchard_bridge.flash_attn,
    "FlashAttnFunction": orchard_bridge.FlashAttnFunction.apply,
    "torch.ops": OPS._flash_attn_fwd,
}


# ---- Values and gradients ------------------------------------------------------------------------

@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 4, 64), (2, 4, 32, 16), (1, 3, 21, 7), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients(way, shape, causal):
    q, k, v = qkv(*shape)
    out, mask = WAYS[way](q, k, v, 0.7, 0.0, causal)
    dout = random(*shape, seed=9)
    exact, grads = true_gradients((q, k, v), dout, 0.7, causal)
    close(out, exact)
    for found, right in zip(torch.autograd.grad(out, (q, k, v), dout), grads):
        close(found, right)
    assert not mask.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    """The first Orchard's kernel read float16 as float32."""
    q, k, v = qkv(2, 4, 32, 16, dtype=dtype)
    out, mask = orchard_bridge.flash_attn(q, k, v, 0.25, 0.0, True)
    dout = random(2, 4, 32, 16, dtype=dtype, seed=9)
    exact, grads = true_gradients((q, k, v), dout, 0.25, True)
    close(out, exact, dtype)
    by_hand = orchard_ops.flash_attn_bwd(dout, q, k, v, mask, 0.25, 0.0, True)
    for found, again, right in zip(torch.autograd.grad(out, (q, k, v), dout), by_hand, grads):
        close(found, right, dtype)
        assert torch.equal(found, again)


def test_the_documents_example():
    """q of [2,4,64], scale 1.0, then out.sum().backward(): what the first formula got wrong."""
    q, k, v = qkv(2, 4, 64)
    out, mask = orchard_ops.flash_attn_fwd(q, k, v, 1.0, 0.0, False)
    out.sum().backward()
    _, grads = true_gradients((q, k, v), torch.ones(2, 4, 64), 1.0, False)
    for leaf, right in zip((q, k, v), grads):
        close(leaf.grad, right)
    elementwise = torch.ones(2, 4, 64)      # grad_out * scale, "dq" of the first Orchard
    assert (q.grad - elementwise).abs().max() > 0.1


@pytest.mark.parametrize("way", WAYS)
def test_a_default_device_is_for_others(way):
    """Tensors that Orchard makes for itself stay where they belong."""
    q, k, v = qkv(2, 4, 12, 8)
    dout, found = torch.ones(2, 4, 12, 8), []
    for default in ("cpu", "meta"):
        torch.manual_seed(4)
        with torch.device(default):
            out, mask = WAYS[way](q, k, v, 0.5, 0.3, True)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            by_hand = orchard_ops.flash_attn_bwd(dout, q, k, v, mask, 0.5, 0.3, True)
            assert metal.probe("cpu") is None
        found.append((out.detach(), mask, *grads, *by_hand))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_queries_and_keys_of_different_number_and_heads():
    q, k, v = random(2, 4, 9, 16), random(2, 2, 30, 16), random(2, 2, 30, 16, seed=3)
    q, k, v = (x.requires_grad_(True) for x in (q, k, v))
    out, mask = orchard_bridge.flash_attn(q, k, v, 0.3, causal=True)
    wide = [x.detach().double().repeat_interleave(2, 1) for x in (k, v)]
    close(out, formula(q.detach().double(), *wide, 0.3, True))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    by_hand = orchard_ops.flash_attn_bwd(torch.ones_like(out), q, k, v, mask, 0.3, 0.0, True)
    assert all(torch.equal(a, b) for a, b in zip(grads, by_hand))


def test_views_are_read_by_their_strides():
    block = random(2, 9, 3, 4, 16)
    q, k, v = (block[:, :, i].transpose(1, 2).requires_grad_(True) for i in range(3))
    out, _ = orchard_bridge.flash_attn(q, k, v, 0.3)
    dout = random(2, 9, 4, 16).transpose(1, 2)
    exact, grads = true_gradients((q, k, v), dout, 0.3, False)
    close(out, exact)
    for found, right in zip(torch.autograd.grad(out, (q, k, v), dout), grads):
        close(found, right)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_first_and_second_order(way):
    tensors = qkv(1, 2, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: WAYS[way](*x, 0.5, 0.0, True)[0], tensors)
    assert torch.autograd.gradgradcheck(lambda *x: WAYS[way](*x, 0.5, 0.0, True)[0], tensors)


@pytest.mark.parametrize("way", WAYS)
def test_second_order_of_many_gradients_at_once(way):
    """is_grads_batched: an autograd Function inside it would record nothing."""
    q, k, v = qkv(1, 2, 4, 3, dtype=torch.float64)
    many = random(3, 1, 2, 4, 3, dtype=torch.float64)

    def second(function):
        first, = torch.autograd.grad(function(q, k, v), q, many, create_graph=True,
                                     is_grads_batched=True)
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    exact = second(lambda *x: formula(*x, 0.5, True))
    for found, right in zip(second(lambda *x: WAYS[way](*x, 0.5, 0.0, True)[0]), exact):
        close(found, right, torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_raises_and_is_not_lost_over_backward(way):
    """These Functions have no jvp, which a compiler would refuse; torch says so."""
    q, k, v = qkv(1, 2, 4, 3, dtype=torch.float64)
    dout, ddout = (random(1, 2, 4, 3, seed=n, dtype=torch.float64) for n in (7, 8))
    results = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(dout, ddout)
        for out in (WAYS[way](q, k, v, 0.5, 0.0, True)[0], formula(q, k, v, 0.5, True)):
            results.append([forward_ad.unpack_dual(x).tangent
                            for x in torch.autograd.grad(out, (q, k, v), dual)])
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            WAYS[way](forward_ad.make_dual(q, ddout), k, v, 0.5, 0.0, True)
    for found, right in zip(*results):
        close(found, right, torch.float64)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.jvp(lambda x: WAYS[way](x, k, v, 0.5, 0.0, True)[0], (q,), (ddout,))


def test_forward_mode_of_backward_by_hand():
    """True tangents from the function; the dispatcher's ops would lose them, and say so."""
    q, k, v = (x.detach() for x in qkv(1, 2, 4, 3, dtype=torch.float64))
    dout, *moves = (random(1, 2, 4, 3, seed=n, dtype=torch.float64) for n in (6, 7, 8, 9, 10))
    rest = (orchard_ops.flash_attn_fwd(q, k, v, 0.5, 0.0, True)[1], 0.5, 0.0, True)

    def tangents(function):
        return torch.func.jvp(function, (dout, q, k, v), tuple(moves))[1]

    exact = tangents(lambda d, *x: torch.func.vjp(lambda *y: formula(*y, 0.5, True), *x)[1](d))
    for found, right in zip(tangents(lambda *x: orchard_ops.flash_attn_bwd(*x, *rest)), exact):
        close(found, right, torch.float64)
    message = "do not pass through flash_attn_mps"
    for op in (OPS._flash_attn_bwd, OPS._flash_attn_bwd_dropout):
        with pytest.raises(orchard.UnsupportedError, match=message):
            tangents(lambda *x: op(*x, *rest))
        with forward_ad.dual_level(), pytest.raises(orchard.UnsupportedError, match=message):
            op(forward_ad.make_dual(dout, q), q, k, v, *rest)


def test_only_the_wanted_gradients():
    q, k, v = qkv(2, 4, 8)
    out, _ = orchard_bridge.flash_attn(q.detach(), k, v.detach(), 1.0)
    out.sum().backward()
    assert q.grad is None and v.grad is None
    close(k.grad, true_gradients((q, k, v), torch.ones(2, 4, 8), 1.0, False)[1][1])


def test_backward_called_by_its_name():
    """Six values, as the first Orchard's: one for each argument of forward."""
    q, k, v = qkv(2, 4, 8)
    out, _ = orchard_bridge.flash_attn(q, k, v, 1.0)
    dout = random(2, 4, 8, seed=9)
    made = orchard_bridge.FlashAttnFunction.backward(out.grad_fn, dout, None)
    for found, right in zip(made, true_gradients((q, k, v), dout, 1.0, False)[1]):
        close(found, right)
    assert made[3:] == (None,) * 3
    assert orchard_bridge.FlashAttnFunction.backward(out.grad_fn, None) == (None,) * 6


# ---- Dropout -------------------------------------------------------------------------------------

@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_acts_on_probabilities_and_backward_redraws_it(way, causal):
    """v is the unit matrix, so the output shows which probabilities were dropped."""
    q, k = random(2, 2, 40, 16).requires_grad_(True), random(2, 2, 40, 16, seed=1)
    v = torch.eye(40).expand(2, 2, 40, 40).contiguous().requires_grad_(True)
    k = k.requires_grad_(True)
    torch.manual_seed(5)
    out, mask = WAYS[way](q, k, v, 0.3, 0.4, causal)
    keep = (out.detach() != 0).double() / 0.6
    seen = torch.ones(40, 40).tril() if causal else torch.ones(40, 40)
    rate = 1 - (keep != 0).double().sum().item() / (4 * seen.sum().item())
    assert abs(rate - 0.4) < 0.05
    dout = random(2, 2, 40, 40)
    exact, grads = true_gradients((q, k, v), dout, 0.3, causal, keep)
    close(out, exact)
    by_hand = orchard_ops.flash_attn_bwd(dout, q, k, v, mask, 0.3, 0.4, causal)
    for found, again, right in zip(torch.autograd.grad(out, (q, k, v), dout), by_hand, grads):
        close(found, right)
        assert torch.equal(found, again)


def test_manual_seed_repeats_dropout():
    q, k, v = qkv(2, 4, 8)
    torch.manual_seed(1)
    first, second = (orchard_ops.flash_attn_fwd(q, k, v, 1.0, 0.5, False)[0] for _ in range(2))
    torch.manual_seed(1)
    again = orchard_bridge.flash_attn(q, k, v, 1.0, 0.5)[0]
    assert torch.equal(first, again) and not torch.equal(first, second)


# ---- The state -----------------------------------------------------------------------------------

def saved_and_loaded(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


TRAVELS = {
    "torch.save": saved_and_loaded,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": torch.clone,
    "detach": torch.detach,
    "deepcopy": copy.deepcopy,
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "slice": lambda x: torch.cat([torch.zeros(3, dtype=torch.int32), x])[3:],
    "every second": lambda x: torch.stack([x, x], 1)[:, 0],
    "contiguous": lambda x: x.contiguous().to("cpu", copy=True),
}


@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_state_survives(travel, dtype):
    q, k, v = qkv(2, 3, 10, 8, dtype=dtype)
    out, mask = orchard_ops.flash_attn_fwd(q, k, v, 0.5, 0.3, True)
    dout = torch.ones_like(out)
    right = torch.autograd.grad(out, (q, k, v), dout)
    moved = TRAVELS[travel](mask)
    found = orchard_ops.flash_attn_bwd(dout, q, k, v, moved, 0.5, 0.3, True)
    assert all(torch.equal(a, b) for a, b in zip(found, right))


def test_the_state_is_small():
    sizes = [orchard_ops.flash_attn_fwd(*[random(1, 2, n, d)] * 3, 1.0, 0.5, False)[1].numel()
             for n, d in ((100, 8), (200, 8), (200, 128))]
    assert sizes == [28 + 200, 28 + 400, 28 + 400]


def refusal(change_mask=lambda mask: mask, change=None, **fields):
    """The message for a mask that does not belong to the call."""
    given = dict(zip("qkv", (random(2, 3, 10, 8, seed=i) for i in range(3))),
                 scale=0.5, dropout_p=0.3, causal=True)
    mask = change_mask(orchard_ops.flash_attn_fwd(**given)[1])
    given.update(fields)
    given.update(change(given) if change else {})
    out = torch.ones(*given["q"].shape[:-1], given["v"].shape[-1])
    with pytest.raises((ValueError, TypeError)) as why:
        orchard_ops.flash_attn_bwd(out, given["q"], given["k"], given["v"], mask, given["scale"],
                                   given["dropout_p"], given["causal"])
    return str(why.value)


def test_a_foreign_mask_is_refused_in_words():
    told = "flash_attn_bwd: mask "
    assert refusal(lambda m: torch.ones(2, 3, 10, 8)) == (
        told + "is float32 of shape [2, 3, 10, 8], must be the int32 vector that flash_attn_fwd "
        "returned: it is an opaque state, not the mask of the first Orchard, and must not be cast "
        "or reshaped")
    assert refusal(lambda m: m.float()).startswith(told + "is float32 of shape [88]")
    assert refusal(lambda m: m.view(2, -1)).startswith(told + "is int32 of shape [2, 44]")
    assert refusal(lambda m: m[:9]) == told + "has 9 numbers, too few for a state of flash_attn_fwd"
    assert refusal(lambda m: m[:-1]) == told + "has 87 numbers, the state of this call has 88"
    assert refusal(lambda m: torch.ones_like(m)) == (
        told + "was not made by this version's flash_attn_fwd: its first word is not the mark of a "
        "state; call flash_attn_fwd again")
    assert refusal(lambda m: None) == (
        told + "is a NoneType, must be the tensor that flash_attn_fwd returned")
    assert refusal(scale=0.25) == (
        told + "belongs to a call with scale=0.5, this call says scale=0.25")
    assert refusal(dropout_p=0.0) == (
        told + "belongs to a call with dropout_p=0.3, this call says dropout_p=0.0")
    assert refusal(causal=False) == (
        told + "belongs to a call with causal=True, this call says causal=False")
    assert refusal(q=random(2, 3, 11, 8)) == (
        told + "belongs to a call with float32 q [2, 3, 10, 8], k [2, 3, 10, 8], v [2, 3, 10, 8]; "
        "this call has float32 q [2, 3, 11, 8], k [2, 3, 10, 8], v [2, 3, 10, 8]")
    assert "this call has bfloat16 q" in refusal(
        change=lambda given: {name: given[name].bfloat16() for name in "qkv"})
    assert refusal(q=random(2, 3, 10, 8, seed=7)).startswith(
        told + "belongs to a call with other q and k: their log-sum-exp differs by ")
    assert refusal(k=torch.full((2, 3, 10, 8), math.nan)).endswith("differs by nan")


def test_the_gradient_must_have_the_outputs_shape():
    q = random(2, 4, 8)
    mask = orchard_ops.flash_attn_fwd(q, q, q, 1.0, 0.0, False)[1]
    with pytest.raises(ValueError, match=re.escape("flash_attn_bwd: grad_out has shape [2, 4, 7], "
                                                   "out has [2, 4, 8]")):
        orchard_ops.flash_attn_bwd(torch.ones(2, 4, 7), q, q, q, mask, 1.0, 0.0, False)


def test_the_header_is_as_documented():
    q = random(2, 3, 10, 8)
    torch.manual_seed(3)
    mask = orchard_ops.flash_attn_fwd(q, q, q, 0.5, 0.25, True)[1]
    numbers = dict(zip(state.FIELDS, mask[:28].view(torch.int64).tolist()))
    assert numbers.pop("magic").to_bytes(8, "big") == b"ORCHSTA\x01"
    torch.manual_seed(3)
    assert numbers.pop("seed") == torch.randint(2**63 - 1, ()).item()
    assert (state.real(numbers.pop("scale")), state.real(numbers.pop("dropout_p"))) == (0.5, 0.25)
    assert numbers == {"rank": 4, "B": 2, "H": 3, "G": 3, "T": 10, "S": 10, "D": 8, "E": 8,
                       "dtype": 1, "causal": 1}
    lse = mask[28:].view(torch.float32).view(2, 3, 10)
    score = 0.5 * (q.double() @ q.double().transpose(-1, -2))
    score = score.masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
    assert (lse - score.logsumexp(-1)).abs().max() < 1e-5


# ---- torch.ops -----------------------------------------------------------------------------------

def test_schemas():
    assert str(OPS._flash_attn_fwd.default._schema) == (
        "flash_attn_mps::_flash_attn_fwd(Tensor q, Tensor k, Tensor v, float scale, "
        "float dropout_p, bool causal) -> (Tensor, Tensor)")
    for name in ("_flash_attn_bwd", "_flash_attn_bwd_dropout"):
        assert str(getattr(OPS, name).default._schema) == (
            f"flash_attn_mps::{name}(Tensor grad_out, Tensor q, Tensor k, Tensor v, "
            "Tensor dropout_mask, float scale, float dropout_p, bool causal) "
            "-> (Tensor, Tensor, Tensor)")


@pytest.mark.parametrize("name", ["_flash_attn_bwd", "_flash_attn_bwd_dropout"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_backward_ops_have_true_maths(name, p):
    q, k, v = (x.detach() for x in qkv(2, 4, 12, 8))
    out, mask = OPS._flash_attn_fwd(q, k, v, 0.5, p, True)
    made = getattr(OPS, name)(torch.ones_like(out), q, k, v, mask, 0.5, p, True)
    if p == 0.0:
        grads = true_gradients((q, k, v), torch.ones_like(out), 0.5, True)[1]
        for found, right in zip(made, grads):
            close(found, right)
    again = orchard_ops.flash_attn_bwd(torch.ones_like(out), q, k, v, mask, 0.5, p, True)
    assert all(torch.equal(a, b) for a, b in zip(made, again))


def test_compiled_and_fake():
    q, k, v = qkv(2, 4, 12, 8)
    run = torch.compile(lambda *x: OPS._flash_attn_fwd(*x, 0.5, 0.0, True)[0], fullgraph=True,
                        backend="aot_eager")
    out = run(q, k, v)
    exact, grads = true_gradients((q, k, v), torch.ones_like(out), 0.5, True)
    close(out, exact)
    for found, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), grads):
        close(found, right)
    q, k, v = (x.detach() for x in (q, k, v))
    mask = OPS._flash_attn_fwd(q, k, v, 0.5, 0.0, True)[1]
    torch.library.opcheck(OPS._flash_attn_bwd.default,
                          (torch.ones(2, 4, 12, 8), q, k, v, mask, 0.5, 0.0, True))


def kept(p, randomness, q):
    """Which weights each sample keeps: all are equal, and values tell them apart."""
    v = torch.eye(6).expand(1, 2, 6, 6)
    return torch.vmap(lambda x: OPS._flash_attn_fwd(x, x, v, 1.0, p, False),
                      randomness=randomness)(q)


def test_vmap_heeds_randomness():
    """As torch's own random operations do."""
    q = torch.zeros(5, 1, 2, 6, 4)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        kept(0.5, "error", q)
    assert (kept(0.0, "error", q)[0] == 1 / 6).all()
    for randomness, masks, of_nested in (("same", 1, 1), ("different", 5, 15)):
        torch.manual_seed(3)
        out, states = kept(0.5, randomness, q)
        assert len({one.numpy().tobytes() for one in out != 0}) == masks
        assert len({one.numpy().tobytes() for one in states}) == masks
        torch.manual_seed(3)
        assert torch.equal(kept(0.5, randomness, q)[0], out)
        nested = torch.vmap(lambda x: kept(0.5, randomness, x)[0], randomness=randomness)(
            q.expand(3, *q.shape))
        assert len({one.numpy().tobytes() for one in (nested != 0).flatten(0, 1)}) == of_nested
    torch.manual_seed(3)
    kept(0.5, "same", q)
    after = torch.rand(())
    torch.manual_seed(3)
    torch.randint(2 ** 63 - 1, ())
    assert torch.rand(()) == after  # one number was drawn


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_keeps_a_state_and_gradients_for_each_sample(randomness):
    tensors = [torch.randn(3, 1, 2, 6, 4, requires_grad=True) for _ in range(3)]
    out, states = torch.vmap(lambda *x: OPS._flash_attn_fwd(*x, 0.5, 0.5, True),
                             randomness=randomness)(*tensors)
    grads = torch.autograd.grad(out.sum(), tensors)
    for i in range(3):
        one = [x[i].detach() for x in tensors]
        again = orchard_ops.flash_attn_bwd(torch.ones(1, 2, 6, 4), *one, states[i], 0.5, 0.5, True)
        for found, right in zip(grads, again):
            torch.testing.assert_close(found[i], right)
    none = torch.vmap(lambda x: OPS._flash_attn_fwd(x, x, x, 0.5, 0.5, True)[0],
                      randomness=randomness)(torch.empty(0, 1, 2, 6, 4))
    assert none.shape == (0, 1, 2, 6, 4)


# ---- enable_flash --------------------------------------------------------------------------------

@pytest.fixture
def no_metal(monkeypatch):
    """A machine without Metal; what this one is, unless it is a Mac."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    metal.probed.cache_clear()
    yield
    metal.probed.cache_clear()


def test_enable_flash_says_that_there_is_no_metal(no_metal, capsys, monkeypatch):
    monkeypatch.delenv("USE_FLASH_ATTN", raising=False)
    assert orchard_bridge.enable_flash() is False
    assert capsys.readouterr() == ("", "")
    assert orchard_bridge.enable_flash(verbose=True) is False
    told = capsys.readouterr().err
    assert "WARNING:orchard_bridge:[starcoder-orchard] FlashAttention does not run on Metal" in told
    assert "INFO:orchard_bridge:[starcoder-orchard] attention of CPU tensors runs by " in told
    with pytest.raises(RuntimeError, match="FlashAttention does not run on Metal"):
        orchard_bridge.enable_flash(strict=True)
    assert orchard_bridge.is_metal_flash_attn_available() is False
    assert "USE_FLASH_ATTN" not in os.environ


def test_enable_flash_when_metal_is_there(monkeypatch):
    """The answer is the probe's, not a name's."""
    monkeypatch.setenv("USE_FLASH_ATTN", "0")
    monkeypatch.setattr(metal, "why_not", lambda: None)
    assert orchard_bridge.enable_flash(strict=True) is True
    assert os.environ["USE_FLASH_ATTN"] == "2"
    assert orchard_bridge.is_metal_flash_attn_available() is True

    def broken():
        raise OSError("no")

    monkeypatch.setattr(metal, "why_not", broken)
    assert orchard_bridge.is_metal_flash_attn_available() is False


def test_the_probe_compares_values(monkeypatch):
    import orchard.torch
    for how in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with how:  # whoever asks, and when
            assert metal.probe("cpu") is None
    calls = []

    def wrong_the_second_time(q, k, v, **options):
        calls.append(1)
        return honest(q, k, v * (1.01 if len(calls) == 2 else 1.0), **options)

    honest = orchard.torch.scaled_dot_product_attention
    monkeypatch.setattr(orchard.torch, "scaled_dot_product_attention", wrong_the_second_time)
    assert re.match(r"out on cpu is off by 0\.0\d", metal.probe("cpu"))


def test_either_import_of_enable_flash_can_be_called(monkeypatch):
    monkeypatch.setattr(metal, "why_not", lambda: "no")
    import orchard_bridge.enable_flash as module
    from orchard_bridge import enable_flash
    assert enable_flash() is False and enable_flash.main() is False
    assert module() is False and module.main() is False


def python(*words, **env):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT,
                          env=dict(os.environ, OMP_NUM_THREADS="1", **env), timeout=300)


def test_enable_flash_as_a_command():
    done = python("-m", "orchard_bridge.enable_flash", "--verbose")
    found = orchard_bridge.is_metal_flash_attn_available()
    assert done.returncode == (0 if found else 1)
    runs = "runs" if found else "does not run"
    assert done.stdout == f"[starcoder-orchard] attention {runs} on Metal\n"
    assert ("does not run on Metal" in done.stderr) is not found
    assert "Warning:" not in done.stderr


def test_exit_statuses(no_metal, capsys):
    from orchard_bridge._enable import command
    assert command([]) == 1
    assert command(["--strict"]) == 2
    assert "FlashAttention does not run on Metal: " in capsys.readouterr().err
    assert command(["--what"]) == 2
    assert capsys.readouterr().err == "enable_flash: --what is neither --verbose nor --strict\n"


# ---- What is printed, and when -------------------------------------------------------------------

def train(**options):
    q, k, v = qkv(2, 4, 32, 16)
    out, _ = orchard_bridge.flash_attn(q, k, v, 0.25, **options)
    out.sum().backward()
    return q, k, v


@pytest.mark.parametrize("variable", ["ORCHARD_DEBUG_FLASHATN", "ORCHARD_DEBUG_FLASH_ATN"])
def test_debug_lines_on_the_cpu(variable, monkeypatch, capsys):
    monkeypatch.setenv(variable, "yes")
    train(dropout_p=0.1, causal=True)
    told = capsys.readouterr()
    assert told.out == (f"{FORWARD} Shapes: q=torch.Size([2, 4, 32, 16]), scale=0.25, dropout=0.1, "
                        "causal=True\n")
    assert told.err == (f"{BACKWARD} Metal kernel unavailable, attempting reference fallback.\n")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_no_debug_lines(value, monkeypatch, capsys):
    for name in ("ORCHARD_DEBUG_FLASHATN", "ORCHARD_DEBUG_FLASH_ATN"):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    train()
    assert capsys.readouterr() == ("", "")


def test_debug_lines_of_metal(monkeypatch, capsys):
    """With a device that takes the call, and with one that fails: the words, and the gradients."""
    right = [x.grad for x in train(causal=True)]
    monkeypatch.setenv("ORCHARD_DEBUG_FLASHATN", "1")
    monkeypatch.setattr(flash_attn_function, "on_mps", lambda x: True)
    monkeypatch.setattr(metal, "storage_is_shared", lambda: True)
    train(causal=True)
    told = capsys.readouterr()
    assert told.out.splitlines()[1:] == [
        f"{BACKWARD} Metal backward succeeded with shared storage tensors."]
    assert told.err == ""
    monkeypatch.setattr(metal, "storage_is_shared", lambda: False)
    train(causal=True)
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{BACKWARD} Metal backward succeeded with private storage tensors, not copied."]

    calls, run = [], flash_ops.differentiate

    def fails_once(*given):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the device was lost")
        return run(*given)

    monkeypatch.setattr(flash_ops, "differentiate", fails_once)
    found = [x.grad for x in train(causal=True)]
    told = capsys.readouterr()
    assert told.err == (f"{BACKWARD} Metal bwd failed (the device was lost); falling back to "
                        "reference attention backward.\n")
    assert "succeeded" not in told.out
    for a, b in zip(found, right):  # without lse_rest, which is the other device's
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert ReportLine("attention_backward", "mps", "the device was lost", 1) in orchard.report()
    monkeypatch.setenv("ORCHARD_STRICT", "1")
    calls.clear()
    with pytest.raises(orchard.UnsupportedError, match="the device was lost; strict forbids"):
        train(causal=True)


def test_storage_is_shared_since_torch_2_12(monkeypatch):
    for version, shared in (("2.11.0", False), ("2.12.0", True), ("2.13.0+cpu", True),
                            ("3.0.0a0", True)):
        monkeypatch.setattr(torch, "__version__", version)
        assert metal.storage_is_shared() is shared


def test_the_log_of_calls(tmp_path):
    """What S0 greps for, in the file that it greps."""
    log = tmp_path / "calls.log"
    done = python("-c", "import torch, orchard_ops\n"
                  "q = torch.randn(2, 4, 64, requires_grad=True)\n"
                  "for _ in range(2):\n"
                  "    out, mask = orchard_ops.flash_attn_fwd(q, q, q, 1.0, 0.0, False)\n"
                  "    out.sum().backward()\n",
                  ORCHARD_DEBUG_FLASH_ATN="1", ORCHARD_DEBUG_FLASH_ATN_LOG=str(log),
                  ORCHARD_BACKEND="cpu")
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "".join(
        f"[flashattn.mm] FWD call={n} backend=cpu\nflash_attn_fwd: cpu forward done\n"
        f"[flashattn.mm] BWD call={n} backend=cpu\nflash_attn_bwd: cpu backward done\n"
        for n in (1, 2))


# ---- Errors --------------------------------------------------------------------------------------

@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 3, 5, 8)], ids=str)
def test_out_may_be_changed_in_place(way, shape):
    """Backward needs the old one, and says so; where it needs none, nothing is in the way."""
    tensors = qkv(*shape)
    out, _ = WAYS[way](*tensors, 0.3, 0.0, False)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out, _ = WAYS[way](*(x.detach() for x in tensors), 0.3, 0.0, False)
    close(out.mul_(2), 2 * formula(*(x.detach().double() for x in tensors), 0.3, False))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("changed", ["out", "q", "v"])
def test_compiled_code_notices_changes_in_place(way, backend, changed):
    """What backward needs; code that changes nothing has the true gradients."""
    def call(q, k, v, change):
        q, v = q * 1, v * 1
        out, _ = WAYS[way](q, k, v, 0.3, 0.0, False)
        if change:
            {"out": out, "q": q, "v": v}[changed].mul_(2)
        return out.sum()

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    tensors = qkv(2, 3, 5, 8)
    found = torch.autograd.grad(compiled(*tensors, False), tensors)
    true = torch.autograd.grad(formula(*tensors, 0.3, False).sum(), tensors)
    for a, b in zip(found, true):
        close(a, b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compiled(*tensors, True).backward()


def test_errors():
    q = random(2, 4, 8)
    for way in WAYS.values():
        for p in (-0.1, 1.0):
            with pytest.raises((ValueError, RuntimeError),
                               match=re.escape(f"dropout_p must be in [0,1), got {p}")):
                way(q, q, q, 1.0, p, False)
    learned = torch.tensor(0.5, requires_grad=True)
    for name in ("orchard_ops", "orchard_bridge", "FlashAttnFunction"):  # torch.ops warns by itself
        with pytest.raises(ValueError, match="scale requires grad, and gets none"):
            WAYS[name](q, q, q, learned, 0.0, False)
    with pytest.raises(RuntimeError, match=re.escape(
            "[orchard][flash_attn_function] Input tensors must be on 'mps' device, got "
            "['meta', 'cpu', 'cpu']")):
        orchard_bridge.flash_attn(q.to("meta"), q, q, 1.0)
    with pytest.raises(ValueError, match="q, k and v are on cpu, meta and cpu, must be on one"):
        orchard_ops.flash_attn_fwd(q, q.to("meta"), q, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="q, k and v have 2, 3 and 3 dimensions"):
        orchard_ops.flash_attn_fwd(q[0], q, q, 1.0, 0.0, False)
    with pytest.raises(TypeError, match="q is int64, must be float64, float32"):
        orchard_ops.flash_attn_fwd(*[q.long()] * 3, 1.0, 0.0, False)
    for way in (orchard_ops.flash_attn_fwd, orchard_bridge.flash_attn):
        with pytest.raises(TypeError, match="k is a NoneType, must be a dense tensor"):
            way(q, None, q, 1.0)
        nested = torch.nested.nested_tensor([q, q[:1]])
        with pytest.raises(TypeError, match="q is a nested tensor, must be a dense tensor"):
            way(nested, nested, nested, 1.0)


def test_nothing_is_copied_to_become_shared():
    views = random(4, 6, 8).transpose(0, 1)
    for x in (None, views, views.clone().requires_grad_(True), random(3)):
        assert flash_attn_function._ensure_shared_mps_tensor(x) is x
