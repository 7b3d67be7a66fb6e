"""What a test asks of its own process."""
import os
import pathlib
import re
import resource
import subprocess
import sys


def resident():
    """Bytes of this process in memory now."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True,
                           text=True, check=True)
    return int(shown.stdout) * 1024


def peak():
    """The most bytes of this process that were in memory at any time, or since `grown` began."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"))[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def grown(work):
    """By how many bytes this process grew while work() ran, be it for a moment. Linux forgets
    earlier peaks when it is told to; elsewhere only what goes beyond them is seen."""
    forget = pathlib.Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5", encoding="ascii")
    before = peak()
    work()
    return peak() - before
