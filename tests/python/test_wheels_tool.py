"""tools/wheels: each of its checks can fail. The wheel of this test run, made for this very machine, is
not one that it would let pass; and it is damaged in one way after the other."""

import base64
import csv
import hashlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import lief
import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF files are Linux'")
ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "linux-x86_64"
LIBRARY = "orchard/lib/liborchard.so"


@pytest.fixture(scope="module")
def tool():
    loader = importlib.machinery.SourceFileLoader("wheels_tool", str(ROOT / "tools" / "wheels"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


def recorded(files):
    """The RECORD of these files."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, (data, _mode) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(data)))
    return text.getvalue()


@pytest.fixture
def files():
    """name: (bytes, mode), of the wheel of this run, but for RECORD."""
    with zipfile.ZipFile(os.environ["ORCHARD_TEST_WHEEL"]) as wheel:
        return {info.filename: (wheel.read(info), info.external_attr >> 16)
                for info in wheel.infolist() if not info.filename.endswith("/RECORD")}


@pytest.fixture
def findings(tool, tmp_path):
    """What the tool says of a wheel with these files."""
    def check(files, record=None, tags="manylinux_2_17_x86_64.manylinux2014_x86_64", name=NAME):
        (folder,) = {n.split("/")[0] for n in files if n.endswith(".dist-info/WHEEL")}
        path = tmp_path / f"orchard-0-py3-none-{tags}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for file, (data, mode) in files.items():
                info = zipfile.ZipInfo(file)
                info.external_attr = mode << 16
                wheel.writestr(info, data)
            own = f"{folder}/RECORD"
            wheel.writestr(own, recorded(files) + f"{own},,\n" if record is None else record)
        return tool.check(path, name)
    return check


def library(tmp_path, text, *flags):
    """A shared library of this machine."""
    source, made = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(made), *flags], check=True)
    return made.read_bytes(), 0o755


def test_a_wheel_for_this_machine_only(findings, files):
    wrong = findings(files)
    assert any("WHEEL has the tags" in one for one in wrong), wrong
    assert any("asks for GLIBC_2.3" in one for one in wrong), wrong  # Debian 12's is 2.36
    assert not any(word in one for one in wrong for word in (
        "RECORD", "missing", "belong", "export")), wrong


def test_record(findings, files):
    before = findings(files)
    good = recorded(files)
    (own,) = {n.split("/")[0] + "/RECORD" for n in files if n.endswith(".dist-info/WHEEL")}
    changed = good.replace("orchard/py.typed,sha256=", "orchard/py.typed,sha256=A", 1)
    assert set(findings(files, changed + f"{own},,\n")) - set(before) == {
        "RECORD is wrong about orchard/py.typed"}
    assert set(findings(files, good + f"orchard/ghost.py,sha256=x,1\n{own},,\n")) - set(before) == {
        "RECORD lists orchard/ghost.py, which is absent"}


@pytest.mark.parametrize("name", ["orchard/py.typed", "orchard/bin/orchard", LIBRARY,
                                  "orchard/lib/liborchard_torch.so", "orchard/_structs.py",
                                  "orchard/torch/mps.py", "orchard_ops/__init__.py",
                                  "orchard_bridge/__init__.py"])
def test_missing_files(findings, files, name):
    del files[name]
    assert f"{name} is missing" in findings(files)


def test_files_of_others(findings, files):
    files["orchard/torch/kernel.c"] = b"/* */", 0o644
    assert "orchard/torch/kernel.c does not belong there" in findings(files)


def test_names_and_modes(findings, files):
    assert "the file's name does not say" in " ".join(findings(files, tags="linux_x86_64"))
    files["orchard/bin/orchard"] = files["orchard/bin/orchard"][0], 0o644
    assert "orchard/bin/orchard is not executable" in findings(files)


def test_symbols_and_libraries(findings, files, tmp_path):
    files[LIBRARY] = library(tmp_path, "int orchard_secret(void) { return 1; }", "-Wl,--no-as-needed",
                             "-lgomp")
    wrong = findings(files)
    assert f"{LIBRARY} exports orchard_secret" in wrong
    assert f"{LIBRARY} does not export orchard_attention_forward" in wrong
    assert any(one.startswith(f"{LIBRARY} loads libgomp.so") for one in wrong), wrong


def test_paths_of_this_machine(findings, files, tmp_path):
    files[LIBRARY] = library(tmp_path, f'const char *orchard_path = "{ROOT}/src";')
    assert f"{LIBRARY} holds a path of this machine, {ROOT}" in findings(files)


def test_the_wrong_system_and_processor(findings, files):
    assert f"{LIBRARY.replace('.so', '.dylib')} is missing" in findings(files, name="macos-arm64")
    files[LIBRARY.replace(".so", ".dylib")] = files[LIBRARY]
    wrong = findings(files, name="macos-arm64")
    assert f"{LIBRARY.replace('.so', '.dylib')} has the wrong format" in wrong
    assert any(one.startswith(f"{LIBRARY} is for") for one in findings(files, name="linux-aarch64"))


def macho(**changes):
    """What lief tells of a right library for macOS on arm64, but for the changes."""
    command = lief.MachO.LoadCommand.TYPE
    facts = {"processor": "ARM64", "own": "@rpath/liborchard.0.dylib", "minos": [11, 0, 0],
             "loads": ["/usr/lib/libSystem.B.dylib"], "signed": True, **changes}
    libraries = [SimpleNamespace(command=command.ID_DYLIB, name=facts["own"])] + [
        SimpleNamespace(command=command.LOAD_DYLIB, name=name) for name in facts["loads"]]
    return SimpleNamespace(
        header=SimpleNamespace(cpu_type=SimpleNamespace(name=facts["processor"])),
        libraries=libraries, has_build_version=True, has_version_min=False,
        build_version=SimpleNamespace(minos=facts["minos"]),
        has_code_signature=facts["signed"])


def test_libraries_for_macos(tool):
    def check(**changes):
        return tool.check_macho(lief, "x", macho(**changes), tool.TARGETS["macos-arm64"])

    assert check() == []
    for words, changes in (("is for", {"processor": "X86_64"}),
                           ("calls itself /tmp/x", {"own": "/tmp/x"}),
                           ("loads /opt/libomp.dylib", {"loads": ["/opt/libomp.dylib"]}),
                           ("asks for macOS 14.0.0", {"minos": [14, 0, 0]}),
                           ("not signed", {"signed": False})):
        wrong = check(**changes)
        assert len(wrong) == 1 and words in wrong[0], wrong
