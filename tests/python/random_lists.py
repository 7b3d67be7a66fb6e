"""Random argument lists, tried in a process of their own: a crash is seen as what it is, and the last
seed that was printed says at which list."""
import collections
import faulthandler
import json
import subprocess
import sys

CALLS = 20000
SEED = 20261116


def child(prepare):
    """What the file does as a program: FIRST COUNT, or "crash". `prepare()` gives the function that
    tries one seed and says in a few words what came of it."""
    faulthandler.enable()
    if sys.argv[1] == "crash":
        import ctypes
        ctypes.string_at(8)
    one = prepare()
    counts = collections.Counter()
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        print(seed, file=sys.stderr)
        counts[one(seed)] += 1
    print(json.dumps(counts))


def _run(file, *words):
    return subprocess.run([sys.executable, "-X", "faulthandler", file, *map(str, words)],
                          capture_output=True, text=True, timeout=300)


def counts_of(file):
    """How often what came of CALLS lists."""
    done = _run(file, SEED, CALLS)
    last = [line for line in done.stderr.split("\n") if "Warning" not in line]
    assert done.returncode == 0, (f"exit status {done.returncode}; again with: python {file} SEED 1\n"
                                  + "\n".join(last[-30:]))
    counts = json.loads(done.stdout)
    print(counts)
    assert sum(counts.values()) == CALLS
    assert not any("Internal" in name or "Device" in name for name in counts)
    return counts


def check_that_a_crash_is_seen(file):
    """The parent's check, tried on a child that dies of a bad address."""
    done = _run(file, "crash")
    assert done.returncode < 0 and "Segmentation fault" in done.stderr
