"""What the tests of the switch share: torch's own function past it, inputs, comparisons, threads.

`clean` is a fixture: importing it puts it around every test of the importing file.
"""

import contextlib
import os
import threading
import time
import types

import planted_room
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from orchard import switch

# Inside an object, because the switch replaces every module-level name of the function.
THE = types.SimpleNamespace(torch=torch._C._nn.scaled_dot_product_attention)


@pytest.fixture(autouse=True)
def clean(request):
    """Every test starts and ends with the switch off and all objects torch's own."""
    bias, fastpath = vars(CausalBias)["__torch_function__"], True
    switch.counts(reset=True)
    torch.manual_seed(5)
    yield
    switch.disable()
    assert F.scaled_dot_product_attention is THE.torch
    assert request.module.imported_earlier is THE.torch
    assert vars(CausalBias)["__torch_function__"] is bias
    assert torch.backends.mha.get_fastpath_enabled() is fastpath
    assert switch.active() == []


@pytest.fixture(autouse=True)
def attention_alone():
    """Import it where all that counts is attention: no room replaces anything."""
    with planted_room.only():
        yield


def qkv(*shape, keys=None, dtype=torch.float32, grad=True, value_size=None):
    kv = shape if keys is None else (*shape[:-2], keys, shape[-1])
    vs = kv if value_size is None else (*kv[:-1], value_size)
    return [torch.randn(s, dtype=dtype).requires_grad_(grad) for s in (shape, kv, vs)]


def both(call, tensors, *args, **kwargs):
    """Outputs and gradients of call(tensors...), by torch and by the switch; and its counts."""
    def run(function):
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        out = function(*leaves, *args, **kwargs)
        wanted = [t for t in leaves if t.requires_grad]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        return [out, *torch.autograd.grad((out * weight).sum(), wanted)]
    expected = run(THE.torch if call is None else call)
    switch.counts(reset=True)
    with switch.enable():
        found = run(F.scaled_dot_product_attention if call is None else call)
    return expected, found, switch.counts()


def close(expected, found, tolerance=2e-5):
    for want, have in zip(expected, found):
        assert have.shape == want.shape and have.dtype == want.dtype
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


# ---- Threads and forks ---------------------------------------------------------------------------

def joined(threads, seconds=120):
    """Waits for all of them; a thread that hangs is a failure and not the end of the run."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@contextlib.contextmanager
def held_by_another_thread(lock):
    """`lock` is held, by a thread that does nothing else, until the block ends."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(120)
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        done.set()
        joined([thread])


def forked(work, seconds=60):
    """Whether work() is true in a forked child; None if it hung."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None
