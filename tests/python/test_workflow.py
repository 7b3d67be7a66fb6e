"""The GitHub workflow, which cannot run here: it is YAML, and its commands are shell and exist."""
import pathlib
import re
import subprocess

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
COMMANDS = {name: [step["run"] for step in job["steps"] if "run" in step]
            for name, job in JOBS.items()}


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
    assert "no Metal device" in COMMANDS["macos"][-1]


def test_every_command_is_shell_and_is_there():
    groups = re.search(r"^ +(lint \| .*)\) \$group", (ROOT / "tests/run").read_text(), re.M)
    for command in sum(COMMANDS.values(), []):
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for script in re.findall(r"(?:^|\s)((?:\.ci|tools|tests)/\w+)", command):
            assert (ROOT / script).stat().st_mode & 0o111, script
        for group in re.findall(r"tests/run (.*)", command):
            assert set(group.split()) <= set(groups[1].split(" | "))
        for test in re.findall(r"tests/(\w+_test) --backend", command):
            assert list((ROOT / "src").glob(f"*/{test}.c")), test
