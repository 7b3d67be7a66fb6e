"""Orchard: exact fused attention, forward and backward, for training.

    import orchard
    out, lse = orchard.attention_forward(q, k, v, causal=True)
    grads = orchard.attention_backward(dout, q, k, v, out, lse, causal=True)

q, k, v: NumPy arrays, torch tensors, anything with DLPack or the buffer protocol, in memory of the
CPU. This package needs neither NumPy nor torch. For torch there is more: `orchard.torch` (autograd,
torch.compile, MPS), `orchard.enable()` as a switch for existing models; these import torch when
first used, `import orchard` never does.

    print(orchard.explain("attention_forward", q=q, k=k, v=v))    who would run it, and why
    print(orchard.report())                                       who ran what so far
    python -m orchard doctor                                      what this machine can do
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List

from ._library import (ArgumentError, CompileError, DeviceError, DtypeError, FileError,
                       InternalError, LayoutError, OrchardError, OutOfMemoryError, ShapeError,
                       UnsupportedError, version)
from .arrays import Array
from .attention import Gradients, attention_backward, attention_forward
from .reports import (Explanation, MemoryReport, Report, ReportLine, explain, memory_report, report)

__version__ = version()

_SWITCHES = ("enable", "disable", "active", "counts", "enable_pytorch_overrides",
             "disable_pytorch_overrides", "get_active_overrides")

__all__ = [
    "ArgumentError", "Array", "CompileError", "DeviceError", "DtypeError", "Explanation",
    "FileError", "Gradients", "InternalError", "LayoutError", "MemoryReport", "OrchardError",
    "OutOfMemoryError", "Report", "ReportLine", "ShapeError", "UnsupportedError",
    "attention_backward", "attention_forward", "explain", "memory_report", "report", "version",
]

if TYPE_CHECKING:
    # "as" tells type checkers that the name is public; __all__ would import torch.
    from .switch import active as active
    from .switch import counts as counts
    from .switch import disable as disable
    from .switch import disable_pytorch_overrides as disable_pytorch_overrides
    from .switch import enable as enable
    from .switch import enable_pytorch_overrides as enable_pytorch_overrides
    from .switch import get_active_overrides as get_active_overrides


def __getattr__(name: str) -> Any:
    """The switches for torch, which import it: only when somebody asks."""
    if name not in _SWITCHES:
        raise AttributeError(f"module 'orchard' has no attribute {name!r}")
    try:
        from . import switch
    except ImportError as why:
        raise ImportError(f"orchard.{name} needs PyTorch: {why}") from why
    return getattr(switch, name)


def __dir__() -> List[str]:
    """Without what is only imported here; with the switches only where they can be had, for which
    torch is imported: who lists names (`help`) gets them all."""
    names = set(globals()) - {"annotations", "TYPE_CHECKING", "Any", "List"}
    try:
        from . import switch
    except Exception:  # torch's: absent, too old, or broken in a way of its own
        return sorted(names)
    return sorted(names | set(_SWITCHES))
