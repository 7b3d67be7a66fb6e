"""The wheel as a user gets it: what it holds, its tag, fresh environments without torch and without
a compiler under every Python of this machine, the command, and that uninstalling leaves nothing.
And the source package: all that the wheel is built from, and nothing made by a build.

tests/run names the wheel in ORCHARD_TEST_WHEEL.
"""
import base64
import csv
import ctypes.util
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WHEEL = pathlib.Path(os.environ.get("ORCHARD_TEST_WHEEL", "ORCHARD_TEST_WHEEL is not set"))


def pythons():
    """Every Python >= 3.9 that can be found here, one for each version."""
    places = [pathlib.Path(p) for p in os.environ.get("PATH", "").split(os.pathsep)]
    places += [p / "bin" for p in sorted((pathlib.Path.home() / ".pyenv/versions").glob("3.*"))]
    found = {}
    for place in places:
        for minor in range(9, 16):
            program = place / f"python3.{minor}"
            if minor in found or not program.exists():
                continue
            # A pyenv shim exists for versions that are not active: it must run, and have venv.
            runs = subprocess.run([str(program), "-c", "import venv, ctypes"],
                                  capture_output=True)
            if runs.returncode == 0:
                found[minor] = str(program)
    found.setdefault(sys.version_info[1], sys.executable)
    return [found[minor] for minor in sorted(found)]


PYTHONS = pythons()


def clean_environment(venv):
    """No compiler, no setting of ours, nothing of the user's."""
    return {"PATH": f"{venv}/bin", "HOME": str(venv.parent), "PYTHONNOUSERSITE": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONFIG_FILE": os.devnull,
            "ORCHARD_OPENCL_LIBRARY": "/nonexistent"}


def run(venv, *words, status=0):
    done = subprocess.run([f"{venv}/bin/python", *words], capture_output=True, text=True,
                          env=clean_environment(venv), cwd=venv)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def pip(venv, *words):
    """This environment's pip acting on the other: making one there takes longer than all else."""
    done = subprocess.run([sys.executable, "-m", "pip", "--python", f"{venv}/bin/python", *words],
                          capture_output=True, text=True, env=clean_environment(venv), cwd=venv)
    assert done.returncode == 0, done.stdout + done.stderr


def contents(folder):
    return {str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*")
            if "__pycache__" not in p.parts}


def new_venv(program, folder):
    subprocess.run([program, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


# ---- What it holds -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel():
    with zipfile.ZipFile(WHEEL) as opened:
        yield opened


def test_name_and_tag(wheel):
    from orchard import version
    system = "linux" if sys.platform == "linux" else "macosx"
    assert re.fullmatch(rf"orchard-{re.escape(version())}-py3-none-{system}_\w+\.whl", WHEEL.name)
    text = wheel.read(f"orchard-{version()}.dist-info/WHEEL").decode()
    assert re.findall(r"^Tag: (\S+)$", text, re.M) == [WHEEL.stem.split("-", 2)[2]]
    assert "Root-Is-Purelib: false" in text


def test_every_module_of_the_tree_and_nothing_else(wheel):
    from orchard import version
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others",
                             "--exclude-standard", "python"], capture_output=True, text=True,
                            check=True).stdout.split()
    expected = {name.removeprefix("python/") for name in listed
                if name.startswith(("python/orchard/", "python/orchard_ops/",
                                    "python/orchard_bridge/")) and not name.endswith(".c")}
    assert {"orchard/__init__.py", "orchard/attention.py", "orchard/py.typed"} <= expected
    suffix = "so" if sys.platform == "linux" else "dylib"
    expected |= {"orchard/_structs.py", "orchard/bin/orchard", f"orchard/lib/liborchard.{suffix}",
                 f"orchard/lib/liborchard_torch.{suffix}"}
    info = f"orchard-{version()}.dist-info/"
    names = set(wheel.namelist())
    assert {n for n in names if not n.startswith(info)} == expected
    assert {n.removeprefix(info) for n in names if n.startswith(info)} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert wheel.getinfo("orchard/bin/orchard").external_attr >> 16 & 0o111 == 0o111


def test_record_is_right(wheel):
    rows = list(csv.reader(io.StringIO(wheel.read(next(
        n for n in wheel.namelist() if n.endswith("/RECORD"))).decode())))
    assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            data = wheel.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(data))), name


def test_metadata(wheel):
    text = wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode()
    assert "Requires-Python: >=3.9" in text and "License" in text
    # torch is an extra: a plain install asks for nothing.
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M):
        assert "extra ==" in line, line


def test_the_library_needs_libc_only_and_exports_orchard_only(wheel, tmp_path):
    if sys.platform != "linux":
        pytest.skip("readelf is for Linux; tools/wheels checks the macOS wheels")
    for name, prefix, least in (("orchard/lib/liborchard.so", "orchard_", 21),
                                ("orchard/lib/liborchard_torch.so", "orchard_torch_", 3),
                                ("orchard/bin/orchard", None, 0)):
        file = wheel.extract(name, tmp_path)
        dynamic = subprocess.run(["readelf", "-dW", file], capture_output=True, text=True).stdout
        needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.*?)\]", dynamic))
        needed = {x for x in needed if not x.startswith("ld-linux")}
        assert needed <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}, needed
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
        if prefix:
            symbols = subprocess.run(["nm", "-D", "--defined-only", file], capture_output=True,
                                     text=True).stdout.split("\n")
            names = {line.split()[-1] for line in symbols if line}
            assert len(names) >= least and all(n.startswith(prefix) for n in names), names


# ---- Fresh environments --------------------------------------------------------------------------

SMOKE = """
import array, sys
import orchard
a = array.array("f", [1, 0, 0, 1, 1, 1])
m = memoryview(a).cast("B").cast("f", [1, 1, 3, 2])
out, lse = orchard.attention_forward(m, m, m, causal=True)
rows = out.tolist()[0][0]
assert rows[0] == [1, 0], rows                      # the first query sees itself alone
assert abs(rows[1][1] - 0.66976154) < 1e-6, rows    # e^(1/sqrt 2) / (1 + e^(1/sqrt 2))
grads = orchard.attention_backward(out, m, m, m, out, lse, causal=True)
assert grads.dq.shape == (1, 1, 3, 2) and grads.dq.tolist()[0][0][0] == [0, 0]
try:
    orchard.attention_forward(m, m, m, dropout=2)
except orchard.ArgumentError as why:
    assert str(why) == "attention_forward: dropout is 2, must be 0 ... 1"
else:
    raise SystemExit("nothing was raised")
assert not {"numpy", "torch"} & set(sys.modules)
print(orchard.__version__, len(orchard.report()) > 0)
"""


def version_of(program):
    """(3, minor), or None for a program that does not run."""
    code = "import sys, venv, ctypes; print(*sys.version_info[:2])"
    done = subprocess.run([str(program), "-c", code], capture_output=True, text=True)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def test_more_than_one_python_is_tried():
    """The tag says that one wheel serves all of them: a single one would prove little."""
    tried = [version_of(program) for program in PYTHONS]
    assert tried == sorted(set(tried)) and tried[0] >= (3, 9), tried
    if len(tried) > 1:
        return
    folders = ["/usr/bin", "/usr/local/bin", *os.environ.get("PATH", "").split(os.pathsep),
               *map(str, (pathlib.Path.home() / ".pyenv/versions").glob("*/bin"))]
    offered = {version_of(program) for folder in set(folders)
               for program in pathlib.Path(folder).glob("python3.*")
               if re.fullmatch(r"python3\.\d+", program.name)}
    assert {one for one in offered if one and one >= (3, 9)} <= set(tried)
    pytest.skip(f"this machine has no second Python: the wheel was tried with {tried} only")


@pytest.mark.parametrize("program", PYTHONS, ids=lambda p: pathlib.Path(p).name)
def test_fresh_environment(program, tmp_path):
    from orchard import version
    venv = new_venv(program, tmp_path / "venv")
    before = contents(venv)
    pip(venv, "install", "--no-index", str(WHEEL))
    assert contents(venv) - before
    assert run(venv, "-c", SMOKE).stdout == f"{version()} True\n"

    # Without torch: one clear message, no chain of others.
    for code, name in (("import orchard.torch", "torch"),
                       ("import orchard; orchard.enable()", "enable")):
        last = run(venv, "-c", code, status=1).stderr.strip().splitlines()[-1]
        assert last.startswith(f"ImportError: orchard.{name} needs PyTorch"), last

    run(venv, "-c", "import orchard, pydoc; pydoc.render_doc(orchard); assert 'enable' not in dir(orchard)")

    # The command, both ways, with its exit status.
    assert run(venv, "-m", "orchard", "--version").stdout == f"orchard {version()}\n"
    assert "no command" in run(venv, "-m", "orchard", "nonsense", status=2).stderr
    script = subprocess.run([f"{venv}/bin/orchard", "--version"], capture_output=True, text=True)
    assert script.returncode == 0 and script.stdout == f"orchard {version()}\n"

    pip(venv, "uninstall", "--yes", "orchard")
    assert contents(venv) == before
    assert "No module named 'orchard'" in run(venv, "-c", "import orchard", status=1).stderr


def test_the_library_s_absence_is_told(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import orchard"], capture_output=True, text=True,
                          env={**os.environ, "ORCHARD_LIBRARY": str(tmp_path / "none.so")})
    assert done.returncode == 1
    assert "ImportError: orchard: cannot load the C library" in done.stderr
    other = ctypes.util.find_library("m") or ctypes.util.find_library("System")
    done = subprocess.run([sys.executable, "-c", "import orchard"], capture_output=True, text=True,
                          env={**os.environ, "ORCHARD_LIBRARY": other})
    assert f"ImportError: orchard: {other} is not Orchard's C library" in done.stderr
    done = subprocess.run([sys.executable, "-m", "orchard", "doctor"], capture_output=True,
                          text=True, env={**os.environ, "ORCHARD_COMMAND": str(tmp_path / "none")})
    assert done.returncode == 127 and "orchard: cannot run" in done.stderr


def orchard(*words, status=0):
    """What `python -m orchard` prints."""
    done = subprocess.run([sys.executable, "-m", "orchard", *words], capture_output=True, text=True,
                          timeout=200)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_command_has_the_signals_of_a_shell_s(tmp_path):
    """Python ignores SIGPIPE, and so would what it becomes: `python -m orchard ... | head`."""
    told = tmp_path / "told"
    told.write_text("#!/bin/sh\nkill -PIPE $$\necho survived\n")
    told.chmod(0o755)
    done = subprocess.run([sys.executable, "-m", "orchard"], capture_output=True, text=True,
                          env={**os.environ, "ORCHARD_COMMAND": str(told)})
    assert done.returncode == -signal.SIGPIPE and "survived" not in done.stdout


def test_doctor_through_python():
    assert "cpu" in orchard("doctor").stdout


def test_explain_and_bench_through_python():
    """Options, output and exit status are those of the command."""
    told = orchard("explain", "softmax_backward", "x=3x37", "--backend", "ref").stdout
    assert told.startswith("softmax_backward x=3x37, f32") and "runs on   ref" in told
    words = ("bench", "softmax_forward", "x=64x64", "softmax_backward", "x=64x64", "--seconds", "0.01", "--threads", "1")
    rows = json.loads(orchard(*words, "--json", "-").stdout)
    assert [(row["op"], row["call"], row["threads"]) for row in rows] == [
        ("softmax_forward", "x=64x64", 1), ("softmax_backward", "x=64x64", 1)]
    assert all(row["ms"] > 0 and row["gbytes"] > 0 for row in rows)
    assert "no operand or option" in orchard("bench", "softmax_forward", "y=3", status=1).stderr
    assert "no-such" in orchard("explain", "no-such", status=2).stderr


# ---- The source package --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source_package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    code = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT,
                   capture_output=True)
    (file,) = folder.glob("orchard-*.tar.gz")
    return file


def test_source_package(source_package):
    with tarfile.open(source_package) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others",
                              "--exclude-standard"], capture_output=True, text=True,
                             check=True).stdout.split("\n")
    needed = {name for name in tracked
              if name.startswith(("src/", "include/", "cli/", "python/", "tools/", "docs/",
                                  "examples/", "bench/"))
              or name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")}
    assert needed - names == set()
    extra = {n for n in names - needed if not n.startswith(".")}
    assert extra <= {"PKG-INFO", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"}, extra


def test_the_source_package_becomes_a_wheel(source_package, tmp_path):
    """As pip does it from PyPI: what only the tree has must not be asked for."""
    shutil.unpack_archive(source_package, tmp_path)
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    # Paths from here on: the compiler's cache knows them, whatever the folder is called this time.
    cache = {"CCACHE_BASEDIR": str(tmp_path), "CCACHE_NOHASHDIR": "1"}
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", str(folder), "--no-deps",
                           "--no-build-isolation", "--disable-pip-version-check", "-w", str(tmp_path)],
                          capture_output=True, text=True, env={**os.environ, **cache})
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tmp_path.glob("orchard-*.whl")
    with zipfile.ZipFile(made) as one, zipfile.ZipFile(WHEEL) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        one.extractall(tmp_path / "unpacked")
    done = subprocess.run([sys.executable, "-c", SMOKE], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")})
    assert re.fullmatch(r"[0-9.]+ True\n", done.stdout), done.stdout + done.stderr
