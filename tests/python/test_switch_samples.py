"""PyTorch's own samples of its operators, with the switch on and off: values, gradients, dtypes,
strides and errors are the same, whatever rooms there are.

Which operators reach a replaced operation is found by calling each of PyTorch's list once; so a
room needs no line here. The planted room shows that the test itself works.
"""

import itertools
import sys
import types
import unittest

import planted_room
import pytest
import torch
from torch.utils import _pytree as pytree

# PyTorch's kit of tests wants this package, which its samples do not use.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

from orchard import switch  # noqa: E402
from orchard.switch import kernels  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_SAMPLES = 48
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2,
             torch.complex64: 2e-4, torch.complex128: 1e-9}
FOUND = {"planted": planted_room.PLANTED, "rooms": kernels.replacements()}


def everything():
    return switch.enable(attention=False, **{group: True for group in
                                             {one.group for one in kernels.replacements()}})


def samples_of(one, dtype, gradients):
    """As one.sample_inputs() gives them, which looks through the whole stack for each."""
    return one.sample_inputs_func(one, "cpu", dtype, gradients)


def reached():
    """The operations that the switch saw since it was last asked, by Orchard computed or not."""
    return {what.partition(": ")[0] for what in switch.counts(reset=True)}


def operators(replacements):
    """Those of PyTorch's list that reach one of the operations, and all that were reached."""
    made, seen = [], set()
    with planted_room.only(*replacements), everything():
        switch.counts(reset=True)
        for one in op_db:
            if torch.float32 not in one.supported_dtypes("cpu"):
                continue
            try:
                sample = next(iter(samples_of(one, torch.float32, True)))
                reached()  # making the sample may reach some too
                out = one(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # needs what this machine lacks
                continue
            found = reached()
            if found:
                made.append(one)
                cotangents(out)
                seen |= found | reached()
    return made, seen


def cotangents(out):
    """Gradients of every leaf that went into `out`, by a fixed cotangent; of infinite results by 0,
    for they have no derivative, and rooms may leave them out."""
    outs = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(3)
    torch.autograd.backward(outs, [torch.where(
        x.detach().isfinite(), torch.randn(x.shape, generator=generator, dtype=x.dtype), 0)
        for x in outs])


before = torch.get_num_threads()
torch.set_num_threads(1)  # tiny problems
CASES, REACHED = [], {}
for name, replacements in FOUND.items():
    ops, REACHED[name] = operators(replacements)
    CASES += [pytest.param(name, one, id=f"{name}-{one.formatted_name}") for one in ops]
torch.set_num_threads(before)


def run(one, sample, gradients):
    """Outputs, then the gradients of the sample's leaves."""
    fresh = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
             if isinstance(x, torch.Tensor) else x
             for x in pytree.tree_leaves((sample.input, sample.args, sample.kwargs))]
    value, args, kwargs = pytree.tree_unflatten(
        fresh, pytree.tree_structure((sample.input, sample.args, sample.kwargs)))
    torch.manual_seed(11)
    out = one(value, *args, **kwargs)
    if gradients:
        cotangents(out)
    return ([x.detach() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(out)],
            [x.grad for x in fresh if isinstance(x, torch.Tensor) and x.requires_grad])


@pytest.mark.parametrize("name, one", CASES)
def test_values_and_gradients(name, one):
    computed = 0
    with planted_room.only(*FOUND[name]):
        for dtype, tolerance in TOLERANCE.items():
            if dtype not in one.supported_dtypes("cpu"):
                continue
            gradients = one.supports_autograd and dtype in one.supported_backward_dtypes("cpu")
            samples = samples_of(one, dtype, gradients)
            for sample in itertools.islice(samples, MOST_SAMPLES):
                expected = run(one, sample, gradients)
                switch.counts(reset=True)
                with everything():
                    found = run(one, sample, gradients)
                computed += sum(count for what, count in switch.counts(reset=True).items()
                                if what.endswith(switch.SERVED))
                for want, have in zip(expected[0], found[0]):
                    if isinstance(want, torch.Tensor) and want.numel():
                        assert want.stride() == have.stride(), sample.summary()
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance,
                                           equal_nan=True, msg=lambda m: f"{m}\n{sample.summary()}")
    assert computed, "no sample was computed by Orchard"


@pytest.mark.parametrize("name, one", [case for case in CASES
                                       if case.values[1].error_inputs_func is not None])
def test_errors(name, one):
    """What torch refuses is refused by torch itself: the room passes it on."""
    with planted_room.only(*FOUND[name]):
        for wrong in one.error_inputs_func(one, "cpu"):
            sample, messages = wrong.sample_input, []
            for on in (False, True):
                try:
                    with everything() if on else torch.enable_grad():
                        one(sample.input, *sample.args, **sample.kwargs)
                    messages.append("no error")
                except Exception as why:
                    messages.append(f"{type(why).__name__}: {why}")
            assert messages[0] == messages[1]


@pytest.mark.parametrize("name", FOUND)
def test_every_replaced_operation_is_reached(name):
    """But variants that only C++ callers and `out=` reach: those of tests by name."""
    missed = {one.op for one in FOUND[name]} - REACHED[name]
    assert not {op for op in missed if "." not in op and not op.endswith("_")}


def test_a_planted_mistake_is_seen(monkeypatch):
    wrong = [one._replace(run=lambda *a, run=one.run: mistaken(run(*a))) for one in
             planted_room.PLANTED if one.op == "aten::gelu_backward"]

    def mistaken(result):
        return result * 1.001 if isinstance(result, torch.Tensor) else result
    monkeypatch.setitem(FOUND, "planted", wrong)
    gelu = next(one for one in op_db if one.name == "nn.functional.gelu")
    with pytest.raises(AssertionError):
        test_values_and_gradients("planted", gelu)
