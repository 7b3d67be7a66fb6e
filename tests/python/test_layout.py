"""The ctypes structs and constants are those of the C compiler: all sizes, offsets and values.

tests/layout_test.c is compiled here, against the headers of the tree and the installed library, and
prints its table; nothing may be missing on either side.
"""
import ctypes
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from orchard import _library, _structs

MACOS = sys.platform == "darwin"
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    # The library is asked for by a name with its version, which the package's file does not have.
    major = _structs.VERSION_MAJOR
    name = f"liborchard.{major}.dylib" if MACOS else f"liborchard.so.{major}"
    (folder / name).symlink_to(_library.path())
    program = folder / "layout"
    subprocess.run(["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L", f"-I{ROOT}/include",
                    f"-I{ROOT}/tests", str(ROOT / "tests/layout_test.c"), "-o", str(program),
                    _library.path(), f"-Wl,-rpath,{folder}"], check=True)
    printed = subprocess.run([str(program), "--print"], check=True, capture_output=True,
                             text=True).stdout
    return [line.split() for line in printed.splitlines()]


def rows(table, kind):
    return [words[1:] for words in table if words[0] == kind]


def test_every_struct_has_the_size_that_c_gives_it(table):
    expected = {name: int(size) for name, _, size in rows(table, "struct")}
    assert {name: ctypes.sizeof(kind) for name, kind in _structs.STRUCTS.items()} == expected
    assert len(expected) >= 11


def test_every_field_is_where_c_has_it(table):
    expected = [(name, int(offset), int(size)) for name, offset, size in rows(table, "field")]
    found = []
    for name, kind in _structs.STRUCTS.items():
        for field, *_ in kind._fields_:
            place = getattr(kind, field)
            found.append((f"{name}.{field}", place.offset, place.size))
    assert sorted(found) == sorted(expected)
    assert len(expected) >= 90


def test_every_constant_has_its_value(table):
    expected = {name.removeprefix("ORCHARD_"): int(value)
                for name, value in rows(table, "constant")}
    found = {name: value for name, value in vars(_structs).items()
             if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and isinstance(value, int)}
    assert found == expected


def test_every_exported_call_has_a_prototype_and_the_other_way_round():
    options = ["-gU"] if MACOS else ["-D", "--defined-only"]
    listed = subprocess.run(["nm", *options, _library.path()], check=True, capture_output=True,
                            text=True).stdout
    exported = set(re.findall(r" T _?(orchard_\w+)", listed))
    assert exported == set(_structs.CALLS)


def test_the_table_can_fail(table):
    """A struct with one field taken away differs from the table."""
    fields = _structs.Tensor._fields_[:-1]
    shorter = type("Shorter", (ctypes.Structure,), {"_fields_": fields})
    size = next(int(size) for name, _, size in rows(table, "struct") if name == "orchard_tensor")
    assert ctypes.sizeof(shorter) != size == ctypes.sizeof(_structs.Tensor)


@pytest.mark.parametrize("declaration", [
    "ORCHARD_API int32_t orchard_x(int32_t (*call)(void));", "typedef union { int32_t a; } orchard_u;",
    "ORCHARD_API int32_t orchard_x(void) __attribute__((pure));", "#define ORCHARD_X 0x10",
    "enum { ORCHARD_X = 3 };", "typedef struct orchard_x { int32_t a[ORCHARD_NONE]; } orchard_x;",
    "typedef struct orchard_x { long a; } orchard_x;"])
def test_a_declaration_that_cannot_be_read_is_an_error(declaration, tmp_path):
    folder = shutil.copytree(ROOT / "include" / "orchard", tmp_path / "orchard")
    command = [sys.executable, str(ROOT / "tools" / "python_structs"), str(folder)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    with open(folder / "core.h", "a") as file:
        file.write(declaration + "\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("tools/python_structs: ")
