"""python -m orchard doctor|bench|explain|replay|tune ...: the `orchard` command of this package.

It is the C program that the package brings along, with its options, output and exit status;
`python -m orchard --help` lists what it can do. Installed packages also have it as `orchard`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from typing import List, Optional


def command() -> str:
    """The program's file: ORCHARD_COMMAND if that is set, else the one inside this package."""
    given = os.environ.get("ORCHARD_COMMAND")
    return given or str(pathlib.Path(__file__).parent / "bin" / "orchard")


def main(words: Optional[List[str]] = None) -> int:
    """Becomes the command; returns only when it cannot be started."""
    program = command()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and who is started here would too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execv(program, ["orchard", *(sys.argv[1:] if words is None else words)])
    except OSError as why:
        print(f"orchard: cannot run {program}: {why.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
