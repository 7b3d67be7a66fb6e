"""The command: python -m orchard.conformance. Exit status 0: nothing is wrong; 1: something is;
2: the command could not run, no case could be checked, or the output could not be written."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
from typing import List, Optional

import torch

from . import report
from .run import chosen, run, run_isolated, message, version_isolated, work
from .targets import find


def parser() -> argparse.ArgumentParser:
    package = (__package__ or "conformance")
    made = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description="Checks a scaled_dot_product_attention, feature by feature and failure by "
                    "failure. Errors are in units of the error bar: up to 1 passes.")
    made.add_argument("--target", action="append", metavar="NAME",
                      help="torch, torch-math, torch-flash, orchard, or module:function; several "
                           "with --markdown make one page (default: torch)")
    made.add_argument("--device", default="cpu", help="where tensors live: cpu, mps, cuda")
    made.add_argument("--only", action="append", default=[], metavar="WORD",
                      help="cases whose area or name contains this")
    made.add_argument("--large", action="store_true",
                      help="also the cases that need gigabytes and minutes")
    made.add_argument("--isolate", action="store_true",
                      help="in another process, which may crash or hang")
    made.add_argument("--limit", type=positive, default=120.0, metavar="SECONDS",
                      help="of one isolated case (default: 120)")
    made.add_argument("--memory", type=positive, metavar="GB",
                      help="address space of the isolated process (default: no limit)")
    made.add_argument("--strict", action="store_true",
                      help="a case that raises or is too heavy counts as a failure too")
    made.add_argument("--list", action="store_true", help="the cases, without running them")
    made.add_argument("--json", metavar="FILE", help="write the verdicts, machine-readable")
    made.add_argument("--markdown", metavar="FILE", help="write the verdicts as a page")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


class Unwritten(Exception):
    """The output got nowhere; without a text if its reader left, as `head` does."""


def say(text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise Unwritten from None
    except OSError as why:
        raise Unwritten(f"the output could not be written: {why.strerror}") from None


def write(file: str, text: str) -> None:
    try:
        pathlib.Path(file).write_text(text)
    except OSError as why:
        raise Unwritten(f"{file} could not be written: {why.strerror}") from None


def command() -> int:
    """The exit status. What nobody could read is no success."""
    try:
        try:
            return main()
        finally:
            say("", end="")     # argparse's help may still be on its way
    except Unwritten as why:
        if str(why):
            print(f"conformance: {why}", file=sys.stderr)
        # Else Python would try to write the rest at its end, and fail in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def main(arguments: Optional[List[str]] = None) -> int:
    given = parser().parse_args(arguments)
    targets = given.target or ["torch"]
    if given.worker:
        work(targets[0], given.device, given.memory)
        return 0
    cases = chosen(given.only, given.large)
    if given.list:
        for case in cases:
            say(f"{case.area:13} {case.name:42} {case.source}\n{'':13}   {case.says}")
        say(f"{len(cases)} cases")
        return 0
    if not cases:
        print(f"conformance: no case contains {' or '.join(given.only)!r}", file=sys.stderr)
        return 2
    if given.json and len(targets) > 1:
        print("conformance: --json takes one target at a time", file=sys.stderr)
        return 2
    columns, versions, bad, unchecked = {}, {}, [], []
    try:
        check_device(given.device)
        for file in (given.json, given.markdown):
            if file:
                with open(file, "a"):       # before an hour of work, not after it
                    pass
        versions = {name: version_isolated(name, given.device) if given.isolate
                    else find(name).version for name in targets}
    except (Exception, SystemExit) as why:
        print(f"conformance: {message(why)}", file=sys.stderr)
        return 2
    for name in targets:
        columns[name] = check_one(given, name, cases, versions[name])
        bad += report.failed(columns[name], given.strict)
        unchecked += [] if report.any_checked(columns[name]) else [name]
    if given.json:
        text = report.as_json(targets[0], versions[targets[0]], given.device, cases,
                              columns[targets[0]])
        write(given.json, text)
    if given.markdown:
        words = " ".join(["python -m", __package__ or "conformance"] +
                         (arguments if arguments is not None else sys.argv[1:]))
        write(given.markdown, report.markdown(columns, versions, cases, [words]))
    for name in unchecked:
        print(f"conformance: {name}: no case could be checked: {report.counts(columns[name])}",
              file=sys.stderr)
    return 1 if bad else 2 if unchecked else 0


def check_device(name: str) -> None:
    """Raises where no tensor can live there and come back."""
    try:
        torch.ones(1, device=name).cpu()
    except Exception as why:
        raise ValueError(f"--device {name}: {str(why).splitlines()[0]}") from None


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def check_one(given: argparse.Namespace, name: str, cases, version: str):
    """One target's verdicts, printed line by line."""
    say(f"{name}: {version}, device {given.device}, {len(cases)} cases")

    def on_verdict(case, verdict) -> None:
        say(report.line(case, verdict))

    if given.isolate:
        verdicts = run_isolated(name, cases, given.device, given.limit, given.memory, on_verdict)
    else:
        verdicts = run(name, cases, given.device, on_verdict)
    say(f"{name}: {report.counts(verdicts)}")
    return verdicts


if __name__ == "__main__":
    sys.exit(command())
