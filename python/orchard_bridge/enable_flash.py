"""python -m orchard_bridge.enable_flash, and `enable_flash.main()`.

The package offers a function of this module's name; so that either import works, the module can be
called as that function.
"""

import sys
import types

from ._enable import _find_orchard_dylib, command
from ._enable import enable_flash as main

__all__ = ["main", "_find_orchard_dylib"]


class _Callable(types.ModuleType):
    def __call__(self, verbose: bool = False, strict: bool = False) -> bool:
        return main(verbose, strict)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
