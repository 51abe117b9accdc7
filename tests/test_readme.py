"""The Python blocks of the README run as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cuda_ext.compat import flash_attn_interface

README = Path(__file__).resolve().parent.parent / "README.md"
# A new block fails here until it has a test of its own below.
MODELS, OPS, DATA_PARALLEL, FLASH_ATTN = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_models() -> None:
    from cuda_ext.integrations import sdpa, transformers

    try:
        names = run(MODELS)
        assert names["out"].shape == (2, 10, 64)
        assert sdpa.calls()["served"] >= 1
    finally:
        sdpa.disable()
        transformers.disable()


def test_ops() -> None:
    names = run(OPS)
    assert names["h"].shape == (4, 128, 2048) and names["h"].requires_grad
    assert names["loss"].shape == () and names["loss"].requires_grad
    assert names["o"].shape == (4, 128, 8, 64) and names["lse"].shape == (4, 8, 128)


def test_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the only rank of a group that torchrun would have described like this."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    names = run(DATA_PARALLEL)
    assert names["step"] == 9
    norm = torch.cat([parameter.grad.flatten() for parameter in names["model"].parameters()]).norm()
    assert 0.0 < norm <= 1.001
    assert not dist.is_initialized()


def test_flash_attn() -> None:
    names = run(FLASH_ATTN)
    assert names["out"].shape == (2, 100, 8, 64) and names["lse"].shape == (2, 8, 100)
    assert names["padded"].shape == (2, 100, 8, 64) and names["packed"].shape == (170, 8, 64)
    assert names["flash_attn_func"] is flash_attn_interface.flash_attn_func
