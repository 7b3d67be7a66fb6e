"""The switch: on and off, what it serves, what it passes through, and that nothing is left behind.

Values are compared with torch's own function, reached past the switch as THE.torch.
"""

import functools
import math
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from switch_testing import THE, attention_alone, both, clean, close, qkv
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported_earlier

from orchard import OrchardError, UnsupportedError, switch


# ---- On and off ----------------------------------------------------------------------------------

def test_with_block_reaches_and_restores():
    q, k, v = qkv(2, 3, 9, 8)
    with switch.enable() as handle:
        assert isinstance(handle, switch.Handle)
        assert F.scaled_dot_product_attention is not THE.torch
        assert "torch.nn.functional.scaled_dot_product_attention" in switch.active()
        assert f"{__name__}.imported_earlier" in switch.active()
        assert "torch.nn.attention.bias.CausalBias.__torch_function__" in switch.active()
        assert "torch.backends.mha.set_fastpath_enabled(False)" in switch.active()
        assert len(switch.active()) == len(set(switch.active()))
        out = F.scaled_dot_product_attention(q, k, v)
        assert type(out.grad_fn).__name__.startswith("Attention")
    assert switch.counts() == {switch.SERVED: 1}
    assert F.scaled_dot_product_attention is THE.torch
    out = F.scaled_dot_product_attention(q, k, v)
    assert "ScaledDotProduct" in type(out.grad_fn).__name__


def test_a_handle_is_on_again_in_a_later_block():
    handle = switch.enable()
    for _ in range(2):
        with handle:
            with handle:
                assert F.scaled_dot_product_attention is not THE.torch
            assert F.scaled_dot_product_attention is not THE.torch
        assert F.scaled_dot_product_attention is THE.torch


def test_exception_inside_with():
    with pytest.raises(KeyError):
        with switch.enable():
            raise KeyError
    assert F.scaled_dot_product_attention is THE.torch


def test_nested_and_out_of_order():
    first = switch.enable()
    second = switch.enable()
    with switch.enable():
        first.remove()
        first.remove()
    assert F.scaled_dot_product_attention is not THE.torch
    second.remove()
    assert F.scaled_dot_product_attention is THE.torch


def test_disable_undoes_all_and_old_handles_are_dead():
    old = switch.enable()
    switch.enable()
    switch.disable()
    assert F.scaled_dot_product_attention is THE.torch
    with switch.enable():
        old.remove()
        assert F.scaled_dot_product_attention is not THE.torch
    switch.disable()
    switch.disable()


def test_nothing_else_of_torch_changes():
    places = {"torch": torch, "F": F, "nn": nn, "_nn": torch._C._nn, "MHA": nn.MultiheadAttention,
              "Layer": nn.TransformerEncoderLayer, "Tensor": torch.Tensor}
    before = {(p, n): o for p, m in places.items() for n, o in list(vars(m).items())}
    with switch.enable():
        changed = [(p, n) for (p, n), thing in before.items()
                   if vars(places[p]).get(n) is not thing]
    assert changed == [("F", "scaled_dot_product_attention")]
    assert all(vars(places[p]).get(n) is thing for (p, n), thing in before.items())


def test_fastpath_is_put_back_as_it_was():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with switch.enable():
            pass
        assert torch.backends.mha.get_fastpath_enabled() is False
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_somebody_elses_wrapper_survives():
    calls = []
    with switch.enable():
        ours = F.scaled_dot_product_attention

        def wrapper(*args, **kwargs):
            calls.append(1)
            return ours(*args, **kwargs)
        F.scaled_dot_product_attention = wrapper
    try:
        assert F.scaled_dot_product_attention is wrapper
        q, k, v = qkv(1, 2, 5, 4)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), THE.torch(q, k, v))
        assert calls and not switch.counts()
    finally:
        F.scaled_dot_product_attention = THE.torch


def test_somebodys_wrapper_around_the_switch_does_not_turn_in_circles():
    """Made while it was on, and still there when it is on again: it calls what calls it."""
    q, flat = torch.randn(1, 2, 4, 8), torch.randn(4, 8)
    theirs = [THE.torch(x, x, x) for x in (q, flat)]
    calls = []
    try:
        switch.enable()
        inner = F.scaled_dot_product_attention

        def wrapper(*args, **kwargs):
            calls.append(args[0].dim())
            return inner(*args, **kwargs)

        F.scaled_dot_product_attention = wrapper
        switch.disable()
        switch.counts(reset=True)
        with switch.enable():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), theirs[0])
            assert torch.equal(F.scaled_dot_product_attention(flat, flat, flat), theirs[1])
            assert sum(switch.counts().values()) == 2  # each once
        assert F.scaled_dot_product_attention is wrapper
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), theirs[0])
        assert torch.equal(inner(q, q, q), theirs[0])  # a name bound meanwhile
        with pytest.raises(RuntimeError):  # torch's own word, and nothing is stuck afterwards
            F.scaled_dot_product_attention(q, q[..., :3], q)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), theirs[0])
        assert calls
    finally:
        switch.disable()
        F.scaled_dot_product_attention = THE.torch
        with switch.enable():  # finds the original anew
            pass


class Doubled:
    """Another's patch, as an object."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return 2 * self.function(*args, **kwargs)


WRAPPERS = {
    "closure": lambda f: lambda *args, **kwargs: 2 * f(*args, **kwargs),
    "object": Doubled,
    "method": lambda f: Doubled(f).__call__,
    "partial": lambda f: functools.partial(Doubled(f)),
    "wraps": lambda f: functools.wraps(f)(lambda *args, **kwargs: 2 * f(*args, **kwargs)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_made_while_on_acts_once(name):
    q = torch.randn(1, 2, 4, 8)
    theirs = 2 * THE.torch(q, q, q)
    try:
        with switch.enable():
            F.scaled_dot_product_attention = WRAPPERS[name](F.scaled_dot_product_attention)
        for _ in range(3):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), theirs)
            with switch.enable():
                pass
    finally:
        F.scaled_dot_product_attention = THE.torch
        with switch.enable():
            pass


def test_a_patch_made_before_outlives_one_that_puts_the_switch_back():
    q = torch.randn(1, 2, 4, 8)
    first = WRAPPERS["closure"](THE.torch)
    F.scaled_dot_product_attention = first
    try:
        with switch.enable():
            ours = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = WRAPPERS["closure"](ours)
        F.scaled_dot_product_attention = ours  # what it found there, but the switch is off now
        for _ in range(2):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), 2 * THE.torch(q, q, q))
            with switch.enable():
                pass
            assert F.scaled_dot_product_attention is first
    finally:
        F.scaled_dot_product_attention = THE.torch
        with switch.enable():
            pass


def test_calls_that_raise_were_not_served(monkeypatch):
    def refuse(*args, **kwargs):
        raise UnsupportedError("attention: ORCHARD_BACKEND=metal, which is not here")
    monkeypatch.setattr(switch._sdpa._orchard_torch, "scaled_dot_product_attention", refuse)
    with switch.enable(), pytest.raises(UnsupportedError):
        F.scaled_dot_product_attention(*qkv(1, 1, 5, 4))
    assert switch.counts() == {}


def test_interrupted_while_it_is_turned_on(monkeypatch):
    """The fixture `clean` sees that all is put back."""
    def interrupt(_):
        raise KeyboardInterrupt
    with monkeypatch.context() as now:
        now.setattr(torch.backends.mha, "set_fastpath_enabled", interrupt)
        with pytest.raises(KeyboardInterrupt):
            switch.enable()
    assert F.scaled_dot_product_attention is not THE.torch
    for _ in range(2):
        with switch.enable():
            assert F.scaled_dot_product_attention(*qkv(1, 2, 5, 4)).shape == (1, 2, 5, 4)
    switch.disable()


@pytest.mark.parametrize("then", ["enable", "disable"])
def test_interrupted_while_it_is_turned_off(monkeypatch, then):
    """The next call ends what Ctrl-C left half undone; `clean` sees that all is put back."""
    def interrupt(*_):
        raise KeyboardInterrupt
    switch.enable()
    with monkeypatch.context() as now:
        now.setattr(torch.backends.mha, "get_fastpath_enabled", interrupt)
        with pytest.raises(KeyboardInterrupt):
            switch.disable()
    assert F.scaled_dot_product_attention is THE.torch
    if then == "disable":
        switch.disable()
    else:
        with switch.enable():
            F.scaled_dot_product_attention(*qkv(1, 2, 5, 4))
        assert switch.counts() == {switch.SERVED: 1}
    assert torch.backends.mha.get_fastpath_enabled()
    # With a CausalBias torch's function asks what stands in the class: no longer ours.
    q = torch.randn(1, 2, 5, 4)
    close([THE.torch(q, q, q, is_causal=True)], [THE.torch(q, q, q, causal_upper_left(5, 5))])


def test_a_block_that_was_never_entered_is_not_waited_for(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt
    handle = switch.Handle({"attention": 1})
    with monkeypatch.context() as now:
        now.setattr(torch.backends.mha, "set_fastpath_enabled", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.__enter__()
    with handle:
        assert switch.active()
    assert not switch.active()


def test_reloaded_while_on():
    code = ("import importlib, torch, torch.nn.functional as F, orchard.switch as switch\n"
            "from torch.nn.attention.bias import causal_lower_right\n"
            "q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)\n"
            "switch.enable(); importlib.reload(switch)\n"
            "assert F.scaled_dot_product_attention is switch._sdpa.BUILTIN\n"
            "assert torch.backends.mha.get_fastpath_enabled()\n"
            "expected = F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6))\n"
            "with switch.enable():\n"
            "    found = F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 6))\n"
            "assert switch.counts() == {switch.SERVED: 1}\n"
            "torch.testing.assert_close(found, expected)\n")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_patch_made_before_is_what_calls_pass_to():
    def patch(*args, **kwargs):
        return "patched"
    F.scaled_dot_product_attention = patch
    try:
        with switch.enable():
            assert F.scaled_dot_product_attention(*qkv(5, 4)) == "patched"
            assert F.scaled_dot_product_attention(*qkv(1, 1, 5, 4)).shape == (1, 1, 5, 4)
        assert F.scaled_dot_product_attention is patch
    finally:
        F.scaled_dot_product_attention = THE.torch


# ---- Names ---------------------------------------------------------------------------------------

def test_name_imported_earlier():
    q, k, v = qkv(1, 2, 7, 8)
    with switch.enable():
        imported_earlier(q, k, v)
    assert switch.counts(reset=True) == {switch.SERVED: 1}
    with switch.enable(imported_names=False):
        assert imported_earlier is THE.torch
        with switch.enable():
            assert imported_earlier is not THE.torch
        assert imported_earlier is THE.torch
        assert F.scaled_dot_product_attention is not THE.torch


def test_name_imported_meanwhile():
    with switch.enable():
        globals()["imported_meanwhile"] = F.scaled_dot_product_attention
        kept = F.scaled_dot_product_attention
    assert globals().pop("imported_meanwhile") is THE.torch
    q, k, v = qkv(1, 2, 7, 8)
    assert torch.equal(kept(q, k, v), THE.torch(q, k, v)) and not switch.counts()


# ---- Served calls are torch's --------------------------------------------------------------------

BOOL = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) > 0.3
CASES = {
    "plain": (lambda: qkv(2, 3, 7, 8), {}),
    "causal": (lambda: qkv(2, 3, 7, 8), {"is_causal": True}),
    "causal, more keys": (lambda: qkv(2, 3, 7, 8, keys=9), {"is_causal": True}),
    "bool mask": (lambda: qkv(2, 3, 7, 8, keys=9), {"attn_mask": BOOL}),
    "bool mask, broadcast": (lambda: qkv(2, 3, 7, 8, keys=9), {"attn_mask": BOOL[None, None, :1]}),
    "fully masked rows": (lambda: qkv(2, 3, 7, 8, keys=9),
                          {"attn_mask": BOOL & (torch.arange(7) > 1)[:, None]}),
    "float mask": (lambda: qkv(2, 3, 7, 8, keys=9), {"attn_mask": torch.randn(2, 1, 7, 9)}),
    "scale": (lambda: qkv(2, 3, 7, 8), {"scale": 0.3}),
    "value size": (lambda: qkv(2, 3, 7, 8, value_size=5), {}),
    "rank 3": (lambda: qkv(4, 7, 8), {"is_causal": True}),
    "rank 3, mask": (lambda: qkv(4, 7, 8), {"attn_mask": torch.randn(4, 7, 7)}),
    "rank 5": (lambda: qkv(2, 2, 3, 7, 8), {}),
    "float64": (lambda: qkv(2, 3, 7, 8, dtype=torch.float64), {"is_causal": True}),
    "some need no gradient": (lambda: [qkv(2, 3, 7, 8)[0], *qkv(2, 3, 7, 8, grad=False)[1:]], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    make, kwargs = CASES[case]
    expected, found, counts = both(None, make(), **kwargs)
    assert counts == {switch.SERVED: 1}
    close(expected, found)


LAYOUTS = {  # how a query of 2 batches, 6 heads, 5 rows of 8 lies in memory
    "contiguous": lambda: torch.randn(2, 6, 5, 8),
    "rows, then heads": lambda: torch.randn(2, 5, 6, 8).transpose(1, 2),
    "fused q, k, v": lambda: torch.randn(2, 5, 3, 6, 8)[:, :, 0].transpose(1, 2),
    "rows first": lambda: torch.randn(5, 2, 6, 8).permute(1, 2, 0, 3),
    "heads first": lambda: torch.randn(6, 2, 5, 8).transpose(0, 1),
    "sliced": lambda: torch.randn(2, 6, 9, 8)[:, :, 2:7],
    "repeated": lambda: torch.randn(1, 1, 5, 8).expand(2, 6, 5, 8),
    "one row": lambda: torch.randn(2, 1, 6, 8).transpose(1, 2),
    "rows outside": lambda: torch.randn(2, 6, 8, 5).mT,
    "rank 3": lambda: torch.randn(6, 5, 8),
    "rank 5": lambda: torch.randn(2, 2, 6, 5, 8),
}


@pytest.mark.parametrize("groups", [6, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_lie_in_memory_as_torchs(layout, groups):
    """So a view of the result is possible with the switch wherever it is without."""
    q = LAYOUTS[layout]()
    k = torch.randn(*q.shape[:-3], groups, 7, 8)
    gqa = groups < 6
    expected = THE.torch(q, k, k, enable_gqa=gqa)
    with switch.enable():
        found = F.scaled_dot_product_attention(q, k, k, enable_gqa=gqa)
    if q.dim() > 3 or not gqa:
        assert switch.counts() == {switch.SERVED: 1}
    assert found.stride() == expected.stride()


def test_grouped_heads():
    q, (k, v) = qkv(2, 6, 7, 8)[0], qkv(2, 2, 7, 8)[1:]
    expected, found, counts = both(None, [q, k, v], is_causal=True, enable_gqa=True)
    assert counts == {switch.SERVED: 1}
    close(expected, found)


def test_gradient_of_the_mask():
    def call(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, m)
    mask = torch.randn(1, 3, 7, 7).requires_grad_()
    expected, found, counts = both(call, [*qkv(2, 3, 7, 8), mask])
    assert counts == {switch.SERVED: 1} and len(found) == 5
    close(expected, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    expected, found, counts = both(None, qkv(2, 3, 17, 8, dtype=dtype), is_causal=True)
    assert counts == {switch.SERVED: 1}
    close(expected, found, 0.02)


def test_float64_with_a_float32_mask():
    """Right by torch's math path; its flash kernel misreads the mask."""
    q, k, v = qkv(1, 2, 5, 8, keys=40, dtype=torch.float64)
    mask = torch.randn(5, 40, requires_grad=True)

    def attend(q, k, v, mask):
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, mask)

    expected, found, counts = both(attend, [q, k, v, mask])
    assert counts == {switch.SERVED: 1}
    close(expected[:4], found[:4], 1e-12)
    close(expected[4:], found[4:])


def test_autocast():
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k.bfloat16(), v, is_causal=True)
    expected, found, counts = both(call, qkv(2, 3, 17, 8))
    assert counts == {switch.SERVED: 1} and found[0].dtype == torch.bfloat16
    close(expected, found, 0.02)


def test_float64_under_autocast_is_left_to_torch():
    """Which leaves fp64 as it is, and refuses it beside what was made bf16."""
    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v)
    wide, narrow = qkv(2, 3, 7, 8, dtype=torch.float64), qkv(2, 3, 7, 8)
    expected, found, counts = both(call, wide)
    assert counts == {"float64 under autocast": 1} and found[0].dtype == torch.float64
    close(expected, found, 0)
    for i in range(3):
        with switch.enable(), pytest.raises(RuntimeError, match="to have the same dtype, but got"):
            call(*[wide[j] if j == i else narrow[j] for j in range(3)])
    assert switch.counts() == {"float64 under autocast": 4}


def test_dropout_rate_and_seed():
    q, k, v = qkv(1, 4, 64, 8, keys=256, grad=False)
    v = torch.ones_like(v)
    with switch.enable():
        torch.manual_seed(1)
        first = F.scaled_dot_product_attention(q * 0, k, v, dropout_p=0.25)
        other = F.scaled_dot_product_attention(q * 0, k, v, dropout_p=0.25)
        torch.manual_seed(1)
        again = F.scaled_dot_product_attention(q * 0, k, v, dropout_p=0.25)
        none = F.scaled_dot_product_attention(q * 0, k, v)
    assert switch.counts() == {switch.SERVED: 4}
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.testing.assert_close(none, torch.ones_like(none))
    # 64 * 4 * 256 draws: the mean of keep / (1 - p) is 1 within five standard errors.
    assert abs(first[..., 0].mean() - 1) < 5 * (0.25 / 0.75 / 65536) ** 0.5
    kept = first[..., 0] * 256 * 0.75
    torch.testing.assert_close(kept, kept.round(), atol=1e-2, rtol=0)


# ---- Passed through ------------------------------------------------------------------------------

class Sub(torch.Tensor):
    pass


PASSED = {
    "subclass": ("tensor subclass",
                 lambda: [t.detach().as_subclass(Sub) for t in qkv(2, 3, 7, 8)], {}),
    "meta": ("device", lambda: [t.to("meta") for t in qkv(2, 3, 7, 8)], {}),
    "float8": ("dtype", lambda: [t.detach().to(torch.float8_e4m3fn) for t in qkv(2, 3, 7, 8)], {}),
    "mixed dtypes": ("dtype", lambda: [*qkv(2, 3, 7, 8)[:2], qkv(2, 3, 7, 8)[2].double()], {}),
    "rank 2": ("rank", lambda: qkv(7, 8), {}),
    "broadcast batch": ("broadcasts", lambda: [qkv(2, 3, 7, 8)[0], *qkv(1, 3, 7, 8)[1:]], {}),
    "heads differ": ("broadcasts", lambda: [qkv(2, 6, 7, 8)[0], *qkv(2, 2, 7, 8)[1:]], {}),
    "groups do not divide": ("broadcasts", lambda: [qkv(2, 5, 7, 8)[0], *qkv(2, 2, 7, 8)[1:]],
                             {"enable_gqa": True}),
    "head sizes differ": ("broadcasts", lambda: [qkv(2, 3, 7, 8)[0], *qkv(2, 3, 7, 4)[1:]], {}),
    "empty": ("empty", lambda: qkv(2, 3, 0, 8), {}),
    "large heads": ("head size", lambda: qkv(1, 1, 3, 520), {}),
    "mask and causal": ("together", lambda: qkv(2, 3, 7, 8),
                        {"attn_mask": torch.ones(7, 7, dtype=torch.bool), "is_causal": True}),
    "mask too large": ("broadcast", lambda: qkv(2, 3, 7, 8), {"attn_mask": torch.zeros(8, 7)}),
    "mask rank 1": ("broadcast", lambda: qkv(2, 3, 7, 8), {"attn_mask": torch.zeros(7)}),
    "integer mask": ("dtype", lambda: qkv(2, 3, 7, 8), {"attn_mask": torch.zeros(7, 7).long()}),
    "dropout 2": ("dropout", lambda: qkv(2, 3, 7, 8), {"dropout_p": 2.0}),
    "dropout True": ("dropout", lambda: qkv(2, 3, 7, 8), {"dropout_p": True}),
    "scale True": ("scale", lambda: qkv(2, 3, 7, 8), {"scale": True}),
    "scale nan": ("scale", lambda: qkv(2, 3, 7, 8), {"scale": float("nan")}),
    "scale 2e30": ("scale", lambda: [t * 0 for t in qkv(2, 3, 7, 8)], {"scale": 2e30}),
    "no tensor": ("no tensor", lambda: [1, 2, 3], {}),
    "sparse": ("strided", lambda: [t.detach().to_sparse() for t in qkv(2, 3, 7, 8)], {}),
}


@pytest.mark.parametrize("case", PASSED)
def test_passed_through_as_torch_does_it(case):
    """The same value, or the same exception with the same words, and a reason that is counted."""
    word, make, kwargs = PASSED[case]
    tensors = make()

    def run(function):
        try:
            return function(*tensors, **kwargs)
        except Exception as why:
            return type(why), str(why)
    expected = run(THE.torch)
    with switch.enable():
        found = run(F.scaled_dot_product_attention)
    (reason, count), = switch.counts().items()
    assert word in reason and count == 1
    if isinstance(expected, torch.Tensor):
        assert type(found) is type(expected) and found.shape == expected.shape
        if expected.device.type != "meta":
            assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(expected))
    else:
        assert found == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_on_another_device_passes(dtype):
    """Asked of a stand-in: of a mask on meta torch itself makes an output that nobody filled."""
    F.scaled_dot_product_attention = lambda *args, **kwargs: "passed on"
    try:
        with switch.enable():
            mask = torch.zeros(7, 7, dtype=dtype, device="meta")
            assert F.scaled_dot_product_attention(*qkv(2, 3, 7, 8), mask) == "passed on"
    finally:
        F.scaled_dot_product_attention = THE.torch
    assert switch.counts() == {"an attn_mask that is nested, not strided or on another device": 1}


@pytest.mark.parametrize("name, value", [("is_causal", 1), ("enable_gqa", torch.tensor(True)),
                                         ("enable_gqa", None), ("enable_gqa", 0)])
def test_what_is_no_bool_is_refused_as_by_torch(name, value):
    with switch.enable(), pytest.raises(TypeError, match=f"{name}.*must be bool, not"):
        F.scaled_dot_product_attention(*qkv(2, 3, 7, 8), **{name: value})


def test_nested_tensors_pass():
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    old = torch.nested.nested_tensor([p.transpose(0, 1) for p in parts])
    expected = [THE.torch(t, t, t) for t in (jagged, old)]
    with switch.enable():
        found = [F.scaled_dot_product_attention(t, t, t) for t in (jagged, old)]
    for want, have in zip(expected, found):
        for one, other in zip(want.unbind(), have.unbind()):
            assert torch.equal(one, other)
    assert switch.counts() == {"a tensor subclass, or no tensor": 1, "a nested tensor": 1}


def test_sdpa_kernel_is_respected():
    q, k, v = qkv(2, 3, 7, 8)
    with switch.enable():
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            F.scaled_dot_product_attention(q, k, v)
    assert switch.counts() == {"sdpa_kernel without FLASH_ATTENTION": 1, switch.SERVED: 1}


def test_a_mode_of_the_user_sees_the_call():
    class Mode(torch.overrides.TorchFunctionMode):
        seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))
    q, k, v = qkv(1, 2, 5, 4)
    with switch.enable():
        with Mode():
            F.scaled_dot_product_attention(q, k, v)
        assert THE.torch in Mode.seen
        with torch.device("cpu"):
            F.scaled_dot_product_attention(q, k, v)
    assert switch.counts() == {"a TorchFunctionMode that should see the call": 1, switch.SERVED: 1}


def test_a_mode_sees_calls_of_compiled_code():
    """Also where nobody had compiled anything before the switch was on."""
    done = subprocess.run([sys.executable, "-c", """
import orchard, torch, torch.nn.functional as F
class Doubles(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return 2 * made if func.__name__ == "scaled_dot_product_attention" else made
q = torch.randn(1, 2, 5, 8)
expected = 2 * F.scaled_dot_product_attention(q, q, q)
def inside(q):
    with Doubles():
        return F.scaled_dot_product_attention(q, q, q)
with orchard.enable():
    call = torch.compile(inside, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(call(q), expected)
    call = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager")
    with Doubles():
        torch.testing.assert_close(call(q), expected)
assert F.scaled_dot_product_attention in torch.overrides.get_overridable_functions()[F]
"""], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_torch_func():
    q, k, v = (t.detach() for t in qkv(3, 2, 5, 4))

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    def tangent():
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(lambda x: loss(x, k, v), (q,), (torch.ones_like(q),))
    grad = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    per_sample = torch.vmap(torch.func.grad(loss))(q, k, v)
    derivative = tangent()
    with switch.enable():
        close(grad, torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v))
        close([per_sample], [torch.vmap(torch.func.grad(loss))(q, k, v)])
        assert switch.counts(reset=True) == {switch.SERVED: 2}
        close(derivative, tangent())
        assert list(switch.counts()) == ["sdpa_kernel without FLASH_ATTENTION"]
        # What torch's flash kernel refuses (2.13).
        close(derivative, torch.func.jvp(lambda x: loss(x, k, v), (q,), (torch.ones_like(q),)))
        assert switch.counts(reset=True) == {
            "sdpa_kernel without FLASH_ATTENTION": 1, switch.SERVED: 1}
        torch.func.functionalize(loss)(q, k, v)
        assert list(switch.counts()) == ["torch.func transforms other than grad, vmap and jvp"]


def test_forward_mode():
    """As torch's explicit path does it; its flash kernel refuses (2.13)."""
    q, k, v = (t.detach() for t in qkv(1, 2, 5, 4))
    bias = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1))
    forward_ad = torch.autograd.forward_ad

    def tangents():
        with forward_ad.dual_level():
            dual, moving = (forward_ad.make_dual(x, x.cos()) for x in (q, bias))
            made = (F.scaled_dot_product_attention(dual, k, v, is_causal=True),
                    F.scaled_dot_product_attention(dual, dual, v, moving))
            return [forward_ad.unpack_dual(x).tangent for x in made]

    with sdpa_kernel(SDPBackend.MATH):
        expected = tangents()
    with switch.enable():
        close(expected, tangents())
    assert switch.counts() == {switch.SERVED: 2}


# ---- metalcore's names ---------------------------------------------------------------------------

def test_overrides_by_metalcores_names(capsys):
    handle = switch.enable_pytorch_overrides(verbose=True)
    assert switch.get_active_overrides() == switch.active() != []
    assert "scaled_dot_product_attention" in capsys.readouterr().out
    handle.remove()
    assert switch.active() == []
    switch.enable_pytorch_overrides()
    switch.disable_pytorch_overrides(all=False)
    assert switch.active() != []
    switch.disable_pytorch_overrides(verbose=True)
    assert switch.active() == [] and "no overrides" in capsys.readouterr().out
    assert switch.enable_pytorch_overrides(attention=False) is None and switch.active() == []


def test_unaligned_tensors_are_torchs():
    """It reads them; Orchard does not."""
    q, k, v = (x.detach() for x in qkv(1, 2, 5, 4))
    odd = bytearray(1 + k.numel() * k.element_size())
    odd[1:] = k.numpy().tobytes()
    unaligned = torch.frombuffer(odd, dtype=k.dtype, offset=1).view(k.shape)
    mask = torch.frombuffer(bytearray(b"." + torch.randn(5, 5).numpy().tobytes()),
                            dtype=torch.float32, offset=1).view(5, 5)
    for arguments in ((q, unaligned, v), (q, k, v, mask)):
        arguments = [x.to(torch.float32) if x is not unaligned else x for x in arguments]
        with switch.enable():
            found = F.scaled_dot_product_attention(*arguments)
        assert torch.equal(found, THE.torch(*arguments))
    with switch.enable():  # aligned at the lower right, which is Orchard's otherwise
        bias = causal_lower_right(3, 5)
        found = F.scaled_dot_product_attention(q[:, :, :3], unaligned, v, bias)
    torch.testing.assert_close(found, THE.torch(q[:, :, :3], k, v, torch.ones(3, 5).tril(2).bool()))
    assert switch.counts() == {"a tensor that is not aligned to its elements": 3}


def test_a_scale_that_the_compiler_does_not_know():
    """1 / sqrt(head size), where sizes are symbols."""
    def call(q):
        return F.scaled_dot_product_attention(q, q, q, scale=1 / math.sqrt(q.size(-1)))

    torch._dynamo.reset()
    with switch.enable():
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
        for size in (8, 16):
            q = qkv(2, 3, 5, size)[0].detach()
            close(compiled(q), THE.torch(q, q, q, scale=size ** -0.5))


def test_the_three_lines_of_the_readme():
    page = pathlib.Path(__file__).resolve().parents[2] / "README.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) == 3
    q, k, v = qkv(2, 3, 9, 8)

    def train(model):
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    exec(code, {"train": train, "model": None})
    assert switch.counts() == {switch.SERVED: 1}
