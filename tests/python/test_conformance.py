"""The conformance kit finds what is wrong and nothing else.

Deliberately broken functions are each flagged in the row that stands for their fault; an honest one
passes there; Orchard passes the whole kit.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import planted_attention  # noqa: E402
from orchard.conformance import (  # noqa: E402
    CASES, Problem, Target, behaviour, check, chosen, find, report)
from orchard.conformance.__main__ import main  # noqa: E402
from orchard.conformance.run import from_json, run_isolated, to_json  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = pathlib.Path(__file__).resolve().parents[2]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Modules written to it can be imported, by workers too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# fault, the row that must tell, a row that the fault does not touch
FAULTS = [
    ("scale forgotten", "scale given", "plain"),
    ("scale 0 taken for none", "scale 0 and negative", "scale given"),
    ("causal at the bottom right", "causal, more keys than queries", "causal"),
    ("causal off by one", "causal", "plain"),
    ("dropout ignored", "dropout drops", "plain"),
    ("dropout on the output", "dropout drops", "plain"),
    ("dropout shared by heads", "dropout drops", "dropout draws anew"),
    ("dropout shared by the batch", "dropout drops", "dropout draws anew"),
    ("dropout forgotten in backward", "dropout's gradient", "dropout drops"),
    ("one mask for all calls", "dropout draws anew", "dropout's gradient"),
    ("query strides ignored", "permuted q, k, v", "plain"),
    ("strides of the gradient ignored", "permuted gradient", "plain"),
    ("fully masked rows are NaN", "fully masked rows", "boolean mask"),
    ("last partial block lost", "decoding", "one of each"),
    ("elementwise backward", "plain", "padded batch without gradient"),
    ("mask turned round", "boolean mask", "additive mask"),
    ("bias before the scale", "additive mask", "boolean mask"),
    ("float mask turned into yes and no", "additive mask", "boolean mask"),
    ("mask of the first head for all", "boolean mask", "one of each"),
    ("16-bit index in the mask", "more than 32,768 keys and a mask", "boolean mask"),
    ("mask rounded to 16 bits", "float32 mask beside 16-bit q", "boolean mask"),
    ("gradient of the mask cut", "gradient of an additive mask", "additive mask"),
    ("heads repeated in the wrong order", "grouped heads", "plain"),
    ("state of the first batch size", "the batch size changes", "plain"),
    ("state shared between graphs", "gradients after a second batch", "plain"),
    ("scores in half precision", "float16 products beyond 65504", "empty"),
    ("sum kept in bfloat16", "short q against long k", "empty"),
    ("writes to its input", "plain", "dropout drops"),
    ("size of q for size of v", "head size of v differs", "plain"),
    ("different every time", "same bits twice", "dropout draws anew"),
    ("gradient cut", "plain", "padded batch without gradient"),
    ("32-bit index of keys", "elements beyond 2^31 and 2^32", "permuted q, k, v"),
]
EXTENDED_FAULTS = [
    ("window one too wide", "sliding window", "plain"),
    ("logarithm to base 2", "log-sum-exp", "sliding window"),
    ("gradient of sinks cut", "log-sum-exp", "sliding window"),
]


def outcome(function, row):
    return BY_NAME[row].run(Target("planted", function)).outcome


@pytest.mark.parametrize("fault, row, untouched", FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_planted_fault_is_flagged_in_its_row(fault, row, untouched):
    assert outcome(planted_attention.planted(fault), untouched) == "passes"
    assert outcome(planted_attention.planted(fault), row) == "wrong"


@pytest.mark.parametrize("fault, row, untouched", EXTENDED_FAULTS,
                         ids=[fault for fault, _, _ in EXTENDED_FAULTS])
def test_planted_fault_of_an_extension(fault, row, untouched):
    assert outcome(planted_attention.extended(), row) == "passes"
    assert outcome(planted_attention.extended(fault), untouched) == "passes"
    assert outcome(planted_attention.extended(fault), row) == "wrong"


@pytest.mark.parametrize("row", sorted({row for _, row, _ in FAULTS}))
def test_an_honest_function_passes_those_rows(row):
    verdict = BY_NAME[row].run(Target("honest", planted_attention.planted()))
    assert verdict.outcome == "passes", verdict


def test_gradients_of_sampled_rows_are_checked_whole():
    """What the row with 2^32 scores does, on a length that an explicit function can hold too."""
    def outcome(fault, rows):
        target = Target("planted", planted_attention.planted(fault))
        return behaviour.sampled_gradients(target, "cpu", 700, rows).outcome

    assert outcome(None, [0, 300, 699]) == "passes"
    assert outcome("gradient of late queries lost", [0, 300]) == "passes"
    assert outcome("gradient of late queries lost", [0, 300, 699]) == "wrong"
    assert outcome("elementwise backward", [0, 300]) == "wrong"


def test_what_is_not_offered_is_not_failed():
    honest = Target("honest", planted_attention.planted())
    extensions = [case for case in CASES if case.area == "extensions"]
    assert len(extensions) == 10
    for case in extensions:
        verdict = case.run(honest)
        assert verdict.outcome == "not offered" and "no argument" in verdict.detail
    bare = Target("bare", lambda query, key, value: planted_attention.honest(query, key, value))
    assert BY_NAME["torch.compile"].run(bare).outcome == "not offered"
    hidden = Target("kwargs", lambda q, k, v, **more: planted_attention.honest(q, k, v, **more))
    assert BY_NAME["sliding window"].run(hidden).outcome == "not offered"


def test_a_refusal_is_told_apart_from_a_wrong_value():
    def refuses(query, key, value):
        raise NotImplementedError("no such head size\nand more")

    verdict = check(Target("refuses", refuses), Problem())
    assert (verdict.outcome, verdict.detail) == ("raises", "NotImplementedError: no such head size")
    assert not report.failed({"x": verdict}) and report.failed({"x": verdict}, strict=True)


def test_shape_dtype_and_gradients_are_looked_at():
    honest = planted_attention.honest
    for name, function in {
        "shape": lambda q, k, v: honest(q, k, v)[:, :, :-1],
        "float64": lambda q, k, v: honest(q, k, v).double(),
        "not a tensor": lambda q, k, v: (honest(q, k, v), None),
        "no gradient of k": lambda q, k, v: honest(q, k.detach(), v),
        "NaN": lambda q, k, v: honest(q, k, v) * torch.where(k[:, :, :, :1] > 9, torch.nan, 1.0)
        + torch.tensor([torch.nan] + [0.0] * 31),
    }.items():
        verdict = check(Target(name, function), Problem())
        assert verdict.outcome == "wrong" and name in verdict.detail, verdict


def test_two_threads_at_once_have_the_threads_of_before(monkeypatch):
    """While a target is called, the kit leaves the number of threads, the process's, alone."""
    changed_in = set()
    change = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (
        changed_in.add(threading.current_thread() is threading.main_thread()), change(n)))
    assert BY_NAME["two threads at once"].run(find("torch")).outcome == "passes"
    assert changed_in == {True}


def test_an_error_of_one_part_in_ten_thousand_is_seen():
    honest = planted_attention.honest
    verdict = check(Target("x", lambda q, k, v: honest(q, k, v * 1.0001)), Problem())
    assert verdict.outcome == "wrong" and 10 < verdict.bars < 10000
    assert check(Target("x", honest), Problem()).bars < 1.0


def test_torch_passes_what_the_kit_takes_for_granted():
    """The reference against somebody else's implementation: torch's explicit path."""
    target = find("torch-math")
    for name in ("plain", "causal", "cross attention", "grouped heads", "additive mask",
                 "fully masked rows", "gradient of an additive mask", "double backward",
                 "dropout's gradient", "head size of v differs"):
        assert BY_NAME[name].run(target).outcome == "passes", name


@pytest.fixture(scope="module")
def orchard_verdicts():
    """Orchard's verdicts, the largest cases too: they take it seconds, and memory that is touched
    nowhere but at its ends."""
    found = find("orchard")
    return {case.name: case.run(found) for case in chosen(large=True)}


def test_orchard_passes(orchard_verdicts):
    not_passing = {name: (v.outcome, v.detail) for name, v in orchard_verdicts.items()
                   if v.outcome != "passes"}
    assert not not_passing


# ---- The command ---------------------------------------------------------------------------------

def test_isolated_crash_and_hang_end_only_their_case():
    cases = [BY_NAME["scale 1"], BY_NAME["one head, rank 3"]]
    crashed = run_isolated("planted_attention:crash", cases[:1])
    assert {v.outcome for v in crashed.values()} == {"crashes"}
    assert "SIGABRT" in crashed["scale 1"].detail
    hung = run_isolated("planted_attention:hang", cases[:1], limit=2.0)
    assert hung["scale 1"].outcome == "hangs"
    fine = run_isolated("planted_attention:honest", cases)
    assert [fine[case.name].outcome for case in cases] == ["passes", "passes"]


def test_a_module_that_speaks_without_ending_its_line(folder):
    """What it says while it is imported stands before the first line that the worker tells."""
    (folder / "planted_loading.py").write_text(
        "print('loading', end='')\nfrom planted_attention import crash, honest\n"
        "def first_only(query, key, value, scale=None):\n"
        "    return (honest if scale else crash)(query, key, value, scale=scale)\n")
    cases = [BY_NAME["scale 1"], BY_NAME["plain"]]
    verdicts = run_isolated("planted_loading:first_only", cases)
    assert {name: v.outcome for name, v in verdicts.items()} == {
        "scale 1": "passes", "plain": "crashes"}


def test_a_module_that_cannot_be_imported_is_a_message(folder, monkeypatch, capfd):
    """Isolated, neither a crash nor a hang of it is one of the command."""
    (folder / "planted_aborting.py").write_text("import os\nos.abort()\n")
    (folder / "planted_waiting.py").write_text("import time\ntime.sleep(600)\n")
    for target, told in (("planted_aborting:f", "importing planted_aborting:f: the process ended by "
                          "SIGABRT"),
                         ("no_such_module:f", "No module named 'no_such_module'"),
                         ("planted_waiting:f", "importing planted_waiting:f was stopped after 1 s")):
        if target == "planted_waiting:f":
            monkeypatch.setattr(sys.modules[run_isolated.__module__], "START", 1.0)
        assert main(["--isolate", "--only", "scale 1", "--target", target]) == 2
        assert capfd.readouterr().err.endswith(f"conformance: {told}\n")


def test_status_json_and_page(folder, monkeypatch, capsys):
    (folder / "planted_targets.py").write_text("raise SystemExit")
    (folder / "planted_targets_broken.py").write_text("raise RuntimeError('not today')")
    file, page = folder / "x.json", folder / "x.md"
    words = ["--only", "scale 1", "--json", str(file), "--markdown", str(page)]
    assert main(["--target", "planted_attention:honest", *words]) == 0
    told = json.loads(file.read_text())
    assert [case["outcome"] for case in told["cases"]] == ["passes"]
    assert "| values | scale 1 |" in page.read_text()
    monkeypatch.setattr(planted_attention, "honest", planted_attention.planted("scale forgotten"))
    assert main(["--target", "planted_attention:honest", *words]) == 1
    assert json.loads(file.read_text())["cases"][0]["outcome"] == "wrong"
    assert main(["--target", "no_such_module:f"]) == 2
    capsys.readouterr()
    assert main(["--target", "math:pi"]) == 2
    assert capsys.readouterr().err == ("conformance: target 'math:pi' is 3.141592653589793, not a "
                                       "function\n")
    assert main(["--target", "tensorflow"]) == 2
    assert capsys.readouterr().err.startswith("conformance: target 'tensorflow' is none of torch,")
    assert main(["--target", "torch", "--only", "no such case"]) == 2
    assert "no case contains" in capsys.readouterr().err
    for words, told in ((["--device", "nonsense"], "--device nonsense: "),
                        (["--device", "meta"], "--device meta: "),
                        (["--json", str(folder / "no/x.json")], "No such file"),
                        (["--target", "planted_targets:ends"], "SystemExit"),
                        (["--target", "planted_targets_broken:f"], "not today")):
        assert main(["--only", "scale 1", *words]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--limit", "-1"])
    assert main(["--list"]) == 0
    assert f"{len(chosen())} cases" in capsys.readouterr().out


def test_a_target_without_one_answer_is_no_success(capsys):
    words = ["--target", "os:getcwd", "--only", "head size not innermost", "--only", "grouped"]
    assert main(words) == 2
    assert capsys.readouterr().err == ("conformance: os:getcwd: no case could be checked: "
                                       "3 not offered, 1 raises\n")
    assert main([*words, "--strict"]) == 1
    assert main(["--target", "planted_attention:honest", *words]) == 2
    assert main(["--target", "torch", "--only", "sinks", "--only", "scale 1"]) == 0


def shell(line, **environment):
    """Status, output and errors of a line of bash, in which `conformance` is the command."""
    line = f'conformance() {{ "{sys.executable}" -m orchard.conformance "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120,
                          env=dict(os.environ, OMP_NUM_THREADS="1", **environment))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux'")
@pytest.mark.parametrize("words, what", [
    ("--list >/dev/full", "the output"),
    ("--help >/dev/full", "the output"),
    ("--only 'scale 1' >/dev/full", "the output"),
    ("--only 'scale 1' --json /dev/full >/dev/null", "/dev/full"),
    ("--only 'scale 1' --markdown /dev/full >/dev/null", "/dev/full")])
def test_output_that_cannot_be_written_is_a_message(words, what):
    assert shell(f"conformance {words}") == (
        2, "", f"conformance: {what} could not be written: No space left on device\n")


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path):
    assert shell("conformance --list | true; exit ${PIPESTATUS[0]}") == (2, "", "")
    (tmp_path / "planted_hang.py").write_text(  # in its second case, when nobody listens any more
        "import time\nimport torch.nn.functional as F\n"
        "def sdpa(query, key, value, scale=None):\n"
        "    if scale is not None: time.sleep(600)\n"
        "    return F.scaled_dot_product_attention(query, key, value)\n")
    status, out, errors = shell(
        "conformance --target planted_hang:sdpa --isolate --only plain --only 'scale 1' | "
        "head -n 1; exit ${PIPESTATUS[0]}",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (status, errors) == (2, "") and out.endswith(", device cpu, 2 cases\n")


def test_a_target_that_ends_the_process_or_speaks_in_between(folder):
    (folder / "planted_speakers.py").write_text(
        "import os, signal, sys\nfrom planted_attention import honest\n"
        "def ends(query, key, value): sys.exit(0)\n"
        "def speaks(query, key, value, scale=None):\n"
        "    print('@{}')\n    return honest(query, key, value, scale=scale)\n"
        "def dies(query, key, value): os.kill(os.getpid(), signal.SIGRTMIN + 6)\n")
    scale, plain = BY_NAME["scale 1"], BY_NAME["plain"]
    assert plain.run(find("planted_speakers:ends")).outcome == "raises"
    assert run_isolated("planted_speakers:speaks", [scale])["scale 1"].outcome == "passes"
    if hasattr(signal, "SIGRTMIN"):  # not on macOS
        died = run_isolated("planted_speakers:dies", [plain])["plain"]
        assert died.outcome == "crashes"
        assert died.detail == f"the process ended by signal {signal.SIGRTMIN + 6}"
    assert to_json(report.Verdict("wrong", float("nan")))["bars"] == "inf"


def test_verdicts_survive_json():
    for case in ("plain", "NaN in hidden keys"):
        verdict = BY_NAME[case].run(find("torch"))
        assert from_json(json.loads(json.dumps(to_json(verdict)))) == verdict


def test_the_folder_alone_runs_with_torch_alone(tmp_path):
    """Copied out of the package, without the C library."""
    shutil.copytree(ROOT / "python/orchard/conformance", tmp_path / "conformance")
    env = {name: value for name, value in os.environ.items() if name != "ORCHARD_LIBRARY"}
    env.update(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-m", "conformance", "--target", "torch-math", "--only",
                           "scale 1", "--isolate"], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "torch-math: 1 passes" in done.stdout


def committed(page):
    """{target: {case: verdict in one word or two}} of a page of docs/conformance, and its counts."""
    text = (ROOT / "docs/conformance" / f"{page}.md").read_text()
    table = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    targets, rows = table[0][3:], table[1:]
    told = {target: {row[1]: row[3 + at].split(",")[0] for row in rows}
            for at, target in enumerate(targets)}
    above = text.partition("| area |")[0]
    return told, dict(re.findall(r"^- \*\*(.*?)\*\* \(.*\): (.*)$", above, re.M))


@pytest.mark.parametrize("page", ["orchard", "torch-2.13-cpu"])
def test_the_committed_results_are_of_these_cases(page):
    told, counts = committed(page)
    assert len(told) == (1 if page == "orchard" else 3) and list(counts) == list(told)
    for target, verdicts in told.items():
        assert list(verdicts) == [case.name for case in CASES]
        assert counts[target] == report.counts(
            {name: report.Verdict(word, None) for name, word in verdicts.items()})


def test_the_committed_verdicts_are_orchards(orchard_verdicts):
    told, = committed("orchard")[0].values()
    assert {name: verdict.outcome for name, verdict in orchard_verdicts.items()} == {
        name: told[name] for name in orchard_verdicts}


@pytest.mark.filterwarnings("ignore::UserWarning")  # what torch-flash says when it refuses
def test_the_committed_verdicts_against_torch_hold():
    """Whatever the page says that torch refuses or gets wrong. What passes is left to the page: it
    takes longer, and close to the bar it depends on the machine. So does whether torch's matrix
    products repeat their bits: with AVX-512 they did, with AVX2 not."""
    told, _ = committed("torch-2.13-cpu")
    asked = {case.name for case in chosen()}
    for target, verdicts in told.items():
        against = {name: word for name, word in verdicts.items()
                   if word not in ("passes", "not offered", "too heavy") and name in asked
                   and BY_NAME[name].area != "repeatability"}
        assert len(against) >= 2
        found = find(target)
        assert {name: BY_NAME[name].run(found).outcome for name in against} == against


def test_a_device_without_float64_is_asked_in_the_other_dtypes(monkeypatch):
    """"mps:0" stands for the device; its tensors are on the CPU here."""
    from orchard.conformance import cases
    asked = []
    monkeypatch.setattr(cases, "check", lambda target, problem, device: asked.append(problem.dtype)
                        or report.Verdict("passes", 0.0))
    BY_NAME["plain"].run(find("torch"), "mps:0")
    assert asked == ["float32", "float16", "bfloat16"]
    for name in ("double backward", "float32 mask beside float64 q"):
        verdict = BY_NAME[name].run(find("torch"), "mps:0")
        assert verdict.outcome == "not measured" and "float64" in verdict.detail
    assert not report.any_checked({name: verdict})


def test_cases_are_named_once_and_explained():
    assert len(BY_NAME) == len(CASES)
    for case in CASES:
        assert case.source and case.says and (case.check or case.problems), case.name
