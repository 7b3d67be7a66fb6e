"""Calls a target with a problem and says how far its answers are from the truth.

The truth is the explicit formula (formula.py) in float64. An answer X, be it the output, the
log-sum-exp or a gradient, is right if

    max|X - X64|  <=  2 max|P - X64| + 4 ulp(max|X64|)

where P is the same explicit formula in the tensors' own dtype (float16 and bfloat16: float32 steps,
the results rounded), the worst of the ways in which a plain implementation may order it. Errors are
given in units of this bar: up to 1.0 passes. Where terms of a sum cancel, P may be exact by luck;
an answer beyond the bar is measured again with R added to it, which is what half an ulp of each
term comes to (formula.roundings).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from . import formula
from .problem import Inputs, Problem, build

PASSES, WRONG, RAISES, ABSENT = "passes", "wrong", "raises", "not offered"
HEAVY, CRASHES, HANGS, NOT_MEASURED = "too heavy", "crashes", "hangs", "not measured"

# From best to worst: a case of several problems has the worst of their verdicts.
ORDER = (PASSES, NOT_MEASURED, ABSENT, HEAVY, RAISES, WRONG, HANGS, CRASHES)


@dataclasses.dataclass(frozen=True)
class Verdict:
    outcome: str
    bars: Optional[float] = None    # the largest error, in units of the bar
    detail: str = ""

    def worse(self, other: "Verdict") -> "Verdict":
        """The worse of the two; of two equal ones, that with the larger error."""
        mine, others = ORDER.index(self.outcome), ORDER.index(other.outcome)
        if mine != others:
            return self if mine > others else other
        return other if (other.bars or 0.0) > (self.bars or 0.0) else self


NO_FLOAT64 = Verdict(NOT_MEASURED, detail="checked in float64, which the device does not have")


class Wrong(Exception):
    """An answer that no error bar is needed for: a wrong shape, a missing gradient."""


def check(target: Callable, problem: Problem, device: str = "cpu",
          reference: Optional[Reference] = None) -> Verdict:
    """One problem put to one target; `reference` where it is known already."""
    inputs = build(problem, device)
    missing = [name for name in inputs.kwargs if not target.accepts(name)]
    if missing:
        return Verdict(ABSENT, detail=f"no argument {missing[0]}")
    before = snapshot(inputs)
    try:
        answers = ask(target, problem, inputs)
    except Wrong as why:
        return Verdict(WRONG, math.inf, str(why))
    except (Exception, SystemExit) as why:
        return raised(why)
    changed = [name for name, x in before.items() if not same(x, tensors_of(inputs)[name])]
    if changed:
        return Verdict(WRONG, math.inf, f"the call changed its input {changed[0]}")
    return compare(answers, reference or references(problem, inputs))


def raised(why: BaseException) -> Verdict:
    """An argument that the signature hid (**kwargs) but the function does not know is absent."""
    text = f"{type(why).__name__}: {str(why).strip().splitlines()[0] if str(why).strip() else ''}"
    if isinstance(why, TypeError) and "unexpected keyword" in text:
        return Verdict(ABSENT, detail=text)
    return Verdict(RAISES, detail=text)


# ---- The target's answers ------------------------------------------------------------------------

def ask(target: Callable, problem: Problem, inputs: Inputs) -> Dict[str, Tensor]:
    """The target's output, log-sum-exp and gradients."""
    with torch.no_grad() if problem.no_grad else contextlib.nullcontext():
        result = target(inputs.q, inputs.k, inputs.v, **inputs.kwargs)
    out, lse = result if problem.lse else (result, None)
    answers = {"out": checked(out, "out", inputs.dout.shape, inputs.q)}
    if lse is not None:
        answers["lse"] = checked(lse, "lse", inputs.dlse.shape, None)
    if inputs.leaves:
        ends = [(out, inputs.dout)] + ([(lse, inputs.dlse)] if lse is not None else [])
        if not out.requires_grad:
            raise Wrong("the output has no gradient though inputs require one")
        found = torch.autograd.grad([end for end, _ in ends], list(inputs.leaves.values()),
                                    [grad.to(end.dtype) for end, grad in ends], allow_unused=True)
        for (name, leaf), grad in zip(inputs.leaves.items(), found):
            if grad is None:
                raise Wrong(f"no gradient of {name}")
            answers["d" + name] = checked(grad, "d" + name, leaf.shape, leaf)
    return {name: x.detach() for name, x in answers.items()}


def checked(x: Tensor, name: str, shape: torch.Size, like: Optional[Tensor]) -> Tensor:
    if not isinstance(x, Tensor):
        raise Wrong(f"{name} is a {type(x).__name__}, not a tensor")
    if x.shape != shape:
        raise Wrong(f"{name} has shape {tuple(x.shape)}, must be {tuple(shape)}")
    if like is not None and x.dtype != like.dtype:
        raise Wrong(f"{name} is {x.dtype}, must be {like.dtype}")
    if like is not None and x.device != like.device:
        raise Wrong(f"{name} is on {x.device}, must be on {like.device}")
    return x


def tensors_of(inputs: Inputs) -> Dict[str, Tensor]:
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
    named.update({name: x for name, x in inputs.kwargs.items() if isinstance(x, Tensor)})
    return named


def snapshot(inputs: Inputs) -> Dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors_of(inputs).items()}


def same(before: Tensor, after: Tensor) -> bool:
    """Same values, NaN equal to NaN."""
    if before.is_floating_point():
        return torch.equal(before.nan_to_num(nan=12345.0), after.detach().nan_to_num(nan=12345.0))
    return torch.equal(before, after)


# ---- The truth -----------------------------------------------------------------------------------

@dataclasses.dataclass
class Reference:
    truth: Dict[str, Tensor]            # in float64
    plain: List[Dict[str, Tensor]]      # the explicit formula in the tensors' own dtype
    rounding: Callable[[], Dict[str, float]]    # R, computed when it is needed


@contextlib.contextmanager
def one_thread():
    """The reference's small products: waiting for other threads would take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def references(problem: Problem, inputs: Inputs, keep: Optional[Tensor] = None) -> Reference:
    """What the answers are measured against."""
    working = torch.float64 if problem.dtype == "float64" else torch.float32
    truth, rounding = explicit(problem, inputs, torch.float64, "scores", keep)
    plain = [explicit(problem, inputs, working, variant, keep)[0] for variant in formula.VARIANTS]
    dtypes = {name: x.dtype for name, x in inputs.leaves.items()}
    for answers in plain:
        for name, x in answers.items():
            kept = problem.aux_dtype() if name == "lse" else dtypes.get(name[1:], inputs.q.dtype)
            answers[name] = x.to(kept)
    return Reference(truth, plain, rounding)


def explicit(problem: Problem, inputs: Inputs, working: torch.dtype, variant: str,
             keep: Optional[Tensor] = None) -> Tuple[Dict[str, Tensor], Callable]:
    """Output, log-sum-exp and gradients by the explicit formula in the `working` dtype, and a
    function that tells what a rounding of each term may cost them."""
    def cast(x: Tensor) -> Tensor:
        return x.detach().cpu().to(working)

    given = {"q": cast(inputs.q), "k": cast(inputs.clean["k"]), "v": cast(inputs.clean["v"])}
    for name in ("bias", "attn_mask", "sinks", "alibi_slopes"):
        x = inputs.kwargs.get(name)
        if x is not None:
            given[name] = x.cpu() if x.dtype == torch.bool else cast(x)
    given["dout"] = cast(inputs.dout)
    if problem.lse:
        given["dlse"] = cast(inputs.dlse)
    if keep is not None:
        given["keep"] = cast(keep)
    of = {"mask": "bias" if "bias" in given else "attn_mask"}
    leaves = {name: given[of.get(name, name)].requires_grad_(True) for name in inputs.leaves}
    pieces = [piece_of(problem, given, *piece) for piece in cut(problem)]
    found = [formula.attention(*piece.qkv, variant=variant, **piece.options) for piece in pieces]
    out, lse = join(problem, [x[0] for x in found]), join(problem, [x[1] for x in found])
    answers = {"out": out.detach()}
    if problem.lse:
        answers["lse"] = lse.detach()
    if leaves:
        ends = [out] + ([lse] if problem.lse else [])
        grads = [given["dout"]] + ([given["dlse"]] if problem.lse else [])
        got = torch.autograd.grad(ends, list(leaves.values()), grads, allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), got):
            answers["d" + name] = torch.zeros_like(leaf) if grad is None else grad
    return answers, lambda: rounding_of(problem, pieces, answers)


# One call of the formula: the whole problem, or one of its packed sequences.
Piece = collections.namedtuple("Piece", "qkv options dout dlse")


def cut(problem: Problem) -> List[Tuple[slice, slice]]:
    """The rows of each packed sequence; everything where nothing is packed."""
    if not problem.packed:
        return [(slice(None), slice(None))]
    rows, t, s = [], 0, 0
    for queries, keys in problem.packed:
        rows.append((slice(t, t + queries), slice(s, s + keys)))
        t, s = t + queries, s + keys
    return rows


def piece_of(problem: Problem, given: Dict[str, Tensor], queries: slice, keys: slice) -> Piece:
    p = problem

    def shaped(x: Optional[Tensor], rows: slice) -> Optional[Tensor]:
        """As [B,H,T,D]; without the last dimension for lse."""
        if x is None or p.rank == 4:
            return x
        return x[rows].transpose(0, 1).unsqueeze(0) if p.packed else x.unsqueeze(1)

    mask, bias = given.get("attn_mask"), given.get("bias")
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask
    options = dict(mask=mask, bias=bias, causal=p.causal, align=p.align or "top_left",
                   window=p.window, scale=p.scale, softcap=p.softcap,
                   alibi=given.get("alibi_slopes"), sinks=given.get("sinks"),
                   lengths=torch.tensor(p.lengths) if p.lengths else None, keep=given.get("keep"))
    qkv = shaped(given["q"], queries), shaped(given["k"], keys), shaped(given["v"], keys)
    return Piece(qkv, options, shaped(given["dout"], queries), shaped(given.get("dlse"), queries))


def join(problem: Problem, parts: List[Tensor]) -> Tensor:
    """The parts' results as the target returns them."""
    if problem.packed:
        return torch.cat([x[0].transpose(0, 1) for x in parts])
    return parts[0].squeeze(1) if problem.rank == 3 else parts[0]


def rounding_of(problem: Problem, pieces: List[Piece],
                answers: Dict[str, Tensor]) -> Dict[str, float]:
    """formula.roundings of every answer, the largest element."""
    double = problem.dtype == "float64"
    unit = torch.finfo(torch.float64).eps if double else torch.finfo(torch.float32).eps / 2
    largest: Dict[str, float] = {}
    for piece in pieces:
        with torch.no_grad():
            found = formula.roundings(*piece.qkv, piece.dout, piece.dlse, unit=unit,
                                      out_unit=torch.finfo(problem.torch_dtype()).eps / 2,
                                      **piece.options)
        if "dmask" in answers:
            found["dmask"] = found["ds"].sum_to_size(
                (1,) * (4 - answers["dmask"].dim()) + answers["dmask"].shape)
        for name in answers:
            x = found[name]
            largest[name] = max(largest.get(name, 0.0), float(x.max()) if x.numel() else 0.0)
    return largest


# ---- The verdict ---------------------------------------------------------------------------------

def ulp(x: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype at x."""
    info = torch.finfo(dtype)
    x = max(x, info.tiny)
    return info.eps * 2.0 ** math.floor(math.log2(x))


def distance(x: Tensor, truth: Tensor) -> float:
    """max|x - truth|; equal infinities are 0 apart, NaN where the truth has none is inf apart."""
    x = x.detach().cpu().double()
    apart = (x - truth).abs()
    apart = torch.where((x == truth) | (x.isnan() & truth.isnan()), torch.zeros_like(apart), apart)
    return float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0


def compare(answers: Dict[str, Tensor], reference: Reference) -> Verdict:
    """The worst of the answers, in units of the bar."""
    worst = Verdict(PASSES, 0.0)
    for name, x in answers.items():
        exact = reference.truth[name]
        finite = exact[exact.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        spread = max(distance(p[name], exact) for p in reference.plain)
        bar = 2.0 * spread + 4.0 * ulp(largest, x.dtype)
        error = distance(x, exact)
        if bar < error < math.inf:
            bar += reference.rounding()[name]
        bars = error / bar
        if bars <= 1.0:
            verdict = Verdict(PASSES, bars, name)
        elif math.isinf(error):
            holds = "NaN" if x.isnan().any() else "infinity"
            verdict = Verdict(WRONG, math.inf, f"{name} holds {holds}")
        else:
            verdict = Verdict(WRONG, bars, f"{name} is off by {error:.2g}, the bar is {bar:.2g}")
        worst = worst.worse(verdict)
    return worst
