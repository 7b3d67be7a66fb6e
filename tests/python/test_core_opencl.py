"""Calls on a device: backend="opencl" of orchard's own calls, ORCHARD_BACKEND for orchard.torch.

Values and gradients against the explicit formula in fp64, within docs/numerics.md's bar, and
against the CPU backend's. Then who ran and how operands came there, as explain, report and
memory_report tell it; what happens without a device, with one that refuses, in a fork, and after
one was lost.

tests/run keeps drivers away from these suites, so each part runs in a child that has them: this
file as a program, FUNCTION FILE, pickles what it saw, and the tests below check it. The device is
PoCL, which is this CPU; behind libfaulty_opencl it passes for a GPU, counts its launches, and fails
when told to.
"""
import ctypes
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import orchard
import pytest
import torch
from core_formula import kept
from torch_formula import assert_within, differentiable, formula, rand, run, wide

B, H, G, T, S, D, E = 2, 4, 2, 67, 75, 13, 16  # a tile of the kernels and a little more, both ways
FORWARD, BACKWARD = "attention_forward", "attention_backward"
NO_DEVICE = "no OpenCL device could be opened"
NO_F64 = "f64 tensors: no GPU backend has double precision"
LOST = "the device was lost"
DROPOUT = dict(dropout=0.25, seed=(3 << 40) + 7, dropout_offset=5)

# ---- Calls, the same in child and parent ---------------------------------------------------------

def hidden_row(mask):
    mask[:, :, 5] = False
    return mask


OPTIONS = {  # in the words of orchard.torch
    "causal": lambda t: dict(is_causal=True),
    "mask": lambda t: dict(attn_mask=hidden_row(torch.rand(B, 1, T, S) < 0.6)),
    "all": lambda t: dict(is_causal=True, causal_alignment="bottom_right", window=(40, -1),
                          softcap=3.0, bias=rand(B, 1, T, S, dtype=t), sinks=rand(H, dtype=t),
                          attn_mask=torch.rand(1, H, T, S) < 0.8, alibi_slopes=torch.rand(H),
                          key_lengths=torch.tensor([75, 31]), scale=0.3),
}
CORES_WORDS = {"is_causal": "causal", "attn_mask": "mask", "causal_alignment": "align",
               "alibi_slopes": "alibi"}
CORES = [("causal", torch.float32), ("mask", torch.float32), ("all", torch.float32),
         ("causal", torch.float16), ("mask", torch.bfloat16)]
TORCHS = [("causal", torch.float32), ("mask", torch.float32), ("mask", torch.bfloat16)]


def drawn(name, dtype):
    """[q, k, v], the options, dout and dlse."""
    torch.manual_seed(len(name))
    options = OPTIONS[name](dtype)
    tensors = [rand(B, heads, length, size, dtype=dtype)
               for heads, length, size in ((H, T, D), (G, S, D), (G, S, E))]
    return tensors, options, rand(B, H, T, E, dtype=dtype), rand(B, H, T, dtype=wide(dtype))


# ---- What a child does ---------------------------------------------------------------------------

def counted():
    return {(line.op, line.backend, line.reason): line.count for line in orchard.report()}


def watched(function, *operands, **options):
    """What a call returned or raised, and what report and memory_report counted meanwhile."""
    before, memory = counted(), orchard.memory_report()
    try:
        result = function(*operands, **options)
    except RuntimeError as error:  # what Orchard raises here is of this kind too
        result = type(error), str(error)
    changes = {line: n - before.get(line, 0) for line, n in counted().items()
               if n != before.get(line, 0)}
    return result, changes, tuple(y - x for x, y in zip(memory, orchard.memory_report()))


def array(x):
    """NumPy's where it has the dtype; torch's tensors are arrays too."""
    return x.numpy() if isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16 else x


def core_step(name, dtype, backend):
    """Forward and backward by orchard's own calls: [out, lse, dq, dk, dv, ...], what was counted,
    and what explain said before."""
    tensors, options, dout, dlse = drawn(name, dtype)
    names = differentiable(options)
    call = {CORES_WORDS.get(n, n): array(x) for n, x in options.items()}
    call.update(DROPOUT if name == "all" else {}, backend=backend)
    operands = [array(x) for x in tensors]
    said = [orchard.explain(FORWARD, *operands, **call)]
    (out, lse), forward, _ = watched(orchard.attention_forward, *operands, **call)
    dlse = torch.where(torch.as_tensor(lse).isinf(), 0.0, dlse)
    call.update(dlse=array(dlse), want=["dq", "dk", "dv", *("d" + n for n in names)])
    operands = [array(dout), *operands, out, lse]
    said.append(orchard.explain(BACKWARD, *operands, **call))
    found, backward, _ = watched(orchard.attention_backward, *operands, **call)
    results = [out, lse, found.dq, found.dk, found.dv, *(getattr(found, "d" + n) for n in names)]
    return [torch.as_tensor(x) for x in results], [forward, backward], said


def aligned(*shape, offset=0):
    """fp32 in memory that begins on a cache line, or `offset` bytes behind one."""
    block = np.empty(4 * int(np.prod(shape)) + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    made = block[start:start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)
    made[:] = np.random.default_rng(1).standard_normal(shape)
    return made


def wholes(**offsets):
    """Five operands of a forward call, in whole cache lines; none in whole pages."""
    shapes = dict(q=(1, 2, 16, 16), k=(1, 2, 40, 16), v=(1, 2, 40, 16), out=(1, 2, 16, 16),
                  lse=(1, 2, 16))
    return {name: aligned(*shape, offset=offsets.get(name, 0)) for name, shape in shapes.items()}


def memory_steps():
    """memory_report for operands that lie well, that do not, with gaps, and for the CPU."""
    well, moved, gaps = wholes(), wholes(k=4, out=8), wholes()
    wider = aligned(1, 2, 16, 25)
    wider[:] = 7
    gaps["out"] = wider[..., :16]
    forward = orchard.attention_forward
    made = [watched(forward, **call, backend="opencl")[2] for call in (well, moved, gaps)]
    expected, _, cpus = watched(forward, *(well[n] for n in "qkv"), backend="cpu")
    return ([*made, cpus], [well["out"], moved["out"], gaps["out"]], expected[0], wider[..., 16:])


def in_fork(work):
    """work() in a forked child, by way of a pipe."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(theirs, "wb") as file:
                pickle.dump(work(), file)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as file:
        result = file.read()
    os.waitpid(child, 0)
    return pickle.loads(result)


def on_pocl():
    """OpenCL as Debian installs it."""
    forward, q = orchard.attention_forward, wholes()["q"]
    wide_q = q.astype(np.float64)
    made = {"core": {(name, dtype, backend): core_step(name, dtype, backend)
                     for name, dtype in CORES for backend in ("opencl", "cpu")},
            "memory": memory_steps()}
    for what, x, backend in (("default", q, None), ("f64", wide_q, "opencl"),
                             ("f64 or cpu", wide_q, "opencl,cpu"), ("cpu first", q, "cpu,opencl")):
        made[what] = (orchard.explain(FORWARD, x, x, x, backend=backend),
                      *watched(forward, x, x, x, backend=backend)[:2])
    made["f64 by cpu"] = forward(wide_q, wide_q, wide_q, backend="cpu")
    made["once"], results = forward(q, q, q, backend="opencl")[0], []

    def work():
        results.extend(forward(q, q, q, backend="opencl")[0] for _ in range(5))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    made["in threads"] = results
    made["by cpu"] = forward(q, q, q, backend="cpu")[0]
    made["in a fork"] = in_fork(lambda: [watched(forward, q, q, q, backend=backend)
                                         for backend in ("opencl,cpu", "opencl")])
    made["after a fork"] = watched(forward, q, q, q, backend="opencl")
    return made


EVENT, LAUNCH = b"event", b"launch"  # libfaulty_opencl keeps these very addresses


def launches():
    return ctypes.CDLL(os.environ["ORCHARD_OPENCL_LIBRARY"]).faulty_opencl_calls(LAUNCH)


def lose_the_device():
    """The next work that was started fails."""
    ctypes.CDLL(os.environ["ORCHARD_OPENCL_LIBRARY"]).faulty_opencl_fail(EVENT, 1)


def torch_step(name, dtype):
    """As core_step, by orchard.torch on heads that were split from rows; and how often launched."""
    from orchard.torch import scaled_dot_product_attention

    def rows(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x

    tensors, options, dout, dlse = drawn(name, dtype)
    before = launches()
    found, changes, _ = watched(run, scaled_dot_product_attention, tensors, options, [], dout, dlse,
                                rows, return_lse=True, enable_gqa=True)
    return found, changes, launches() - before


def plain_step():
    """Out and gradients of a call without options, which has ops of its own."""
    from orchard.torch import scaled_dot_product_attention
    torch.manual_seed(4)
    leaves = [torch.randn(1, 2, T, 16).requires_grad_() for _ in range(3)]
    out = scaled_dot_product_attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def torch_on_opencl():
    """ORCHARD_BACKEND=opencl,cpu, with the kernels that ORCHARD_TORCH_KERNEL names."""
    from orchard.torch import cpu, scaled_dot_product_attention
    x = torch.ones(1, 2, 5, 16)
    made = {"kernel": cpu.kernel(), "plain": watched(plain_step),
            "said": orchard.explain(FORWARD, x, x, x),
            "f64": watched(scaled_dot_product_attention, *[x.double()] * 3)}
    made.update({(name, dtype): torch_step(name, dtype) for name, dtype in TORCHS})
    lose_the_device()
    made["losing"] = watched(scaled_dot_product_attention, x, x, x)
    made["lost"] = watched(scaled_dot_product_attention, x, x, x, window=(2, 2))
    return made


def deviating():
    """A device whose kernels do nothing, every second call audited, ORCHARD_STRICT=1: what torch's
    calls without options saw, with nothing recorded and with a graph; then orchard's own calls, and
    how often torch heard of their output."""
    from orchard.torch import cpu, scaled_dot_product_attention
    assert cpu.kernel() == os.environ["ORCHARD_TORCH_KERNEL"]
    x = torch.from_numpy(wholes()["q"])
    made = [[watched(scaled_dot_product_attention, *[leaf] * 3) for _ in range(4)]
            for leaf in (x, x.clone().requires_grad_())]
    out = torch.empty_like(x)
    made.append([watched(orchard.attention_forward, x, x, x, out=out) for _ in range(4)])
    return made, out._version


def on_a_gpu():
    """A device that passes for a GPU, and ORCHARD_BACKEND unset."""
    call = wholes()
    q, k, v = (call[n] for n in "qkv")
    forward, made, begin = orchard.attention_forward, {}, launches()
    made["said"] = orchard.explain(FORWARD, q, k, v)
    made["default"], at = watched(forward, **call), launches()
    made["cpu"], made["torch"] = watched(forward, q, k, v, backend="cpu"), watched(plain_step)
    made["launches"] = at - begin, launches() - at
    given, leaf = torch.empty(1, 2, 16, 16), torch.ones(1, 2, 16, 16, requires_grad=True)
    kept_by_a_graph = (leaf * given).sum()
    lose_the_device()
    made["losing"] = watched(forward, q, k, v, out=given)
    made["graph"] = watched(kept_by_a_graph.backward)[0]
    made["lost said"] = watched(orchard.explain, FORWARD, q, k, v)[0]
    made["lost"] = watched(forward, q, k, v)
    made["lost alone"] = watched(forward, q, k, v, backend="opencl")
    return made


def without_a_device():
    """ORCHARD_BACKEND=opencl, and no OpenCL."""
    from orchard.torch import scaled_dot_product_attention
    call = wholes()
    q, k, v = (call[n] for n in "qkv")
    call["out"][:], call["lse"][:] = 5, 6
    forward, x = orchard.attention_forward, torch.from_numpy(q)
    made = {"forward": watched(forward, **call, backend="opencl"), "given": call,
            "backward": watched(orchard.attention_backward, q, q, k, v, call["out"], call["lse"],
                                backend="opencl"),
            "environment": watched(forward, q, k, v),
            "said": orchard.explain(FORWARD, q, k, v, backend="opencl"),
            "fallback said": orchard.explain(FORWARD, q, k, v, backend="opencl,cpu"),
            "fallback": watched(forward, q, k, v, backend="opencl,cpu"),
            "expected": forward(q, k, v, backend="cpu"),
            "torch": watched(scaled_dot_product_attention, x, x, x),
            "torch with options": watched(scaled_dot_product_attention, x, x, x, window=(2, 2)),
            "memory": orchard.memory_report()}
    os.environ["ORCHARD_STRICT"] = "1"
    made["strict"] = watched(forward, q, k, v, backend="opencl,cpu", threads=1)
    return made


# ---- The parent ----------------------------------------------------------------------------------

linux = pytest.mark.skipif(not sys.platform.startswith("linux"),
                           reason="PoCL is for Linux")
OURS = ("ORCHARD_AUDIT", "ORCHARD_BACKEND", "ORCHARD_STRICT", "ORCHARD_TUNE",
        "ORCHARD_METAL_LIBRARY", "ORCHARD_OPENCL_LIBRARY", "ORCHARD_OPENCL_DEVICE")
FAULTY = pathlib.Path(os.environ.get("ORCHARD_BUILD", "ORCHARD_BUILD is not set"),
                      "tests/libfaulty_opencl.so")
CHILDREN = {
    "on_pocl": (on_pocl, {}),
    **{f"torch {kernel}": (torch_on_opencl, dict(
        ORCHARD_OPENCL_LIBRARY=str(FAULTY), FAULTY_OPENCL_MODE="", ORCHARD_BACKEND="opencl,cpu",
        ORCHARD_TORCH_KERNEL=kernel)) for kernel in ("c", "python")},
    **{f"deviating {kernel}": (deviating, dict(
        ORCHARD_OPENCL_LIBRARY=str(FAULTY), FAULTY_OPENCL_SKIP="all", ORCHARD_BACKEND="opencl",
        ORCHARD_AUDIT="2", ORCHARD_STRICT="1", ORCHARD_TORCH_KERNEL=kernel))
       for kernel in ("c", "python")},
    "on_a_gpu": (on_a_gpu, dict(ORCHARD_OPENCL_LIBRARY=str(FAULTY), FAULTY_OPENCL_MODE="gpu")),
    "without_a_device": (without_a_device, dict(ORCHARD_OPENCL_LIBRARY="/nonexistent",
                                                ORCHARD_BACKEND="opencl")),
}


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    """What a child of that name saw; each runs once."""
    folder, results = tmp_path_factory.mktemp("opencl"), {}
    # What PoCL compiled is kept where tests/run keeps it: the same flags, the same kernels.
    kernels = FAULTY.parents[2] / "pocl-cache-plain" if "ORCHARD_BUILD" in os.environ else folder
    kernels.mkdir(exist_ok=True)

    def ask(name):
        if name not in results:
            function, settings = CHILDREN[name]
            if settings.get("ORCHARD_OPENCL_LIBRARY") == str(FAULTY):
                assert FAULTY.exists(), f"{FAULTY} is missing: tests/run release builds it"
            environment = {n: x for n, x in os.environ.items() if n not in OURS}
            environment.update(POCL_EXTRA_BUILD_FLAGS="-cl-opt-disable", ORCHARD_CACHE="0",
                               POCL_CACHE_DIR=str(kernels), ORCHARD_OPENCL_PLATFORM="Portable",
                               **settings)
            done = subprocess.run([sys.executable, "-X", "faulthandler", __file__,
                                   function.__name__, str(folder / "saw")], env=environment,
                                  capture_output=True, text=True, timeout=300)
            results[name] = done, None
            if done.returncode == 0:
                results[name] = done, pickle.loads((folder / "saw").read_bytes())
        done, result = results[name]
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
        return result

    return ask


def expected(name, dtype):
    """(what, exact, as torch computes it) of every result."""
    tensors, options, dout, dlse = drawn(name, dtype)
    names, factor = differentiable(options), None
    if name == "all":
        factor = torch.from_numpy(kept(B, H, T, S, DROPOUT["dropout"], DROPOUT["seed"],
                                       DROPOUT["dropout_offset"]))
    exact_options = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                     for n, x in options.items()}
    exact = run(formula, [x.double() for x in tensors], exact_options, names, dout, dlse,
                factor=factor)
    plain = run(formula, tensors, options, names, dout, dlse, dtype=wide(dtype), factor=factor)
    return zip(["out", "lse", "dq", "dk", "dv", *names], exact, plain)


def assert_values(name, dtype, found, others=None):
    """Within the bar of the formula in fp64 and, where given, of another backend's values."""
    results = list(expected(name, dtype))
    assert len(found) == len(results)
    for i, (what, exact, plain) in enumerate(results):
        assert found[i].dtype == (wide(dtype) if what == "lse" else dtype)
        kind = found[i].dtype
        assert_within((f"{name} {what}", kind), found[i], exact, plain)
        if others:
            assert_within((f"{name} {what} of another", kind), found[i], others[i], plain)


def says(explanation, taker, *asked):
    return explanation.backend == taker and explanation.asked == asked


def refusal(op, reason, end="no other backend is left"):
    """What `watched` saw of a call that only opencl could have taken."""
    message = f"{op}: opencl cannot run this call: {reason}; {end}"
    return (orchard.UnsupportedError, message), {(op, "opencl", reason): 1}, (0, 0, 0, 0)


# ---- orchard's own calls -------------------------------------------------------------------------

@linux
@pytest.mark.parametrize("name, dtype", CORES, ids=str)
def test_values_and_gradients(saw, name, dtype):
    core = saw("on_pocl")["core"]
    assert_values(name, dtype, core[name, dtype, "opencl"][0], core[name, dtype, "cpu"][0])


@linux
@pytest.mark.parametrize("backend", ["opencl", "cpu"])
@pytest.mark.parametrize("name, dtype", CORES, ids=str)
def test_report_counts_what_explain_said(saw, name, dtype, backend):
    _, counts, said = saw("on_pocl")["core"][name, dtype, backend]
    assert counts == [{(op, backend, None): 1} for op in (FORWARD, BACKWARD)]
    assert [x.op for x in said] == [FORWARD, BACKWARD]
    for explanation in said:
        assert says(explanation, backend, (backend, None))
        assert (explanation.cpu is None) == (backend == "opencl")
        assert str(explanation).startswith(f"{explanation.op}: {backend}")
    if backend == "opencl":  # backward alone keeps something between its kernels
        assert said[0].scratch_bytes == 0 and said[1].scratch_bytes >= 4 * B * H * T


@linux
def test_memory_report_tells_wrapped_from_copied(saw):
    (well, moved, gaps, cpu), found, cpus, between = saw("on_pocl")["memory"]
    assert well == (0, 5, 0, 0) and cpu == (0, 0, 0, 0)
    assert moved == (0, 3, 2, 4 * 2 * 40 * 16 + 4 * 2 * 16 * 16)  # k and out
    assert gaps == (0, 4, 1, 4 * (31 * 25 + 16))  # out, from its first element to its last
    for out in found:  # copied or not
        assert np.array_equal(out, found[0])
        np.testing.assert_allclose(out, cpus, rtol=0, atol=2e-6)
    assert (between == 7).all()


@linux
def test_a_cpu_as_a_device_is_used_only_by_name(saw):
    said, _, counts = saw("on_pocl")["default"]
    why = "the device is this CPU, which the cpu backend uses better"
    assert said.backend == "cpu" and said.asked[1:] == (("opencl", why), ("cpu", None))
    assert counts == {(FORWARD, name, reason): 1 for name, reason in said.asked}
    said, _, counts = saw("on_pocl")["cpu first"]
    assert says(said, "cpu", ("cpu", None)) and counts == {(FORWARD, "cpu", None): 1}


@linux
def test_what_opencl_refuses_is_an_error_or_the_cpus(saw):
    said, result, counts = saw("on_pocl")["f64"]
    assert says(said, None, ("opencl", NO_F64))
    assert (result, counts) == refusal(FORWARD, NO_F64)[:2]
    said, result, counts = saw("on_pocl")["f64 or cpu"]
    assert says(said, "cpu", ("opencl", NO_F64), ("cpu", None))
    assert counts == {(FORWARD, "opencl", NO_F64): 1, (FORWARD, "cpu", None): 1}
    assert all(map(np.array_equal, result, saw("on_pocl")["f64 by cpu"]))


@linux
def test_python_threads_share_the_device(saw):
    found = saw("on_pocl")["in threads"]
    assert len(found) == 20 and all(np.array_equal(x, saw("on_pocl")["once"]) for x in found)


@linux
def test_a_forked_child_goes_on_with_the_cpu(saw):
    """Drivers do not survive a fork; the parent keeps its device."""
    (result, counts, memory), alone = saw("on_pocl")["in a fork"]
    assert np.array_equal(result[0], saw("on_pocl")["by cpu"]) and memory == (0, 0, 0, 0)
    assert counts == {(FORWARD, "opencl", NO_DEVICE): 1, (FORWARD, "cpu", None): 1}
    assert alone == refusal(FORWARD, NO_DEVICE)
    result, counts, _ = saw("on_pocl")["after a fork"]
    assert np.array_equal(result[0], saw("on_pocl")["once"])
    assert counts == {(FORWARD, "opencl", None): 1}


# ---- orchard.torch -------------------------------------------------------------------------------

kernels = pytest.mark.parametrize("kernel", ["c", "python"])
BOTH = {(FORWARD, "opencl", None): 1, (BACKWARD, "opencl", None): 1}


@linux
@kernels
@pytest.mark.parametrize("name, dtype", TORCHS, ids=str)
def test_torch_values_where_the_environment_names_opencl(saw, name, dtype, kernel):
    seen = saw(f"torch {kernel}")
    found, counts, launched = seen[name, dtype]
    assert seen["kernel"] == kernel and counts == BOTH and launched > 0
    assert_values(name, dtype, found)
    assert all(map(torch.equal, found, saw("torch c")[name, dtype][0]))


@linux
@kernels
def test_torch_calls_without_options_run_there_too(saw, kernel):
    found, counts, memory = saw(f"torch {kernel}")["plain"]
    assert counts == BOTH and sum(memory[:3]) == 16  # lse_rest twice
    assert says(saw(f"torch {kernel}")["said"], "opencl", ("opencl", None))
    for x, y in zip(found, plain_step()):  # here, on the CPU
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


@linux
@kernels
def test_torch_falls_back_as_the_environment_allows(saw, kernel):
    result, counts, _ = saw(f"torch {kernel}")["f64"]
    assert torch.equal(result, torch.ones(1, 2, 5, 16, dtype=torch.float64))
    assert counts == {(FORWARD, "opencl", NO_F64): 1, (FORWARD, "cpu", None): 1}


@linux
def test_torch_keeps_to_the_cpu_where_nobody_names_opencl(saw):
    """Even beside a GPU, which orchard's own calls then prefer."""
    seen = saw("on_a_gpu")
    assert seen["said"].backend == "opencl" and seen["said"].asked[-1] == ("opencl", None)
    assert seen["default"][1][FORWARD, "opencl", None] == 1
    lengths = [x.nbytes for x in wholes().values()]  # no whole pages, as GPUs want them: copied
    assert seen["default"][2] == (0, 0, 5, sum(lengths))
    found, counts, memory = seen["torch"]
    assert counts == {(FORWARD, "cpu", None): 1, (BACKWARD, "cpu", None): 1}
    assert memory == (0, 0, 0, 0) and all(map(torch.equal, found, plain_step()))
    at_default, at_others = seen["launches"]
    assert at_default > 0 and at_others == 0
    np.testing.assert_allclose(seen["default"][0][0], seen["cpu"][0][0], rtol=0, atol=2e-6)


@linux
@kernels
def test_a_strict_audits_error_arrives(saw, kernel):
    """Taken for a mistake of the caller's it led to another call, which nobody audited."""
    made, version = saw(f"deviating {kernel}")
    for calls in made:
        assert [counts[FORWARD, "opencl", None] for _, counts, _ in calls] == [1] * 4
        errors = [result for result, _, _ in calls if result[0] is orchard.InternalError]
        assert len(errors) == 2
        assert all(message.startswith(f"{FORWARD}: audit: ") for _, message in errors)
    assert version == 4  # what an audit found wrong was written all the same


# ---- A device that is lost, or not there ---------------------------------------------------------

FALLBACK = {(FORWARD, "opencl", NO_DEVICE): 1, (FORWARD, "cpu", None): 1}


def assert_lost(seen):
    kind, message = seen[0]
    assert kind is orchard.DeviceError and message.startswith("opencl: the device is lost: ")
    assert seen[1][FORWARD, "opencl", LOST] == 1 and (FORWARD, "cpu", None) not in seen[1]


@linux
def test_after_a_loss_the_next_backend_goes_on(saw):
    seen = saw("on_a_gpu")
    assert_lost(seen["losing"])
    kind, message = seen["graph"]  # it had saved what was given as out, which is undefined now
    assert kind is RuntimeError and "modified by an inplace operation" in message
    result, counts, memory = seen["lost"]
    assert FALLBACK.items() <= counts.items() and memory == (0, 0, 0, 0)
    assert np.array_equal(result[0], seen["cpu"][0][0])
    assert seen["lost said"].asked[-2:] == (("opencl", NO_DEVICE), ("cpu", None))
    assert seen["lost alone"] == refusal(FORWARD, NO_DEVICE)


@linux
@kernels
def test_torch_raises_the_loss_as_orchards_exception(saw, kernel):
    assert_lost(saw(f"torch {kernel}")["losing"])


@linux
@kernels
def test_after_a_loss_torch_goes_on(saw, kernel):
    result, counts, _ = saw(f"torch {kernel}")["lost"]
    assert torch.equal(result, torch.ones(1, 2, 5, 16)) and counts == FALLBACK


def test_without_a_device_opencl_alone_is_an_error(saw):
    seen = saw("without_a_device")
    assert seen["forward"] == refusal(FORWARD, NO_DEVICE)
    assert seen["backward"] == refusal(BACKWARD, NO_DEVICE)
    assert seen["environment"] == refusal(FORWARD, NO_DEVICE)
    assert says(seen["said"], None, ("opencl", NO_DEVICE))
    assert "no backend takes this call" in str(seen["said"]) and NO_DEVICE in str(seen["said"])
    assert (seen["given"]["out"] == 5).all() and (seen["given"]["lse"] == 6).all()
    assert seen["torch with options"] == refusal(FORWARD, NO_DEVICE)
    assert seen["torch"] == refusal(FORWARD, NO_DEVICE)


def test_without_a_device_the_cpu_takes_over_where_it_may(saw):
    seen = saw("without_a_device")
    result, counts, _ = seen["fallback"]
    assert counts == FALLBACK and all(map(np.array_equal, result, seen["expected"]))
    assert says(seen["fallback said"], "cpu", ("opencl", NO_DEVICE), ("cpu", None))
    assert seen["memory"] == (0, 0, 0, 0)
    assert seen["strict"] == refusal(FORWARD, NO_DEVICE, "strict forbids a fallback")


if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps(found))
