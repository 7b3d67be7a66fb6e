"""The fake of torch.mps keeps the documented rules of compile_shader: each is broken here once, and
each that gives a value is compared with that value."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import fake_mps

fake_mps.install()

MSL = "#include <metal_stdlib>\nusing namespace metal;\n"
ADD = MSL + """kernel void add(device float *x [[buffer(0)]], constant long *n [[buffer(1)]],
                constant float *f [[buffer(2)]], uint i [[thread_position_in_grid]])
{ x[i] += float(n[0]) + f[0]; }
kernel void where(device uint *x [[buffer(0)]], uint3 i [[thread_position_in_grid]],
                  uint3 n [[threads_per_grid]], uint3 g [[threads_per_threadgroup]])
{ x[(i.z * n.y + i.y) * n.x + i.x] = g.x * 100 + g.y * 10 + g.z; }
"""


def values_of(kind: str) -> str:
    """A kernel that copies 4 values of a type out of its second argument."""
    return MSL + (f"kernel void take(device {kind} *x [[buffer(0)]], constant {kind} *y [[buffer(1)]], "
                  "uint i [[thread_position_in_grid]]) { x[i] = y[i]; }\n")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> fake_mps.MpsTensor:
    return fake_mps.tensor(torch.zeros(*shape, dtype=dtype))


@pytest.fixture(scope="module")
def library():
    return torch.mps.compile_shader(ADD)


# ---- Texts ---------------------------------------------------------------------------------------

def test_a_text_that_does_not_compile_is_a_syntax_error():
    with pytest.raises(SyntaxError, match="undeclared identifier 'nothing'"):
        torch.mps.compile_shader(MSL + "kernel void f(device float *x [[buffer(0)]]) { x[0] = nothing; }")


def test_the_text_must_be_ascii():
    with pytest.raises(SyntaxError, match="ASCII"):
        torch.mps.compile_shader(ADD + "// \u03b1\n")


def test_threadgroup_memory_is_static():
    static = MSL + """kernel void turn(device float *x [[buffer(0)]], uint i [[thread_position_in_grid]])
    { threadgroup float t[32]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); x[i] = t[31 - i]; }"""
    kernel = torch.mps.compile_shader(static).turn
    assert kernel.static_thread_group_memory_length == 128
    x = fake_mps.tensor(torch.arange(32.0))
    kernel(x, threads=32, group_size=32)
    assert x.cpu().tolist() == list(reversed(range(32)))
    with pytest.raises(RuntimeError, match="no way to set the length"):
        torch.mps.compile_shader(MSL + "kernel void f(device float *x [[buffer(0)]], "
                                 "threadgroup float *t [[threadgroup(0)]]) { x[0] = 1.0f; }")


def test_an_unknown_kernel_is_a_runtime_error(library):
    with pytest.raises(RuntimeError, match="nobody"):
        library.nobody


# ---- Grids ---------------------------------------------------------------------------------------

def test_threads_are_those_of_the_whole_grid(library):
    x = zeros(64)
    library.add(x, [1], [0.5], threads=64, group_size=32)
    assert (x.cpu() == 1.5).all()
    x = zeros(64)
    library.add(x, [1], [0.5], threads=32, group_size=32)  # not 32 groups
    assert (x.cpu()[:32] == 1.5).all() and not x.cpu()[32:].any()


def test_threads_default_to_the_first_tensors_elements(library):
    x = zeros(3, 5)
    library.add(x, [1], [0.5])
    assert (x.cpu() == 1.5).all()


def test_grids_of_three_dimensions(library):
    x = zeros(2, 6, 8, dtype=torch.int32)
    library.where(x, threads=[8, 6, 2], group_size=[4, 3, 1])
    assert (x.cpu() == 431).all()


@pytest.mark.parametrize("threads, group, error, words", [
    (64, [32, 1], RuntimeError, "group_size->size"),
    ([64, 1, 1, 1], None, RuntimeError, "threads has 4"),
    ([], None, RuntimeError, "threads has 0"),
    (2048, 2048, ValueError, "Threadgroup size exceeds 1024"),
    ([64, 64], [64, 64], ValueError, "Threadgroup size exceeds 1024"),
    (0, 32, RuntimeError, "without threads"),
    (40, 32, RuntimeError, "not whole groups"),
    (1 << 32, 32, RuntimeError, "32 bits"),
    (-1, 32, RuntimeError, "Unable to cast threads"),
    (32.0, 32, RuntimeError, "Unable to cast threads"),
    ([32.0], [32], RuntimeError, "Unable to cast threads"),
])
def test_wrong_grids(library, threads, group, error, words):
    with pytest.raises(error, match=words):
        library.add(zeros(64), [1], [0.5], threads=threads, group_size=group)


def test_no_tensor_and_no_threads(library):
    with pytest.raises(RuntimeError, match="Number of threads is undefined"):
        library.add([1], [1], [0.5])


# ---- Tensors -------------------------------------------------------------------------------------

def test_views_start_at_their_offset_and_strides_are_not_passed(library):
    block = torch.zeros(4, 8)
    view = fake_mps.tensor(block)[1:, 2::2]  # 3 x 3, apart
    library.add(view, [1], [0.5], threads=4, group_size=4)
    assert block.flatten().nonzero().flatten().tolist() == [10, 11, 12, 13]


def test_cpu_tensors_only_without_dimensions(library):
    with pytest.raises(RuntimeError, match="Passed CPU tensor to MPS op"):
        library.add(zeros(4), torch.tensor([1]), [0.5], threads=4, group_size=4)
    x = zeros(4)
    library.add(x, torch.tensor(3), torch.tensor(0.25, dtype=torch.float64), threads=4, group_size=4)
    assert (x.cpu() == 3.25).all()  # fp64 became fp32


def test_dtypes_are_not_checked(library):
    x = zeros(8, dtype=torch.float16)
    library.add(x, [1], [0.5], threads=4, group_size=4)  # 16 bytes are 4 floats
    assert x.cpu().view(torch.float32).tolist() == [1.5] * 4


def test_an_empty_storage_has_no_buffer(library):
    with pytest.raises(RuntimeError, match="nil would be bound"):
        library.add(zeros(0), [1], [0.5], threads=4, group_size=4)


def test_lists_of_tensors_are_not_offered(library):
    with pytest.raises(RuntimeError, match="addresses"):
        library.add([zeros(4)], [1], [0.5], threads=4, group_size=4)


# ---- Scalars -------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, dtype, values, casts", [
    ("long", torch.int64, [1, -2, 2**40, 2**63 - 1], None),
    ("float", torch.float32, [0.1, 1e30, -2.0, 3.0], None),
    ("float", torch.float32, [0.5, 1, 2, 3], None),  # the first one decides
    ("int", torch.int32, [1, -2, 3, 4], "int32"),
    ("int", torch.int32, [1, -2, 3, 4], {1: "int32"}),
    ("short", torch.int16, [1, -2, 3, 4], {1: "int16"}),
    ("char", torch.int8, [1, -2, 3, 4], {1: "int8"}),
    ("uchar", torch.uint8, [1, 2, 3, 255], {1: "uint8"}),
    ("half", torch.float16, [0.1, 2.0, -3.0, 4.0], {1: "fp16"}),
    ("bfloat", torch.bfloat16, [0.1, 2.0, -3.0, 4.0], {1: "bf16"}),
])
def test_lists_become_arrays(kind, dtype, values, casts):
    x = zeros(4, dtype=dtype)
    torch.mps.compile_shader(values_of(kind)).take(x, values, threads=4, group_size=4, arg_casts=casts)
    assert torch.equal(x.cpu(), torch.tensor(values, dtype=dtype))


def test_single_numbers_and_bools(library):
    x = zeros(4)
    library.add(x, True, 0.25, threads=4, group_size=4)
    assert (x.cpu() == 1.25).all()


@pytest.mark.parametrize("value, casts, words", [
    (None, None, "Unsupported argument type"),
    ("1", None, "Unsupported argument type"),
    ([], None, "Empty list"),
    ([None], None, "Unexpected argument types"),
    ([1, 0.5], None, "Unable to cast"),
    ([0.5, "x"], None, "Unable to cast"),
    ([2**63], None, "Unable to cast"),
    ([1], {1: "int64"}, "Unsupported cast instruction"),
    ([1], ["int32"], "Unexpected caster arg type list"),
    ([1] * 513, None, "setBytes of 4104 bytes"),
])
def test_wrong_scalars(library, value, casts, words):
    with pytest.raises(RuntimeError, match=words):
        library.add(zeros(4), value, [0.5], threads=4, group_size=4, arg_casts=casts)


def test_lists_of_4096_bytes_fit(library):
    x = zeros(4)
    library.add(x, [2] + [0] * 511, [0.5], threads=4, group_size=4)
    assert (x.cpu() == 2.5).all()


def test_31_buffers_and_no_more(library):
    with pytest.raises(RuntimeError, match="more than 31 buffers"):
        library.add(*[zeros(4)] * 32, threads=4, group_size=4)


def test_no_arguments_by_name(library):
    with pytest.raises(TypeError):
        library.add(zeros(4), [1], f=[0.5])


# ---- What stops the program: in a child ----------------------------------------------------------

@pytest.mark.parametrize("call, words", [
    ("library.add(x, [1], threads=4, group_size=4)", b"buffer(2)"),  # nothing bound: the real one uses what was left
    ("library.add(x, [1], [0.5], threads=8, group_size=8)", b"buffer(0)"),  # beyond the storage
])
def test_misuse_that_the_standin_stops_at(call, words):
    code = ("import torch, fake_mps, test_fake_mps as t; fake_mps.install()\n"
            f"library = torch.mps.compile_shader(t.ADD); x = t.zeros(4)\n{call}\n")
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200,
                           env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.abspath(__file__))))
    assert child.returncode != 0 and b"metal stand-in:" in child.stderr and words in child.stderr, child.stderr


# ---- Tensors that say mps ------------------------------------------------------------------------

def test_tensors_say_mps_wherever_they_come_from():
    x = zeros(4, 6)
    made = [x, x[1:], x.T, x + 1, torch.empty(3, device=x.device), torch.empty_like(x), x.new_empty(2),
            torch.empty_strided((2, 3), (1, 2), device=x.device), x.half(), x.contiguous(), x.detach()]
    assert all(type(y) is fake_mps.MpsTensor and y.device.type == "mps" and y.is_mps for y in made)
    assert type(x.cpu()) is torch.Tensor and x.cpu().device.type == "cpu"
    y = fake_mps.tensor(torch.ones(3, requires_grad=True))
    (y * 2).sum().backward()
    assert type(y.grad) is fake_mps.MpsTensor and y.grad.cpu().tolist() == [2, 2, 2]


def test_cpu_tensors_do_not_mix_with_those_on_mps():
    x, y = zeros(2, 3), torch.ones(2, 3)
    for mix in (lambda: x + y, lambda: y + x, lambda: torch.where(y > 0, x, 0.0), lambda: x @ y.T,
                lambda: torch.cat([x, y]), lambda: x.masked_fill(y > 0, 1.0), lambda: x.add_(y),
                lambda: torch.func.vjp(lambda a: a * y, x)):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device.*mps:0 and cpu"):
            mix()
    assert (x + torch.tensor(2.0)).cpu().tolist() == [[2.0] * 3] * 2  # one number may
    x.copy_(y)
    assert torch.equal(x.cpu(), y) and type(y.to(x.device)) is fake_mps.MpsTensor
    for made in (torch.arange(3, device=x.device), torch.ones(3, device=x.device), x.new_ones(3)):
        assert type(made) is fake_mps.MpsTensor and made.numel() == 3


def test_orchard_operations_go_to_the_kernel_for_mps():
    library = torch.library.Library("orchard", "FRAGMENT")
    library.define("fake_mps_probe(Tensor x) -> Tensor")
    library.impl("fake_mps_probe", lambda x: x + 1, "MPS")
    library.impl("fake_mps_probe", lambda x: x - 1, "CPU")
    probe = torch.ops.orchard.fake_mps_probe
    assert probe(torch.zeros(1)).item() == -1 and probe(zeros(1)).cpu().item() == 1
