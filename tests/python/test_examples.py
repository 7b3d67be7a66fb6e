"""Every Python example runs, with small settings, and prints what its first lines promise."""

import os
import pathlib
import re
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(name, *arguments):
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *map(str, arguments)],
                          capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tiny_gpt():
    out = run("tiny_gpt.py", "--steps", 8, "--context", 32, "--width", 32, "--layers", 2,
              "--sample", 5)
    losses = dict(((d, who), float(loss)) for d, who, loss in
                  re.findall(r"dropout (\S+) +(PyTorch|Orchard) +loss (\S+)", out))
    assert len(losses) == 4 and len(re.findall(r"\d s$", out, re.M)) == 4
    assert abs(losses["0.0", "PyTorch"] - losses["0.0", "Orchard"]) < 2e-5
    assert losses["0.0", "Orchard"] != losses["0.1", "Orchard"]
    # 2 layers, 8 steps, twice by Orchard.
    assert re.search(r"^attention_forward +cpu +(\d+) +ran", out, re.M)
    assert re.search(r"^attention_backward +cpu +32 +ran", out, re.M)
    assert "\n# Orchard" in out


def test_finetune_transformers():
    out = run("finetune_transformers.py", "--steps", 12, "--batch", 4)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert len(re.findall(r"^  \d+\+\d+=", out, re.M)) == 4
    assert "2 attention layers by Orchard" in out and "in memory" not in out


def test_custom_mask():
    out = run("custom_mask.py", "--length", 96)
    deviations = [float(one) for one in re.findall(r"gradients (\S+)$", out, re.M)]
    assert len(deviations) == 4 and max(deviations) < 1e-4
    assert f"mask of {96 * 96:7} bytes" in out
