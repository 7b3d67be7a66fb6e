"""What type checkers and `dir` make of the package: `py.typed` is a promise to their users."""

import subprocess
import sys

USER = '''
from typing import Tuple
import orchard
import orchard.torch
import torch
from orchard.torch import scaled_dot_product_attention

def step(q: torch.Tensor) -> torch.Tensor:
    with orchard.enable():
        out = scaled_dot_product_attention(q, q, q, is_causal=True)
    pair: Tuple[torch.Tensor, torch.Tensor] = scaled_dot_product_attention(q, q, q, return_lse=True)
    for either in (True, False):
        made = scaled_dot_product_attention(q, q, q, window=[1, 0], return_lse=either)
        assert isinstance(made, tuple) == either
    orchard.disable()
    names: str = ", ".join(orchard.active()) + str(orchard.counts())
    first = orchard.attention_forward(q, q, q, causal=True)[0]
    return out.transpose(1, 2) + pair[1].sum() + len(names) + len(str(first))
'''
WRONG = {
    'scaled_dot_product_attention(q, q, q, dropout="0.1")': "call-overload",
    "scaled_dot_product_attention(q, q, q, return_lse=True).transpose(1, 2)": "attr-defined",
    "orchard.attention_forward(q, q, q, casual=True)": "call-arg",
}


def mypy_run(folder, text):
    """mypy --strict on a user's file. torch itself is left out: reading it takes a minute."""
    (folder / "user.py").write_text(text)
    (folder / "mypy.ini").write_text("[mypy]\nstrict = True\ncache_dir = /dev/null\n"
                                     "[mypy-orchard.*]\nfollow_imports = silent\n"
                                     "[mypy-torch.*]\nfollow_imports = skip\n")
    return subprocess.run([sys.executable, "-m", "mypy", "user.py"], cwd=folder, text=True,
                          capture_output=True, timeout=300)


def test_what_users_write_passes(tmp_path):
    done = mypy_run(tmp_path, USER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mistakes_are_seen(tmp_path):
    lines = USER.splitlines()
    calls = "".join(f"    {call}\n" for call in WRONG)
    done = mypy_run(tmp_path, "\n".join(lines[:7]) + f"\ndef wrong(q: torch.Tensor) -> None:\n{calls}")
    for line, kind in zip(range(9, 9 + len(WRONG)), WRONG.values()):
        assert f"user.py:{line}: error" in done.stdout, done.stdout
        assert f"[{kind}]" in next(x for x in done.stdout.splitlines()
                                   if x.startswith(f"user.py:{line}: error")), done.stdout


def test_dir_names_what_is_ours():
    code = ("import orchard\n"
            "print(*(x for x in dir(orchard) if x[0] != '_' and x not in orchard.__all__))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    switches = ("active counts disable disable_pytorch_overrides enable enable_pytorch_overrides "
                "get_active_overrides")
    assert done.stdout.split() == sorted(["arrays", "attention", "reports", *switches.split()])
