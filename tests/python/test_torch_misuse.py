"""Nothing a caller passes may crash or be swallowed: a clear exception, the library's message."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

import orchard
import orchard_ops
from orchard import _library
from orchard.torch.attention import ops
from orchard.torch import scaled_dot_product_attention as attention
from orchard_bridge.flash_attn_function import FlashAttnFunction

Q = torch.randn(2, 4, 5, 8)


OPERANDS = ("attn_mask", "bias", "alibi_slopes", "sinks", "key_lengths", "cu_seqlens_q",
            "cu_seqlens_k")
place = {"on": None}


def moved(x):
    return x.to(place["on"]) if place["on"] and type(x) is torch.Tensor else x


def call(*tensors, **options):
    return attention(*map(moved, tensors or (Q, Q, Q)),
                     **{n: moved(x) if n in OPERANDS else x for n, x in options.items()})


CASES = [
    # what is passed, the exception, a part of its message
    (lambda: call(None, Q, Q), "Argument", "query is a NoneType, must be a tensor"),
    (lambda: call(Q, [1.0], Q), "Argument", "key is a list"),
    (lambda: call(Q, Q, "value"), "Argument", "value is a str"),
    (lambda: call(attn_mask="mask"), "Argument", "attn_mask is a str"),
    (lambda: call(attn_mask=True), "Argument", "attn_mask is a bool"),
    (lambda: call(attn_mask=torch.ones(5, 5, dtype=torch.int64)), "Dtype", "bool or floating"),
    (lambda: call(attn_mask=torch.zeros(5, 5, dtype=torch.float64)), "Dtype", "bias is f64"),
    (lambda: call(attn_mask=torch.zeros(3, 5)), "Shape", "queries, must be 1 or 5"),
    (lambda: call(attn_mask=torch.zeros(1, 1, 1, 5, 5)), "Shape", "5 dimensions"),
    (lambda: call(attn_mask=torch.zeros(5, 5), bias=torch.zeros(5, 5)), "Argument", "add the two"),
    (lambda: call(bias=torch.ones(5, 5, dtype=torch.bool)), "Dtype", "bias is torch.bool"),
    (lambda: call(bias=3), "Argument", "bias is a int"),
    (lambda: call(scale=float("nan")), "Argument", "scale is nan, must be finite"),
    (lambda: call(scale=float("inf")), "Argument", "scale is inf"),
    (lambda: call(scale="1"), "Argument", "scale is '1', must be a number"),
    (lambda: call(scale=torch.tensor(1.0)), "Argument", "must be a number"),
    (lambda: call(scale=True), "Argument", "must be a number"),
    (lambda: call(dropout_p=1.5), "Argument", "dropout is 1.5, must be 0 ... 1"),
    (lambda: call(dropout_p=-0.1), "Argument", "dropout is -0.1"),
    (lambda: call(dropout_p=float("nan")), "Argument", "dropout is"),
    (lambda: call(dropout_p="no"), "Argument", "dropout_p is 'no'"),
    (lambda: call(dropout_p=None), "Argument", "dropout_p is None"),
    (lambda: call(softcap=-2.0), "Argument", "softcap is -2"),
    (lambda: call(softcap=float("inf")), "Argument", "softcap is inf"),
    (lambda: call(softcap=1e-40), "Argument", "softcap is 1e-40, must be 1e-30 ... 1e+30"),
    (lambda: call(scale=-2e30), "Argument", "scale is -2e+30, must be -1e+30 ... 1e+30"),
    (lambda: call(softcap="x"), "Argument", "softcap is 'x'"),
    (lambda: call(window=3), "Argument", "window is 3, must be (left, right)"),
    (lambda: call(window=(1,)), "Argument", "window"),
    (lambda: call(window=(1.5, 2)), "Argument", "window is 1.5, must be an integer"),
    (lambda: call(window=(-2, 0)), "Argument", "window is (-2, 0)"),
    (lambda: call(window=(2 ** 70, 0)), "Argument", "64 bits"),
    (lambda: call(attn_mask=causal_lower_right(4, 5)), "Shape",
     "causal_lower_right(4, 5), there are 5 queries and 5 keys"),
    (lambda: call(causal_alignment="middle"), "Argument", '"top_left" or "bottom_right"'),
    (lambda: call(causal_alignment=1), "Argument", "causal_alignment is 1"),
    (lambda: call(causal_alignment=[]), "Argument", "causal_alignment is []"),
    (lambda: call(is_causal=torch.ones(2)), "Argument", "is_causal is a Tensor"),
    (lambda: call(is_causal="no"), "Argument", "is_causal is 'no', must be True or False"),
    (lambda: call(enable_gqa=None), "Argument", "enable_gqa is None, must be True or False"),
    (lambda: call(return_lse=torch.ones(2)), "Argument", "return_lse is a Tensor"),
    (lambda: call(Q, Q[:, :2], Q[:, :2], enable_gqa=torch.ones(2)), "Argument",
     "enable_gqa is a Tensor"),
    (lambda: call(dropout_p=torch.ones(2)), "Argument", "dropout_p is a Tensor of shape [2], must be"),
    (lambda: call(alibi_slopes=torch.rand(3)), "Shape", "alibi must hold 4 heads"),
    (lambda: call(alibi_slopes=torch.rand(4).double()), "Dtype", "alibi is f64"),
    (lambda: call(alibi_slopes=0.5), "Argument", "alibi_slopes is a float"),
    (lambda: call(sinks=torch.rand(2, 4)), "Shape", "sinks must be [4]"),
    (lambda: call(sinks=torch.ones(4, dtype=torch.int64)), "Dtype", "sinks is i64"),
    (lambda: call(key_lengths=torch.tensor([5, 6])), "Argument", "key_lengths[1] is 6"),
    (lambda: call(key_lengths=torch.tensor([5.0, 5.0])), "Dtype", "key_lengths is f32"),
    (lambda: call(key_lengths=[5, 5]), "Argument", "key_lengths is a list"),
    (lambda: call(Q[:, :, 0], Q, Q), "Shape", "key has 4 heads, query has 2"),
    (lambda: call(torch.tensor(1.0), Q, Q), "Shape", "at least 2"),
    (lambda: call(Q, Q[..., :4], Q), "Shape", "k has head size 4, q has 8"),
    (lambda: call(Q, Q, Q[:, :, :3]), "Shape", "v has 4 heads and 3 rows"),
    (lambda: call(Q, Q[:, :2], Q[:, :2]), "Shape", "enable_gqa=True"),
    (lambda: call(Q, Q[:, :3], Q[:, :3], enable_gqa=True), "Shape", "multiple of k's"),
    (lambda: call(torch.randn(3, 4, 5, 8), Q, Q), "Shape", "do not fit together"),
    (lambda: call(Q, Q.double(), Q), "Dtype", "k is f64, must be f32"),
    (lambda: call(Q, Q, Q.half()), "Dtype", "v is f16, must be f32"),
    (lambda: call(*[torch.ones(1, 1, 2, 2, dtype=torch.int64)] * 3), "Dtype", "q is i64"),
    (lambda: call(*[torch.ones(1, 1, 2, 2, dtype=torch.complex64)] * 3), "Dtype", "know"),
    (lambda: call(*[torch.ones(1, 1, 2, 2).to(torch.float8_e4m3fn)] * 3), "Dtype", "know"),
    (lambda: call(*[torch.ones(1, 1, 2, 600)] * 3), "Shape", "head size of q is 600"),
    (lambda: call(*[torch.ones(1, 1, 2, 0)] * 3), "Shape", "head size"),
    (lambda: call(Q.to_sparse(), Q, Q), "Unsupported", "layout torch.sparse_coo"),
    (lambda: call(Q, Q.to_mkldnn(), Q), "Unsupported", "layout torch._mkldnn"),
    (lambda: call(torch.nested.nested_tensor([Q[0], Q[1]]), Q, Q), "Unsupported", "nested"),
    (lambda: call(*[torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)] * 3), "Unsupported",
     "query is quantized"),
    (lambda: call(Q, Q.to("meta"), Q), "Argument", "key is on meta, query is on cpu"),
    (lambda: call(attn_mask=torch.ones(5, 5, device="meta").bool()), "Argument", "is on meta"),
    (lambda: call(max_seqlen_q=5), "Argument", "belong to cu_seqlens"),
    (lambda: call(Q[0], Q[0], Q[0], cu_seqlens_q=torch.tensor([0, 4])), "Argument", "max_seqlen_q"),
    (lambda: call(Q[0], Q[0], Q[0], cu_seqlens_q=torch.tensor([0, 4]), max_seqlen_q=4,
                  max_seqlen_k=4), "Argument", "without the other"),
    (lambda: call(*[Q[0]] * 3, cu_seqlens_q=torch.tensor([0, 9]), max_seqlen_q=9, max_seqlen_k=4,
                  cu_seqlens_k=torch.tensor([0, 4])), "Argument", "cu_seqlens_q[1] is 9"),
    (lambda: call(*[Q[0]] * 3, cu_seqlens_q=torch.tensor([0, 4]), max_seqlen_q=2, max_seqlen_k=4,
                  cu_seqlens_k=torch.tensor([0, 4])), "Argument", "max_t says 2"),
    (lambda: call(*[Q] * 3, cu_seqlens_q=torch.tensor([0, 4]), max_seqlen_q=4, max_seqlen_k=4,
                  cu_seqlens_k=torch.tensor([0, 4])), "Shape", "packed"),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: CASES[i][2][:40])
@pytest.mark.parametrize("recording", [True, False])
def test_misuse(case, recording):
    do, kind, message = CASES[case]
    with torch.set_grad_enabled(recording), pytest.raises(Exception) as caught:
        do()
    assert type(caught.value) is getattr(_library, kind + "Error"), repr(caught.value)
    assert isinstance(caught.value, orchard.OrchardError)
    assert message in str(caught.value) and "\n" not in str(caught.value)


# Numbers that lie in memory, layouts that meta does not have, two devices.
NOT_ON_META = ("key_lengths[1]", "cu_seqlens_q[1]", "max_t says", "layout", "nested", "quantized",
               "is on meta")


@pytest.mark.parametrize("case", [i for i, (_, _, message) in enumerate(CASES)
                                  if not any(words in message for words in NOT_ON_META)],
                         ids=lambda i: CASES[i][2][:40])
@pytest.mark.parametrize("recording", [True, False])
def test_misuse_on_meta(case, recording, monkeypatch):
    monkeypatch.setitem(place, "on", "meta")
    test_misuse(case, recording)


@pytest.mark.parametrize("change", [
    dict(dout=torch.randn(2, 4, 5, 7)), dict(out=torch.randn(2, 4, 4, 8)),
    dict(lse=torch.randn(2, 4, 4)), dict(lse=torch.randn(2, 4, 5).double()),
    dict(lse_rest=torch.randn(2, 4, 4)), dict(lse_rest=torch.randn(2, 4, 5).double()),
    dict(dlse=torch.randn(2, 4)), dict(k=torch.randn(2, 4, 5, 6)), dict(needs=0)],
    ids=str)
def test_wrong_backwards_say_the_same_on_meta(change):
    given = dict(needs=7, dout=Q, dlse=None, out=Q, lse=Q[..., 0].contiguous(), lse_rest=None,
                 q=Q, k=Q, v=Q)
    given.update(change)
    rest = (*(None,) * 8, 0, 0, None, False, False, -1, -1, 0.0, 0.0)
    said = []
    for device in ("cpu", "meta"):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            ops.backward(*(x.to(device) if isinstance(x, torch.Tensor) else x
                           for x in given.values()), *rest)
        said.append(str(caught.value).split("\n", 1)[0])
    assert said[0] == said[1] and said[0].startswith("attention_backward: ")


def test_errors_after_requires_grad_are_the_same():
    q = Q.clone().requires_grad_()
    with pytest.raises(_library.DtypeError, match="k is f64, must be f32"):
        attention(q, Q.double(), Q)


def test_other_devices_are_named():
    with pytest.raises(_library.UnsupportedError, match="device cuda"):
        ops.kernel_for("cuda")


def test_meta_tensors_have_shapes():
    q = Q.to("meta")
    out, lse = attention(q, q, q, is_causal=True, return_lse=True)
    assert out.is_meta and out.shape == Q.shape and out.is_contiguous()
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_raising_leaks_nothing():
    """400 refused calls with operands of 1 and 2 MiB: leaked handles would keep them alive."""
    import resource
    before = None
    for i in range(400):
        big = torch.zeros(1, 4, 1024, 64)
        with pytest.raises(_library.DtypeError):
            attention(big, big.double(), big)
        del big
        if i == 50:
            gc.collect()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_direct_op_calls_say_the_same():
    with pytest.raises(Exception, match="q has rank 2"):
        ops.forward(Q[0, 0], Q, Q, *(None,) * 8, 0, 0, None, False, False, -1, -1, 0.0, 0.0)
    out, lse = ops.forward(Q, Q, Q, *(None,) * 8, 0, 0, None, False, False, -1, -1, 0.0, 0.0)
    with pytest.raises(Exception, match="no gradient is asked for"):
        ops.backward(0, out, None, out, lse, None, Q, Q, Q, *(None,) * 8, 0, 0, None, False,
                     False, -1, -1, 0.0, 0.0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_absent_operands_and_wrong_ranks_of_the_ops(device):
    q, rest = Q.to(device), (*(None,) * 8, 0, 0, None, False, False, -1, -1, 0.0, 0.0)
    words = "is missing|no memory that can be read"
    for at in range(3):
        with pytest.raises((ValueError, RuntimeError), match=words):
            ops.forward(*[None if i == at else q for i in range(3)], *rest)
    for at in (0, 2, 3, 5, 6, 7):
        given = [None if i in (1, 4, at) else q for i in range(8)]
        with pytest.raises((ValueError, RuntimeError), match=words):
            ops.backward(7, *given, *rest)
    with pytest.raises((ValueError, RuntimeError), match="has rank 2, must be"):
        ops.forward(q[0, 0], q, q, *rest)


def test_a_head_of_key_or_value_is_repeated_no_times_for_none():
    """Heads of 1 and 0 become 0, as torch broadcasts."""
    for k, v in ((Q[:, :1], Q[:, :0]), (Q[:, :0], Q[:, :1])):
        with pytest.raises(_library.ShapeError):
            call(Q, k, v)


# ---- Storages that were shrunk under their tensors, as FSDP does ---------------------------------

def operands(packed):
    """Every tensor that the two ops take, in the order of backward's schema."""
    B, H, T, S, D, E = 2, 4, 5, 7, 8, 6
    size = (2 * T, H) if packed else (B, H, T)
    keys = (2 * S, H) if packed else (B, H, S)
    given = dict(dout=torch.randn(*size, E), dlse=torch.randn(size), out=None, lse=None,
                 lse_rest=torch.zeros(size),
                 q=torch.randn(*size, D), k=torch.randn(*keys, D), v=torch.randn(*keys, E),
                 bias=torch.randn(1, H, T, S), mask=torch.rand(1, 1, T, S) < 0.9,
                 alibi=torch.rand(H), sinks=torch.randn(H), key_lengths=torch.tensor([S, S - 2]),
                 cu_seqlens_q=None, cu_seqlens_k=None, seed=torch.tensor(3))
    if packed:
        given.update(key_lengths=None, cu_seqlens_q=torch.tensor([0, 3, 2 * T]),
                     cu_seqlens_k=torch.tensor([0, S, 2 * S]), bias=None, mask=None)
    return given


def run(op, kernels, given, packed):
    options = (7 * packed, 7 * packed, None, False, False, -1, -1, 0.0, 0.25)
    forward, backward = kernels
    if op == "attention_forward":
        return forward(*list(given.values())[5:], *options)
    return backward(31 if not packed else 23, *given.values(), *options)


@pytest.mark.parametrize("kernels", [(ops.forward, ops.backward), ops.kernel_for("cpu")],
                         ids=["c", "python"])
@pytest.mark.parametrize("op", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_operand_must_fit_into_its_storage(kernels, op, packed):
    given = operands(packed)
    given["out"], given["lse"] = run("attention_forward", kernels, given, packed)
    run(op, kernels, given, packed)
    first = 0 if op == "attention_backward" else 5
    for name in [name for name, x in list(given.items())[first:] if x is not None]:
        whole = given[name].numel() * given[name].element_size()
        for there in (0, whole - 1):
            cut = given[name].clone()
            cut.untyped_storage().resize_(there)
            with pytest.raises((orchard.ArgumentError, RuntimeError)) as caught:
                run(op, kernels, dict(given, **{name: cut}), packed)
            assert str(caught.value).split("\n")[0] == (
                f"{op}: {name} needs {whole} bytes of its storage, which has {there}")


def test_views_must_fit_into_their_storage():
    """To the byte; and tensors of no element need none."""
    base = torch.randn(2, 9, 4, 16)
    view = base.transpose(1, 2)[:, 1:, 2:7, 3:11]
    expected = attention(view, view, view)
    storage = base.untyped_storage()
    last = 4 * (1 + 3 * 1 + 16 * 3 + 64 * 6 + 576 + 7)
    storage.resize_(last)
    assert torch.equal(attention(view, view, view), expected)
    storage.resize_(last - 1)
    for options in ({}, {"dropout_p": 0.5}, {"return_lse": True}):
        with pytest.raises(orchard.ArgumentError, match=f"q needs {last} bytes of its storage, "
                                                        f"which has {last - 1}"):
            attention(view, view, view, **options)
    assert attention(*[torch.empty(0, 4, 5, 8)] * 3).numel() == 0
    one = torch.randn(1, 1, 1, 8)
    many = one.expand(2, 4, 5, 8)
    torch.testing.assert_close(attention(many, many, many), many)


def test_storages_shrunk_between_forward_and_backward():
    for name in "qkv":
        given = {n: torch.randn(1, 2, 3, 4, requires_grad=True) for n in "qkv"}
        out = attention(*given.values())
        given[name].untyped_storage().resize_(0)
        with pytest.raises(orchard.ArgumentError,
                           match=f"attention_backward: {name} needs 96 bytes of its storage, "
                                 "which has 0"):
            out.sum().backward()


# ---- Out of memory -------------------------------------------------------------------------------

NO_SPECIFIC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
int pthread_setspecific(pthread_key_t key, const void *value)
{
    int (*real)(pthread_key_t, const void *);
    Dl_info caller;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_setspecific");
    if (dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "orchard_torch")) {
        return ENOMEM;
    }
    return real(key, value);
}
"""
WITHOUT_MEMORY = """
import orchard, torch, orchard.torch
x = torch.zeros(1, 1, 2, 2)
try:
    orchard.attention_forward(x, x, x[..., :0])
except orchard.ShapeError as why:
    print(type(why).__name__)
for needs in (False, True):
    try:
        orchard.torch.scaled_dot_product_attention(x.requires_grad_(needs), x, x)
    except orchard.OutOfMemoryError as why:
        print(why)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD is for Linux")
def test_no_memory_for_a_context_has_its_own_message(tmp_path):
    """And not that of the call before."""
    (tmp_path / "no.c").write_text(NO_SPECIFIC)
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "no.c"), "-o", str(tmp_path / "no.so"),
                    "-ldl"], check=True)
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True,
                          timeout=120, env=dict(os.environ, LD_PRELOAD=str(tmp_path / "no.so")))
    message = "attention_forward: no memory for this thread's context\n"
    assert done.stdout == "ShapeError\n" + 2 * message, done.stdout + done.stderr


UNKNOWN_BACKEND = """
import orchard, torch, orchard.torch
x = torch.zeros(1, 1, 2, 2)
for call in (lambda: orchard.attention_forward(x, x, x),
             lambda: orchard.torch.scaled_dot_product_attention(x, x, x),
             lambda: orchard.torch.scaled_dot_product_attention(x, x, x, window=(1, 1))):
    try:
        call()
    except orchard.ArgumentError as why:
        print(why)
"""


@pytest.mark.parametrize("kernel", ["c", "python"])
def test_a_wrong_environment_is_an_argument_error_everywhere(kernel):
    done = subprocess.run([sys.executable, "-c", UNKNOWN_BACKEND], capture_output=True, text=True,
                          timeout=120, env=dict(os.environ, ORCHARD_BACKEND="nonsense",
                                                ORCHARD_TORCH_KERNEL=kernel))
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1, done.stdout + done.stderr
    assert lines[0].startswith('ctx_create: ORCHARD_BACKEND is "nonsense"')


@pytest.mark.parametrize("apply", [orchard_ops.flash_attn_fwd, FlashAttnFunction.apply])
def test_the_first_orchards_names_raise_the_same_exceptions(apply):
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    for wrong, kind in (((q, q.double(), q), orchard.DtypeError),
                        ((q, q[..., :4], q), orchard.ShapeError)):
        with pytest.raises(kind, match="attention_forward: k"):
            apply(*wrong, 1.0, 0.0, False)
    with pytest.raises(orchard.ArgumentError, match="scale is nan"):
        apply(q, q, q, float("nan"), 0.0, False)


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa", "return_lse", "dropout_p",
                                  "causal_alignment"])
def test_several_numbers_for_one(name):
    for several in (np.array([0, 1]), torch.tensor([0, 1])):
        with pytest.raises(orchard.ArgumentError, match=name):
            call(**{name: several})
