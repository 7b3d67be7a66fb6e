"""orchard.torch.mps on the fake of torch.mps: kernels really run, on the Metal stand-in.

Needs ORCHARD_BUILD (a build directory with ORCHARD_TESTS=ON) and PYTHONPATH=python:tests/python.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any, Dict, Optional

import pytest
import torch

import attention_formula
import fake_mps
from orchard.torch import _launch
from orchard.torch.mps import DTYPES, Launcher, Unsupported

BUILD = os.environ["ORCHARD_BUILD"]
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


# ---- The C library -------------------------------------------------------------------------------

library = ctypes.CDLL(os.path.join(BUILD, "liborchard.so"))
library.orchard_last_error.restype = ctypes.c_char_p


def check(status: int) -> None:
    if status:
        raise ValueError(library.orchard_last_error().decode())


class CtxOpts(ctypes.Structure):
    _fields_ = [("threads", ctypes.c_int32), ("strict", ctypes.c_int32),
                ("backend", ctypes.c_char_p), ("rest", ctypes.c_char * 64)]


def make_context(backend: Optional[str] = None) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    opts = CtxOpts(backend=backend.encode() if backend else None, strict=1 if backend else 0)
    check(library.orchard_ctx_create_version(ctypes.byref(handle), ctypes.byref(opts), 200))
    return handle


fake_mps.install()
standin = ctypes.CDLL(os.path.join(BUILD, "tests", "metal", "libmetal_standin.so"))
context = make_context("ref")


def make_launcher() -> Launcher:
    return Launcher(library, lambda: context, check)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return make_launcher()


# ---- Attention through autograd, as orchard.torch will have it -----------------------------------

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, launcher, options, others, q, k, v, bias, sinks):
        rows = q.shape[:-1]
        out = torch.empty(rows + v.shape[-1:], dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        inputs = dict(others, q=q, k=k, v=v, bias=bias, sinks=sinks)
        launcher.run("attention_forward", dict(inputs, out=out, lse=lse), options)
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse)
        ctx.rest = launcher, options, others
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, bias, sinks, out, lse = ctx.saved_tensors
        launcher, options, others = ctx.rest
        inputs = dict(q=q, k=k, v=v, bias=bias, sinks=sinks)
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = {GRADIENTS[name]: torch.empty(x.shape, dtype=x.dtype, device=x.device)
                     for n, (name, x) in enumerate(inputs.items())
                     if x is not None and ctx.needs_input_grad[3 + n]}
        launcher.run("attention_backward", dict(others, **inputs, **gradients, dout=dout, dlse=dlse,
                                                out=out, lse=lse), options)
        return (None, None, None) + tuple(gradients.get(GRADIENTS[name]) for name in inputs)


def on_mps(inputs: Dict[str, Optional[torch.Tensor]]) -> Dict[str, Optional[torch.Tensor]]:
    return {name: None if x is None else fake_mps.tensor(x) for name, x in inputs.items()}


def run(launcher: Launcher, inputs, options) -> Any:
    named = on_mps(inputs)
    own = [named.pop(name, None) for name in GRADIENTS]
    return Attention.apply(launcher, options, named, *own)


# ---- The error bar of docs/numerics.md -----------------------------------------------------------

def ulp(x: torch.Tensor, dtype: torch.dtype) -> float:
    most = x.abs().max().item()
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(most)) if most > 0 else 0.0


def assert_within_bar(what: str, got: torch.Tensor, plain: torch.Tensor, true: torch.Tensor) -> None:
    """At most twice the error of plain PyTorch in the same dtype, and four units in the last place."""
    assert got.shape == true.shape, what
    dtype, got, plain = got.dtype, got.double(), plain.to(got.dtype).double()
    infinite = true.isinf()
    assert torch.equal(got[infinite], true[infinite]), what
    if got[~infinite].numel():
        error = (got - true)[~infinite].abs().max().item()
        bar = 2 * (plain - true)[~infinite].abs().max().item() + 4 * ulp(true[~infinite], dtype)
        assert error <= bar, f"{what}: error {error:.3g}, the bar is {bar:.3g}"


def gradients_of(out, lse, leaves, through_lse: bool) -> Dict[str, torch.Tensor]:
    torch.manual_seed(5)
    rows = torch.randn(out.shape)
    sums = torch.randn(lse.shape) if through_lse else torch.zeros(lse.shape)
    if isinstance(out, fake_mps.MpsTensor):
        rows, sums = fake_mps.tensor(rows), fake_mps.tensor(sums)
    grads = torch.autograd.grad((out, lse), list(leaves.values()),
                                (rows.to(out.dtype), sums.to(lse.dtype)))
    return dict(zip(leaves, grads), out=out.detach(), lse=lse.detach())


def judge(launcher: Launcher, inputs, options, differentiate=("q", "k", "v"), through_lse=False):
    """Forward and backward on the fake against the formula on the CPU; returns the fake's results."""
    for name in differentiate:
        inputs[name].requires_grad_()
    found = {}
    for way, dtype in (("true", torch.float64), ("plain", inputs["q"].dtype)):
        leaves = {n: inputs[n].detach().clone().requires_grad_() for n in differentiate}
        out, lse = attention_formula.attention(dict(inputs, **leaves), options, dtype)
        found[way] = gradients_of(out, lse, leaves, through_lse)
    named = on_mps(inputs)
    leaves = {n: named[n] for n in differentiate}
    own = [named.pop(name, None) for name in GRADIENTS]
    out, lse = Attention.apply(launcher, options, named, *own)
    found["mps"] = {n: x.cpu() for n, x in gradients_of(out, lse, leaves, through_lse).items()}
    for what, got in found["mps"].items():
        assert_within_bar(what, got, found["plain"][what], found["true"][what].double())
    return found["mps"]


def draw(B=2, H=4, G=2, T=37, S=53, D=16, E=16, dtype=torch.float32, seed=1, **_):
    torch.manual_seed(seed)
    return {"q": torch.randn(B, H, T, D).to(dtype), "k": torch.randn(B, G, S, D).to(dtype),
            "v": torch.randn(B, G, S, E).to(dtype)}


# ---- Values --------------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "fp16": dict(dtype=torch.float16),
    "bf16": dict(dtype=torch.bfloat16),
    "causal": dict(options=dict(causal=1)),
    "causal_bottom_right": dict(options=dict(causal=1, align=1)),
    "mha": dict(G=4),
    "mqa": dict(G=1),
    "head_sizes": dict(D=24, E=40),
    "scale": dict(options=dict(has_scale=1, scale=0.3)),
    "window": dict(options=dict(causal=1, has_window=1, window_left=7, window_right=0)),
    "softcap": dict(options=dict(softcap=3.0)),
    "one": dict(B=1, H=1, G=1, T=1, S=1),
    "bf16_causal": dict(dtype=torch.bfloat16, options=dict(causal=1), T=70, S=70),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(launcher, name):
    case = CASES[name]
    judge(launcher, draw(**case), case.get("options", {}), through_lse=name in ("plain", "causal"))


def test_against_pytorchs_own_attention(launcher):
    inputs = {n: x.requires_grad_() for n, x in draw(G=4, T=40, S=40).items()}
    out, _ = run(launcher, inputs, dict(causal=1))
    theirs = torch.nn.functional.scaled_dot_product_attention(*inputs.values(), is_causal=True)
    torch.testing.assert_close(out.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 4, 37, 53), (2, 1, 37, 53), (1, 1, 37, 1), (2, 4, 1, 53)])
def test_bias_with_gradient(launcher, shape):
    inputs = dict(draw(), bias=torch.randn(shape))
    judge(launcher, inputs, {}, ("q", "k", "v", "bias"))


def test_float_bias_of_bf16_rows(launcher):
    inputs = dict(draw(dtype=torch.bfloat16), bias=torch.randn(1, 4, 37, 53))
    grads = judge(launcher, inputs, dict(causal=1), ("q", "k", "v", "bias"))
    assert grads["bias"].dtype == torch.float32


def test_mask_with_rows_that_see_nothing(launcher):
    mask = torch.rand(2, 1, 37, 53) < 0.6
    mask[1, :, 4] = False
    results = judge(launcher, dict(draw(), mask=mask), {})
    assert not results["out"][1, :, 4].any()
    assert (results["lse"][1, :, 4] == -math.inf).all()


def test_sinks_and_alibi(launcher):
    inputs = dict(draw(), sinks=torch.randn(4), alibi=torch.rand(4))
    judge(launcher, inputs, dict(causal=1), ("q", "k", "v", "sinks"))


def test_philox_is_random123s():
    zero = attention_formula.philox(torch.zeros(1, 4).numpy().astype("uint64"), (0, 0))[0]
    assert [hex(w) for w in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("dropout", [0.2, 0.75])
def test_dropout_is_the_documented_mask(launcher, dropout):
    options = dict(dropout=dropout, seed=0x123456789ABCDEF, dropout_offset=7)
    judge(launcher, draw(), options)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_key_lengths(launcher, dtype):
    inputs = dict(draw(), key_lengths=torch.tensor([53, 20], dtype=dtype))
    inputs["k"][1, :, 20:] = math.nan  # padding never reaches an output
    inputs["v"][1, :, 20:] = math.nan
    out, lse = run(launcher, dict(inputs), dict(causal=1, align=1))
    for name in ("k", "v"):
        inputs[name] = torch.nan_to_num(inputs[name])
    true, true_lse = attention_formula.attention(inputs, dict(causal=1, align=1), torch.float64)
    torch.testing.assert_close(out.cpu().double(), true, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), true_lse, rtol=1e-5, atol=1e-5)


def test_strided_and_repeated_lengths(launcher):
    inputs = draw()
    for lengths in (torch.tensor([53, 0, 20, 0])[::2], torch.tensor([31]).expand(2)):
        out, _ = run(launcher, dict(inputs, key_lengths=lengths), {})
        true, _ = attention_formula.attention(dict(inputs, key_lengths=lengths), {}, torch.float64)
        torch.testing.assert_close(out.cpu().double(), true, rtol=1e-5, atol=1e-5)


def test_packed_sequences(launcher):
    lengths = [(5, 9), (0, 3), (17, 12)]
    cu = [torch.tensor([0] + [sum(pair[i] for pair in lengths[:n + 1]) for n in range(3)],
                       dtype=torch.int32) for i in (0, 1)]
    torch.manual_seed(2)
    q, k, v = torch.randn(22, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    own = [fake_mps.tensor(x) for x in leaves] + [None, None]
    others = on_mps(dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1]))
    out, _ = Attention.apply(launcher, dict(max_t=17, max_s=12, causal=1, align=1), others, *own)
    parts = []
    for n in range(3):
        rows, keys = slice(cu[0][n], cu[0][n + 1]), slice(cu[1][n], cu[1][n + 1])
        one = {"q": q[rows], "k": k[keys], "v": v[keys]}
        one = {name: x.transpose(0, 1)[None] for name, x in one.items()}
        part, _ = attention_formula.attention(one, dict(causal=1, align=1), torch.float64)
        parts.append(part[0].transpose(0, 1))
    true = torch.cat(parts)
    torch.testing.assert_close(out.detach().cpu().double(), true.detach(), rtol=1e-5, atol=1e-5)
    weight = torch.randn(22, 4, 16)
    wanted = torch.autograd.grad(true, leaves, weight.double())
    got = torch.autograd.grad(out, own[:3], fake_mps.tensor(weight))
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_decode_over_splits(launcher):
    results = judge(launcher, draw(T=2, S=1100), {})
    assert "attention_combine" in fake_mps.Counts.last_names
    assert results["out"].shape == (2, 4, 2, 16)


# ---- Views: no copy, whatever the strides ---------------------------------------------------------

def test_heads_behind_rows(launcher):
    inputs = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in draw().items()}
    assert inputs["q"].stride(1) == 16
    judge(launcher, inputs, dict(causal=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slices_with_offsets_and_gaps(launcher, dtype):
    torch.manual_seed(3)
    inputs = {"q": torch.randn(4, 6, 40, 40).to(dtype)[1::2, 1:5, 2:39, 3:35:2],
              "k": torch.randn(3, 3, 60, 21).to(dtype)[1:, :2, 5:58, 5:],
              "v": torch.randn(2, 16, 2, 53).to(dtype).permute(0, 2, 3, 1)}
    assert inputs["q"].storage_offset() % 2 == 1 and inputs["q"].stride(-1) == 2
    assert inputs["k"].storage_offset() % 2 == 0 and inputs["k"].stride(-2) % 2 == 1
    judge(launcher, inputs, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_block_for_q_k_and_v(launcher, dtype):
    torch.manual_seed(4)
    block = torch.randn(2, 37, 3, 4, 16).to(dtype)
    q, k, v = (x.transpose(1, 2) for x in block.unbind(2))
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    judge(launcher, dict(q=q, k=k, v=v), dict(causal=1))


def test_keys_repeated_by_stride_0(launcher):
    inputs = draw()
    k, v = (inputs[n][:1].expand(2, -1, -1, -1) for n in "kv")
    out, _ = run(launcher, dict(inputs, k=k, v=v), {})
    true, _ = attention_formula.attention(dict(inputs, k=k, v=v), {}, torch.float64)
    torch.testing.assert_close(out.cpu().double(), true, rtol=1e-5, atol=1e-5)


def test_gradients_that_come_with_stride_0(launcher):
    leaves = [fake_mps.tensor(x.requires_grad_()) for x in draw().values()]
    out, _ = Attention.apply(launcher, {}, {}, *leaves, None, None)
    out.sum().backward()
    inputs = {n: x.requires_grad_() for n, x in draw().items()}
    true, _ = attention_formula.attention(inputs, {}, torch.float64)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), list(inputs.values()))):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_outputs_into_a_view_leave_the_rest(launcher):
    inputs = on_mps(draw())
    block = torch.full((2, 4, 37, 48), 7.0)
    launcher.run("attention_forward", dict(inputs, out=fake_mps.tensor(block)[..., 16:32]))
    true, _ = attention_formula.attention(draw(), {}, torch.float64)
    torch.testing.assert_close(block[..., 16:32].double(), true, rtol=1e-5, atol=1e-5)
    assert (block[..., :16] == 7).all() and (block[..., 32:] == 7).all()


@pytest.mark.parametrize("sizes", [dict(T=0), dict(S=0), dict(B=0), dict(H=0, G=0)])
def test_empty(launcher, sizes):
    results = judge(launcher, draw(**sizes), {})
    assert not results["out"].any()


def test_private_storage(launcher):
    fake_mps.Counts.private = True
    try:
        judge(launcher, dict(draw(), bias=torch.randn(1, 4, 37, 53)), dict(causal=1), ("q", "k", "v", "bias"))
    finally:
        fake_mps.Counts.private = False


@pytest.mark.parametrize("order", ["reverse", "random:3"])
def test_any_order_of_threads(launcher, order, monkeypatch):
    def bits():
        leaves = [fake_mps.tensor(x.requires_grad_()) for x in draw(dtype=torch.bfloat16).values()]
        out, lse = Attention.apply(launcher, dict(causal=1), {}, *leaves, None, None)
        grads = torch.autograd.grad(out, leaves, fake_mps.tensor(torch.ones(out.shape)).to(out.dtype))
        return [x.detach().cpu() for x in (out, lse, *grads)]
    straight = bits()
    monkeypatch.setenv("METAL_STANDIN_ORDER", order)
    assert all(torch.equal(a, b) for a, b in zip(straight, bits()))


# ---- C and PyTorch launch the very same thing ----------------------------------------------------

def call_c(op: str, operands, options, backend_context) -> None:
    arguments = _launch.Arguments(op)
    for name, x in operands.items():
        arguments.set_tensor(name, x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride())
    for name, value in options.items():
        arguments.set_option(name, value)
    check(getattr(library, "orchard_" + op)(
        backend_context, (ctypes.c_char * len(arguments.bytes)).from_buffer(arguments.bytes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_bits_as_the_c_librarys_metal_backend(launcher, dtype, monkeypatch):
    monkeypatch.setenv("ORCHARD_METAL_LIBRARY", os.path.join(BUILD, "tests", "metal", "libmetal_standin.so"))
    metal = make_context("metal")
    inputs = dict(draw(dtype=dtype), bias=torch.randn(2, 4, 37, 53).to(dtype), sinks=torch.randn(4),
                  dout=torch.randn(2, 4, 37, 16).to(dtype))
    options = dict(causal=1, dropout=0.1, seed=99, softcap=5.0)
    outputs = {}
    for way in ("c", "torch"):
        out, lse = torch.empty(2, 4, 37, 16, dtype=dtype), torch.empty(2, 4, 37)
        grads = {GRADIENTS[n]: torch.empty_like(inputs[n]) for n in GRADIENTS}
        attended = {n: inputs[n] for n in GRADIENTS}
        forward = dict(attended, out=out, lse=lse)
        backward = dict(attended, **grads, dout=inputs["dout"], out=out, lse=lse)
        for op, operands in (("attention_forward", forward), ("attention_backward", backward)):
            if way == "c":
                call_c(op, operands, options, metal)
            else:
                launcher.run(op, on_mps(operands), options)
        outputs[way] = dict(grads, out=out, lse=lse)
    library.orchard_ctx_free(metal)
    for name, x in outputs["c"].items():
        assert x.abs().sum() > 0 and torch.equal(x, outputs["torch"][name]), name


# ---- Compiled once -------------------------------------------------------------------------------

def test_one_library_per_specialisation():
    launcher, inputs = make_launcher(), draw()
    launcher.device()
    compiles = fake_mps.Counts.compiles

    def compiled(call) -> int:
        nonlocal compiles
        call()
        new, compiles = fake_mps.Counts.compiles - compiles, fake_mps.Counts.compiles
        return new

    def both(inputs, **options):
        leaves = [fake_mps.tensor(x.requires_grad_()) for x in inputs.values()]
        out, _ = Attention.apply(launcher, options, {}, *leaves, None, None)
        out.sum().backward()

    assert compiled(lambda: both(inputs)) == 4  # forward; delta, dq, dkv
    assert compiled(lambda: both(inputs)) == 0
    assert compiled(lambda: both(draw(T=5, S=9, B=1), causal=1)) == 0  # sizes and causal are scalars
    assert compiled(lambda: both(inputs, softcap=2.0)) == 4            # more options: other text
    assert compiled(lambda: both(draw(dtype=torch.float16))) == 4
    decode = draw(T=1, S=1200, B=1)
    assert compiled(lambda: run(launcher, decode, {})) == 1  # attention_decode and _combine: one text
    assert launcher.compiled == 13
    assert launcher.report() == [("attention_forward", None, 6), ("attention_backward", None, 5)]


def test_plans_are_kept_and_numbers_are_fresh():
    launcher, calls = make_launcher(), []
    create = library.orchard_launches_create
    plain = _launch.make_plan
    try:
        _launch.make_plan = lambda *a: calls.append(1) or plain(*a)
        inputs = draw()
        first, _ = run(launcher, inputs, {})
        inputs["v"].mul_(2)
        second, _ = run(launcher, inputs, {})
        assert len(calls) == 1 and torch.equal(second.cpu(), 2 * first.cpu())
        for length in (53, 11):
            lengths = torch.full((2,), length)
            out, _ = run(launcher, dict(inputs, key_lengths=lengths), {})
            true, _ = attention_formula.attention(dict(inputs, key_lengths=lengths), {}, torch.float64)
            torch.testing.assert_close(out.cpu().double(), true, rtol=1e-5, atol=1e-5)
        assert len(calls) == 3 and library.orchard_launches_create is create
    finally:
        _launch.make_plan = plain


# ---- What is refused, counted and explained ------------------------------------------------------

def operands_of(dtype=torch.float32, **sizes):
    inputs = draw(dtype=dtype, **sizes)
    q, v = inputs["q"], inputs["v"]
    return on_mps(dict(inputs, out=torch.full(q.shape[:-1] + v.shape[-1:], 7.0).to(dtype)))


def test_unsupported_is_explained_and_counted():
    launcher, operands = make_launcher(), operands_of(torch.float64)
    reason = "f64 tensors: no GPU backend has double precision"
    assert launcher.supported("attention_forward", operands, count=False) == reason
    assert launcher.report() == []
    assert launcher.supported("attention_forward", operands) == reason
    with pytest.raises(Unsupported, match="mps did not take the call .f64 tensors"):
        launcher.run("attention_forward", operands)
    assert launcher.report() == [("attention_forward", reason, 2)]
    assert (operands["out"].cpu() == 7).all()
    assert launcher.supported("attention_forward", operands_of()) is None


def test_a_kernel_that_does_not_compile():
    launcher = make_launcher()
    launcher.device()
    standin.metal_standin_fail(b"compile", ctypes.c_long(1))
    compiles = fake_mps.Counts.compiles
    reason = launcher.supported("attention_forward", operands_of())
    assert reason.startswith("the device's compiler refused a kernel: attention_forward_matrix: ")
    assert launcher.supported("attention_forward", operands_of()) == reason
    assert fake_mps.Counts.compiles == compiles + 1  # it is not tried again
    assert launcher.supported("attention_forward", operands_of(torch.float16)) is None  # only itself
    assert launcher.report() == [("attention_forward", reason, 2)]


def test_registers_that_are_short(monkeypatch):
    launcher = make_launcher()
    monkeypatch.setenv("METAL_STANDIN_MAX_THREADS", "96")
    reason = launcher.supported("attention_forward", operands_of())
    assert reason == ("kernel attention_forward_matrix cannot run with 128 threads in a group, the "
                      "limit is 96")


def test_a_gpu_without_matrices(monkeypatch):
    monkeypatch.setenv("METAL_STANDIN_FAMILY", "6")
    launcher = make_launcher()
    assert launcher.device().matrix == 0 and launcher.device().simd_width == 32
    fake_mps.Counts.last_names.clear()
    judge(launcher, draw(), dict(causal=1))
    assert fake_mps.Counts.last_names == ["attention_forward", "attention_delta", "attention_dq", "attention_dkv"]


def test_a_pytorch_without_compile_shader():
    old = Launcher(library, lambda: context, check, mps=object())
    assert "needs 2.7" in old.supported("attention_forward", operands_of())
    assert old.report()[0][2] == 1


@pytest.mark.parametrize("change, error, words", [
    (lambda o: o.update(k=o["k"].half()), ValueError, "k is f16, must be f32"),
    (lambda o: o.update(q=o["q"].to(torch.complex64)), TypeError, "q is torch.complex64"),
    (lambda o: o.update(q=o["q"].int()), ValueError, "q is i32, must be f64, f32, f16 or bf16"),
    (lambda o: o.update(mask=fake_mps.tensor(torch.ones(1, 1, 37, 53))), ValueError, "mask is f32, must be bool"),
    (lambda o: o.update(q=draw()["q"]), ValueError, "q is on cpu, must be on mps"),
    (lambda o: o.update(q=torch._neg_view(o["q"])), ValueError, "q is not a plain strided tensor"),
    (lambda o: o.update(out=o["q"]), ValueError, "output out overlaps q in memory"),
    (lambda o: o.update(out=o["out"][:1].expand(2, 4, 37, 16)), ValueError, "elements share memory"),
    (lambda o: o.update(v=o["v"][:, :, :-1]), ValueError, "v has 2 heads and 52 rows"),
    (lambda o: o.update(key_lengths=fake_mps.tensor(torch.tensor([5, 99]))), ValueError, "key_lengths.1. is 99"),
    (lambda o: o.update(dq=o["q"]), TypeError, "there is no operand dq"),
    (lambda o: o.pop("out"), ValueError, "out is missing"),
])
def test_wrong_calls_raise_and_write_nothing(launcher, change, error, words):
    operands = operands_of()
    out, dispatches = operands["out"], fake_mps.Counts.dispatches
    change(operands)
    with pytest.raises(error, match=words):
        launcher.run("attention_forward", operands)
    assert (out.cpu() == 7).all() and fake_mps.Counts.dispatches == dispatches


def test_wrong_options_raise(launcher):
    with pytest.raises(TypeError, match="there is no option casual"):
        launcher.run("attention_forward", operands_of(), dict(casual=1))
    with pytest.raises(TypeError, match="there is no option q"):
        launcher.run("attention_forward", operands_of(), dict(q=1))
    with pytest.raises(ValueError, match="softcap is -1"):
        launcher.run("attention_forward", operands_of(), dict(softcap=-1.0))


def test_lengths_that_nobody_looks_at_cost_no_copy(launcher, monkeypatch):
    operands = dict(operands_of(), key_lengths=fake_mps.tensor(torch.tensor([53, 20])))
    copies = []
    plain = fake_mps.MpsTensor.cpu
    monkeypatch.setattr(fake_mps.MpsTensor, "cpu", lambda self: copies.append(1) or plain(self))
    launcher.run("attention_forward", operands, check_lengths=False)
    assert not copies
    launcher.run("attention_forward", operands)
    assert len(copies) == 1
