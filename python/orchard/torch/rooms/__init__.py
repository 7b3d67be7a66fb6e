"""The rooms: a file for each family of operations, which nothing else names.

A file has formulas in torch operations and makes `operation.Operation`s of them; public functions
with torch's signatures, listed in `__all__` (they become orchard.torch.<function>), modules (listed
there too, they become orchard.torch.nn.<Module>), REPLACES for the switch (../replacement.py), and
`samples` for the tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import List


def all_rooms() -> List[ModuleType]:
    """Every file of this folder, imported."""
    return [importlib.import_module(f"{__name__}.{found.name}")
            for found in pkgutil.iter_modules(__path__)]
