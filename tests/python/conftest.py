"""What every file of tests/python shares: the closing line that tests/run reads, and its two rules.

A skipped or expected-to-fail case counts as failed unless its reason stands below. With
ORCHARD_TEST_INSTALLED set, as tests/run does, `orchard` must come from the environment's own
site-packages: a test of the tree would say nothing about the wheel.
"""
import contextlib
import os
import pathlib
import sys
import tempfile
import threading

import pytest

# Inductor keeps compiled graphs with the strides that an op's fake gave then, and its key does not
# know the fake: code compiled by another tree would be tested instead of this one's.
_inductor = tempfile.TemporaryDirectory(prefix="orchard-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor.name

ALLOWED_SKIPS = {  # the beginning of a reason: why such a case may be left out
    "a fork is told by Linux only": "elsewhere Orchard must be imported before; docs/pytorch.md says so",
    "/dev/full is Linux'": "what is said of a full disk is the same code on every system",
    "ELF files are Linux'": "tools/wheels is for Linux",
    "large pages are asked for on Linux only": "they only save time",
    "LD_PRELOAD is for Linux": "the code that fails there is the same",
    "malloc's figures are glibc's": "what takes and returns memory is the same code elsewhere",
    "PoCL is for Linux": "the same calls take other backends there",
    "readelf is for Linux": "the same is checked for macOS wheels by tools/wheels",
    "this machine has no second Python": "those that others have tell; the wheel holds no code for one",
    "threads are listed by Linux only": "whose threads work is the same code on every system",
}

@contextlib.contextmanager
def _forward_mode_elsewhere():
    import torch

    inside, done = threading.Event(), threading.Event()

    def differentiates():
        with torch.autograd.forward_ad.dual_level():
            inside.set()
            done.wait(60)

    other = threading.Thread(target=differentiates)
    other.start()
    inside.wait(60)
    try:
        yield
    finally:
        done.set()
        other.join()


@pytest.fixture
def forward_mode_elsewhere():
    """`with forward_mode_elsewhere():` another thread is in forward mode, whose levels torch counts
    for all threads together."""
    return _forward_mode_elsewhere


@pytest.fixture
def one_thread():
    """Tiny problems are fastest so: pytestmark = pytest.mark.usefixtures("one_thread")."""
    import torch  # which not every file needs

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_counts = {"passed": 0, "failed": 0}
_refused = []


def pytest_configure(config):
    if not os.environ.get("ORCHARD_TEST_INSTALLED"):
        return
    import orchard

    where = pathlib.Path(orchard.__file__).resolve()
    if pathlib.Path(sys.prefix).resolve() not in where.parents:
        raise RuntimeError(f"orchard is imported from {where}, not from {sys.prefix}")


def _allowed(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    return any(reason.startswith(start) for start in ALLOWED_SKIPS), reason


def pytest_runtest_logreport(report):
    if report.skipped:
        allowed, reason = _allowed(report)
        if not allowed:
            _counts["failed"] += 1
            _refused.append(f"{report.nodeid}: skipped ({reason}), which is not on the list")
    elif report.failed:
        _counts["failed"] += 1
    elif report.when == "call":
        _counts["passed"] += 1


def pytest_collectreport(report):
    if report.failed:
        _counts["failed"] += 1
    elif report.skipped and not _allowed(report)[0]:
        _counts["failed"] += 1
        _refused.append(f"{report.nodeid}: skipped as a whole")


def pytest_unconfigure(config):
    names = [pathlib.Path(word.split("::")[0]).stem for word in config.args]
    for line in _refused:
        print(line)
    name = names[0] if len(names) == 1 else "python"
    print(f"{name}: {_counts['passed']} passed, {_counts['failed']} failed")


def pytest_sessionfinish(session, exitstatus):
    if _refused and session.exitstatus == 0:
        session.exitstatus = 1
