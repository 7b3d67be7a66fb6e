"""A conformance kit for scaled_dot_product_attention: anybody's, not only Orchard's.

    python -m orchard.conformance --target torch
    python -m orchard.conformance --target mypackage.attention:sdpa --isolate --json result.json

It asks a function the questions at which attention implementations are known to have failed, and
compares output and gradients with an explicit float64 formula. It needs torch and nothing else:
the folder can be copied anywhere. docs/conformance.md teaches it; the modules, in order of reading:

    formula.py    attention written out: the truth
    problem.py    one call described by numbers, and its tensors
    check.py      calls a target, measures its errors in units of the error bar
    cases.py      the questions and where they come from; behaviour.py: those beyond values
    targets.py    which functions are checked
    run.py        in this process or in a guarded one
    report.py     tables, JSON
"""

from .cases import CASES, Case
from .check import Verdict, check
from .problem import Problem
from .run import chosen, run, run_isolated
from .targets import Target, find

__all__ = ["CASES", "Case", "Problem", "Target", "Verdict", "check", "chosen", "find", "run",
           "run_isolated"]
