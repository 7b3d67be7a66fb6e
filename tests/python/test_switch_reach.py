"""The switch reaches modules, threads, checkpoints, compiled code and CausalBias masks."""

import copy
import os
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from switch_testing import (THE, attention_alone, clean, close, forked, held_by_another_thread, joined,
                            qkv)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_earlier
from torch.utils.checkpoint import checkpoint

from orchard import switch
from orchard.switch import counting


# ---- Modules -------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("what", ["mha", "layer", "encoder"])
def test_modules(what, mode):
    """The same outputs and gradients, and the attention inside is ours, in eval mode too."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    module = {"mha": nn.MultiheadAttention(16, 4, batch_first=True), "layer": layer,
              "encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)}[what]
    module.train(mode == "train")
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [5]])
    causal = torch.ones(6, 6).triu(1).bool()

    def run():
        with torch.set_grad_enabled(mode in ("train", "eval")), \
                torch.inference_mode(mode == "inference"):
            if what == "mha":
                out, weights = module(x, x, x, key_padding_mask=padding, attn_mask=causal,
                                      need_weights=False)
                assert weights is None
            elif what == "layer":
                out = module(x, src_mask=causal, src_key_padding_mask=padding)
            else:
                out = module(x, mask=causal, src_key_padding_mask=padding)
        if mode not in ("train", "eval"):
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]
    expected = run()
    with switch.enable():
        found = run()
    assert switch.counts() == {switch.SERVED: 2 if what == "encoder" else 1}
    close([w[~padding] if w.shape == x.shape else w for w in expected],
          [h[~padding] if h.shape == x.shape else h for h in found], 1e-4)


# ---- Threads -------------------------------------------------------------------------------------

def test_other_threads_are_reached():
    q, k, v = qkv(2, 3, 7, 8)
    found = []

    def work():
        found.append(torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q)[0])
    with switch.enable():
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        [t.start() for t in threads]
        joined(threads)
    assert switch.counts() == {switch.SERVED: 4} and len(found) == 4
    expected = torch.autograd.grad(THE.torch(q, k, v).sum(), q)
    for one in found:
        close(expected, [one])


def test_switching_while_others_call():
    q, k, v = qkv(1, 2, 5, 4, grad=False)
    expected = THE.torch(q, k, v)
    wrong = []
    stop = threading.Event()

    def call():
        while not stop.is_set():
            if not torch.allclose(F.scaled_dot_product_attention(q, k, v), expected, atol=1e-5):
                wrong.append("value")

    def toggle():
        for _ in range(8):
            with switch.enable():
                if F.scaled_dot_product_attention is THE.torch:
                    wrong.append("off inside with")
    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    togglers = [threading.Thread(target=toggle, daemon=True) for _ in range(3)]
    [t.start() for t in callers + togglers]
    try:
        joined(togglers)
    finally:
        stop.set()
    joined(callers)
    assert not wrong
    assert F.scaled_dot_product_attention is THE.torch


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_while_another_thread_counts_or_switches():
    """The child's locks are its own: nobody there would give the parent's back."""
    q, k, v = qkv(1, 2, 5, 4, grad=False)
    expected = THE.torch(q, k, v)

    def call():
        found = F.scaled_dot_product_attention(q, k, v)
        switch.disable()
        off = F.scaled_dot_product_attention is THE.torch and switch.active() == []
        return torch.allclose(found, expected, atol=1e-5) and off
    with switch.enable():
        for lock in (counting.lock.here(), switch._lock.here()):
            with held_by_another_thread(lock):
                assert forked(call) is True
        assert switch._lock.here() is lock  # the parent's are as they were


# ---- Checkpoints ---------------------------------------------------------------------------------

@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_checkpoint(reentrant, backward_inside):
    q, k, v = qkv(2, 3, 7, 8)
    expected = torch.autograd.grad(THE.torch(q, k, v, is_causal=True).square().sum(), (q, k, v))

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with switch.enable():
        loss = checkpoint(call, *leaves, use_reentrant=reentrant).square().sum()
        if backward_inside:
            loss.backward()
            assert switch.counts() == {switch.SERVED: 2}
    if not backward_inside and not reentrant:
        # torch itself notices that the recomputation was another one: never a silent mixture.
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            loss.backward()
        return
    if not backward_inside:
        loss.backward()
    close(expected, [t.grad for t in leaves])


# ---- torch.compile -------------------------------------------------------------------------------

def ops_of(call):
    """The attention ops that a call runs."""
    with torch.profiler.profile() as record:
        call()
    return {e.key for e in record.key_averages()
            if e.key in ("orchard::attention", "orchard::attention_forward",
                         "orchard::attention_forward_rest",
                         "aten::_scaled_dot_product_flash_attention_for_cpu",
                         "aten::_scaled_dot_product_attention_math")}


# With a formula, without one, without gradients.
OURS = [{"orchard::attention"}, {"orchard::attention_forward_rest"}, {"orchard::attention_forward"}]
THEIRS = [{"aten::_scaled_dot_product_flash_attention_for_cpu"}]


@pytest.mark.parametrize("start_on", [False, True])
def test_compiled_before_during_after(start_on):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    tensors = qkv(2, 3, 7, 8)
    expected = THE.torch(*tensors, is_causal=True) * 2
    gradients = torch.autograd.grad(expected.square().sum(), tensors)
    for on in ([True, False, True] if start_on else [False, True, False]):
        handle = switch.enable() if on else None
        out = attend(*tensors)
        close([expected, *gradients], [out, *torch.autograd.grad(out.square().sum(), tensors)])
        assert ops_of(lambda: attend(*tensors)) in (OURS if on else THEIRS)
        if handle:
            handle.remove()
    assert not switch.counts()


def test_compiled_name_imported_earlier_and_dynamic_shapes():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q, k, v, m):
        return imported_earlier(q, k, v, m)

    with switch.enable():
        for length in (5, 9, 12):
            q, k, v = qkv(2, 3, length, 8)
            m = torch.randn(1, 1, length, length)
            close([THE.torch(q, k, v, m)], [attend(q, k, v, m)])
        assert ops_of(lambda: attend(q, k, v, m)) in OURS
    assert ops_of(lambda: attend(q, k, v, m)) in THEIRS


def test_compiled_sdpa_kernel():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = qkv(2, 3, 7, 8, grad=False)
    with switch.enable():
        close([THE.torch(q, k, v)], [attend(q, k, v)])
        assert ops_of(lambda: attend(q, k, v)) not in OURS


@pytest.mark.parametrize("start_on", [False, True])
def test_compiled_layer_before_during_after(start_on):
    """torch.compile does not look into multi_head_attention_forward, yet must notice the switch."""
    torch._dynamo.reset()
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16)
    expected = layer(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for on in ([True, False, True] if start_on else [False, True, False]):
        handle = switch.enable() if on else None
        out = compiled(x)
        close([expected, *gradients],
              [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))], 1e-4)
        assert ops_of(lambda: compiled(x)) in (OURS if on else THEIRS)
        if handle:
            handle.remove()


def test_switched_inside_compiled_code():
    """On for the block and off after it, also if the block ends by an exception. With fullgraph
    torch refuses the switch, as all that changes modules."""
    torch._dynamo.reset()

    def attend(q, k, v, fail):
        with switch.enable():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            if fail:
                raise ZeroDivisionError
            return out + 1

    tensors = qkv(2, 3, 7, 8, grad=False)
    call = torch.compile(attend, backend="aot_eager")
    close([THE.torch(*tensors, is_causal=True) + 1], [call(*tensors, False)])
    assert switch.active() == [] and switch.counts() in ({}, {switch.SERVED: 1})
    assert ops_of(lambda: call(*tensors, False)) in OURS
    with pytest.raises(ZeroDivisionError):
        call(*tensors, True)
    assert switch.active() == [] and F.scaled_dot_product_attention is THE.torch
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors, False)
    assert switch.active() == []


@pytest.mark.parametrize("transform", [
    lambda f: torch.func.grad(lambda *x: f(*x).square().sum()), torch.vmap], ids=["grad", "vmap"])
def test_transforms_inside_compiled_code_are_torchs(transform):
    torch._dynamo.reset()
    tensors = qkv(2, 3, 7, 8, grad=False)

    def attend(*x):
        return transform(lambda *y: F.scaled_dot_product_attention(*y, is_causal=True))(*x)

    expected = attend(*tensors)
    with switch.enable():
        found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(expected, found)


def test_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: F.scaled_dot_product_attention(*a), fullgraph=True)
    tensors = qkv(2, 3, 7, 8)
    with switch.enable():
        expected = THE.torch(*tensors)
        out = compiled(*tensors)
        close([expected, *torch.autograd.grad(expected.sum(), tensors)],
              [out, *torch.autograd.grad(out.sum(), tensors)])
        assert ops_of(lambda: compiled(*tensors)) in OURS


def test_exported_program_holds_torchs_op():
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)
    tensors = tuple(qkv(2, 3, 7, 8, grad=False))
    with switch.enable():
        program = torch.export.export(Attend(), tensors)
    assert "orchard." not in str(program.graph)
    close([THE.torch(*tensors)], [program.module()(*tensors)])


def test_torchscript_and_fx_keep_torchs_op():
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    tensors = qkv(2, 3, 7, 8, grad=False)
    expected = THE.torch(*tensors, is_causal=True)
    with switch.enable():
        scripted = torch.jit.script(attend)
        traced = torch.jit.trace(attend, tuple(tensors))
        graph = torch.fx.symbolic_trace(attend)
        mha = torch.jit.script(nn.MultiheadAttention(8, 2))
        mha(torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8), need_weights=False)
        for one in (scripted, traced, graph):
            assert torch.equal(one(*tensors), expected)
    for one in (scripted, traced):
        assert "scaled_dot_product_attention" in str(one.graph)
        assert "orchard::" not in str(one.graph)


# ---- CausalBias ----------------------------------------------------------------------------------

@pytest.mark.parametrize("through", ["F", "imported earlier", "held elsewhere"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5)])
def test_causal_bias(make, lengths, through):
    rows, columns = lengths
    q, k, v = qkv(2, 3, rows, 8, keys=columns)
    offset = columns - rows if make is causal_lower_right else 0
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(offset)
    expected = THE.torch(q, k, v, mask)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    held = THE.torch  # in a place that no switch of names can reach
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "lower right will produce NaNs": it gives zeros
        bias = make(rows, columns)
    with switch.enable():
        call = {"F": F.scaled_dot_product_attention, "imported earlier": imported_earlier,
                "held elsewhere": held}[through]
        out = call(q, k, v, bias)
        assert switch.counts() == {switch.SERVED: 1}
        assert torch.equal(out, call(q, k, v, attn_mask=bias))
        with pytest.raises(ValueError, match="should not be used with causal"):
            call(q, k, v, bias, is_causal=True)
    close([expected, *gradients], [out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    close([expected], [THE.torch(q, k, v, bias)])


def test_causal_bias_that_passes_through():
    q, k, v = (t.detach() for t in qkv(2, 3, 5, 8, keys=9))
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    with switch.enable(), sdpa_kernel(SDPBackend.MATH):
        bias = causal_lower_right(5, 9)
        close([THE.torch(q, k, v, mask)], [F.scaled_dot_product_attention(q, k, v, bias)])
        assert switch.counts() == {"sdpa_kernel without FLASH_ATTENTION": 1}
        with pytest.raises(RuntimeError):  # a bias of another size
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(4, 9))


def test_causal_bias_does_other_things_as_before():
    before = repr(causal_lower_right(2, 3))
    with switch.enable():
        assert repr(causal_lower_right(2, 3)) == before
        assert isinstance(copy.copy(causal_lower_right(2, 3)), CausalBias)
