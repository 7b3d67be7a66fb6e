"""Cases that are no single comparison of values: dropout, autograd's rules, repeatability, memory.

Each function takes a target and a device, and returns a Verdict.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import threading
from typing import Callable, Dict, List, Optional

import torch
from torch import Tensor

from . import formula
from .check import (ABSENT, HEAVY, NO_FLOAT64, NOT_MEASURED, PASSES, WRONG, Reference, Verdict,
                    Wrong, ask, check, compare, raised, references)
from .problem import Inputs, Problem, build, has_float64

Target = Callable


def guarded(check: Callable) -> Callable:
    """What a target raises is a verdict, not the end of the run."""
    @functools.wraps(check)
    def run(target: Target, device: str) -> Verdict:
        try:
            return check(target, device)
        except Wrong as why:
            return Verdict(WRONG, math.inf, str(why))
        except (Exception, SystemExit) as why:
            return raised(why)
    return run


def call(target: Target, inputs: Inputs, **more) -> Tensor:
    return target(inputs.q, inputs.k, inputs.v, **inputs.kwargs, **more)


def verdict_of(problem: Problem, inputs: Inputs, answers: Dict[str, Tensor],
               keep: Optional[Tensor] = None) -> Verdict:
    return compare(answers, references(problem, inputs, keep))


# ---- Autograd's rules ----------------------------------------------------------------------------

def gradients(out: Tensor, inputs: Inputs, **more) -> Dict[str, Tensor]:
    if not out.requires_grad:
        raise Wrong("the output has no gradient though inputs require one")
    found = torch.autograd.grad(out, list(inputs.leaves.values()), inputs.dout, **more)
    return {"d" + name: x for name, x in zip(inputs.leaves, found)}


@guarded
def two_graphs(target: Target, device: str) -> Verdict:
    problems = [Problem(B=4, causal=True), Problem(B=2, T=50), Problem(B=4, T=20)]
    inputs = [build(problem, device) for problem in problems]
    outs = [call(target, one) for one in inputs]
    worst = Verdict(PASSES, 0.0)
    for problem, one, out in zip(problems, inputs, outs):   # the oldest graph first
        answers = dict(out=out.detach(), **gradients(out, one))
        worst = worst.worse(verdict_of(problem, one, answers))
    return worst


@guarded
def backward_twice(target: Target, device: str) -> Verdict:
    problem = Problem(causal=True)
    inputs = build(problem, device)
    out = call(target, inputs)
    gradients(out, inputs, retain_graph=True)
    return verdict_of(problem, inputs, dict(out=out.detach(), **gradients(out, inputs)))


@guarded
def changed_input(target: Target, device: str) -> Verdict:
    problem = Problem()
    inputs = build(problem, device)
    out = call(target, inputs)
    with torch.no_grad():
        inputs.q.mul_(3.0)
    try:
        found = gradients(out, inputs)
    except RuntimeError as why:
        if "modified by an inplace operation" in str(why):
            return Verdict(PASSES, detail="raises")
        raise
    with torch.no_grad():
        inputs.q.div_(3.0)
    if verdict_of(problem, inputs, dict(out=out.detach(), **found)).outcome == PASSES:
        return Verdict(PASSES, detail="kept the values of forward")
    return Verdict(WRONG, math.inf, "other gradients, without a word")


def second_order(target: Target, inputs: Inputs) -> Dict[str, Tensor]:
    """Gradients of |dq|^2 + |dk|^2 + |dv|^2."""
    out = call(target, inputs)
    first = torch.autograd.grad(out, list(inputs.leaves.values()), inputs.dout, create_graph=True)
    if not any(x.requires_grad for x in first):
        raise Wrong("the gradient has no gradient, and nobody said so")
    second = torch.autograd.grad(sum((x * x).sum() for x in first), list(inputs.leaves.values()))
    return dict(zip(inputs.leaves, second))


@guarded
def double_backward(target: Target, device: str) -> Verdict:
    if not has_float64(device):
        return NO_FLOAT64
    problem = Problem(B=1, H=2, T=9, D=5, dtype="float64")
    inputs = build(problem, device)
    found = second_order(target, inputs)
    exact = second_order(lambda q, k, v, **_: formula.attention(q, k, v)[0], build(problem, "cpu"))
    return within(found, exact, 1e-9)


@guarded
def forward_mode(target: Target, device: str) -> Verdict:
    if not has_float64(device):
        return NO_FLOAT64
    problem = Problem(B=1, H=2, T=9, D=5, dtype="float64", no_grad=True)
    inputs, clean = build(problem, device), build(problem, "cpu")

    def tangent(function: Callable, x: Inputs) -> Tensor:
        primals = (x.q, x.k, x.v)
        return torch.func.jvp(function, primals, tuple(torch.ones_like(p) for p in primals))[1]

    exact = tangent(lambda q, k, v: formula.attention(q, k, v)[0], clean)
    return within({"tangent": tangent(target, inputs)}, {"tangent": exact}, 1e-9)


def within(found: Dict[str, Tensor], exact: Dict[str, Tensor], tolerance: float) -> Verdict:
    """Relative to the largest value; for what the error bar does not cover."""
    for name, x in exact.items():
        error = float((found[name].detach().cpu() - x.detach()).abs().max() / x.abs().max())
        if not error <= tolerance:
            return Verdict(WRONG, error / tolerance, f"{name} is off by {error:.2g} of the largest")
    return Verdict(PASSES)


@guarded
def compiled(target: Target, device: str) -> Verdict:
    problem = Problem(causal=True)
    inputs = build(problem, device)
    torch._dynamo.reset()
    if not target.accepts("is_causal"):
        return Verdict(ABSENT, detail="no argument is_causal")
    function = torch.compile(lambda q, k, v: target.function(q, k, v, is_causal=True),
                             fullgraph=True, backend="aot_eager")
    out = function(inputs.q, inputs.k, inputs.v)
    return verdict_of(problem, inputs, dict(out=out.detach(), **gradients(out, inputs)))


# ---- Dropout -------------------------------------------------------------------------------------

def identity_problem(**fields) -> Problem:
    """v is the unit matrix twice over, so that the output shows every probability, twice: who
    drops outputs instead of probabilities drops the two apart."""
    return Problem(B=2, H=2, T=48, S=64, D=16, E=128, **fields)


def dropped(target: Target, device: str, p: float, seed: int, **fields):
    """(inputs, out, keep): one call with dropout and the multiplier that its output shows."""
    problem = identity_problem(**fields)
    inputs = build(problem, device)
    unit = torch.eye(64, dtype=inputs.v.dtype, device=device).repeat(1, 2)
    unit = unit.expand_as(inputs.v).contiguous()
    inputs.v = unit.requires_grad_("v" in problem.grads and not problem.no_grad)
    if "v" in inputs.leaves:
        inputs.leaves["v"] = inputs.v
    inputs.clean["v"] = unit.detach().clone()
    torch.manual_seed(seed)
    out = call(target, inputs, dropout_p=p)
    keep = (out.detach().cpu()[..., :64] != 0).double() / (1.0 - p)
    return problem, inputs, out, keep


def alike(keep: Tensor) -> str:
    """Which two of the independent masks [B,H,T,S] are the same one; "" if none are."""
    masks = {(b, h): keep[b, h] for b in range(keep.shape[0]) for h in range(keep.shape[1])}
    for (one, x), (other, y) in itertools.combinations(masks.items(), 2):
        if torch.equal(x, y):
            return (f"drops alike in batch element {one[0]}, head {one[1]} and batch element "
                    f"{other[0]}, head {other[1]}")
    return ""


def offers_dropout(target: Target) -> bool:
    return target.accepts("dropout_p")


@guarded
def dropout_drops(target: Target, device: str) -> Verdict:
    if not offers_dropout(target):
        return Verdict(ABSENT, detail="no argument dropout_p")
    worst = Verdict(PASSES, 0.0)
    for p in (0.1, 0.5, 0.8):
        problem, inputs, out, keep = dropped(target, device, p, 7, grads="qkv")
        rate = float((keep == 0).double().mean())
        sigma = math.sqrt(p * (1 - p) / keep.numel())
        if abs(rate - p) > 5 * sigma:
            return Verdict(WRONG, abs(rate - p) / (5 * sigma), f"drops {rate:.3f} where p is {p}")
        for rows in (keep.flatten(0, 2), keep.permute(3, 0, 1, 2).flatten(1)):
            if bool((rows == 0).all(-1).any()) and p < 0.8:
                return Verdict(WRONG, math.inf, "drops whole rows or columns")
        if shared := alike(keep):
            return Verdict(WRONG, math.inf, shared)
        worst = worst.worse(verdict_of(problem, inputs, {"out": out.detach()}, keep))
    return worst


@guarded
def dropout_gradient(target: Target, device: str) -> Verdict:
    if not offers_dropout(target):
        return Verdict(ABSENT, detail="no argument dropout_p")
    worst = Verdict(PASSES, 0.0)
    for fields in ({}, {"causal": True}, {"dtype": "bfloat16"}):
        problem, inputs, out, keep = dropped(target, device, 0.3, 11, **fields)
        if fields.get("causal"):
            seen = formula.visible(48, 64, "cpu", causal=True)
            keep = torch.where(seen, keep, torch.ones_like(keep))
        answers = dict(out=out.detach(), **gradients(out, inputs))
        worst = worst.worse(verdict_of(problem, inputs, answers, keep))
    return worst


@guarded
def dropout_seed(target: Target, device: str) -> Verdict:
    if not offers_dropout(target):
        return Verdict(ABSENT, detail="no argument dropout_p")
    problem, inputs, first, _ = dropped(target, device, 0.5, 3)
    second = call(target, inputs, dropout_p=0.5)
    torch.manual_seed(3)
    again = call(target, inputs, dropout_p=0.5)
    zero = [(x.detach() == 0) for x in (first, second, again)]
    if torch.equal(zero[0], zero[1]):
        return Verdict(WRONG, math.inf, "two calls dropped the same probabilities")
    if not torch.equal(zero[0], zero[2]):
        return Verdict(WRONG, math.inf, "torch.manual_seed does not bring the mask back")
    whole = call(target, inputs, dropout_p=0.0)
    return verdict_of(problem, inputs, {"out": whole.detach()})


@guarded
def dropout_fully_masked(target: Target, device: str) -> Verdict:
    if not offers_dropout(target):
        return Verdict(ABSENT, detail="no argument dropout_p")
    problem, inputs, out, keep = dropped(target, device, 0.3, 5, mask="fully-masked-rows")
    seen = inputs.kwargs["attn_mask"].cpu()
    keep = torch.where(seen, keep, torch.ones_like(keep))
    return verdict_of(problem, inputs, dict(out=out.detach(), **gradients(out, inputs)), keep)


# ---- Repeatability -------------------------------------------------------------------------------

def answers_of(target: Target, problem: Problem, device: str) -> Dict[str, Tensor]:
    return ask(target, problem, build(problem, device))


def differing(first: Dict[str, Tensor], second: Dict[str, Tensor]) -> Verdict:
    for name, x in first.items():
        if not torch.equal(x, second[name]):
            apart = float((x.double() - second[name].double()).abs().max())
            return Verdict(WRONG, None, f"{name} differs by up to {apart:.2g}")
    return Verdict(PASSES)


REPEATED = (Problem(B=2, H=4, T=150, D=64, causal=True), Problem(B=1, H=1, T=2, S=3000, D=64),
            Problem(H=4, G=2, T=130, dtype="bfloat16"))


@guarded
def same_bits(target: Target, device: str) -> Verdict:
    worst = Verdict(PASSES)
    for problem in REPEATED:
        first = answers_of(target, problem, device)
        for _ in range(3):
            worst = worst.worse(differing(first, answers_of(target, problem, device)))
    return worst


@guarded
def same_bits_threads(target: Target, device: str) -> Verdict:
    threads, worst = torch.get_num_threads(), Verdict(PASSES)
    try:
        for problem in REPEATED:
            first = answers_of(target, problem, device)
            for n in (1, 3):
                torch.set_num_threads(n)
                worst = worst.worse(differing(first, answers_of(target, problem, device)))
            torch.set_num_threads(threads)
    finally:
        torch.set_num_threads(threads)
    return worst


@guarded
def grad_mode(target: Target, device: str) -> Verdict:
    worst = Verdict(PASSES, 0.0)
    for fields in ({"mask": "padding", "mask_shape": "B11S"}, {"causal": True},
                   {"T": 3, "S": 70, "D": 64}, {"dtype": "bfloat16", "mask": "bool"}):
        for no_grad in (True, False):
            worst = worst.worse(check(target, Problem(no_grad=no_grad, **fields), device))
    return worst


@guarded
def two_threads(target: Target, device: str) -> Verdict:
    problems = [Problem(causal=True, T=64), Problem(T=50, S=90, dtype="bfloat16")]
    # Beforehand: computing them changes the number of torch's threads, which is the process's.
    known = [references(problem, build(problem, device)) for problem in problems]
    found: List[Verdict] = []

    def work(problem: Problem, reference: Reference) -> None:
        for _ in range(10):
            found.append(check(target, problem, device, reference))

    workers = [threading.Thread(target=work, args=pair) for pair in zip(problems, known)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    worst = Verdict(PASSES, 0.0)
    for verdict in found:
        worst = worst.worse(verdict)
    return worst


# ---- Memory --------------------------------------------------------------------------------------

def peak_bytes(work: Callable[[], None]) -> Optional[int]:
    """How much `work` raises this process's memory at most; None where the system cannot tell."""
    try:
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")                                     # forget the old peak
        before = status_bytes("VmRSS")
        work()
        return status_bytes("VmHWM") - before
    except OSError:
        return None


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise OSError(field)


@guarded
def training_memory(target: Target, device: str) -> Verdict:
    if device != "cpu" or sys.platform != "linux":
        return Verdict(NOT_MEASURED, detail="measured on Linux for the CPU only")
    small = build(Problem(B=1, H=4, T=256, D=32), device)
    gradients(call(target, small), small)       # libraries load, threads start
    inputs = build(Problem(B=1, H=4, T=4096, D=32), device)
    peak = peak_bytes(lambda: gradients(call(target, inputs), inputs))
    if peak is None:
        return Verdict(NOT_MEASURED, detail="/proc is not there")
    matrix = 4 * 4 * 4096 * 4096
    text = f"{peak / 2**20:.0f} MiB; one score matrix is {matrix / 2**20:.0f} MiB"
    return Verdict(PASSES if peak < matrix / 4 else HEAVY, detail=text)


@guarded
def flat_memory(target: Target, device: str) -> Verdict:
    if device != "cpu" or sys.platform != "linux":
        return Verdict(NOT_MEASURED, detail="measured on Linux for the CPU only")

    whole = build(Problem(B=1, H=2, T=465, D=32, no_grad=True), device)

    def steps(n: int) -> None:
        for i in range(n):
            length = 64 + 37 * i % 401
            q, k, v = (x[:, :, :length].clone().requires_grad_(True)
                       for x in (whole.q, whole.k, whole.v))
            torch.autograd.grad(target(q, k, v), (q, k, v), whole.dout[:, :, :length])

    steps(60)
    gc.collect()
    before = status_bytes("VmRSS")
    steps(400)
    gc.collect()
    grown = status_bytes("VmRSS") - before
    text = f"grew by {grown / 2**20:.1f} MiB over 400 steps"
    return Verdict(PASSES if grown < 16 * 2**20 else HEAVY, detail=text)


@guarded
def far_elements(target: Target, device: str) -> Verdict:
    """Batch elements that lie 2^31 or 2^32 elements apart: a 32-bit index, signed or not, finds
    something else. Pages between are never touched."""
    problem = Problem(B=2, H=2, T=20, S=40, D=32, dtype="float16")
    worst = Verdict(PASSES, 0.0)
    for apart in (2**31, 2**32):
        inputs = build(problem, device)
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
        both = sum(x[0].numel() for x in tensors.values())
        block = torch.empty(apart + 64 + both, dtype=torch.float16, device=device)
        start = 0
        for name, x in tensors.items():
            far = block.as_strided(x.shape, (apart + 64, *x.stride()[1:]), start)
            far.copy_(x.detach())
            if name in inputs.leaves:
                inputs.leaves[name] = far.requires_grad_(True)
            setattr(inputs, name, far)
            start += x[0].numel()
        worst = worst.worse(verdict_of(problem, inputs, ask(target, problem, inputs)))
    return worst


def sampled(inputs: Inputs, rows: Tensor, causal: bool) -> Tensor:
    """The exact output of some rows of one head, which is all that fits into memory."""
    q, k, v = (x.cpu().double() for x in (inputs.q, inputs.k, inputs.v))
    key = torch.arange(k.shape[2])
    seen = key <= rows.view(-1, 1) if causal else torch.ones(len(rows), len(key), dtype=torch.bool)
    return formula.attention(q[:, :, rows], k, v, mask=seen.view(1, 1, len(rows), -1))[0]


@guarded
def many_scores(target: Target, device: str) -> Verdict:
    inputs = build(Problem(B=1, H=1, T=46500, D=4, no_grad=True, causal=True), device)
    with torch.no_grad():
        out = call(target, inputs)
    rows = torch.tensor([0, 1, 17, 32767, 32768, 46340, 46341, 46499])
    return within({"out": out[:, :, rows].double()}, {"out": sampled(inputs, rows, True)}, 2e-6)


@guarded
def many_scores_backward(target: Target, device: str) -> Verdict:
    # The second and the third pair lie around the 2^31st and the 2^32nd score.
    return sampled_gradients(target, device, 65600, [0, 1, 32736, 32737, 65472, 65473, 65599])


def sampled_gradients(target: Target, device: str, length: int, rows: List[int]) -> Verdict:
    """Only sampled rows have an incoming gradient: q gets one there and nowhere else, k and v get
    theirs from these rows alone, so that the whole of all three can be checked."""
    inputs = build(Problem(B=1, H=1, T=length, D=4), device)
    some = torch.zeros(length, 1, dtype=torch.bool, device=device)
    some[rows] = True
    inputs.dout = torch.where(some, inputs.dout, torch.zeros_like(inputs.dout))
    out = call(target, inputs)
    answers = dict(gradients(out, inputs), out=out[:, :, rows])
    exact = sampled(inputs, torch.tensor(rows), False)
    found = torch.autograd.grad(exact, list(inputs.leaves.values()),
                                inputs.dout[:, :, rows].cpu().double())
    truth = {"d" + name: x for name, x in zip(inputs.leaves, found)}
    return within(answers, dict(truth, out=exact.detach()), 1e-5)
