"""The ctypes structs of orchard.torch._launch are those that tests/layout_test.c pins for C."""

from __future__ import annotations

import ctypes
import pathlib
import re

import pytest

from orchard.torch import _launch

TEXT = (pathlib.Path(__file__).parent.parent / "layout_test.c").read_text()
CLASSES = {
    "orchard_tensor": _launch.Tensor,
    "orchard_attention": _launch.Attention,
    "orchard_attention_forward_args": _launch.AttentionForwardArgs,
    "orchard_attention_backward_args": _launch.AttentionBackwardArgs,
    "orchard_device_info": _launch.DeviceInfo,
    "orchard_launch": _launch.Launch,
    "orchard_launches": _launch.Launches,
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_where_c_has_it(name):
    kind = CLASSES[name]
    size = re.search(rf"STRUCT\({name}, (\d+)\)", TEXT)
    fields = re.findall(rf"FIELD\({name}, (\w+), (\d+), (\d+)\)", TEXT)
    assert ctypes.sizeof(kind) == int(size.group(1))
    assert [(f, getattr(kind, f).offset, getattr(kind, f).size) for f, _ in kind._fields_] == [
        (f, int(at), int(length)) for f, at, length in fields]


def test_pieces():
    assert f"VALUE(ORCHARD_SOURCE_PIECES, {_launch.SOURCE_PIECES})" in TEXT
    assert f"VALUE(ORCHARD_MAX_RANK, {_launch.MAX_RANK})" in TEXT
