"""Memory stays flat, and small: nothing [T,S] is stored for the backward."""

import ctypes
import os
import sys

import pytest
import torch

from orchard.torch import cpu
from orchard.torch.attention import ops
from orchard.torch import scaled_dot_product_attention as attention
from process import grown, resident


def test_2000_steps_of_varying_length_stay_flat():
    generator = torch.Generator().manual_seed(0)

    def step(length):
        q, k, v = (torch.randn(2, 4, length, 32, requires_grad=True) for _ in range(3))
        attention(q, k, v, is_causal=True, dropout_p=0.1,
                  bias=torch.zeros(length)).sum().backward()

    lengths = torch.randint(1, 65, (2300,), generator=generator).tolist()
    for length in lengths[:300]:  # the allocator's pools and the plans fill
        step(length)
    step(64)
    before = resident()
    for length in lengths[300:]:
        step(length)
    assert resident() - before < 8 * 2 ** 20


def test_autograd_keeps_no_matrix():
    saved = []
    q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention(q, k, v, is_causal=True, dropout_p=0.1)
    assert sum(x.numel() for x in saved) <= 4 * q.numel() + 2 * 2 * 256 + 1


@pytest.mark.parametrize("options", [{}, {"window": (64, 64)}], ids=str)
def test_long_sequences_need_little(options):
    """16,384 tokens: the matrix of scores would take a gigabyte, and one of bool a quarter of it.
    Not even for a moment, neither forward nor backward."""
    def forward(length):
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
        return attention(q, k, v, **options)

    forward(64).sum().backward()  # all that is loaded when first needed
    outs = []
    assert grown(lambda: outs.append(forward(16384))) < 32 * 2 ** 20
    assert grown(lambda: outs.pop().sum().backward()) < 32 * 2 ** 20


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def in_use():
    """Bytes that malloc has handed out and not got back."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


glibc_only = pytest.mark.skipif(sys.platform != "linux", reason="malloc's figures are glibc's")


@glibc_only
def test_scratch_lies_outside_of_mallocs_heap():
    """It is kept, and would keep what torch frees around it from being given back."""
    def step(length):
        q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
        attention(q, k, v, window=(8, 8)).sum().backward()

    assert cpu.kernel() == "c"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # another number: a context of its own
    step(64)
    heap, all_of_it = in_use(), resident()
    step(16384)
    assert in_use() - heap < 2 ** 18 < 2 ** 20 < resident() - all_of_it
    torch.set_num_threads(threads)


# ---- What torch hands to kernel.c is deleted there: tensors, and a box around each optional one --

Q, ROWS = torch.randn(1, 2, 3, 4), torch.zeros(1, 2, 3)
PACKED, STARTS, SEED = torch.randn(3, 2, 4), torch.tensor([0, 1, 3]), torch.tensor(7)
REST = 0.5, True, False, -1, -1, 1.0, 0.1  # scale ... dropout, as in ops.ATTENTION
DENSE = (torch.zeros(1, 2, 3, 3), torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.zeros(2),
         torch.zeros(2), torch.tensor([3]), None, None)  # bias ... cu_seqlens_k


def dense():
    out, lse, lse_rest = ops.forward_rest(Q, Q, Q, *DENSE, SEED, 0, 0, *REST)
    ops.backward(31, out, ROWS, out, lse, lse_rest, Q, Q, Q, *DENSE, SEED, 0, 0, *REST)


def packed():
    options = *(None,) * 5, STARTS, STARTS, SEED, 2, 2, *REST
    out, lse = ops.forward(PACKED, PACKED, PACKED, *options)
    ops.backward(7, out, lse, out, lse, None, PACKED, PACKED, PACKED, *options)


def plain():
    ops.plain_forward(Q, Q, Q, 0.5, True)
    out, *rows = ops.plain_forward_rest(Q, Q, Q, 0.5, True)
    ops.plain_backward(7, out, out, *rows, Q, Q, Q, 0.5, True)


def refused_by_kernel_c():
    with pytest.raises(RuntimeError, match="seed must be one int64"):
        ops.forward(Q, Q, Q, *DENSE, ROWS, 0, 0, *REST)
    with pytest.raises(RuntimeError, match="seed must be one int64"):
        ops.backward(31, Q, ROWS, Q, ROWS, ROWS, Q, Q, Q, *DENSE, ROWS, 0, 0, *REST)


def refused_by_the_library():
    with pytest.raises(RuntimeError, match="k has head size 3"):
        ops.forward(Q, Q[..., 1:], Q, *DENSE, SEED, 0, 0, *REST)
    with pytest.raises(RuntimeError, match="k has head size 3"):
        ops.backward(31, Q, ROWS, Q, ROWS, ROWS, Q, Q[..., 1:], Q, *DENSE, SEED, 0, 0, *REST)


@glibc_only
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("call", [dense, packed, plain, refused_by_kernel_c,
                                  refused_by_the_library])
def test_calls_leave_nothing_in_mallocs_heap(call):
    """malloc's smallest block takes 32 bytes: 64,000 if each round lost one."""
    assert cpu.kernel() == "c"
    for _ in range(300):
        call()
    before = in_use()
    for _ in range(2000):
        call()
    assert in_use() - before < 32_000


def flags_at(address):
    """What Linux knows about the memory there: "hg" among it if large pages were asked for."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                start, end = (int(x, 16) for x in first.split("-"))
                inside = start <= address < end
            elif inside and first == "VmFlags:":
                return rest
    raise AssertionError("no mapping has that address")


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux only")
def test_large_gradients_ask_for_large_pages():
    """One of 8 MiB has pages of 2 MiB in it, whatever its address; one of 2 MiB is left alone."""
    has_them = os.path.isdir("/sys/kernel/mm/transparent_hugepage")
    assert cpu.kernel() == "c"
    for size, asked in ((512, False), (1024, has_them)):
        q, k, v = (torch.randn(1, 2, size, 16) for _ in range(3))
        bias = torch.randn(1, 2, size, size, requires_grad=True)
        gradient, = torch.autograd.grad(attention(q, k, v, bias).sum(), bias)
        middle = gradient.data_ptr() + gradient.nbytes // 2
        assert ("hg" in flags_at(middle)) == asked
