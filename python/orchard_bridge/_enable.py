"""What enable_flash does: says whether attention runs on Metal here. Nothing needs to be loaded."""

from __future__ import annotations

import logging
import os
import sys
from typing import List, Optional

from orchard import _library

from . import metal

log = logging.getLogger("orchard_bridge")
log.addHandler(logging.NullHandler())   # silent unless the program sets up logging, or `verbose`
PREFIX = "[starcoder-orchard] "
FORMAT = "%(asctime)s %(levelname)s:%(name)s:%(message)s"


def enable_flash(verbose: bool = False, strict: bool = False) -> bool:
    """True if attention, forward and backward, really runs on Metal on this machine.

    False means that everything works all the same, tensors on mps by PyTorch's operations and
    others on the CPU; `strict` makes it a RuntimeError.
    `verbose` prints the reason; it goes to the logger "orchard_bridge" in any case.
    """
    why = metal.why_not()
    if why is None:
        os.environ["USE_FLASH_ATTN"] = "2"
        say(logging.INFO, "FlashAttention runs on Metal", verbose)
        return True
    say(logging.WARNING, f"FlashAttention does not run on Metal: {why}", verbose)
    say(logging.INFO, f"attention of CPU tensors runs by {_find_orchard_dylib()}", verbose)
    if strict:
        raise RuntimeError(f"{PREFIX}FlashAttention does not run on Metal: {why}")
    return False


def say(level: int, text: str, verbose: bool) -> None:
    log.log(level, PREFIX + text)
    if verbose:
        record = log.makeRecord(log.name, level, "", 0, PREFIX + text, (), None)
        print(logging.Formatter(FORMAT).format(record), file=sys.stderr, flush=True)


def is_metal_flash_attn_available() -> bool:
    """The same question without a word; never raises."""
    try:
        return metal.why_not() is None
    except Exception:
        return False


def _find_orchard_dylib() -> Optional[str]:
    """The C library in use; ORCHARD_LIBRARY names another one before the first import."""
    return _library.path()


def command(arguments: List[str]) -> int:
    """python -m orchard_bridge.enable_flash [--verbose] [--strict]: 0 Metal, 1 not, 2 fatal."""
    unknown = [word for word in arguments if word not in ("--verbose", "--strict")]
    if unknown:
        print(f"enable_flash: {unknown[0]} is neither --verbose nor --strict", file=sys.stderr)
        return 2
    try:
        found = enable_flash("--verbose" in arguments, "--strict" in arguments)
    except RuntimeError as why:
        print(why, file=sys.stderr)
        return 2
    print(f"{PREFIX}attention {'runs' if found else 'does not run'} on Metal")
    return 0 if found else 1
