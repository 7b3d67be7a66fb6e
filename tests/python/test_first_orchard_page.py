"""docs/from-the-first-orchard.md: one page; its commands run, its names exist, none is forgotten."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import orchard_bridge
import orchard_ops
from orchard_bridge import flash_attn_function

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/from-the-first-orchard.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)

# What a user of the first Orchard calls, sets or reads; each must be on the page.
OLD = """
flash_attn_fwd flash_attn_bwd enable_flash enable_flash.main() flash_attn FlashAttnFunction
_ensure_shared_mps_tensor is_metal_flash_attn_available _ref_attention _contig
_metal_kernel_available _flash_attn_fwd _flash_attn_bwd _flash_attn_bwd_dropout
orchard_flash_attn_fwd orchard_flash_attn_bwd orchard_flash_attn_bwd_dropout
orchard_mtlbuffer_from_tensor_storage get_device_backend DeviceBackend patch_model F._star_orig_sdpa
log_summary apply_mps_optimizations configure_attention_backend MPSQuantConfig QuantizedLinear
LoRALinear orchard_patch_flash.py ORCHARD_DEBUG_FLASHATN ORCHARD_DEBUG_FLASH_ATN
ORCHARD_TENSOR_PROFILE USE_FLASH_ATTN FLASHATTN_LOG_LEVEL ORCHARD_DYLIB_PATH ORCHARD_REPO_PATH
ORCHARD_ROOT ORCHARD_FORCE_CPU ORCHARD_KERNEL_DIR ORCHARD_PROFILE_ALLOC
/tmp/flashattn_kernel_calls.log /tmp/orchard_tensor_profile.log RUN_THIS_FIRST.sh
rebuild_orchard.py check_orchard.sh ORCHARD_BUILD_EXPERIMENTAL build_ext benchmarks/run.py
orchard_bench
""".split()
OLD_LINES = """
tensor storage is not shared; cannot get MTLBuffer handle
could not cast IMPSAllocator to MPSHeapAllocatorImpl
could not materialize shared proxy for private tensor
invalid shared buffer size
flash_attn_mps kernel not loaded
Metal FlashAttention backward kernel unavailable
Input tensors must be on 'mps' device
dropout_p must be in [0,1), got P
[orchard][FlashAttnFunction.backward] Metal backward succeeded with shared storage tensors.
[orchard][FlashAttnFunction.backward] Metal kernel unavailable, attempting reference fallback.
falling back to reference attention backward.
[flashattn.mm] FWD call=N
[flashattn.mm] BWD call=N
""".strip().splitlines()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """An environment in which `python` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    env = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(folder))
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    return env


@pytest.mark.parametrize("commands", COMMANDS, ids=[text.splitlines()[0][:60] for text in COMMANDS])
def test_commands_run(commands, here):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, env=here,
                          capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_its_commands():
    assert len(COMMANDS) == 4


def test_it_is_one_page():
    assert len(PAGE.splitlines()) <= 70


def test_lines_that_are_said_to_be_written_are():
    """The log lines of the page's table are still in the code that writes them."""
    folders = (ROOT / "src", ROOT / "python")
    code = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.[chp]*")
                     if path.suffix in (".c", ".h", ".py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # adjacent literals joined
    for words in ("FWD", "call=", "Metal backward succeeded", "falling back to",
                  "Metal bwd failed (", "falling back to reference attention backward.",
                  "Metal kernel unavailable, attempting reference fallback.",
                  "private storage tensors, not copied"):
        assert words in PAGE and words in code, words


@pytest.mark.parametrize("name", OLD + OLD_LINES)
def test_nothing_is_forgotten(name):
    assert name in PAGE


def test_names_said_to_be_there_are_there():
    there = 0
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[1].startswith("there"):
            name = re.match(r"`([\w.]+)", cells[0]).group(1)
            module, _, rest = name.partition(".")
            found = {"orchard_ops": orchard_ops, "orchard_bridge": orchard_bridge,
                     "torch": torch}[module]
            for part in rest.split("."):
                found = getattr(found, part)
            assert callable(found)
            there += 1
    assert there == 7
    assert flash_attn_function.FlashAttnFunction is orchard_bridge.FlashAttnFunction


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
