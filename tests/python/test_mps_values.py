"""orchard.torch on mps: values and gradients of the public function, computed by the library's Metal
kernels on the fake of torch.mps, against the explicit formula in fp64 within the error bar."""

import math

import pytest
import torch

import core_formula
import fake_mps
from orchard.torch import mps
from orchard.torch import scaled_dot_product_attention as attention
from test_torch_values import OPTIONS, check_large_scores, large_scores
from torch_formula import assert_within, differentiable, formula, check_values, rand

fake_mps.install()
B, H, T, S, D, E = 2, 4, 13, 21, 16, 24  # those of OPTIONS
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
RAN = [("attention_forward", "mps", None), ("attention_backward", "mps", None)]


def counts():
    return {(line.op, line.backend, line.reason): line.count for line in mps.report()}


def on_trial(tensors, options, name, **more):
    """Right values, and Orchard's kernels ran, once each way, and nothing else."""
    before, launches = counts(), fake_mps.Counts.dispatches
    found = check_values(attention, tensors, options, name, place=fake_mps.tensor, **more)
    after = counts()
    new = {line: after[line] - before.get(line, 0) for line in after}
    assert {line: count for line, count in new.items() if count} == dict.fromkeys(RAN, 1)
    if all(x.numel() for x in tensors):
        assert fake_mps.Counts.dispatches > launches + 1
    return found


def draw(dtype=torch.float32, B=2, H=4, G=2, T=37, S=53, D=16, E=16, seed=1):
    torch.manual_seed(seed)
    return [rand(B, H, T, D, dtype=dtype), rand(B, G, S, D, dtype=dtype),
            rand(B, G, S, E, dtype=dtype)]


# ---- Options and dtypes --------------------------------------------------------------------------

FEWER = ["plain", "causal", "mqa_causal", "mask_4d", "float_mask_2d", "bias_and_mask", "softcap",
         "sinks", "key_lengths_bottom_right", "everything"]


@pytest.mark.parametrize("option, dtype", [(o, torch.float32) for o in OPTIONS]
                         + [(o, d) for o in FEWER for d in HALVES], ids=str)
def test_options(option, dtype):
    torch.manual_seed(len(option))
    options = OPTIONS[option](dtype)
    G = options.pop("G", H)
    on_trial([rand(B, H, T, D, dtype=dtype), rand(B, G, S, D, dtype=dtype),
              rand(B, G, S, E, dtype=dtype)], options, option)


@pytest.mark.parametrize("T, S", [(1, 1), (31, 33), (64, 64), (70, 130), (2, 1100)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles(T, S, dtype):
    fake_mps.Counts.last_names.clear()
    options = {"enable_gqa": True, "is_causal": True, "causal_alignment": "bottom_right"}
    on_trial(draw(dtype, T=T, S=S), options, f"{T} x {S}")
    assert ("attention_combine" in fake_mps.Counts.last_names) == (S == 1100)  # split keys


@pytest.mark.parametrize("shape", [(1, 4, 37, 53), (2, 1, 37, 53), (37, 1), (2, 4, 1, 53)], ids=str)
def test_bias_with_gradient(shape):
    found = on_trial(draw(), {"attn_mask": rand(*shape), "enable_gqa": True}, "bias")
    assert found["attn_mask"].shape == shape


def test_float_bias_of_bf16_rows():
    options = {"bias": rand(1, 4, 37, 53), "is_causal": True, "enable_gqa": True}
    assert on_trial(draw(torch.bfloat16), options, "bias")["bias"].dtype == torch.float32


def test_rows_that_see_nothing():
    mask = torch.rand(2, 1, 37, 53) < 0.6
    mask[1, :, 4] = False
    found = on_trial(draw(), {"attn_mask": mask, "enable_gqa": True}, "mask")
    assert not found["out"][1, :, 4].any() and (found["lse"][1, :, 4] == -math.inf).all()


def test_gradients_of_rows_of_nothing_but_the_lowest_number():
    mask = torch.zeros(37, 53)
    mask[::3] = torch.finfo(torch.float32).min
    copies = [x.double().requires_grad_() for x in draw()]
    leaves = [fake_mps.tensor(x.detach().float()).requires_grad_() for x in copies]
    out = attention(*leaves, fake_mps.tensor(mask), enable_gqa=True)
    true, _ = formula(*copies, mask.double(), enable_gqa=True)
    dout = rand(*out.shape)
    out.backward(fake_mps.tensor(dout))
    true.backward(dout.double())
    for leaf, copy in zip(leaves, copies):
        torch.testing.assert_close(leaf.grad.cpu().double(), copy.grad, rtol=1e-5, atol=1e-5)


def test_head_sizes():
    for D, E in ((24, 40), (80, 8), (128, 128)):
        on_trial(draw(D=D, E=E), {"enable_gqa": True}, f"{D} and {E}")


def test_a_gradient_for_some_inputs_only():
    q, k, v = (fake_mps.tensor(x) for x in draw(G=4))
    k.requires_grad_()
    out = attention(q, k, v, is_causal=True)
    out.sum().backward()
    leaf = k.detach().cpu().requires_grad_()
    true, _ = formula(q.cpu(), leaf, v.cpu(), is_causal=True, dtype=torch.float64)
    torch.testing.assert_close(k.grad.cpu(), torch.autograd.grad(true.sum(), leaf)[0])
    assert q.grad is None and v.grad is None


def test_against_pytorchs_own_attention():
    tensors = draw(G=4, T=40, S=40)
    out = attention(*map(fake_mps.tensor, tensors), is_causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(out.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_gradients_of_large_scores(options):
    given = large_scores()
    leaves = [fake_mps.tensor(x).requires_grad_() for x in given[:3]]
    out = attention(*leaves, **options)
    grads = torch.autograd.grad(out[0] if options else out, leaves, fake_mps.tensor(given[3]))
    check_large_scores(grads[2].cpu(), given)


# ---- Dropout -------------------------------------------------------------------------------------

@pytest.mark.parametrize("dropout", [0.2, 0.75])
def test_dropout_is_the_documented_mask(dropout):
    torch.manual_seed(11)
    seed = int(torch.randint(2 ** 63 - 1, ()))
    factor = torch.from_numpy(core_formula.kept(2, 4, 37, 53, dropout, seed, 0))
    assert abs((factor == 0).double().mean() - dropout) < 0.02
    on_trial(draw(), {"dropout_p": dropout, "enable_gqa": True}, "dropout", factor=factor, seed=11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_seed_drops_the_same_on_cpu_and_mps(dtype):
    tensors, results = draw(dtype, G=4), []
    for place in (lambda x: x, fake_mps.tensor):
        torch.manual_seed(12)
        leaves = [place(x.detach()).requires_grad_() for x in tensors]
        out = attention(*leaves, dropout_p=0.4, is_causal=True)
        out.backward(place(torch.ones(out.shape, dtype=dtype)))
        results.append([x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))])
    for name, cpu, found in zip(("out", "dq", "dk", "dv"), *results):
        assert_within((name, dtype), found, cpu, cpu)
        assert torch.equal(found == 0, cpu == 0) or name != "out"


# ---- Views: no copy, whatever the strides --------------------------------------------------------

def test_heads_behind_rows():
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw()]
    assert tensors[0].stride(1) == 16
    on_trial(tensors, {"is_causal": True, "enable_gqa": True}, "transposed")


def slices(dtype=torch.float32):
    """q, k and v with the sizes of draw()'s, in views with offsets, gaps and turned dimensions."""
    torch.manual_seed(3)
    return [rand(4, 6, 40, 40, dtype=dtype)[1::2, 1:5, 2:39, 3:35:2],
            rand(3, 3, 60, 21, dtype=dtype)[1:, :2, 5:58, 5:],
            rand(2, 16, 2, 53, dtype=dtype).permute(0, 2, 3, 1)]


def copied(tensors):
    """Names of those whose own memory was not bound since the last look."""
    bound = set(fake_mps.Counts.last_addresses)
    fake_mps.Counts.last_addresses.clear()
    return [name for name, x in tensors.items() if x.data_ptr() not in bound]


@pytest.mark.parametrize("views", [False, True])
def test_kernels_work_on_the_callers_memory(views):
    """On all that is passed, and on the very results that are returned."""
    options = {"bias": rand(1, 4, 39, 55)[..., 1:38, 2:], "sinks": rand(5)[1:],
               "attn_mask": (rand(2, 2, 37, 53) < 1)[:, 1:], "alibi_slopes": torch.rand(6)[2:],
               "key_lengths": torch.tensor([9, 53, 20])[1:]}
    options = {name: fake_mps.tensor(x if views else x.clone()) for name, x in options.items()}
    leaves = [fake_mps.tensor(x) for x in (slices() if views else draw())]
    leaves += options["bias"], options["sinks"]
    [x.requires_grad_() for x in leaves]
    dout, dlse = (fake_mps.tensor(x) for x in (rand(2, 4, 16, 37).mT, rand(2, 4, 38)[..., 1:]))

    fake_mps.Counts.last_addresses.clear()
    out, lse = attention(*leaves[:3], enable_gqa=True, return_lse=True, **options)
    tensors = dict(zip("qkv", leaves), out=out, lse=lse, **options)
    assert copied(tensors) == []
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    tensors.update(zip(("dq", "dk", "dv", "dbias", "dsinks"), grads), dout=dout, dlse=dlse)
    assert copied(tensors) == []


@pytest.mark.parametrize("split", [True, False])
def test_outputs_lie_as_on_the_cpu(split):
    tensors = draw(G=4)
    if split:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    strides = []
    for place in (lambda x: x, fake_mps.tensor):
        leaves = [place(x.detach()).requires_grad_() for x in tensors]
        out, lse = attention(*leaves, return_lse=True)
        grads = torch.autograd.grad(out, leaves, place(torch.ones(out.shape)))
        strides.append([x.stride() for x in (out, lse, *grads)])
    assert strides[0] == strides[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_with_offsets_and_gaps(dtype):
    q, k, v = slices(dtype)
    assert q.storage_offset() % 2 == 1 and q.stride(-1) == 2
    assert k.storage_offset() % 2 == 0 and k.stride(-2) % 2 == 1
    on_trial([q, k, v], {"enable_gqa": True}, "slices")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_block_for_q_k_and_v(dtype):
    torch.manual_seed(4)
    q, k, v = (x.transpose(1, 2) for x in rand(2, 37, 3, 4, 16, dtype=dtype).unbind(2))
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    on_trial([q, k, v], {"is_causal": True}, "one block")


def test_repeated_views():
    q, k, v = draw(G=4)
    on_trial([q, *(x[:1].expand(2, -1, -1, -1) for x in (k, v))], {}, "repeated")


def test_negated_views():
    q, k, v = map(fake_mps.tensor, draw(G=4))
    negated = torch._neg_view(q)
    assert negated.is_neg()
    assert torch.equal(attention(negated, k, v).cpu(), attention(-q, k, v).cpu())


def test_shapes_of_torch():
    """2, 3 and 5 dimensions, repeated batches and heads."""
    torch.manual_seed(1)
    for shapes in (((5, 8), (7, 8), (7, 6)), ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
                   ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
                   ((2, 4, 5, 8), (1, 1, 7, 8), (1, 1, 7, 8))):
        tensors = [rand(*shape) for shape in shapes]
        out = attention(*map(fake_mps.tensor, tensors))
        theirs = torch.nn.functional.scaled_dot_product_attention(*tensors)
        torch.testing.assert_close(out.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_that_come_with_stride_0():
    leaves = [fake_mps.tensor(x).requires_grad_() for x in draw(G=4)]
    attention(*leaves).sum().backward()
    copies = [x.requires_grad_() for x in draw(G=4)]
    true, _ = formula(*copies, dtype=torch.float64)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [dict(T=0), dict(S=0), dict(B=0)], ids=str)
def test_empty(sizes):
    assert not on_trial(draw(**sizes, G=4), {}, "empty")["out"].any()


def test_private_storage():
    fake_mps.Counts.private = True
    try:
        on_trial(draw(), {"attn_mask": rand(1, 4, 37, 53), "enable_gqa": True}, "private")
    finally:
        fake_mps.Counts.private = False


@pytest.mark.parametrize("order", ["reverse", "random:3"])
def test_any_order_of_threads(order, monkeypatch):
    def bits():
        leaves = [fake_mps.tensor(x).requires_grad_() for x in draw(torch.bfloat16, G=4)]
        out, lse = attention(*leaves, is_causal=True, return_lse=True)
        grads = torch.autograd.grad(out, leaves, fake_mps.tensor(torch.ones(out.shape)).to(out.dtype))
        return [x.detach().cpu() for x in (out, lse, *grads)]
    straight = bits()
    monkeypatch.setenv("METAL_STANDIN_ORDER", order)
    assert all(torch.equal(a, b) for a, b in zip(straight, bits()))


# ---- Lengths and packed sequences ----------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_padding_never_reaches_an_output(dtype):
    q, k, v = draw(G=4)
    clean = formula(q, k, v, key_lengths=torch.tensor([53, 20]), dtype=torch.float64)
    k[1, :, 20:] = v[1, :, 20:] = math.nan
    lengths = fake_mps.tensor(torch.tensor([53, 20], dtype=dtype))
    found = attention(*map(fake_mps.tensor, (q, k, v)), key_lengths=lengths, return_lse=True)
    for a, b in zip(found, clean):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=1e-5, atol=1e-5)


def test_strided_and_repeated_lengths():
    tensors = draw(G=4)
    for lengths in (torch.tensor([53, 0, 20, 0])[::2], torch.tensor([31]).expand(2)):
        on_trial(tensors, {"key_lengths": lengths}, "lengths")


def test_packed_sequences():
    torch.manual_seed(2)
    lengths_t, lengths_s = [5, 0, 17], [9, 3, 12]
    cu = [fake_mps.tensor(torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32))
          for n in (lengths_t, lengths_s)]
    tensors = [rand(22, 4, 16), rand(24, 2, 16), rand(24, 2, 16)]
    leaves = [fake_mps.tensor(x).requires_grad_() for x in tensors]
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    out = attention(*leaves, enable_gqa=True, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1],
                    max_seqlen_q=17, max_seqlen_k=12, **options)
    copies, parts = [x.clone().requires_grad_() for x in tensors], []
    for part in zip(copies[0].split(lengths_t), copies[1].split(lengths_s),
                    copies[2].split(lengths_s)):
        one, _ = formula(*[x.transpose(0, 1)[None] for x in part], **options, dtype=torch.float64)
        parts.append(one[0].transpose(0, 1))
    true, dout = torch.cat(parts), rand(22, 4, 16)
    torch.testing.assert_close(out.detach().cpu(), true, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(out, leaves, fake_mps.tensor(dout))
    for a, b in zip(got, torch.autograd.grad(true, copies, dout)):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


# ---- Second order --------------------------------------------------------------------------------

def second_order(place, tensors, options):
    """Gradients of first and second order, by q, k, v and whatever else takes one."""
    names = differentiable(options)
    placed = {n: place(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    leaves = [place(x.detach()).requires_grad_() for x in tensors]
    leaves += [placed[n].detach().requires_grad_() for n in names]
    placed.update(zip(names, leaves[3:]))
    torch.manual_seed(9)
    first = torch.autograd.grad(attention(*leaves[:3], **placed).square().sum(), leaves,
                                create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    return [x.detach().cpu() for x in (*first, *second)]


CU = torch.tensor([0, 5, 5, 13], dtype=torch.int32)
SECOND = {
    **{name: OPTIONS[name] for name in ("causal", "everything", "key_lengths_bottom_right")},
    "dropout": lambda t: {"dropout_p": 0.3, "G": 2, "enable_gqa": True},
    "packed": lambda t: {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 8,
                         "max_seqlen_k": 8, "is_causal": True, "G": 2, "enable_gqa": True},
}


@pytest.mark.parametrize("option", SECOND)
def test_second_order(option):
    torch.manual_seed(len(option))
    options = SECOND[option](torch.float32)
    G = options.pop("G", H)
    sizes = ((13,), (13,)) if option == "packed" else ((B, T), (B, S))
    tensors = [rand(*n, h, d) for n, h, d in zip((*sizes, sizes[1]), (H, G, G), (D, D, D))]
    if option != "packed":
        tensors = [x.transpose(1, 2) for x in tensors]
    on_cpu, on_mps = (second_order(place, tensors, options)
                      for place in (lambda x: x, fake_mps.tensor))
    for cpu, other in zip(on_cpu, on_mps):
        assert cpu.abs().max() > 0
        torch.testing.assert_close(other, cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_of_the_device(dtype):
    tensors = draw(G=4)
    with torch.autocast("mps", dtype=dtype):
        out = attention(*map(fake_mps.tensor, tensors), attn_mask=fake_mps.tensor(rand(37, 53)))
    assert out.dtype == dtype and type(out) is fake_mps.MpsTensor
