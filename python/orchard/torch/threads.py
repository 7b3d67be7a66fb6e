"""Which threads a call runs on: torch's own, so that two pools never fight for the cores.

torch exports `torch_parallel_for` (2.10 and later) with the very signature that a context's
`parallel_for` has. Where torch lacks it, and in a forked child, where torch's threads no longer
exist and its own parallel operations would hang, the library's own pool does the work: it is made
anew after a fork. Either way as many threads are used as `torch.get_num_threads()` says.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from typing import Optional

import torch

from .. import _context

MOST_THREADS = 256  # of a context

# CPU tensors are served by the CPU: a GPU backend only where the user names one.
BACKENDS = None if os.environ.get("ORCHARD_BACKEND") else "cpu,ref"


def torch_library() -> Optional[ctypes.CDLL]:
    """libtorch_cpu, which torch has loaded privately; None where it has another name."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    path = pathlib.Path(torch.__file__).parent / "lib" / name
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def forked() -> bool:
    """Whether this process is a fork (Linux tells): torch's threads may have been left behind
    before Orchard was imported."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
    except (OSError, IndexError, ValueError):
        return False
    return bool(flags & 0x40)  # PF_FORKNOEXEC: no program was started since


def _find_parallel_for() -> Optional[int]:
    library = None if forked() else torch_library()
    function = getattr(library, "torch_parallel_for", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


parallel_for = _find_parallel_for()


def _in_forked_child() -> None:
    global parallel_for
    parallel_for = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def context() -> _context.Context:
    """The calling thread's context, with as many threads as torch would use now."""
    return _context.context(threads=min(torch.get_num_threads(), MOST_THREADS), backend=BACKENDS,
                            parallel_for=parallel_for)
