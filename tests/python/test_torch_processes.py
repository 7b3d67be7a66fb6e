"""Threads, forks and ranks: torch's own threads do the work, and every process model goes on.

Every wait has an end, and what does not end in time says where it stands."""

import datetime
import faulthandler
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

import orchard
from orchard import _context
from orchard.torch import cpu
from orchard.torch.attention.operands import PLAIN_FORWARD
from orchard.torch import scaled_dot_product_attention as attention
from orchard.torch import threads
from process import resident


def step(seed=0, length=130):
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(2, 4, length, 16, generator=generator).requires_grad_()
              for _ in range(3)]
    out = attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


WORKERS = """
import os, time, torch, orchard.torch as o
from orchard.torch import cpu
TICK = 1 / os.sysconf("SC_CLK_TCK")
def times():
    made = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as file:
            made[task] = TICK * sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
    return made
x = torch.randn(1, 12, 512, 64)
for count in (3, 1, 2):
    torch.set_num_threads(count)
    torch.exp(torch.randn(1 << 20)); torch.mm(torch.randn(256, 256), torch.randn(256, 256))
    time.sleep(0.3)  # those without work stop looking for some
    before, end = times(), time.monotonic() + 1
    while time.monotonic() < end:
        o.scaled_dot_product_attention(x, x, x)
    after = times()
    spent = sorted(after[task] - before.get(task, 0.0) for task in after)
    busy = sum(one > sum(spent) / 10 for one in spent)
    print(cpu.kernel(), count, busy, len(set(after) - set(before)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed by Linux only")
@pytest.mark.parametrize("kernel", ["c", "python"])
def test_work_runs_on_torchs_threads(kernel):
    """As many as torch was told of share the work, and none of them is new."""
    assert threads.parallel_for, "torch 2.10 and later export it"
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "ORCHARD_TORCH_KERNEL": kernel})
    assert done.stdout.split("\n")[:-1] == [f"{kernel} {n} {n} 0" for n in (3, 1, 2)], done


def test_many_threads_at_once():
    expected = {seed: step(seed) for seed in range(4)}
    wrong = []

    def work(seed):
        for _ in range(10):
            if not same(step(seed), expected[seed]):
                wrong.append(seed)

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
    assert not wrong and not any(t.is_alive() for t in running)


def test_backward_in_another_thread_than_forward():
    """As autograd's own threads for devices do, and users'."""
    q, k, v = (torch.randn(2, 3, 33, 16, requires_grad=True) for _ in range(3))
    for options in ({"is_causal": True}, {"dropout_p": 0.3}):
        out, found = attention(q, k, v, **options), []
        expected = torch.autograd.grad(out.sin().sum(), (q, k, v), retain_graph=True)
        thread = threading.Thread(target=lambda: found.extend(
            torch.autograd.grad(out.sin().sum(), (q, k, v))))
        thread.start()
        thread.join(60)
        assert len(found) == 3 and same(found, expected)


def test_threads_come_and_go_without_leaving_memory():
    """Each thread's context ends with it."""
    def round_of(count):
        for _ in range(count):
            thread = threading.Thread(target=step, args=(0, 40))
            thread.start()
            thread.join(60)
            assert not thread.is_alive()

    torch.set_num_threads(1)
    try:
        round_of(30)
        before = resident()
        round_of(200)
        assert resident() - before < 16 * 2 ** 20
    finally:
        torch.set_num_threads(2)


def test_set_num_threads_changes_no_bit():
    expected, before = step(), torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            assert threads.context().threads == count
            assert same(step(), expected)
    finally:
        torch.set_num_threads(before)


def in_child(work, seconds=60):
    """Runs work() in a forked child; its exit status, None if it hung."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def fork_with_torchs_pool_alive():
    torch.exp(torch.randn(1 << 20))
    expected = step()
    assert in_child(lambda: same(step(), expected), 30) == 0
    assert same(step(), expected)


PYTHONS_KERNEL = """
import torch, test_torch_processes
from orchard.torch import cpu
assert cpu.kernel() == "python"
torch.set_num_threads(2)
test_torch_processes.fork_with_torchs_pool_alive()
"""


@pytest.mark.parametrize("kernel", ["c", "python"])
def test_fork_with_torchs_pool_alive(kernel):
    """There torch's own parallel operations hang; ours go on with Orchard's pool. The two kernels
    learn of the fork each in its own way."""
    if kernel == "c":
        return fork_with_torchs_pool_alive()
    done = subprocess.run([sys.executable, "-c", PYTHONS_KERNEL], cwd=pathlib.Path(__file__).parent,
                          env={**os.environ, "ORCHARD_TORCH_KERNEL": kernel}, timeout=120,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


IMPORTED_LATE = """
import os, signal, sys, torch
torch.set_num_threads(2)
torch.exp(torch.randn(1 << 22))
child = os.fork()
if not child:
    signal.alarm(60)
    import orchard.torch
    x = torch.ones(2, 4, 130, 16)
    os._exit(not torch.equal(orchard.torch.scaled_dot_product_attention(x, x, x), x))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a fork is told by Linux only")
@pytest.mark.parametrize("kernel", ["c", "python"])
def test_orchard_is_imported_after_the_fork(kernel):
    """torch's threads were left behind in the parent before anybody here could see it."""
    done = subprocess.run([sys.executable, "-c", IMPORTED_LATE], capture_output=True, text=True,
                          env={**os.environ, "ORCHARD_TORCH_KERNEL": kernel}, timeout=120)
    assert done.returncode == 0, done


def test_a_forked_child_has_contexts_of_its_own():
    """The parent's may hold devices, whose drivers do not survive a fork."""
    def ask():
        return _context.context(threads=1, backend="ref")

    parents = ask()
    assert in_child(lambda: ask() is not parents and ask() is ask()) == 0
    assert ask() is parents


@pytest.fixture
def freed(monkeypatch):
    """The addresses of contexts that Python has freed."""
    seen, free = [], _context.lib.orchard_ctx_free

    def record(handle):
        seen.append(handle.value)
        free(handle)

    monkeypatch.setattr(_context.lib, "orchard_ctx_free", record)
    return seen


def in_thread(work):
    made = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    thread.join(60)
    return made[0]


def test_pythons_contexts_end_with_their_thread(freed):
    x = torch.randn(1, 2, 5, 8)

    def work():
        outs = [orchard.attention_forward(x, x, x, backend="cpu", threads=1)[0],
                cpu.in_python(PLAIN_FORWARD)(x, x, x, None, False)[0]]
        assert same(outs, [attention(x, x, x)] * 2)
        return [ctx.handle.value for ctx in _context._contexts.made.values()]

    made = [address for _ in range(20) for address in in_thread(work)]
    assert len(made) == 40 and sorted(freed) == sorted(made)


def test_pythons_contexts_end_when_another_number_of_threads_is_asked_for(freed):
    x, counts = torch.randn(1, 2, 5, 8), (1, 1, 2, 3, 1)

    def work():
        for count in counts:
            torch.set_num_threads(count)
            cpu.in_python(PLAIN_FORWARD)(x, x, x, None, False)
            orchard.attention_forward(x, x, x, backend="ref", threads=count)
            seen.append(([ctx.threads for ctx in _context._contexts.made.values()], len(freed)))

    before, seen = torch.get_num_threads(), []
    try:
        in_thread(work)
    finally:
        torch.set_num_threads(before)
    ends = (0, 0, 2, 4, 6)  # how many contexts did, before each
    assert seen == [([count] * 2, ended) for count, ended in zip(counts, ends)]


def test_a_forked_child_frees_only_contexts_of_its_own(freed):
    """What another thread of the parent was using at the fork is dropped in the child at once."""
    held = [_context.Context(threads=1, backend="ref")]
    address = held[0].handle.value

    def in_the_child():
        held.clear()
        inherited, own = list(freed), _context.Context(threads=1, backend="ref")
        address_of_own = own.handle.value
        del own
        return inherited == [] and freed == [address_of_own]

    assert in_child(in_the_child) == 0
    assert freed == []
    held.clear()
    assert freed == [address]


class Attended(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return step(i, 40)[0]


def test_dataloader_workers():
    expected = [step(i, 40)[0] for i in range(6)]
    for method in ("fork", "spawn"):
        loader = DataLoader(Attended(), num_workers=2 if method == "fork" else 1, batch_size=None,
                            multiprocessing_context=method, timeout=120)
        found = list(loader)
        assert len(found) == len(expected) and same(found, expected)


def send(queue, leaves):
    out = attention(*leaves)
    queue.put(out.detach().sum().item())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_torch_multiprocessing(method):
    context = mp.get_context(method)
    queue = context.Queue()
    leaves = [torch.randn(1, 2, 20, 8).share_memory_() for _ in range(3)]
    count = 2 if method == "fork" else 1  # a spawned child takes seconds to import torch
    children = [context.Process(target=send, args=(queue, leaves)) for _ in range(count)]
    for child in children:
        child.start()
    found = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert found == [attention(*leaves).sum().item()] * count


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return self.out(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 10, 16, generator=generator) for _ in range(5)]


RANK_SECONDS = 100


def rank_main(rank, store, path):
    faulthandler.dump_traceback_later(RANK_SECONDS, exit=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=RANK_SECONDS - 20))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Block())
    result = train(model, [batch[2 * rank:2 * rank + 2] for batch in data()])
    if rank == 0:
        torch.save(result, path)
    # Without destructors: torch 2.13 can deadlock in gloo's, now and then on a busy machine. It
    # waits with the GIL held for a thread that drops the last gradient exchange and wants the GIL.
    os._exit(0)


def where_it_stands(process):
    """What each thread of a process waits for, as far as Linux tells."""
    tasks = pathlib.Path(f"/proc/{process}/task")
    lines = [f"{task.name} {(task / 'comm').read_text().strip()}: {(task / 'wchan').read_text()}"
             for task in (tasks.iterdir() if tasks.exists() else ())]
    return f"process {process} did not end: " + "; ".join(lines)


def run_ranks(*arguments):
    """mp.spawn of two ranks, with an end."""
    ranks = mp.spawn(rank_main, arguments, nprocs=2, join=False)
    end = time.monotonic() + RANK_SECONDS + 30
    while not ranks.join(timeout=5):
        if time.monotonic() < end:
            continue
        late = [process for process in ranks.processes if process.is_alive()]
        stand = [where_it_stands(process.pid) for process in late]
        for process in late:
            process.kill()
        pytest.fail("\n".join(stand))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_two_ranks_train_as_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    run_ranks(str(tmp_path / "store"), str(tmp_path / "result.pt"))
    found = torch.load(tmp_path / "result.pt")
    torch.manual_seed(0)
    for a, b in zip(found, train(Block(), data())):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
