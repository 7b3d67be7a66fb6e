"""PyTorch's own samples of scaled_dot_product_attention with the switch on, in every dtype: values
and gradients within the error bar of the explicit formula in fp64. Their scores go to hundreds."""

import sys
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import orchard
from torch_formula import EPSILON, largest

# PyTorch's kit of tests wants this package, which its samples do not use.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

OP = next(one for one in op_db if one.name == "nn.functional.scaled_dot_product_attention")


def run(tensors, options, dout, dtype=None):
    """[out, dq, dk, dv and the mask's gradient, where it has one]."""
    leaves = [x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach().clone()
              for x in tensors]
    for leaf, x in zip(leaves, tensors):
        leaf.requires_grad_(x.requires_grad)
    out = F.scaled_dot_product_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, [x for x in leaves if x.requires_grad],
                                               dout.to(out.dtype))]


def of_rounded_out(q, k, out, dout, scale):
    """What the rounding of out, which backward reads, can do to dq and dk."""
    rows = EPSILON[q.dtype] * (dout * out).double().abs().sum(-1)
    return abs(scale) * largest(k) * largest(rows), abs(scale) * largest(q) * rows.sum().item()


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
def test_values_and_gradients(dtype):
    torch.manual_seed(2)
    served = 0
    for sample in OP.sample_inputs_func(OP, "cpu", dtype, True):
        options = dict(sample.kwargs)
        if options.get("dropout_p"):  # another generator's numbers
            continue
        mask = options.pop("attn_mask", None)
        tensors = [sample.input, *sample.args, *([] if mask is None else [mask])]
        q, k, v = tensors[:3]
        like = F.scaled_dot_product_attention(*tensors, **options)
        dout = torch.randn(like.shape, dtype=torch.float64).to(dtype)
        with sdpa_kernel(SDPBackend.MATH):
            exact, plain = (run(tensors, options, dout, to) for to in (torch.float64, None))
        orchard.enable()
        try:
            before = sum(line.count for line in orchard.report())
            found = run(tensors, options, dout)
            served += sum(line.count for line in orchard.report()) - before
        finally:
            orchard.disable()
        scale = options.get("scale") or q.shape[-1] ** -0.5
        # Of fp64, the reference rounds scores of hundreds as well.
        allowed = (0.0, *of_rounded_out(q, k, exact[0], dout, scale), 0.0, 0.0)
        for name, f, e, p, more in zip(("out", "dq", "dk", "dv", "mask"), found, exact, plain,
                                       allowed):
            bar = 2 * largest(p - e) + (256 if dtype == torch.float64 else 4) \
                * EPSILON[dtype] * largest(e) + more
            assert largest(f - e) <= bar, (name, sample.summary(), largest(f - e) / bar)
    assert served >= 10
