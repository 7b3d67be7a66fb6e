"""The ctypes structs and constants are those of the C compiler: all sizes, offsets and values.

A program that prints them is written and compiled here, against the headers of the tree.
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


def printed_by_c(folder, fields):
    """What the C compiler says of the headers of the tree: sizes of structs, (offset, size) of
    their `fields`, values of constants."""
    lines = [f'printf("size {name} %zu\\n", sizeof({name}));' for name in fields]
    lines += [f'printf("field {name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
              f'sizeof((({name} *)0)->{field}));' for name in fields for field in fields[name]]
    lines += [f'printf("constant {name} %lld\\n", (long long)ORCHARD_{name});'
              for name in CONSTANTS]
    source, program = folder / "layout.c", folder / "layout"
    source.write_text("#include <orchard.h>\n#include <stddef.h>\n#include <stdio.h>\n"
                      "int main(void)\n{\n" + "\n".join(lines) + "\n}\n")
    subprocess.run(["cc", "-std=c11", f"-I{ROOT}/include", str(source), "-o", str(program)],
                   check=True)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {tuple(words[:2]): tuple(map(int, words[2:]))
            for words in (line.split() for line in told.splitlines())}


CONSTANTS = {name: value for name, value in vars(_structs).items()
             if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and isinstance(value, int)}
FIELDS = {name: [field for field, *_ in kind._fields_] for name, kind in _structs.STRUCTS.items()}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return printed_by_c(tmp_path_factory.mktemp("layout"), FIELDS)


def test_every_struct_has_the_size_that_c_gives_it(table):
    """A field that Python does not have would be missed here."""
    for name, kind in _structs.STRUCTS.items():
        assert table["size", name] == (ctypes.sizeof(kind),), name
    assert len(FIELDS) >= 20


def test_every_field_is_where_c_has_it(table):
    for name, kind in _structs.STRUCTS.items():
        for field in FIELDS[name]:
            place = getattr(kind, field)
            assert table["field", f"{name}.{field}"] == (place.offset, place.size), (name, field)


def test_every_constant_has_its_value(table):
    for name, value in CONSTANTS.items():
        assert table["constant", name] == (value,), name
    assert len(CONSTANTS) >= 40


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
    size, = table["size", "orchard_tensor"]
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
