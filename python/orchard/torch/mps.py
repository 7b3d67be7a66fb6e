"""MPS tensors: the library's own kernels, launched inside PyTorch's queue.

The C library says what to run (orchard/launch.h): kernel texts in MSL, grids, lists of scalars.
`torch.mps.compile_shader` compiles the texts and encodes the launches into the same encoder that
PyTorch's own operations use, so their order is PyTorch's, nothing waits, and no memory is copied:

    reason = launcher.supported("attention_forward", operands, options)
    if reason is None:
        launcher.run("attention_forward", operands, options)     # writes operands["out"]

`report()` tells what became of the calls so far (a part of `orchard.report()`).

What compile_shader promises, and what is made of it:
- argument i is buffer i; a tensor binds the MTLBuffer of its storage, private or shared, at the
  byte where the tensor starts. So views cost nothing, and the starts in the plan's list of ints
  stay 0. Strides are not passed: they are in that list.
- ints become int64, floats float32, lists of them arrays: just what the kernels take, no casts.
- `threads` counts the threads of the whole grid, not groups.
- dtypes are not compared with the kernel's parameters: the plan's own checks do that.
- nothing is kept: one library for each text is kept here.

Every buffer index must be bound anew, since the encoder still holds what others bound: absent and
empty operands are bound to a few bytes that no kernel touches. Writes do not count as in-place
changes for autograd: outputs must be fresh tensors.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple, Union

import torch

from .. import reports
from .._exports import check_storage
from .._library import ArgumentError, DtypeError, LayoutError, UnsupportedError
from .._locks import ProcessLock
from .._operations import describe
from .._structs import HOST_READ
from . import _launch
from .signature import Operands, Options
from .tensors import DTYPES

NOT_COMPILED = "the device's compiler refused a kernel"  # as the C library says it
FAST_MATH = "PYTORCH_MPS_FAST_MATH would let kernels lose infinities, NaN and precision"

# Does this GPU have 8x8 matrices, and how wide is a SIMD group? Asked by compiling, not by name.
_PROBE = """#include <metal_stdlib>
using namespace metal;
kernel void orchard_probe(device float *x [[buffer(0)]])
{
    %s
}
"""
_MATRIX = "simdgroup_float8x8 a(1.0f); simdgroup_multiply(a, a, a); simdgroup_store(a, x, 8);"

# Where nothing compiles, calls are checked all the same: as for any GPU of Apple's.
_ANY_DEVICE = _launch.DeviceInfo(name=b"torch.mps", group_threads=1024, local_bytes=32768, matrix=0,
                                 simd_width=32)

# Storages get addresses so far apart, above all real ones, so that the C library finds overlaps.
_NO_ADDRESS, _STORAGE_BITS = 1 << 60, 50
_MOST_PLANS = 512


@functools.lru_cache(maxsize=None)
def host_read(op: str) -> Tuple[str, ...]:
    """Lengths, whose numbers the C library checks if it is given them."""
    return tuple(x.name for x in describe(op).inputs if x.role == HOST_READ)


STRICT = "; strict forbids a fallback"


def strict() -> bool:
    """Whether a refusal is an error."""
    return os.environ.get("ORCHARD_STRICT", "") not in ("", "0")


class Refused(UnsupportedError):
    """A call that the launcher does not take; the C library's own message."""

    def __init__(self, op: str, reason: str, note: str = "") -> None:
        super().__init__(f"{op}: mps cannot run this call: {reason}{note}")
        self.op, self.reason, self.note = op, reason, note

    def __reduce__(self) -> tuple:  # from another process
        return type(self), (self.op, self.reason, self.note)


class _Ready:
    """A plan whose kernels are compiled."""

    __slots__ = ("plan", "kernels")

    def __init__(self, plan: _launch.Plan, kernels: List[Any]) -> None:
        self.plan, self.kernels = plan, kernels


def _first_line(why: Exception) -> str:
    return (str(why).strip() or "no reason was given").splitlines()[0]


def storage_is_shared() -> bool:
    """Tensors on mps live in shared storage since torch 2.12; before, in private storage."""
    major, minor = (int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return (major, minor) >= (2, 12)


def _on_host(lengths: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which are those that kernels will read with."""
    host = lengths.cpu()
    if host.stride() == lengths.stride():
        return host
    if 0 in lengths.stride():
        return lengths[:1].cpu().expand(lengths.shape)
    return torch.empty_strided(lengths.shape, lengths.stride(), dtype=lengths.dtype,
                               device="cpu").copy_(host)


class Launcher:
    """Runs operations of the C library on MPS tensors. `mps` is torch.mps, or what a test puts in
    its place."""

    def __init__(self, mps: Any = torch.mps) -> None:
        self._mps = mps
        self._device: Union[_launch.DeviceInfo, str, None] = None  # or why nothing compiles
        self._lock = ProcessLock()
        self._libraries: Dict[Tuple[bytes, Tuple[int, ...]], Any] = {}  # or why it did not compile
        self._plans: Dict[tuple, _Ready] = {}
        self._nothing: Dict[torch.device, torch.Tensor] = {}
        self._counts: Dict[Tuple[str, str, Optional[str]], int] = {}
        self.compiled = 0  # libraries, so far
        self.agreed: Set[tuple] = set()  # calls that were asked for and will be taken

    # ---- The device ------------------------------------------------------------------------------

    def device(self) -> Union[_launch.DeviceInfo, str]:
        """What plans are made for, or why nothing compiles here. Every GPU that torch runs on is
        Apple's own: 32 KiB of threadgroup memory and 1024 threads are sure, the rest is asked for.
        """
        with self._lock.here():
            if self._device is None:
                self._device = self._ask_device()
            return self._device

    def _ask_device(self) -> Union[_launch.DeviceInfo, str]:
        if os.environ.get("PYTORCH_MPS_FAST_MATH", "0") != "0":  # as torch asks, once
            return FAST_MATH
        for matrix, statements in ((1, _MATRIX), (0, "")):
            try:
                probe = self._mps.compile_shader(_PROBE % statements).orchard_probe
                return _launch.DeviceInfo(
                    name=b"torch.mps", group_threads=1024, local_bytes=32768, matrix=matrix,
                    simd_width=probe.thread_execution_width)
            except (SyntaxError, RuntimeError, AttributeError) as why:
                refused = f"{NOT_COMPILED}: orchard_probe: {_first_line(why)}"
        return refused

    # ---- From a call to compiled kernels ---------------------------------------------------------

    def _library_of(self, launch: _launch.OneLaunch) -> Any:
        with self._lock.here():
            found = self._libraries.get(launch.text)
            if found is None:
                try:
                    found = self._mps.compile_shader(_launch.source(launch))
                    self.compiled += 1
                except (SyntaxError, RuntimeError) as why:  # remembered: it would not help again
                    found = _first_line(why)
                self._libraries[launch.text] = found
            return found

    def _kernel_of(self, launch: _launch.OneLaunch, width: int) -> Tuple[Any, Optional[str]]:
        """The kernel, or why it cannot run."""
        library = self._library_of(launch)
        if isinstance(library, str):
            return None, f"{NOT_COMPILED}: {launch.kernel}: {library}"
        try:
            kernel = getattr(library, launch.kernel)
        except (AttributeError, RuntimeError) as why:
            return None, f"{NOT_COMPILED}: {launch.kernel}: {why}"
        most, wide = kernel.max_threads_per_threadgroup, kernel.thread_execution_width
        if launch.group[0] > most:
            return None, (f"kernel {launch.kernel} cannot run with {launch.group[0]} threads in a "
                          f"group, the limit is {most}")
        if wide != width:
            return None, f"kernel {launch.kernel} runs {wide} threads in step, planned were {width}"
        return kernel, None

    def _describe(self, op: str, operands: Mapping[str, Optional[torch.Tensor]],
                  options: Mapping[str, Any], check_lengths: bool, asking: bool
                  ) -> Tuple[tuple, List[Tuple[str, torch.Tensor, int]]]:
        """All that a plan depends on, and each operand with the number that says where it lies."""
        check_lengths = check_lengths and any(operands.get(name) is not None
                                              for name in host_read(op))
        storages: Dict[int, int] = {}
        described, key = [], []
        for name, tensor in operands.items():
            if tensor is None:
                continue
            if tensor.device.type != "mps" and not (asking and tensor.is_meta):
                raise ArgumentError(f"{op}: {name} is on {tensor.device}, must be on mps")
            if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
                raise LayoutError(f"{op}: {name} is not a plain strided tensor")
            if tensor.dtype not in DTYPES:
                raise DtypeError(f"{op}: {name} is {tensor.dtype}, which Orchard does not know")
            if tensor.is_meta:
                storage = -id(tensor)
            else:
                check_storage(op, name, tensor)
                storage = tensor.untyped_storage().data_ptr()
            place = storages.setdefault(storage, len(storages) + 1)
            offset = tensor.storage_offset()
            described.append((name, tensor, _NO_ADDRESS + (place << _STORAGE_BITS)
                              + offset * tensor.element_size()))
            key.append((name, place, offset, tensor.dtype, tensor.shape, tensor.stride()))
        return (op, check_lengths, tuple(key), tuple(options.items())), described

    def _arguments(self, op: str, described: List[Tuple[str, torch.Tensor, int]],
                   options: Mapping[str, Any], check_lengths: bool
                   ) -> Tuple[_launch.Arguments, List[torch.Tensor]]:
        """The args struct, and host tensors that must outlive it."""
        arguments, kept = _launch.Arguments(op), []
        for name, tensor, address in described:
            if name in host_read(op):
                address = 0
                if check_lengths:
                    kept.append(_on_host(tensor))
                    address = kept[-1].data_ptr()
            try:
                arguments.set_tensor(name, address, DTYPES[tensor.dtype], tensor.shape,
                                     tensor.stride())
            except KeyError:
                raise TypeError(f"{op}: there is no operand {name}") from None
        for name, value in options.items():
            try:
                arguments.set_option(name, value)
            except KeyError:
                raise TypeError(f"{op}: there is no option {name}") from None
        return arguments, kept

    def _prepare(self, op: str, operands: Mapping[str, Optional[torch.Tensor]],
                 options: Mapping[str, Any], check_lengths: bool, asking: bool = False
                 ) -> Tuple[_Ready, Optional[str]]:
        """The plan with its kernels; or why there is none."""
        key, described = self._describe(op, operands, options, check_lengths, asking)
        ready = self._plans.get(key)
        if ready is not None:
            return ready, None
        found = self.device()
        device = _ANY_DEVICE if isinstance(found, str) else found
        arguments, kept = self._arguments(op, described, options, check_lengths)
        plan = _launch.make_plan(op, arguments, device)
        ready = _Ready(plan, [])
        if isinstance(found, str):
            return ready, found
        if plan.reason is not None:
            return ready, plan.reason
        for launch in plan.launches:
            kernel, reason = self._kernel_of(launch, device.simd_width)
            if reason is not None:
                return ready, reason
            ready.kernels.append(kernel)
        if not kept and not options.get("seed"):  # lengths and seeds are others the next time
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = ready
        return ready, None

    # ---- Asking and running ----------------------------------------------------------------------

    def check(self, op: str, operands: Mapping[str, Optional[torch.Tensor]],
              options: Mapping[str, Any]) -> None:
        """Raises where a call is wrong, as for any GPU; what it needs may all be meta tensors."""
        _, described = self._describe(op, operands, options, False, asking=True)
        arguments, _ = self._arguments(op, described, options, False)
        _launch.make_plan(op, arguments, _ANY_DEVICE)

    def supported(self, op: str, operands: Mapping[str, Optional[torch.Tensor]],
                  options: Mapping[str, Any] = {}, *, check_lengths: bool = True,
                  count: bool = True) -> Optional[str]:
        """None: `run` would take the call; its kernels are compiled then. Otherwise why not, and
        the refusal is counted unless `count` is False. Raises where the call is wrong. Outputs may
        be meta tensors: there is no need to make them first."""
        _, reason = self._prepare(op, operands, options, check_lengths, asking=True)
        if reason is not None and count:
            self.count(op, reason)
        return reason

    def run(self, op: str, operands: Mapping[str, Optional[torch.Tensor]],
            options: Mapping[str, Any] = {}, *, check_lengths: bool = True) -> None:
        """Queues the operation; its outputs are among the operands and must be fresh.

        `operands` has the names of the C struct's tensors, `options` those of its scalars.
        `check_lengths`: the numbers of key_lengths and cu_seqlens are brought to the host and
        checked, which waits for the GPU; without, they must be right. Raises Refused where
        `supported` says why not.
        """
        ready, reason = self._prepare(op, operands, options, check_lengths)
        if reason is not None:
            self.count(op, reason)
            raise Refused(op, reason)
        plan = ready.plan
        if plan.launches:
            device = next(t for t in operands.values() if t is not None).device
            bound: List[Any] = []
            for name in plan.operands:
                tensor = operands.get(name)
                present = tensor is not None and tensor.numel()
                bound.append(tensor if present else self._dummy(device))
            for size in plan.scratch:
                bound.append(torch.empty(size, dtype=torch.uint8, device=device))
            if _launch.logging():
                self._log_bound(op, plan.operands, operands)
            for launch, kernel in zip(plan.launches, ready.kernels):
                kernel(*bound, launch.ints, plan.floats, threads=launch.threads,
                       group_size=launch.group)
        self.ran(op)

    def _log_bound(self, op: str, names: List[str],
                   operands: Mapping[str, Optional[torch.Tensor]]) -> None:
        for name in names:
            tensor = operands.get(name)
            if tensor is not None and tensor.numel():
                _launch.log_bind(op, name, tensor.element_size(), tensor.shape, tensor.stride(),
                                 storage_is_shared())

    def _dummy(self, device: torch.device) -> torch.Tensor:
        found = self._nothing.get(device)
        if found is None:
            found = self._nothing[device] = torch.empty(16, dtype=torch.uint8, device=device)
        return found

    def agree(self, asked: tuple) -> None:
        """Remembers that this call is taken, whatever `asked` says of it."""
        if len(self.agreed) >= _MOST_PLANS:
            self.agreed.clear()
        self.agreed.add(asked)

    # ---- What happened ---------------------------------------------------------------------------

    def ran(self, op: str, backend: str = "mps", fell_back: Optional[str] = None) -> None:
        """One more call that `backend` ran, after Orchard's kernels did not for the reason
        `fell_back`. The log of calls, if it is on, waits for it: only what is done succeeded."""
        self.count(op, None, backend)
        if _launch.logging():
            self._mps.synchronize()
            _launch.log_call(op, "metal" if backend == "mps" else backend, fell_back)

    def count(self, op: str, reason: Optional[str], backend: str = "mps") -> None:
        """One more call that `backend` ran, or did not for this reason."""
        with self._lock.here():
            key = op, backend, reason
            self._counts[key] = self._counts.get(key, 0) + 1

    def report(self) -> reports.Report:
        """How often each operation ran, and why it did not."""
        with self._lock.here():
            return reports.Report(reports.ReportLine(op, backend, reason, count)
                                  for (op, backend, reason), count in self._counts.items())


launcher = Launcher()


def report() -> reports.Report:
    """What became of the calls with MPS tensors so far: run by Orchard's kernels ("mps"), refused
    and why, run by PyTorch's own operation instead ("pytorch")."""
    return launcher.report()


reports.also(report)
