"""Runs cases against a target, in this process or, isolated, in another.

Isolated, a worker process runs the cases one after the other and reports each by a line. If it dies
or takes too long, that case's verdict is "crashes" or "hangs", and a new worker goes on with the
next one: isolation costs a process start only at the beginning and where something went wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .cases import CASES, Case
from .check import CRASHES, HANGS, Verdict
from .targets import find

OnVerdict = Callable[[Case, Verdict], None]
Lines = queue.Queue[Optional[str]]
START = 120.0   # seconds in which a worker must have imported torch and the target
MARK = f"@{__name__}: "


def chosen(only: Sequence[str] = (), large: bool = False) -> List[Case]:
    """The cases whose name or area contains one of the words of `only` (all if there are none)."""
    return [case for case in CASES if (large or not case.large) and
            (not only or any(word.lower() in f"{case.area}: {case.name}".lower() for word in only))]


def run(target: str, cases: Sequence[Case], device: str = "cpu",
        on_verdict: OnVerdict = lambda case, verdict: None) -> Dict[str, Verdict]:
    """Every case in this process."""
    found, verdicts = find(target), {}
    for case in cases:
        verdicts[case.name] = case.run(found, device)
        on_verdict(case, verdicts[case.name])
    return verdicts


# ---- Isolated ------------------------------------------------------------------------------------

def run_isolated(target: str, cases: Sequence[Case], device: str = "cpu", limit: float = 120.0,
                 memory: Optional[float] = None,
                 on_verdict: OnVerdict = lambda case, verdict: None) -> Dict[str, Verdict]:
    """Every case in a worker process, each with `limit` seconds; `memory` in GB, or no limit."""
    verdicts: Dict[str, Verdict] = {}
    left = list(cases)
    while left:
        for case, verdict in one_worker(target, left, device, limit, memory):
            verdicts[case.name] = verdict
            on_verdict(case, verdict)
        left = [case for case in cases if case.name not in verdicts]
    return verdicts


def one_worker(target: str, cases: Sequence[Case], device: str, limit: float,
               memory: Optional[float]) -> Iterator[Tuple[Case, Verdict]]:
    """Verdicts until the worker is done, or has died or been stopped in a case."""
    with started(target, cases, device, memory) as (worker, lines, _):
        for case in cases:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                worker.kill()
                yield case, Verdict(HANGS, detail=f"stopped after {limit:g} s")
                return
            if line is None:
                yield case, Verdict(CRASHES, detail=death(worker.wait()))
                return
            yield case, from_json(json.loads(line))


def version_isolated(target: str, device: str = "cpu") -> str:
    """The target's version, asked in a worker: to import it may crash or hang, too."""
    with started(target, [], device, None) as (_, _, version):
        pass
    return version


@contextlib.contextmanager
def started(target: str, cases: Sequence[Case], device: str,
            memory: Optional[float]) -> Iterator[Tuple[subprocess.Popen[str], Lines, str]]:
    """A worker that has found the target, the lines that it sends, and the target's version."""
    package = __name__.rpartition(".")[0]
    command = [sys.executable, "-m", package, "--worker", "--target", target, "--device", device]
    if memory:
        command += ["--memory", str(memory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=environment()) as worker, \
            contextlib.ExitStack() as end:
        assert worker.stdin and worker.stdout
        json.dump([case.name for case in cases], worker.stdin)
        worker.stdin.close()
        lines: Lines = queue.Queue()
        reader = threading.Thread(target=forward_lines, args=(worker.stdout, lines), daemon=True)
        reader.start()
        end.callback(reader.join)   # before its stream is closed
        end.callback(worker.kill)   # before that: a case may hang when the caller goes away
        try:
            line = lines.get(timeout=START)
        except queue.Empty:
            raise RuntimeError(f"importing {target} was stopped after {START:g} s") from None
        if line is None:
            raise RuntimeError(f"importing {target}: {death(worker.wait())}")
        ready = json.loads(line)
        if "error" in ready:
            raise RuntimeError(ready["error"])
        yield worker, lines, ready["version"]


def environment() -> Dict[str, str]:
    """The worker finds the modules that this process finds."""
    return dict(os.environ, PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))


def forward_lines(stream, lines: Lines) -> None:
    for line in stream:
        if line.startswith(MARK):       # what the target itself prints is not for us
            lines.put(line[len(MARK):])
    lines.put(None)


def death(code: int) -> str:
    if code < 0:
        known = -code in set(signal.Signals)
        return f"the process ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"the process ended with status {code}"


def work(target: str, device: str, memory: Optional[float]) -> None:
    """The worker's side: names of cases from standard input, to standard output a line when the
    target was found, and one for each case."""
    names = json.load(sys.stdin)
    by_name = {case.name: case for case in CASES}
    try:
        found = find(target)
    except (Exception, SystemExit) as why:
        send({"error": message(why)})
        return
    if memory:
        import resource
        bytes_ = int(memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    send({"version": found.version})
    for name in names:
        send(to_json(by_name[name].run(found, device)))


def send(fields: Dict) -> None:
    """On a line of its own: the target may have printed without ending its line."""
    print("\n" + MARK + json.dumps(fields), flush=True)


def message(why: BaseException) -> str:
    return str(why).strip() or type(why).__name__


# ---- Verdicts as JSON ----------------------------------------------------------------------------

def to_json(verdict: Verdict) -> Dict:
    """JSON has neither infinity nor NaN: an error beyond measure is the word "inf"."""
    fields = dataclasses.asdict(verdict)
    if fields["bars"] is not None and not math.isfinite(fields["bars"]):
        fields["bars"] = "inf"
    return fields


def from_json(fields: Dict) -> Verdict:
    bars = fields["bars"]
    return Verdict(fields["outcome"], None if bars is None else float(bars), fields["detail"])
