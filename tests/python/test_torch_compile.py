"""torch.compile(fullgraph=True): results are eager's, shapes may change, graphs stay few."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import orchard
import orchard_ops
from orchard.torch import scaled_dot_product_attention as attention


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def leaves(T=6, S=9, H=2, G=2, D=8, dtype=torch.float32):
    return [torch.randn(2, h, n, D, dtype=dtype, requires_grad=True)
            for h, n in ((H, T), (G, S), (G, S))]


def results(function, tensors, dout=None):
    out = function(*tensors)
    out = out[0] if isinstance(out, tuple) else out
    torch.manual_seed(1)
    dout = torch.randn_like(out)
    return [out, *torch.autograd.grad(out, tensors, dout)]


CALLS = {
    "plain": lambda q, k, v: attention(q, k, v),
    "causal": lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.3),
    "mask": lambda q, k, v: attention(q, k, v, torch.ones(q.size(2), k.size(2)).tril(2).bool()),
    "bias": lambda q, k, v: attention(q, k, v, (q.mean(-1, keepdim=True) + k.mean(-1)[:, :, None])),
    "sinks": lambda q, k, v: attention(q, k, v, sinks=q.mean((0, 2, 3)), softcap=2.0,
                                       alibi_slopes=torch.tensor([0.5, 0.25]),
                                       window=(3, 3)),
    "lse": lambda q, k, v: attention(q, k, v, return_lse=True, causal_alignment="bottom_right",
                                     is_causal=True),
    "gqa": lambda q, k, v: attention(q, k[:, :1], v[:, :1], enable_gqa=True),
    "layout": lambda q, k, v: attention(*(x.transpose(1, 2).contiguous().transpose(1, 2)
                                          for x in (q, k, v))).transpose(1, 2).flatten(2) * 2,
    "three": lambda q, k, v: attention(q[0], k[0], v[0]),
    "lengths": lambda q, k, v: attention(q, k, v, key_lengths=torch.tensor([4, 9]), is_causal=True,
                                         causal_alignment="bottom_right"),
    "packed": lambda q, k, v: packed(q, k, v, torch.tensor([0, 5, 5, 12]),
                                     torch.tensor([0, 7, 8, 18]), 7, 10),
}


def packed(q, k, v, cu_q, cu_k, max_t, max_s):
    """The batch's rows, one after the other, as sequences of other lengths."""
    return attention(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), is_causal=True,
                     cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_t, max_seqlen_k=max_s)


@pytest.mark.parametrize("name", CALLS)
def test_inductor_equals_eager(name):
    tensors = leaves()
    torch.manual_seed(5)
    eager = results(CALLS[name], tensors)
    torch.manual_seed(5)
    compiled = results(torch.compile(CALLS[name], fullgraph=True), tensors)
    for a, b in zip(eager, compiled):
        torch.testing.assert_close(a, b)


SHARED = {
    "key_is_value": lambda q, k: attention(q, k, k),
    "all_one": lambda q, k: attention(q, q, q, is_causal=True) + k.sum(),
    "query_is_value": lambda q, k: attention(q, k[:, :, :6], q, scale=0.3),
    "all_one_three": lambda q, k: attention(q[0], q[0], q[0], softcap=2.0) + k.sum(),
}


@pytest.mark.parametrize("name", SHARED)
def test_one_tensor_in_several_places(name):
    """Its gradient is the sum of all places'; so for two arguments that are one tensor."""
    tensors = leaves()[:2]
    eager = results(SHARED[name], tensors)
    for a, b in zip(eager, results(torch.compile(SHARED[name], fullgraph=True), tensors)):
        torch.testing.assert_close(a, b)
    call = torch.compile(CALLS["causal"], fullgraph=True, backend="aot_eager")
    one = tensors[0]
    found = results(lambda x: call(x, x, x), [one])
    for a, b in zip(results(lambda x: CALLS["causal"](x, x, x), [one]), found):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", ["no_grad", "inference", "no_requires_grad"])
def test_without_gradients(mode):
    tensors = leaves()
    if mode == "no_requires_grad":
        tensors = [x.detach() for x in tensors]
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode,
               "no_requires_grad": torch.enable_grad}[mode]
    call = torch.compile(CALLS["causal"], fullgraph=True, backend="aot_eager")
    with context():
        assert torch.equal(call(*tensors), CALLS["causal"](*tensors))


def test_dynamic_shapes_make_one_graph():
    counters.clear()
    call = torch.compile(CALLS["causal"], fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (11, 17, 29, 40):  # no two sizes equal: torch would tie them
        tensors = leaves(T=length, S=length + 3)
        for a, b in zip(results(CALLS["causal"], tensors), results(call, tensors)):
            assert torch.equal(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_each_scale_is_a_graph_of_its_own():
    """torch.compile takes numbers of Python as constants; docs/pytorch.md says so."""
    torch._dynamo.reset()
    counters.clear()

    def call(q, k, v, scale):
        return attention(q, k, v, scale=scale)

    compiled, tensors = torch.compile(call, fullgraph=True, backend="aot_eager"), leaves()
    for scale in (0.5, 0.25, 0.5):
        assert torch.equal(compiled(*tensors, scale), call(*tensors, scale))
    assert counters["stats"]["unique_graphs"] == 2


def test_dynamic_shapes_by_inductor():
    """Its own code around the two ops, for other lengths than it was compiled for."""
    counters.clear()

    def call(q, k, v):
        return attention(q * 2, k, v, is_causal=True).transpose(1, 2).flatten(2).relu()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for length in (11, 17, 40):
        tensors = leaves(T=length, S=length + 3)
        for a, b in zip(results(call, tensors), results(compiled, tensors)):
            torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_dynamic_packed_sequences_make_one_graph():
    """Their lengths and the longest of them are new at each call."""
    counters.clear()
    compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, keys in (([5, 0, 17], [8, 3, 17]), ([13, 2, 15], [1, 30, 3]),
                       ([2, 6, 32], [40, 1, 3])):
        cu = [torch.tensor([0, *n]).cumsum(0) for n in (rows, keys)]
        tensors = leaves(T=sum(rows) // 2, S=sum(keys) // 2)

        def call(function):
            return results(lambda q, k, v: function(q, k, v, *cu, max(rows), max(keys)), tensors)

        for a, b in zip(call(packed), call(compiled)):
            assert torch.equal(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_graph_holds_the_two_ops_and_no_more():
    seen = []

    def look(graph, _inputs):
        seen.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"
                     and not any(word in str(n.target) for word in ("getitem", "detach"))])
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func

    def compiler(graph, inputs):
        return make_boxed_func(look(graph, inputs))

    call = torch.compile(CALLS["plain"], fullgraph=True,
                         backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    results(call, leaves())
    forward, backward = seen
    assert forward == ["orchard.attention.default"]
    assert backward == ["orchard.attention_backward.default"]


CHANGES = {  # in place, of what backward needs
    "out": lambda q, x: attention(q, q, q).mul_(2.0),
    "residual": lambda q, x: attention(q, q, q).add_(q),
    "query": lambda q, x: attention(x := q * 2, x, x) + x.add_(1.0),
    "sum": lambda q, x: (x := q * 2).add_(attention(x, x, x, softcap=9.0)),
    "mask": lambda q, x: attention(q, q, q, m := x > 0) + m.logical_not_().sum(),
    "lengths": lambda q, x: attention(q, q, q, key_lengths=(
        n := torch.tensor([2, 3]))) + n.add_(1).sum(),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_found(name, backend):
    """Compiled, a Function would forget to look, and its gradients be those of other operands."""
    q = leaves(T=4, S=4)[0]
    call = torch.compile(CHANGES[name], fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        call(q, torch.randn(4, 4)).sum().backward()


def test_second_order_of_the_backend_eager():
    """By finite differences: a gradient penalty in training."""
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    x = leaves(dtype=torch.float64)[0]
    call = torch.compile(CALLS["causal"], fullgraph=True, backend="eager")

    def loss(weight):
        made = x @ weight
        first, = torch.autograd.grad(call(made, made, made).sin().sum(), x, create_graph=True)
        return first.square().sum()

    step = 1e-6 * torch.randn_like(weight)
    found, = torch.autograd.grad(loss(weight), weight)
    difference = loss(weight.detach().requires_grad_() + step) - loss(weight - step)
    torch.testing.assert_close((found * step).sum(), difference / 2, rtol=1e-5, atol=0)


def test_where_only_compliant_ops_are_allowed():
    tensors = leaves()
    with torch._dynamo.config.patch(only_allow_pt2_compliant_ops=True):
        call = torch.compile(CALLS["causal"], fullgraph=True, backend="aot_eager")
        for a, b in zip(results(CALLS["causal"], tensors), results(call, tensors)):
            assert torch.equal(a, b)


def test_strides_inside_a_graph_are_eagers():
    """Inductor lays out what it computes as it likes, but not what our ops read: what they return
    follows it. Seen by an op of our own, since what a graph returns is laid out anew."""
    seen = []
    with torch.library._scoped_library("orchard_test", "FRAGMENT") as library:
        library.define("look(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
        library.impl("look", lambda x: seen.append(x.stride()) or x + 1, "CPU")
        torch.library.register_fake("orchard_test::look", torch.empty_like, lib=library)

        def call(q, k, v):
            q = q.transpose(1, 2).contiguous().transpose(1, 2).flip(2)
            return torch.ops.orchard_test.look(attention(q, k, v))

        tensors = [x.detach() for x in leaves()]
        eager = call(*tensors)
        with torch._functorch.config.patch(custom_op_default_layout_constraint="flexible_layout"):
            torch.testing.assert_close(torch.compile(call, fullgraph=True)(*tensors), eager)
    assert seen == [(96, 8, 16, 1)] * 2


def test_dropout_is_new_each_call_and_repeats_with_the_seed():
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(lambda q, k, v: attention(q, k, v, dropout_p=0.5), fullgraph=True,
                         backend=counter)
    tensors = leaves()
    torch.manual_seed(3)
    first, second = call(*tensors), call(*tensors)
    torch.manual_seed(3)
    again = call(*tensors)
    assert not torch.equal(first, second) and torch.equal(first, again)
    assert counter.frame_count == 1, "a new seed must not compile anew"


def test_dropout_backward_uses_the_forwards_mask():
    """With v the only leaf, dv = p^T dout: rows of dropped probabilities tell the mask."""
    call = torch.compile(lambda q, k, v: attention(q, k, v, dropout_p=0.5), fullgraph=True)
    q, k = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)
    v = torch.eye(8).view(1, 1, 8, 8).requires_grad_()
    out = call(q, k, v)
    dv, = torch.autograd.grad(out, v, torch.eye(8).view(1, 1, 8, 8))
    torch.testing.assert_close(dv[0, 0].T, out[0, 0])


# By Orchard's function and by the first Orchard's names.
DROPPING = {"function": lambda v, p: attention(v.detach(), v.detach(), 2 * v, dropout_p=p),
            "orchard_ops": lambda v, p: orchard_ops.flash_attn_fwd(
                v.detach(), v.detach(), 2 * v, 0.3, p, False)[0],
            "dispatcher": lambda v, p: torch.ops.flash_attn_mps._flash_attn_fwd(
                v.detach(), v.detach(), 2 * v, 0.3, p, False)[0]}


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.parametrize("setting", [{"activation_memory_budget": 0.5},
                                     {"activation_memory_budget": 0.0},
                                     {"aggressive_recomputation": True},
                                     {"ban_recompute_not_in_allowlist": False}, {}], ids=str)
def test_dropout_that_backward_might_draw_again_is_not_compiled(setting, name):
    """torch's partitioner would recompute the seed, which is random. Without a setting: a region's
    budget."""
    v = torch.randn(1, 2, 40, 8, requires_grad=True)

    def function(v, p):
        if setting:
            return DROPPING[name](v, p)
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return DROPPING[name](v, p)

    with functorch_config.patch(**setting):
        for p, whole in ((0.0, True), (0.5, False))[:2 if setting else 1]:
            torch.compiler.reset()
            out = torch.compile(function, fullgraph=whole)(v, p)
            dv, = torch.autograd.grad(out, v, out.detach())  # out is linear in 2 v
            torch.testing.assert_close((dv * v).sum(), out.square().sum())
        for backend in ("inductor", "aot_eager_decomp_partition"):
            torch.compiler.reset()
            with pytest.raises(Exception, match="backward could draw another mask"):
                torch.compile(function, fullgraph=True, backend=backend)(v, 0.5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_in_a_compiled_checkpoint(backend):
    """Two calls in one graph, each with a mask of its own, which the checkpoint's second forward
    draws again."""
    q, v = torch.zeros(1, 1, 64, 4), torch.randn(1, 1, 64, 8, requires_grad=True)

    def layer(v):
        return torch.stack([attention(q, q, v, dropout_p=0.5) for _ in range(2)])

    call = torch.compile(lambda v: checkpoint(layer, v, use_reentrant=False), fullgraph=True,
                         backend=backend)
    out = call(v)
    dv, = torch.autograd.grad(out, v, out.detach())
    torch.testing.assert_close((dv * v).sum(), out.square().sum())  # out is linear in v
    assert not torch.equal(*out) and not torch.equal(call(v), out)


def test_autocast_compiled():
    tensors = leaves()
    for dtype in (torch.bfloat16, torch.float16):
        def call(*x):
            with torch.autocast("cpu", dtype):
                return attention(*x)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        out = compiled(*tensors)
        assert out.dtype == dtype and torch.equal(out, call(*tensors))


def test_numbers_that_are_known_at_run_time_only():
    """The longest sequence and a window as numbers of tensors, which no graph holds."""
    def packed(x, cu):
        longest = cu.diff().max().item()
        return attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest,
                         max_seqlen_k=longest, window=(cu[1].item(), 0))

    graphs = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = torch.compile(packed, fullgraph=True, backend=graphs, dynamic=True)
        for cu in (torch.tensor(ends) for ends in ([0, 2, 5], [0, 1, 9], [0, 4, 7], [0, 3, 8])):
            x = torch.randn(int(cu[-1]), 2, 8, requires_grad=True)
            for found, expected in zip(results(lambda x: call(x, cu), [x]),
                                       results(lambda x: packed(x, cu), [x])):
                assert torch.equal(found, expected)
    assert graphs.frame_count <= 2


def test_errors_inside_compiled_code_are_messages():
    call = torch.compile(lambda q, k, v: attention(q, k, v, softcap=-1.0), backend="aot_eager",
                         fullgraph=True)
    with pytest.raises(Exception, match="softcap is -1, must be positive"):
        call(*leaves())


@pytest.mark.parametrize("name", ["grad", "vmap", "vmap of grad"])
def test_func_transforms_are_not_lost(name):
    """Compiled, torch.func.grad would see a call without gradient: refused, or run uncompiled."""
    q, k, v = (x.detach() for x in leaves())
    gradient = torch.func.grad(lambda x: attention(x, k, v).square().sum())
    call = {"grad": gradient, "vmap": torch.vmap(lambda x: attention(x, k, v)),
            "vmap of grad": torch.vmap(gradient)}[name]
    x = q if name == "grad" else torch.stack([q, 2 * q])
    expected = call(x)
    assert expected.abs().max() > 0
    assert torch.equal(torch.compile(lambda x: call(x), backend="aot_eager")(x), expected)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="torch.func"):
        torch.compile(lambda x: call(x), backend="aot_eager", fullgraph=True)(x)


# ---- The functions that know nothing of torch ----------------------------------------------------

def core_forward(x):
    y = x * 2
    return orchard.attention_forward(y, y, y, causal=True)[0] + 1


def core_backward(x):
    y = x * 2
    out, lse = orchard.attention_forward(y, y, y)
    return orchard.attention_backward(out, y, y, y, out, lse).dq + 1


def core_explain(x):
    return x + orchard.explain("attention_forward", x, x, x, threads=1).scratch_bytes


def core_reports(x):
    return x + len(orchard.report()[:1]) + len(orchard.memory_report())


def core_error(x):
    try:
        return orchard.attention_forward(x, x, x[:, :1, :2])[0]
    except orchard.ShapeError:
        return x + 1


@pytest.mark.parametrize("call", [core_forward, core_backward, core_explain, core_reports,
                                  core_error])
def test_the_core_package_runs_uncompiled(call):
    compiled = torch.compile(call, backend="aot_eager")
    for T in (3, 4, 5):
        x = torch.randn(1, 2, T, 8)
        assert torch.equal(compiled(x), call(x))


def test_the_core_package_and_fullgraph():
    for call in (core_forward, core_explain):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="computes outside torch"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(torch.randn(1, 2, 3, 8))


def test_the_core_package_with_more_options_than_dynamo_compiles_for():
    x = torch.randn(1, 2, 9, 8)
    for scale in range(12):
        options = dict(scale=scale / 8, align=("top_left", "bottom_right")[scale % 2])
        call = torch.compile(lambda x: orchard.attention_forward(x, x, x, **options)[0] + 1,
                             backend="eager")
        assert torch.equal(call(x), orchard.attention_forward(x, x, x, **options)[0] + 1)


FIRST_CALL = """
import sys, orchard
assert "torch" not in sys.modules
import torch
def call(x):
    y = x * 2
    return orchard.attention_forward(y, y, y)[0] + 1
x = torch.randn(1, 2, 3, 8)
found = torch.compile(call, backend="eager")(x)
assert torch.equal(found, call(x))
"""


def test_the_core_packages_first_call_is_in_compiled_code():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
