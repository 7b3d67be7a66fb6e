"""Verdicts as a table for people, in text or Markdown, and as JSON for programs."""

from __future__ import annotations

import collections
import datetime
import json
import math
import platform
from typing import Dict, List, Sequence

import torch

from .cases import Case
from .check import (ABSENT, CRASHES, HANGS, HEAVY, NOT_MEASURED, ORDER, PASSES, RAISES, WRONG,
                    Verdict)
from .run import to_json

FAILURES = (WRONG, CRASHES, HANGS)
STRICT_FAILURES = FAILURES + (RAISES, HEAVY)


def outcome(verdict: Verdict) -> str:
    """The verdict in a few words: "passes, 0.31", "wrong, 1.2e+06"."""
    if verdict.bars is None or verdict.outcome not in (PASSES, WRONG):
        return verdict.outcome
    if math.isinf(verdict.bars):
        return verdict.outcome
    number = f"{verdict.bars:.2f}" if verdict.bars < 1000 else f"{verdict.bars:.1e}"
    return f"{verdict.outcome}, {number}"


def detail(verdict: Verdict) -> str:
    """What a passing comparison was worst at is of no interest; anything else is."""
    if verdict.outcome == PASSES and verdict.bars is not None:
        return ""
    return verdict.detail


def line(case: Case, verdict: Verdict) -> str:
    return f"{case.area:13} {case.name:42} {outcome(verdict):16} {detail(verdict)}".rstrip()


def counts(verdicts: Dict[str, Verdict]) -> str:
    found = collections.Counter(verdict.outcome for verdict in verdicts.values())
    return ", ".join(f"{found[word]} {word}" for word in ORDER if found[word])


def failed(verdicts: Dict[str, Verdict], strict: bool = False) -> List[str]:
    bad = STRICT_FAILURES if strict else FAILURES
    return [name for name, verdict in verdicts.items() if verdict.outcome in bad]


def any_checked(verdicts: Dict[str, Verdict]) -> bool:
    """Whether there was an answer to check: a function that refuses every call is not right."""
    return any(verdict.outcome not in (ABSENT, RAISES, NOT_MEASURED)
               for verdict in verdicts.values())


def machine() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((row.split(":", 1)[1].strip() for row in file
                         if row.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads, {platform.system()}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(columns: Dict[str, Dict[str, Verdict]], versions: Dict[str, str],
             cases: Sequence[Case], commands: Sequence[str]) -> str:
    """One page: a row for each case, a column for each target, then what went wrong in words."""
    names = list(columns)
    rows = ["# Conformance: " + ", ".join(names), "",
            f"{datetime.date.today().isoformat()}; {machine()}. Made by", ""]
    rows += [f"    {command}" for command in commands]
    rows += ["", "A number is the largest error in units of the error bar: up to 1 is right. "
             "[How to read and repeat this](../conformance.md).", ""]
    rows += [f"- **{name}** ({versions[name]}): {counts(columns[name])}" for name in names]
    rows += ["", "| area | case | stands for | " + " | ".join(names) + " |",
             "|---" * (3 + len(names)) + "|"]
    for case in cases:
        cells = [case.area, case.name, case.source]
        cells += [outcome(columns[name][case.name]) for name in names]
        rows.append("| " + " | ".join(map(cell, cells)) + " |")
    for name in names:
        shown = [case for case in cases if columns[name][case.name].outcome not in (PASSES, ABSENT)]
        rows += ["", f"## {name}: what was found", ""] if shown else []
        rows += [f"- **{case.name}** ({case.says}): {outcome(columns[name][case.name])}. "
                 f"{detail(columns[name][case.name])}".rstrip() for case in shown]
    return "\n".join(rows) + "\n"


def as_json(target: str, version: str, device: str, cases: Sequence[Case],
            verdicts: Dict[str, Verdict]) -> str:
    return json.dumps({
        "target": target, "version": version, "device": device,
        "date": datetime.date.today().isoformat(), "machine": machine(),
        "cases": [dict(name=case.name, area=case.area, source=case.source, says=case.says,
                       **to_json(verdicts[case.name])) for case in cases],
    }, indent=1) + "\n"
