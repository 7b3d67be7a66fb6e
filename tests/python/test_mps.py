"""The launcher of orchard.torch.mps on the fake of torch.mps: that it launches what C launches, that
each text is compiled once, and what it refuses. The values are in test_mps_values.py."""

from __future__ import annotations

import copy
from typing import Dict, Optional

import pytest
import torch

import fake_mps
from orchard import _library, _structs
from orchard._context import Context
from orchard.torch import _launch, mps
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch.mps import Launcher
from orchard.torch.tensors import DTYPES
from switch_testing import forked, held_by_another_thread
from torch_formula import formula

fake_mps.install()
INPUTS = ("q", "k", "v", "bias", "sinks")


def on_mps(tensors: Dict[str, Optional[torch.Tensor]]) -> Dict[str, Optional[torch.Tensor]]:
    return {name: None if x is None else fake_mps.tensor(x) for name, x in tensors.items()}


def draw(B=2, H=4, G=2, T=37, S=53, D=16, E=16, dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    return {"q": torch.randn(B, H, T, D).to(dtype), "k": torch.randn(B, G, S, D).to(dtype),
            "v": torch.randn(B, G, S, E).to(dtype)}


def operands_of(dtype=torch.float32, **sizes):
    inputs = draw(dtype=dtype, **sizes)
    q, v = inputs["q"], inputs["v"]
    return on_mps(dict(inputs, out=torch.full(q.shape[:-1] + v.shape[-1:], 7.0).to(dtype)))


def counted(launcher: Launcher):
    return [(line.op, line.reason, line.count) for line in launcher.report()]


@pytest.fixture
def launcher(monkeypatch) -> Launcher:
    """A new one, which the public function uses as well."""
    made = Launcher()
    monkeypatch.setattr(mps, "launcher", made)
    return made


# ---- C and PyTorch launch the very same thing ----------------------------------------------------

def call_c(ctx: Context, op: str, operands, options) -> None:
    arguments = _launch.Arguments(op)
    for name, x in operands.items():
        arguments.set_tensor(name, x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride())
    for name, value in options.items():
        arguments.set_option(name, value)
    _library.check(_library.lib.orchard_op_call(ctx.handle, op.encode(), arguments.struct))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_same_bits_as_the_c_librarys_metal_backend(launcher, dtype, monkeypatch):
    monkeypatch.setenv("ORCHARD_METAL_LIBRARY", fake_mps.library("libmetal_standin.so"))
    metal = Context(backend="metal", strict=True)
    inputs = dict(draw(dtype=dtype), bias=torch.randn(2, 4, 37, 53).to(dtype), sinks=torch.randn(4))
    dout = torch.randn(2, 4, 37, 16).to(dtype)
    options = dict(causal=1, dropout=0.1, seed=99, softcap=5.0, dropout_offset=7)
    outputs = {}
    for way in ("c", "torch"):
        out, lse = torch.empty(2, 4, 37, 16, dtype=dtype), torch.empty(2, 4, 37)
        grads = {"d" + name: torch.empty_like(inputs[name]) for name in INPUTS}
        forward = dict(inputs, out=out, lse=lse)
        backward = dict(inputs, **grads, dout=dout, out=out, lse=lse)
        for op, operands in (("attention_forward", forward), ("attention_backward", backward)):
            if way == "c":
                call_c(metal, op, operands, options)
            else:
                launcher.run(op, on_mps(operands), options)
        outputs[way] = dict(grads, out=out, lse=lse)
    for name, x in outputs["c"].items():
        assert x.abs().sum() > 0 and torch.equal(x, outputs["torch"][name]), name


def test_outputs_into_a_view_leave_the_rest(launcher):
    inputs, block = draw(), torch.full((2, 4, 37, 48), 7.0)
    launcher.run("attention_forward", dict(on_mps(inputs), out=fake_mps.tensor(block)[..., 16:32]))
    true, _ = formula(*inputs.values(), dtype=torch.float64)
    torch.testing.assert_close(block[..., 16:32], true, rtol=1e-5, atol=1e-5)
    assert (block[..., :16] == 7).all() and (block[..., 32:] == 7).all()


# ---- Compiled once -------------------------------------------------------------------------------

def test_one_library_per_specialisation(launcher):
    launcher.device()
    compiles = fake_mps.Counts.compiles

    def compiled(inputs, backward=True, **options) -> int:
        nonlocal compiles
        leaves = [fake_mps.tensor(x.requires_grad_(backward)) for x in inputs.values()]
        out = attention(*leaves, enable_gqa=True, **options)
        if backward:
            out.sum().backward()
        new, compiles = fake_mps.Counts.compiles - compiles, fake_mps.Counts.compiles
        return new

    assert compiled(draw()) == 4  # forward; delta, dq, dkv
    assert compiled(draw()) == 0
    assert compiled(draw(T=5, S=9, B=1), is_causal=True) == 0  # sizes and causal are scalars
    assert compiled(draw(), softcap=2.0) == 4                  # more options: other text
    assert compiled(draw(dtype=torch.float16)) == 4
    # attention_decode and _combine are one text
    assert compiled(draw(T=1, S=1200, B=1), backward=False) == 1
    assert launcher.compiled == 13
    assert counted(launcher) == [("attention_forward", None, 6), ("attention_backward", None, 5)]


def test_plans_are_kept_and_numbers_are_fresh(launcher, monkeypatch):
    calls, plain = [], _launch.make_plan
    monkeypatch.setattr(_launch, "make_plan", lambda op, *rest: calls.append(op) or plain(op, *rest))
    inputs = draw(G=4)
    placed = [fake_mps.tensor(x) for x in inputs.values()]
    first = attention(*placed).cpu()
    inputs["v"].mul_(2)
    assert torch.equal(attention(*placed).cpu(), 2 * first)
    assert calls == ["attention_forward"]  # asked, run, asked, run: one plan
    for length in (53, 11):
        lengths = torch.full((2,), length)
        out = attention(*placed, key_lengths=fake_mps.tensor(lengths))
        true, _ = formula(*inputs.values(), key_lengths=lengths, dtype=torch.float64)
        torch.testing.assert_close(out.cpu(), true, rtol=1e-5, atol=1e-5)
    assert len(calls) == 4  # one to ask, and one for each look at the lengths
    leaves = [x.detach().requires_grad_() for x in placed]
    for dropout in (0.0, 0.0, 0.5, 0.5):
        out = attention(*leaves, dropout_p=dropout)
        out.backward(torch.empty_like(out))
    assert calls[4:] == ["attention_forward", "attention_backward",  # with lse_rest between them
                         "attention_forward", "attention_backward",  # asked with dropout
                         "attention_forward", "attention_backward",  # and run with its seed
                         "attention_forward", "attention_backward"]


# ---- Forks ---------------------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_counts(launcher):
    def count():
        launcher.count("attention_forward", None)
        return len(launcher.report()) == 1
    with held_by_another_thread(launcher._lock.here()):
        assert forked(count) is True
    assert counted(launcher) == []  # that was the child's


# ---- What is refused, counted and explained ------------------------------------------------------

def test_unsupported_is_explained_and_counted(launcher):
    operands = operands_of(torch.float64)
    reason = "f64 tensors: no GPU backend has double precision"
    assert launcher.supported("attention_forward", operands, count=False) == reason
    assert counted(launcher) == []
    assert launcher.supported("attention_forward", operands) == reason
    with pytest.raises(_library.UnsupportedError,
                       match="attention_forward: mps cannot run this call: f64 tensors"):
        launcher.run("attention_forward", operands)
    assert counted(launcher) == [("attention_forward", reason, 2)]
    assert (operands["out"].cpu() == 7).all()
    assert launcher.supported("attention_forward", operands_of()) is None


def test_a_kernel_that_does_not_compile(launcher):
    launcher.device()
    fake_mps.fail("compile", 1)
    compiles = fake_mps.Counts.compiles
    reason = launcher.supported("attention_forward", operands_of())
    assert reason.startswith("the device's compiler refused a kernel: attention_forward_matrix: ")
    assert launcher.supported("attention_forward", operands_of()) == reason
    assert fake_mps.Counts.compiles == compiles + 1  # it is not tried again
    assert launcher.supported("attention_forward", operands_of(torch.float16)) is None  # only it
    assert counted(launcher) == [("attention_forward", reason, 2)]


class NoCompiler:
    """torch.mps whose compiler refuses everything, the probe too unless it shall pass."""

    def __init__(self, probe=False):
        self.probe, self.tried = probe, 0

    def compile_shader(self, text):
        if self.probe and "orchard_probe" in text:
            return torch.mps.compile_shader(text)
        self.tried += 1
        raise SyntaxError("Failed to create metal library\nand more lines")


def test_a_compiler_that_refuses_even_the_probe(monkeypatch):
    """PyTorch computes the call, and it is counted; nothing is compiled again."""
    compiler = NoCompiler()
    launcher = Launcher(compiler)
    monkeypatch.setattr(mps, "launcher", launcher)
    inputs = draw(G=4)
    for _ in range(2):
        leaves = [fake_mps.tensor(x).requires_grad_() for x in inputs.values()]
        out = attention(*leaves, is_causal=True)
        out.sum().backward()
    copies = [x.clone().requires_grad_() for x in inputs.values()]
    true, _ = formula(*copies, is_causal=True, dtype=torch.float64)
    torch.testing.assert_close(out.detach().cpu(), true.detach(), rtol=1e-4, atol=1e-5)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)
    reason = ("the device's compiler refused a kernel: orchard_probe: Failed to create metal "
              "library")
    assert [(x.op, x.backend, x.reason, x.count) for x in launcher.report()] == [
        ("attention_forward", "mps", reason, 2), ("attention_forward", "pytorch", None, 2)]
    assert compiler.tried == 2  # with matrices and without
    with pytest.raises(_library.UnsupportedError, match="orchard_probe"):
        launcher.run("attention_forward", operands_of())


def test_registers_that_are_short(launcher, monkeypatch):
    monkeypatch.setenv("METAL_STANDIN_MAX_THREADS", "96")
    reason = launcher.supported("attention_forward", operands_of())
    assert reason == ("kernel attention_forward_matrix cannot run with 128 threads in a group, the "
                      "limit is 96")


def test_a_gpu_without_matrices(launcher, monkeypatch):
    monkeypatch.setenv("METAL_STANDIN_FAMILY", "6")
    assert launcher.device().matrix == 0 and launcher.device().simd_width == 32
    fake_mps.Counts.last_names.clear()
    inputs = list(draw(G=4).values())
    leaves = [fake_mps.tensor(x).requires_grad_() for x in inputs]
    out = attention(*leaves, is_causal=True)
    out.sum().backward()
    assert fake_mps.Counts.last_names == ["attention_forward", "attention_delta", "attention_dq",
                                          "attention_dkv"]
    copies = [x.requires_grad_() for x in inputs]
    true, _ = formula(*copies, is_causal=True, dtype=torch.float64)
    torch.testing.assert_close(out.detach().cpu(), true.detach(), rtol=1e-5, atol=1e-5)
    for leaf, wanted in zip(leaves, torch.autograd.grad(true.sum(), copies)):
        torch.testing.assert_close(leaf.grad.cpu(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value, fast", [("1", True), ("", True), ("0", False)])
def test_kernels_are_not_compiled_with_fast_math(value, fast, monkeypatch):
    monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", value)
    reason = Launcher().supported("attention_forward", operands_of())
    assert fast == ("PYTORCH_MPS_FAST_MATH would let kernels lose" in str(reason))


@pytest.mark.parametrize("change, error, words", [
    (lambda o: o.update(k=o["k"].half()), TypeError, "k is f16, must be f32"),
    (lambda o: o.update(q=o["q"].to(torch.complex64)), TypeError, "q is torch.complex64"),
    (lambda o: o.update(q=o["q"].int()), TypeError, "q is i32, must be f64, f32, f16 or bf16"),
    (lambda o: o.update(mask=fake_mps.tensor(torch.ones(1, 1, 37, 53))), TypeError,
     "mask is f32, must be bool"),
    (lambda o: o.update(q=draw()["q"]), ValueError, "q is on cpu, must be on mps"),
    (lambda o: o.update(q=torch._neg_view(o["q"])), ValueError, "q is not a plain strided tensor"),
    (lambda o: o.update(out=o["q"]), ValueError, "output out overlaps q in memory"),
    (lambda o: o.update(out=o["out"][:1].expand(2, 4, 37, 16)), ValueError, "elements may share memory"),
    (lambda o: o["k"].untyped_storage().resize_(99), ValueError,
     "k needs 13568 bytes of its storage, which has 99"),
    (lambda o: o.update(v=o["v"][:, :, :-1]), ValueError, "v has 2 heads and 52 rows"),
    (lambda o: o.update(key_lengths=fake_mps.tensor(torch.tensor([5, 99]))), ValueError,
     "key_lengths.1. is 99"),
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
    q, k, v = (operands[name].detach().requires_grad_() for name in "qkv")
    out = attention(q, k, v, enable_gqa=True, key_lengths=operands["key_lengths"])
    assert len(copies) == 2  # the forward looks, the backward does not
    out.sum().backward()
    assert len(copies) == 2


def test_texts_are_ascii():
    """compile_shader makes nothing of other letters."""
    arguments = _launch.Arguments("attention_forward")
    tensors = dict(draw(), out=torch.empty(2, 4, 37, 16))
    for place, (name, x) in enumerate(tensors.items(), 1):
        arguments.set_tensor(name, place << 50, DTYPES[x.dtype], x.shape, x.stride())
    device = _structs.DeviceInfo(group_threads=1024, simd_width=32, matrix=1, local_bytes=32768)
    plan = _launch.make_plan("attention_forward", arguments, device)
    assert all(_launch.source(launch).isascii() for launch in plan.launches) and plan.launches


def test_a_backward_looks_at_lengths_that_no_forward_has_seen(launcher):
    """Wrong ones would make the kernels write outside."""
    q, k, v = (fake_mps.tensor(torch.randn(13, 4, 16)) for _ in range(3))
    rest = (0, 0, None, False, False, -1, -1, 0.0, 0.0)
    lse = fake_mps.tensor(torch.zeros(13, 4))

    def backward(*cu, longest=8):
        none = (None,) * 5
        return torch.ops.orchard.attention_backward(7, q, None, q, lse, None, q, k, v, *none, *cu, None,
                                                    longest, longest, *rest[2:])
    cu = [fake_mps.tensor(torch.tensor(n)) for n in ([0, 5, 13], [0, 14, 13], [0, 8, 13])]
    with pytest.raises(ValueError, match="cu_seqlens_k.1. is 14"):
        backward(cu[0], cu[1])
    cu[2][1] = 8  # as it was: a first write
    torch.ops.orchard.attention_forward(q, k, v, *(None,) * 5, cu[0], cu[2], None, 8, 8, *rest[2:])
    backward(cu[0], cu[2])
    with pytest.raises(ValueError, match="max_t says 7"):  # seen, but for other limits
        backward(cu[0], cu[2], longest=7)
    again = copy.deepcopy(cu[2])
    again[1] = 20
    assert again._version == cu[2]._version
    with pytest.raises(ValueError, match="cu_seqlens_k.1. is 20"):  # a copy, which nobody has seen
        backward(cu[0], again)
    cu[2][1] = 20
    with pytest.raises(ValueError, match="cu_seqlens_k.1. is 20"):  # written to since
        backward(cu[0], cu[2])
