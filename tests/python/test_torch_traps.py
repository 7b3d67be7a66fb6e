"""Every known trap of torch 2.13 for such ops: each was seen to happen; none may happen here."""

import copy
import gc
import pickle
import re
import shutil
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import orchard
from orchard import _library
from orchard.torch.attention import autograd, ops
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch import transforms


def leaves(*shape, dtype=torch.float64):
    return [torch.randn(*(shape or (1, 2, 5, 4)), dtype=dtype, requires_grad=True)
            for _ in range(3)]


def plain(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def test_func_grad_and_vjp():
    q, k, v = (x.detach() for x in leaves())
    found = torch.func.grad(lambda *x: attention(*x).square().sum(), argnums=(0, 1, 2))(q, k, v)
    expected = torch.func.grad(lambda *x: plain(*x).square().sum(), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    out, pull = torch.func.vjp(attention, q, k, v)
    for a, b in zip(pull(2 * out), expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("options", [{}, {"window": (9, 9)}])
def test_forward_mode_over_backward_is_not_lost(options):
    """It gave a tangent of zero. More of forward mode: test_torch_forward_mode.py."""
    q, k, v = leaves()
    dout, ddout = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(2))
    results = []
    for out in (attention(q, k, v, **options), plain(q, k, v)):
        def back(d):
            return torch.autograd.grad(out, (q, k, v), d, retain_graph=True)

        found = [*torch.func.jvp(back, (dout,), (ddout,))[1]]
        with forward_ad.dual_level():
            duals = back(forward_ad.make_dual(dout, ddout))
            results.append(found + [forward_ad.unpack_dual(x).tangent for x in duals])
    for a, b in zip(*results):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def test_another_threads_forward_mode_changes_nothing(forward_mode_elsewhere):
    q, k, v = leaves()
    exact = torch.autograd.grad(plain(q, k, v).square().sum(), (q, k, v))
    with forward_mode_elsewhere():
        for options in ({}, {"window": (9, 9)}):
            out = attention(q, k, v, **options)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), exact)


@pytest.mark.parametrize("options", [{}, {"window": (2, 2)}])
@pytest.mark.parametrize("second", [False, True])
def test_errors_of_backward_are_orchards(options, second):
    """Here a saved tensor comes back in another shape."""
    q, k, v = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[..., :1]):
        out = attention(q, k, v, **options)
        with pytest.raises(orchard.ShapeError, match="attention_backward: "):
            torch.autograd.grad(out.sum(), q, create_graph=second)


def test_more_threads_than_a_context_has():
    """torch starts one for each core, and there are machines with more than 256."""
    told = run("import torch, orchard.torch as o\n"
               "torch.set_num_threads(300); x = torch.ones(1, 2, 5, 8)\n"
               "print(torch.equal(o.scaled_dot_product_attention(x, x, x), x))").stdout
    assert told == "True\n"


@pytest.mark.parametrize("kernels", [(ops.forward, ops.backward), ops.kernel_for("cpu")],
                         ids=["c", "python"])
def test_too_many_dimensions(kernels):
    """More than the structs hold, and so C says it."""
    x, numbers = torch.ones(1, 2, 3, 8), (0, 0, None, False, False, -1, -1, 0.0, 0.0)
    forward, backward = kernels
    given = [x, x, x, *[None] * 8]
    out, lse = forward(*given, *numbers)
    for at, name in enumerate(("q", "k", "v", "bias", "mask", "alibi", "sinks", "key_lengths")):
        dtype = {"mask": torch.bool, "key_lengths": torch.int32}.get(name, torch.float32)
        wrong = [*given[:at], torch.ones((1,) * 9, dtype=dtype), *given[at + 1:]]
        said = f": {name} has rank 9, (the limit is 8|must)"
        with pytest.raises((orchard.ShapeError, RuntimeError), match="attention_forward" + said):
            forward(*wrong, *numbers)
        with pytest.raises((orchard.ShapeError, RuntimeError), match="attention_backward" + said):
            backward(7, x, None, out, lse, None, *wrong, *numbers)


def test_ops_refuse_one_operand_on_meta():
    """torch asks the fakes then, and the results would be memory that nobody wrote to."""
    x, rest = torch.ones(1, 2, 3, 8), (0, 0, None, False, False, -1, -1, 0.0, 0.5)
    nothing, seed = [None] * 7, torch.tensor(3)
    out, lse = ops.forward(x, x, x, *nothing, seed, *rest)
    calls = [lambda y: ops.forward(x, y, x, *nothing, seed, *rest),
             lambda y: ops.forward(x, x, x, y, *nothing[1:], seed, *rest),
             lambda y: ops.forward(x, x, x, *nothing, y.long(), *rest),
             lambda y: ops.backward(7, y, None, out, lse, None, x, x, x, *nothing, seed, *rest),
             lambda y: ops.backward(7, x, None, out, lse, y[..., 0], x, x, x, *nothing, seed, *rest),
             lambda y: ops.backward(7, x, None, out, lse, None, x, x, x, *nothing, y.long(), *rest)]
    for call in calls:
        with pytest.raises(orchard.ArgumentError, match="q is on cpu, .* on meta"):
            call(x.to("meta"))


def test_errors_come_back_from_other_processes():
    from orchard.torch import mps
    for error in (mps.Refused("attention_forward", "why", " and more"),
                  orchard.ShapeError("attention: so")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)
        assert getattr(again, "reason", None) == getattr(error, "reason", None)


def test_causal_bias_under_autocast():
    from torch.nn.attention.bias import causal_lower_right
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        bias = causal_lower_right(3, 5)
    finally:
        torch.set_default_dtype(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, k, bias)
        exact = F.scaled_dot_product_attention(q, k, k, torch.ones(3, 5).tril(2).bool())
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)


def test_errors_of_others_stay_theirs():
    """Of a saved-tensor hook, say, even if they sound like Orchard's and one of those came before."""
    class Full(RuntimeError):
        pass

    def full(kind):
        try:
            raise OSError("no space left")
        except OSError as why:
            raise kind("attention cache is full") from why

    def same(x):
        return x

    q, k, v = leaves()
    for options in ({}, {"window": (2, 2)}):
        for kind in (Full, RuntimeError, ValueError):
            def hook(x):
                full(kind)

            for hooks in ((hook, same), (same, hook)):
                with pytest.raises(orchard.ShapeError):
                    attention(q, k[..., :2], v, **options)
                with torch.autograd.graph.saved_tensors_hooks(*hooks):
                    with pytest.raises(kind, match="attention cache is full") as caught:
                        attention(q, k, v, **options).sum().backward()
                assert type(caught.value) is kind and type(caught.value.__cause__) is OSError


def test_the_status_of_an_op_called_directly_is_not_anothers():
    q, k, v = leaves()
    with pytest.raises(RuntimeError, match="head size"):
        ops.plain_forward(q.detach(), k.detach()[..., :2], v.detach(), None, False)

    def hook(x):
        raise RuntimeError("attention: of a hook")

    with torch.autograd.graph.saved_tensors_hooks(hook, lambda x: x):
        with pytest.raises(RuntimeError, match="of a hook") as caught:
            attention(q, k, v)
    assert type(caught.value) is RuntimeError


def test_another_threads_compiler_changes_nothing():
    """torch.compiler.is_compiling() says yes in all threads while one of them compiles."""
    q, k, v = leaves()
    many = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)

    def batched():
        first, = torch.autograd.grad(attention(q, k, v), q, many, create_graph=True,
                                     is_grads_batched=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    def answers():
        with forward_ad.dual_level():
            dual = attention(forward_ad.make_dual(q.detach(), many[0]), k.detach(), v.detach())
            tangent = forward_ad.unpack_dual(dual).tangent
        with orchard.enable():
            switched = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, k, v))(many)
            assert orchard.counts(reset=True) == {"served by Orchard": 1}
        return (tangent, batched(), torch.func.grad(lambda x: attention(x, k, v).square().sum())(q),
                torch.func.vmap(lambda x: attention(x, k, v))(many), switched)

    inside, go = threading.Event(), threading.Event()

    def backend(graph, _example):
        inside.set()
        go.wait(60)
        return graph.forward

    expected = answers()
    torch._dynamo.reset()
    other = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(
        torch.ones(2)))
    other.start()
    try:
        assert inside.wait(60) and torch.compiler.is_compiling()
        found = answers()
    finally:
        go.set()
        other.join()
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_second_order_is_not_lost():
    q, k, v = leaves()
    results = []
    for function in (attention, plain):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, = torch.autograd.grad(function(q, k, v).sum(), k, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    for a, b in zip(*results):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("detected", [True, False])
def test_second_order_of_batched_grads_is_not_lost(detected, monkeypatch):
    """is_grads_batched, and so jacobian(vectorize=True), runs backward in a vmap of its own, in
    which a Function records nothing."""
    if not detected:  # a torch without the question
        monkeypatch.setattr(transforms, "_is_legacy_batched", lambda tensor: True)
    q, k, v = leaves()
    grads = torch.randn(3, *q.shape, dtype=q.dtype)
    results = []
    for function in (attention, plain):
        first = torch.autograd.grad(function(q, k, v), (q, k, v), grads, is_grads_batched=True,
                                    create_graph=True)
        loss = sum(x.square().sum() for x in first)
        jacobian = torch.autograd.functional.jacobian(lambda x: function(x, k, v), q,
                                                      create_graph=True, vectorize=True)
        results.append([*first, *torch.autograd.grad(loss + jacobian.square().sum(), (q, k, v))])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_second_order_of_batched_grads_with_every_option():
    q, k, v = leaves(2, 2, 5, 4)
    bias, sinks = (torch.randn(s, dtype=q.dtype, requires_grad=True) for s in ((1, 2, 5, 5), (2,)))
    inputs = (q, k, v, bias, sinks)
    dout, dlse = (torch.randn(2, *s, dtype=q.dtype) for s in ((2, 2, 5, 4), (2, 2, 5)))

    def second(batched):
        torch.manual_seed(4)
        made = attention(q, k, v, bias, 0.3, sinks=sinks, return_lse=True, softcap=2.0,
                         key_lengths=torch.tensor([5, 3]))
        if batched:
            first = torch.autograd.grad(made, inputs, (dout, dlse), is_grads_batched=True,
                                        create_graph=True)
        else:
            first = [torch.stack(x) for x in zip(*(
                torch.autograd.grad(made, inputs, pair, create_graph=True)
                for pair in zip(dout, dlse)))]
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)]

    for a, b in zip(second(True), second(False)):
        torch.testing.assert_close(a, b)


HIDDEN = {  # of five keys, which the second batch element cannot see, and by what
    "key lengths": ([3, 4], {"key_lengths": torch.tensor([5, 3])}),
    "causal": ([3, 4], {"is_causal": True}),
    "window": ([0, 1], {"window": (0, 0), "causal_alignment": "bottom_right"}),
    "mask": ([1], {"attn_mask": torch.tensor([True, False, True, True, True])}),
    "bias": ([2], {"bias": torch.zeros(5).double().index_fill(0, torch.tensor([2]), -torch.inf)}),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_nan_in_hidden_keys_reaches_no_second_order(name):
    places, options = HIDDEN[name]
    q, k, v = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (3, 5, 5))
    results = []
    for anything in (0.0, torch.nan):
        k[1, :, places] = v[1, :, places] = anything
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        first = torch.autograd.grad(attention(*x, **options).square().sum(), x, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), x)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_public_function_has_gradients_without_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = leaves()
        attention(*tensors).sum().backward()
    assert all(x.grad is not None for x in tensors)


def test_seeds_reach_63_bits():
    q = torch.randn(1, 1, 4, 4)
    rest = (None,) * 7
    numbers = (0, 0, None, False, False, -1, -1, 0.0, 0.5)
    outs = [ops.forward(q, q, q, *rest, torch.tensor(seed), *numbers)[0]
            for seed in (0, 1, 2 ** 32, 2 ** 62, 2 ** 63 - 1)]
    assert len({tuple(x.flatten().tolist()) for x in outs}) == len(outs)


def test_outputs_are_fresh():
    q, k, v = (x.detach() for x in leaves())
    out, lse = attention(q, k, v, return_lse=True)
    grads = ops.backward(7, out, None, out, lse, None, q, k, v, *(None,) * 8, 0, 0, None, False,
                         False, -1, -1, 0.0, 0.0)
    storages = [x.untyped_storage().data_ptr() for x in (q, k, v, out, lse, *grads[:3])]
    assert len(set(storages)) == len(storages)


def test_gradients_of_any_stride():
    """sum().backward() brings strides of 0; a transposed use brings (1, n)."""
    q, k, v = leaves()
    ones = torch.autograd.grad(attention(q, k, v), (q, k, v), torch.ones(1, 2, 5, 4).double())
    spread = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    weight = torch.randn(4, 5, dtype=torch.float64)
    turned = torch.autograd.grad((attention(q, k, v).mT * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((plain(q, k, v).mT * weight).sum(), (q, k, v))
    for a, b, c, d in zip(ones, spread, turned, expected):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, d)


def test_arguments_equal_to_zero_reach_the_kernel():
    """Defaults in a schema are dropped before a Python kernel: the schemas have none."""
    for op in (ops.forward, ops.forward_rest, ops.backward):
        assert not any(a.has_default_value() for a in op._schema.arguments)
    q, k, v = (x.detach() for x in leaves())
    torch.testing.assert_close(attention(q, k, v, scale=0.0),
                               v.mean(2, keepdim=True).expand_as(q))


def test_autocast_takes_the_dtype_asked_for():
    q, k, v = leaves(dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            out = attention(q, k, v)
        assert out.dtype == dtype
        for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
            assert gradient.dtype == torch.float32 and gradient.shape == x.shape
        mask = torch.zeros(5, 5, dtype=torch.float16, requires_grad=True)
        with torch.autocast("cpu", dtype):
            out = attention(q, k, v, attn_mask=mask)
        assert torch.autograd.grad(out.sum(), mask)[0].dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attention(q, k, v).dtype == torch.float32


def test_library_stays_referenced():
    gc.collect()
    assert ops.library is not None and attention(*leaves()).shape == (1, 2, 5, 4)


def test_another_fragment_may_use_the_namespace():
    other = torch.library.Library("orchard", "FRAGMENT")
    other.define("test_fragment(Tensor x) -> Tensor")
    other.impl("test_fragment", lambda x: x + 1, "CPU")
    assert torch.ops.orchard.test_fragment(torch.zeros(1)).item() == 1
    assert attention(*leaves()).shape == (1, 2, 5, 4)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.attention = attention
        self.op = ops.forward

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_modules_copy_and_pickle(tmp_path):
    block, x = Block(), torch.randn(2, 5, 8)
    expected = block(x)
    assert torch.equal(copy.deepcopy(block)(x), expected)
    del block.op  # torch's OpOverload copies, but does not pickle
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), expected)
    torch.save(block, tmp_path / "block.pt")
    assert torch.equal(torch.load(tmp_path / "block.pt", weights_only=False)(x), expected)
    torch.save(block.state_dict(), tmp_path / "state.pt")
    other = Block()
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(other(x), expected)


def test_vmap_has_a_rule():
    q, k, v = (x.detach() for x in leaves(3, 1, 2, 5, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a slow loop warns
        found = torch.vmap(attention)(q, k, v)
        with torch.no_grad():
            also = torch.vmap(attention)(q, k, v)
    expected = torch.stack([attention(*x) for x in zip(q, k, v)])
    assert torch.equal(found, expected) and torch.equal(also, expected)


def test_float32_beside_a_float64_query():
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    for name in ("alibi_slopes", "sinks"):
        given = torch.rand(4, requires_grad=name == "sinks")
        found = attention(q, k, v, **{name: given})
        torch.testing.assert_close(found, attention(q, k, v, **{name: given.double()}))
        assert (found - attention(q, k, v)).abs().max() > 1e-3
    found.sum().backward()
    assert given.grad.dtype == torch.float32 and given.grad.abs().max() > 0


def test_a_side_of_a_window_may_be_none():
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    assert torch.equal(attention(q, k, v, window=(None, 2)), attention(q, k, v, window=(-1, 2)))


def test_alibi_with_gradient_is_refused_not_lost():
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(_library.UnsupportedError, match="alibi_slopes requires a gradient"):
        attention(*leaves(), alibi_slopes=slopes)
    with torch.no_grad():
        attention(*leaves(), alibi_slopes=slopes)


def test_saved_tensors_are_checked_for_changes():
    q, k, v = leaves()
    scaled = q * 2
    out = attention(scaled, k, v)
    with torch.no_grad():
        scaled.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("place", ["q", "k", "v", "bias", "sinks"])
def test_tensors_that_outlived_their_transform_keep_their_history(place):
    """What torch.func.grad wrapped and somebody kept is a shell around the tensor with a history:
    recorded as it is, its gradient would be lost without a word."""
    tensors = dict(zip("qkv", leaves()))
    for name, shape in (("bias", (1, 2, 5, 5)), ("sinks", (2,))):
        tensors[name] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    kept = []

    def keep(x):
        kept.append(x * 2)
        return kept[-1].sum()

    def gradient(doubled):
        q, k, v, bias, sinks = {**tensors, place: doubled}.values()
        out = attention(q, k, v, bias, sinks=sinks)
        return torch.autograd.grad(out.square().sum(), tensors[place])[0]

    torch.func.grad(keep)(tensors[place])
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept[0])
    torch.testing.assert_close(gradient(kept[0]), gradient(tensors[place] * 2), rtol=0, atol=0)


def test_classes_take_what_torch_func_demands():
    assert autograd.Attention.generate_vmap_rule is False
    assert not hasattr(autograd.AttentionFast, "vmap") or \
        autograd.AttentionFast.vmap is torch.autograd.Function.vmap


def run(code, **environment):
    import os
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})


which_need_torch = pytest.mark.parametrize("package", [
    "orchard.torch", "orchard.switch", "orchard.transformers", "orchard_ops", "orchard_bridge",
    "orchard_bridge.enable_flash"])


@which_need_torch
def test_without_torch_one_message(package):
    done = run("import sys; sys.modules['torch'] = None\n"
               f"try:\n    import {package}\n"
               "except ImportError as e:\n    print(type(e).__name__, e)")
    assert done.stdout.startswith("ImportError orchard.torch needs PyTorch 2."), done
    assert done.stdout.count("\n") == 1


@which_need_torch
def test_old_torch_one_message(package):
    done = run("import sys, types; t = types.ModuleType('torch'); t.__version__ = '2.1.0+cpu'\n"
               "sys.modules['torch'] = t\n"
               f"try:\n    import {package}\n"
               "except ImportError as e:\n    print(e)")
    assert done.stdout == "orchard.torch needs PyTorch 2.10 or later, this is 2.1.0+cpu\n", done


CALL = ("import torch, orchard.torch as o, orchard.torch.cpu as c\n"
        "torch.manual_seed(0)\n"
        "x = [torch.randn(2, 3, 33, 16, requires_grad=True) for _ in range(3)]\n"
        "y = o.scaled_dot_product_attention(*x, is_causal=True, dropout_p=0.2)\n"
        "g = torch.autograd.grad(y.square().sum(), x)\n"
        "import hashlib; h = hashlib.sha256()\n"
        "[h.update(z.detach().contiguous().numpy().tobytes()) for z in (y, *g)]\n"
        "print(c.kernel(), c.why_not, h.hexdigest())")


def test_python_kernel_gives_the_same_bits():
    """Where the C kernel cannot be had (an older torch, a missing file), Python's takes over."""
    chosen = run(CALL).stdout.split()
    python = run(CALL, ORCHARD_TORCH_KERNEL="python").stdout.split()
    absent = run(CALL, ORCHARD_TORCH_LIBRARY="/nonexistent/liborchard_torch.so").stdout.split()
    assert python[0] == absent[0] == "python" and "/nonexistent" in " ".join(absent)
    assert chosen[-1] == python[-1] == absent[-1]


def test_another_library_keeps_the_c_kernel(tmp_path):
    """A build of the C library alone, as ORCHARD_LIBRARY may name, has no kernel.c beside it."""
    alone = shutil.copy(_library.path(), tmp_path)
    told = run(f"import orchard._library as l\nassert l.path() == {alone!r}\n{CALL}",
               ORCHARD_LIBRARY=alone)
    assert told.stdout.split() == run(CALL).stdout.split() and told.stdout.startswith("c "), told


@pytest.mark.parametrize("library, why", [
    ("None", "torch .* has no libtorch_cpu where Orchard looks for it"),
    ("ctypes.CDLL(None)", "torch .* has no aoti_torch_[a-z_]+")])
def test_why_the_c_kernel_cannot_be_had(library, why):
    told = run("import ctypes, orchard.torch.cpu as c, orchard.torch.threads as t\n"
               f"t.torch_library = lambda: {library}\n"
               "print(c._open(), '-', c.why_not)").stdout.strip()
    assert re.fullmatch(f"None - {why}", told), told
