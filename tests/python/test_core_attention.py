"""orchard.attention_forward and attention_backward: values against formulas in fp64.

Two references: core_formula.py (every option, every dtype) and torch's own fp64 autograd. Then what
the call promises around the values: the same bits for any number of threads, the interpreter left
free meanwhile, threads, fork, explain and report.
"""
import os
import subprocess
import sys
import threading
import time

import numpy as np
import orchard
import pytest
import torch
from core_formula import Formula, philox

RNG = np.random.default_rng(5)
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rounded(values, name):
    """The values in a dtype as an operand, and exactly what it holds as fp64."""
    if name == "bfloat16":
        tensor = torch.from_numpy(np.asarray(values)).to(torch.bfloat16)
        return tensor, tensor.double().numpy()
    array = np.asarray(values).astype(name)
    return array, array.astype(np.float64)


def as_double(x):
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def assert_close(found, expected, name, factor, what):
    found = as_double(found)
    assert found.shape == expected.shape, what
    infinite = np.isinf(expected)
    assert np.array_equal(found[infinite], expected[infinite]), what
    top = np.abs(expected[~infinite]).max(initial=0)
    off = np.abs(found[~infinite] - expected[~infinite]).max(initial=0)
    assert off <= factor * EPS[name] * max(top, 1e-30), f"{what}: off by {off}, largest {top}"


B, H, G, T, S, D, E = 2, 4, 2, 9, 13, 8, 6


def case(name):
    """Options by name, as the formula takes them; arrays in fp64."""
    options = {
        "plain": {},
        "scale": dict(scale=0.7),
        "zero scale": dict(scale=0.0),
        "causal": dict(causal=True),
        "causal bottom right": dict(causal=True, align="bottom_right"),
        "window": dict(window=(3, 2)),
        "window left": dict(window=(2, None), align="bottom_right"),
        "window causal": dict(window=(4, -1), causal=True, align="bottom_right"),
        "softcap": dict(softcap=1.5),
        "bias": dict(bias=RNG.standard_normal((B, H, T, S))),
        "bias rows": dict(bias=RNG.standard_normal((1, H, 1, S))),
        "mask": dict(mask=RNG.random((B, 1, T, S)) < 0.6),
        "mask keys": dict(mask=RNG.random((B, 1, 1, S)) < 0.6, causal=True),
        "alibi": dict(alibi=np.array([0.5, 0.25, 0.125, 0.1]), align="bottom_right"),
        "alibi batch": dict(alibi=RNG.random((B, H)).astype(np.float32), causal=True),
        "sinks": dict(sinks=RNG.standard_normal(H)),
        "sinks masked": dict(sinks=RNG.standard_normal(H), mask=RNG.random((B, H, T, S)) < 0.1),
        "lengths": dict(key_lengths=np.array([5, 13])),
        "lengths causal": dict(key_lengths=np.array([0, 7], np.int32), causal=True,
                               align="bottom_right"),
        "dropout": dict(dropout=0.3, seed=(7 << 40) + 12345, dropout_offset=3),
        "all": dict(scale=0.3, causal=True, align="bottom_right", window=(6, -1), softcap=3.0,
                    bias=RNG.standard_normal((B, 1, T, S)), mask=RNG.random((1, H, T, S)) < 0.8,
                    alibi=np.array([0.3, 0.2, 0.1, 0.0]), sinks=RNG.standard_normal(H),
                    key_lengths=np.array([9, 12]), dropout=0.2, seed=99, dropout_offset=2**32 - 1),
    }
    return options if name is None else options[name]


def operands_of(name, dtype):
    options, call, exact = case(name), {}, {}
    wide = "float64" if dtype == "float64" else "float32"
    for key, value in options.items():
        kind = {"bias": dtype, "sinks": dtype, "alibi": wide}.get(key)
        call[key], exact[key] = (value, value) if kind is None else rounded(value, kind)
    return call, exact


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("name", list(case(None)))
def test_values_and_gradients(name, dtype):
    (q, q64), (k, k64), (v, v64), (dout, dout64) = (
        rounded(RNG.standard_normal(shape), dtype)
        for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, E), (B, H, T, E)))
    call, exact = operands_of(name, dtype)
    expected = Formula(q64, k64, v64, **exact)
    out, lse = orchard.attention_forward(q, k, v, **call)
    accumulated = dtype if dtype == "float64" else "float32"
    assert_close(out, expected.out, dtype, 2 if EPS[dtype] > 1e-6 else 8, "out")
    assert_close(lse, expected.lse, accumulated, 16, "lse")

    dlse = RNG.standard_normal((B, H, T)).astype(accumulated)
    dlse[~np.isfinite(expected.lse)] = 0
    want = ["dq", "dk", "dv"] + ["dbias"] * ("bias" in call) + ["dsinks"] * ("sinks" in call)
    found = orchard.attention_backward(dout, q, k, v, out, lse, dlse=dlse, want=want, **call)
    gradients = expected.gradients(dout64, dlse)
    assert [x is not None for x in found] == [x in want for x in found._fields]
    for which in want:
        # out's rounding reaches every gradient through sum(dout * out).
        assert_close(getattr(found, which), gradients[which], dtype, 32, which)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_packed_sequences(dtype):
    lengths_t, lengths_s = [3, 0, 7, 1], [5, 2, 7, 0]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32)
                  for x in (lengths_t, lengths_s))
    (q, q64), (k, k64), (v, v64), (dout, dout64) = (
        rounded(RNG.standard_normal(shape), dtype)
        for shape in ((11, H, D), (14, G, D), (14, G, E), (11, H, E)))
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_t=7, max_s=7, causal=True)
    out, lse = orchard.attention_forward(q, k, v, **options)
    found = orchard.attention_backward(dout, q, k, v, out, lse, **options)
    expected = [np.zeros(x.shape) for x in (q64, q64[..., 0], q64, k64, v64)]
    expected[0] = np.zeros(dout64.shape)
    for t0, t1, s0, s1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        heads = [np.swapaxes(x, 0, 1)[None] for x in (q64[t0:t1], k64[s0:s1], v64[s0:s1])]
        one = Formula(*heads, causal=True)
        grads = one.gradients(np.swapaxes(dout64[t0:t1], 0, 1)[None])
        for whole, part, (a, b) in zip(
                expected, (one.out, one.lse[..., None], grads["dq"], grads["dk"], grads["dv"]),
                ((t0, t1), (t0, t1), (t0, t1), (s0, s1), (s0, s1))):
            rows = np.swapaxes(part[0], 0, 1)
            whole[a:b] = rows[..., 0] if whole.ndim == 2 else rows
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *found[:3]), expected):
        assert_close(x, y, "float32" if what == "lse" and dtype != "float64" else dtype, 32, what)


@pytest.mark.parametrize("options", [
    {}, dict(causal=True), dict(mask=True), dict(bias=True)])
def test_torch_s_own_autograd_agrees(options):
    generator = torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, length, 16, dtype=torch.float64, generator=generator)
               for heads, length in ((4, 33), (2, 47), (2, 47)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    call, torch_mask = dict(causal=options.get("causal", False)), None
    if "mask" in options:
        torch_mask = torch.rand(2, 1, 33, 47, generator=generator) < 0.7
        call["mask"] = torch_mask
    if "bias" in options:
        torch_mask = torch.randn(1, 4, 33, 47, dtype=torch.float64, generator=generator)
        call["bias"] = torch_mask
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=torch_mask, is_causal=call["causal"], enable_gqa=True)
    dout = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(dout)
    out, lse = orchard.attention_forward(q, k, v, **call)
    assert torch.allclose(out, expected.detach(), rtol=0, atol=1e-13)
    found = orchard.attention_backward(dout, q, k, v, out, lse, **call)
    for x, leaf in zip(found[:3], leaves):
        assert torch.allclose(x, leaf.grad, rtol=0, atol=1e-12)


def test_philox_is_random123_s():
    """Known answers of Random123 for the reference's own generator."""
    ones = np.full((1, 4), 0xFFFFFFFF)
    assert [f"{x:08x}" for x in philox(np.zeros((1, 4), np.int64), (0, 0))[0]] == \
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert [f"{x:08x}" for x in philox(ones, (0xFFFFFFFF, 0xFFFFFFFF))[0]] == \
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_one_head_layout_and_given_memory():
    q, k, v = (RNG.standard_normal((3, n, 5)).astype(np.float32) for n in (4, 6, 6))
    out, lse = np.empty((3, 4, 5), np.float32), np.empty((3, 4), np.float32)
    given = orchard.attention_forward(q, k, v, out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    expected = Formula(q[:, None], k[:, None], v[:, None])
    assert_close(out, expected.out[:, 0], "float32", 8, "out")
    dk = np.empty_like(k)
    found = orchard.attention_backward(out, q, k, v, out, lse, want=(), dk=dk)
    assert found.dk is dk and found.dq is None and found.dv is None
    assert_close(dk, expected.gradients(expected.out)["dk"][:, 0], "float32", 32, "dk")


def test_empty_calls():
    q, k = np.zeros((0, 2, 3, 4), np.float32), np.zeros((0, 2, 5, 4), np.float32)
    out, lse = orchard.attention_forward(q, k, k)
    assert out.shape == (0, 2, 3, 4) and lse.shape == (0, 2, 3)
    q, k = np.ones((1, 2, 3, 4), np.float32), np.ones((1, 2, 0, 4), np.float32)
    out, lse = orchard.attention_forward(q, k, k)
    assert not out.any() and np.isneginf(lse).all()


# ---- Around the values ---------------------------------------------------------------------------


def test_the_same_bits_for_any_number_of_threads_and_layout():
    q = RNG.standard_normal((2, 3, 130, 40)).astype(np.float32)
    out, lse = orchard.attention_forward(q, q, q, causal=True, threads=1)
    grads = orchard.attention_backward(out, q, q, q, out, lse, causal=True, threads=1)
    other = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    for threads in (2, 3, 7):
        again, lse2 = orchard.attention_forward(other, q, other, causal=True, threads=threads)
        assert np.array_equal(out, again) and np.array_equal(lse, lse2)
        more = orchard.attention_backward(out, other, q, q, out, lse, causal=True, threads=threads)
        assert all(np.array_equal(x, y) for x, y in zip(grads[:3], more[:3]))


def test_the_interpreter_is_free_during_a_call():
    q = RNG.standard_normal((1, 2, 512, 64)).astype(np.float32)
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    other.start()
    start = time.perf_counter()
    orchard.attention_forward(q, q, q, threads=1, backend="ref")  # slow on purpose
    end = time.perf_counter()
    done.set()
    other.join(60)
    inside = [t for t in ticks if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
    assert end - start > 0.1 and len(inside) >= 10, (end - start, len(inside))


def at_once(call, operands):
    """What `call` makes of each list of operands. A thread for each must find the same ten times,
    all of them at work at once; what they are refused before is each one's own."""
    expected, right = [call(*given) for given in operands], []
    together = threading.Barrier(len(operands))

    def repeat(given, made):
        for _ in range(10):
            with pytest.raises(orchard.ShapeError, match="head size"):
                call(given[0][..., :0], *given[1:])
        together.wait(60)
        for _ in range(10):
            right.append(all(map(np.array_equal, call(*given), made)))

    threads = [threading.Thread(target=repeat, args=each, daemon=True)
               for each in zip(operands, expected)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    # Fewer than all where a thread hangs or raises.
    assert (right.count(True), right.count(False)) == (10 * len(operands), 0)
    return expected


def test_many_python_threads_at_once():
    """Each has a context of its own: in a shared one, calls would overwrite each other's scratch.
    Forward first: there it would give wrong values, in backward it would crash."""
    def forward(q):
        return orchard.attention_forward(q, q, q, threads=1)

    def backward(q, out, lse):
        return orchard.attention_backward(out, q, q, q, out, lse, threads=1)[:3]

    inputs = [RNG.standard_normal((1, 4, 300, 32)).astype(np.float32) for _ in range(4)]
    made = at_once(forward, [(q,) for q in inputs])
    at_once(backward, [(q, *outputs) for q, outputs in zip(inputs, made)])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on():
    q = RNG.standard_normal((2, 4, 200, 32)).astype(np.float32)
    expected, lse = orchard.attention_forward(q, q, q, threads=2)
    grads = orchard.attention_backward(expected, q, q, q, expected, lse, threads=2)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            out, lse2 = orchard.attention_forward(q, q, q, threads=2)
            again = orchard.attention_backward(expected, q, q, q, expected, lse, threads=2)
            if np.array_equal(out, expected) and np.array_equal(grads.dk, again.dk):
                status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if not pid:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert pid and status == 0


def counted():
    return {(line.op, line.backend, line.reason): line.count for line in orchard.report()}


def test_explain_says_what_report_then_counts():
    q = RNG.standard_normal((1, 2, 5, 8)).astype(np.float32)
    for backend in ("cpu", "ref"):
        said = orchard.explain("attention_forward", q, q, q, causal=True, backend=backend)
        assert said.backend == backend and said.asked == ((backend, None),)
        assert str(said).startswith(f"attention_forward: {backend}")
        assert said.scratch_bytes >= 0
        assert (said.cpu in ("avx2", "neon", "scalar")) == (backend == "cpu")
        before = counted()
        out, lse = orchard.attention_forward(q, q, q, causal=True, backend=backend)
        after = counted()
        assert {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)} == \
            {("attention_forward", backend, None): 1}
        said = orchard.explain("attention_backward", out, q, q, q, out, lse, backend=backend)
        assert said.op == "attention_backward" and said.backend == backend
    table = str(orchard.report()).splitlines()
    assert table[0].split() == ["op", "backend", "calls"]
    assert any(line.split()[:2] == ["attention_forward", "ref"] for line in table)
    assert orchard.memory_report() == (0, 0, 0, 0)


def test_a_report_tells_audits_from_refusals():
    code = ("import numpy as np, orchard\nq = np.ones((1, 1, 2, 2), np.float32)\n"
            "orchard.attention_forward(q, q, q)\nprint(orchard.report())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "ORCHARD_AUDIT": "1", "ORCHARD_BACKEND": "cpu,ref"})
    lines = [line.split(None, 3) for line in done.stdout.splitlines()[1:]]
    assert lines == [["attention_forward", "cpu", "1", "ran"],
                     ["attention_forward", "cpu", "1", "audit: agrees"]], done


@pytest.mark.parametrize("kind", ["numpy", "torch", "buffer"])
def test_explain_needs_no_memory_for_results(kind):
    """137 GB and more; and the answer is that of a call whose results have memory."""
    import torch
    make = {"numpy": np.broadcast_to, "torch": lambda x, shape: torch.from_numpy(x).expand(shape),
            "buffer": lambda x, shape: memoryview(np.broadcast_to(x, shape))}[kind]
    one = np.zeros((1, 1, 1, 64), np.float32)
    for T in (2**7, 2**26, 2**30):
        q, lse = make(one, (1, 8, T, 64)), make(one[..., 0], (1, 8, T))
        said = orchard.explain("attention_forward", q, q, q, causal=True, threads=1)
        grads = orchard.explain("attention_backward", q, q, q, q, q, lse, threads=1)
        if T == 2**7:
            out, lse = np.zeros((1, 8, T, 64), np.float32), np.zeros((1, 8, T), np.float32)
            assert said == orchard.explain("attention_forward", q, q, q, causal=True, threads=1,
                                           out=out, lse=lse)
            assert grads == orchard.explain("attention_backward", q, q, q, q, q, lse, dq=out,
                                            threads=1)
        assert said.backend and grads.op == "attention_backward"
    q = np.broadcast_to(one, (1, 2**20, 2**30, 64))
    with pytest.raises(orchard.OutOfMemoryError, match=r"no memory for out, \[1, 1048576, "):
        orchard.explain("attention_forward", q, q, np.broadcast_to(one[..., :1], (1, 1, 9, 512)))


def test_explain_refuses_what_the_call_refuses():
    q = RNG.standard_normal((1, 2, 5, 8)).astype(np.float32)
    with pytest.raises(orchard.ArgumentError, match="explain: there is no operation 'attention'"):
        orchard.explain("attention", q=q)
    with pytest.raises(orchard.ArgumentError) as array:
        orchard.explain(q)
    assert str(array.value) == ("explain: op is a ndarray of shape [1, 2, 5, 8], must be the name "
                                "of an operation: attention_forward, attention_backward")
    with pytest.raises(TypeError, match="missing a required argument: 'k'"):
        orchard.explain("attention_forward", q)
    with pytest.raises(orchard.ShapeError) as one:
        orchard.explain("attention_forward", q, q[..., :4], q)
    with pytest.raises(orchard.ShapeError) as two:
        orchard.attention_forward(q, q[..., :4], q)
    assert str(one.value) == str(two.value)


class Unspeakable:
    def __repr__(self):
        raise AttributeError("no name")


@pytest.mark.parametrize("options, words", [
    ({"seed": 10**5000}, "seed is a int, must be 0 ... 18446744073709551615"),
    ({"seed": -1}, "seed is -1, must be 0 ... 18446744073709551615"),
    ({"seed": Unspeakable()}, "seed is a Unspeakable, must be an integer"),
    ({"max_t": "x" * 1000}, "max_t is 'xxxxxxxxxxx"),
    ({"causal": "yes"}, "causal is 'yes', must be True or False"),
    ({"causal": 2}, "causal is 2, must be 0 or 1"),
    ({"align": Unspeakable()}, "align is a Unspeakable, must be"),
    ({"window": Unspeakable()}, "window is a Unspeakable, must be"),
    ({"backend": Unspeakable()}, "backend is a Unspeakable, must be"),
    ({"threads": 257}, "threads is 257, must be 0 ... 256"),
    ({"scale": "1"}, "scale is '1', must be a number"),
    ({"scale": np.str_("1")}, "must be a number"),
    ({"scale": 1j}, "scale is 1j, must be a number"),
    ({"scale": np.complex64(1)}, "must be a number"),
    ({"scale": np.array(1j)}, "must be a number"),
    ({"scale": torch.tensor(1j)}, "must be a number"),
    ({"scale": torch.tensor(1.0, requires_grad=True)}, "scale is a torch tensor that requires grad"),
    ({"scale": 10**400}, "scale is no number that fits"),
    ({"softcap": torch.ones(2)}, "softcap is no number that fits"),
    ({"softcap": 1e40}, "softcap is 1e+40, must be 1e-30 ... 1e+30"),
])
def test_options_that_are_refused(options, words):
    q = np.ones((1, 1, 2, 2), np.float32)
    with pytest.raises(orchard.ArgumentError) as refused:
        orchard.attention_forward(q, q, q, **options)
    assert words in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["é" * 1000, "cpu\udc80", "cpu\0", "no\nname"])
def test_names_of_backends_that_no_backend_has(name):
    q = np.ones((1, 1, 2, 2), np.float32)
    with pytest.raises(orchard.ArgumentError, match="which no backend is called"):
        orchard.attention_forward(q, q, q, backend=name)


def test_messages_with_foreign_bytes():
    """Of the environment, where a name may be anything but 0."""
    code = ("import numpy as np, orchard\nq = np.ones((1, 1, 2, 2), np.float32)\n"
            "try: orchard.attention_forward(q, q, q)\n"
            "except orchard.ArgumentError as why: print(ascii(str(why)))")
    for name, shown in ((b"\xff\xc3", "??"), ("\u00e9".encode() * 400, "\\xe9\\xe9")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env={**os.environb, b"ORCHARD_BACKEND": name})
        assert shown in done.stdout and done.stdout.startswith("'ctx_create: "), done
