"""The GitHub workflow, which cannot run here: it is YAML, and its commands are shell and exist."""
import pathlib
import re
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
COMMANDS = {name: [step["run"] for step in job["steps"] if "run" in step]
            for name, job in JOBS.items()}


def program(test):
    """Its source."""
    return next((ROOT / "src").glob(f"*/{test}.c"), ROOT / "tests" / f"{test}.c")


def test_linux_runs_what_this_ci_runs():
    assert JOBS["linux"]["runs-on"].startswith("ubuntu-")
    assert COMMANDS["linux"] == [".ci/run"]


def test_wheels_are_built_and_kept():
    """.ci/run makes them too, and runs those that it can; here they are for whoever wants them."""
    assert COMMANDS["wheels"] == ["make wheels"]
    assert JOBS["wheels"]["steps"][-1]["with"]["path"] == "dist/*.whl"
    assert re.search(r"^wheels:.*\n\t.*tools/wheels$", (ROOT / "Makefile").read_text(), re.M)


def test_macos_runs_the_cpu_tests_and_says_when_there_is_no_gpu():
    assert JOBS["macos"]["runs-on"].startswith("macos-")
    assert "tests/run release python" in COMMANDS["macos"]
    there, absent = COMMANDS["macos"][-1].split("else")
    for command in ("orchard doctor", "orchard explain softmax --backend metal"):
        assert f"build/test-release/{command}" in there
    tests = {program(name): name for name in
             re.findall(r"build/test-release/tests/(\w+) --backend metal", there)}
    assert {"attention_test", "attention_fully_masked_test", "attention_large_scores_test",
            "attention_regression_test"} <= set(tests.values())
    for source in tests:    # the stand-in is for Linux, and a test that needs it ends without it
        assert not re.search("standin_use.h|device_fixture.h", source.read_text()), source
    assert "-m orchard.conformance --isolate --device mps --target orchard" in there
    assert "no Metal device" in absent


def test_the_tests_wheel_has_a_build_folder_of_its_own():
    """CMake keeps -Werror and the compiler: they would be those of the next `pip install .`."""
    own, = re.findall(r'^build-dir = "build/(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    built, = re.findall(r'pip" wheel ((?:.*\\\n)*.*)', (ROOT / "tests/run").read_text())
    folder, = re.findall(r"build-dir=\$build/([\w-]+)", built)
    assert "ORCHARD_WERROR=ON" in built and folder != own


def test_a_package_has_one_version_in_every_list():
    pinned = {}
    lists = ["bench/bench_requirements.txt", "tests/python/requirements.txt",
             "tests/python_packages.txt", "tools/wheels_requirements.txt"]
    for line in "".join((ROOT / file).read_text() for file in lists).splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pinned.setdefault(name, []).append(version)
    several = {name: versions for name, versions in pinned.items() if len(versions) > 1}
    assert {"lief", "numpy", "scikit-build-core", "torch", "transformers", "ziglang"} <= set(several)
    assert all(len(set(versions)) == 1 for versions in several.values()), several


def test_the_demo_ends_with_the_tiny_gpt():
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert recipe.splitlines()[-1] == "\t@.venv/bin/python examples/tiny_gpt.py"


def test_readme_begins_with_the_three_lines():
    """They stand on its first screen; test_switch.py runs them."""
    screen = (ROOT / "README.md").read_text().splitlines()[:20]
    assert "orchard.enable()" in "\n".join(screen)


def test_readme_lists_every_variable():
    files = [file for folder in ("src", "cli", "python") for file in (ROOT / folder).rglob("*.*")
             if file.suffix in (".c", ".py")]
    read = set(re.findall(r'"(ORCHARD_[A-Z_]+)"', "".join(file.read_text() for file in files)))
    rows = re.findall(r"^\| `ORCHARD_.*", (ROOT / "README.md").read_text(), re.M)
    assert len(read) > 20 and read == set(re.findall(r"ORCHARD_[A-Z_]+", "".join(rows)))


def test_every_command_is_shell_and_is_there():
    groups = re.search(r"^ +(check \| lint \| .*)\) \$group", (ROOT / "tests/run").read_text(), re.M)
    for command in sum(COMMANDS.values(), []):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for script in re.findall(r"(?:^|\s)((?:\.ci|tools|tests)/\w+)", command):
            assert (ROOT / script).stat().st_mode & 0o111, script
        for group in re.findall(r"tests/run (.*)", command):
            assert set(group.split()) <= set(groups[1].split(" | "))
        for test in re.findall(r"tests/(\w+_test) --backend", command):
            assert program(test).exists(), test
