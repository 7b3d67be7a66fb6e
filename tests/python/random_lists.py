"""Random argument lists, drawn by hypothesis and tried in a process of their own: a crash is seen as
what it is, and the last number that was printed says at which list. The lists are the same each
time; one that fails an assertion is made as small as can be and shown by the choices that made it."""
import collections
import faulthandler
import itertools
import json
import subprocess
import sys

CALLS = 20000


class Choices:
    """What random.Random is asked for here, each answer a choice of hypothesis'. It likes the ends
    of a range and, when it looks for a smaller list, the first one: neither may be what is rare."""

    def __init__(self, drawn):
        self.drawn = drawn
        self.choice, self.randrange, self.sample = drawn.choice, drawn.randrange, drawn.sample

    def random(self):
        return (self.drawn.randrange(128) + 96) % 128 / 128

    def number(self):
        """To seed values with, or one of its own."""
        return self.drawn.randrange(2 ** 16) * 0x9e3779b97f4a7c15 % 2 ** 63


def child(prepare):
    """What the file does as a program: COUNT, or "crash". `prepare()` gives the function that draws
    and tries one list and says in a few words what came of it."""
    faulthandler.enable()
    if sys.argv[1] == "crash":
        import ctypes
        ctypes.string_at(8)
    from hypothesis import HealthCheck, Phase, given, settings, strategies
    one = prepare()
    counts, number = collections.Counter(), itertools.count(1)

    @settings(max_examples=int(sys.argv[1]), derandomize=True, database=None, deadline=None,
              phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    @given(strategies.randoms(note_method_calls=True, use_true_random=False))
    def lists(drawn):
        print("list", next(number), file=sys.stderr)
        counts[one(Choices(drawn))] += 1

    lists()
    print(json.dumps(counts))


def _run(file, *words):
    return subprocess.run([sys.executable, "-X", "faulthandler", file, *map(str, words)],
                          capture_output=True, text=True, timeout=500)


def counts_of(file):
    """How often what came of CALLS lists."""
    done = _run(file, CALLS)
    last = [line for line in done.stderr.split("\n") if "Warning" not in line]
    assert done.returncode == 0, (f"exit status {done.returncode}; again with: python {file} {CALLS}\n"
                                  + "\n".join(last[-60:]))
    counts = json.loads(done.stdout)
    print(counts)
    assert sum(counts.values()) == CALLS
    assert not any("Internal" in name or "Device" in name for name in counts)
    return counts


def check_that_a_crash_is_seen(file):
    """The parent's check, tried on a child that dies of a bad address."""
    done = _run(file, "crash")
    assert done.returncode < 0 and "Segmentation fault" in done.stderr
