"""The types that a user's type checker sees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

PROGRAM = """
import torch
from typing_extensions import assert_type

import cuda_ext

x, w = torch.randn(4, 16), torch.randn(32, 16, requires_grad=True)
hidden = cuda_ext.linear(x, w, activation="gelu").relu()
q = torch.randn(2, 8, 4, 16)
out = cuda_ext.flash_attention(q, q, q, causal=True, attn_mask=torch.ones(8, 8, dtype=torch.bool)).flatten(2)
out, lse = cuda_ext.flash_attention(q, q, q, window=(4, 0), return_lse=True)
lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
packed = cuda_ext.flash_attention_varlen(q[0], q[0], q[0], lengths, lengths, max_seqlen_q=5).flatten(1)


def either(return_lse: bool) -> None:
    result = cuda_ext.flash_attention(q, q, q, return_lse=return_lse)
    assert_type(result, torch.Tensor | tuple[torch.Tensor, torch.Tensor])


module = cuda_ext.nn.MLP(16, 64)
y = module(x, residual=x).sum()
product = cuda_ext.gemm(x, w.t(), out_dtype=torch.bfloat16).float()
with cuda_ext.testing.emulated() as emulation:
    count: int = emulation.counters["mma"]
"""


MISTAKES = """
cuda_ext.flash_attention(q, q, q, return_lse=True).flatten()
cuda_ext.flash_attention(q, q, q, softcap="much")
cuda_ext.flash_attention(q, q, q, max_seqlen_q=3)
cuda_ext.linear(x, w, activation=3)
"""


@pytest.mark.sampled
def test_strict_check_finds_the_mistakes_only(run_python: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + MISTAKES)
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    options = ("--strict", "--follow-imports=silent", cache, f"--python-executable={sys.executable}")
    done = run_python("-m", "mypy", *options, str(tmp_path / "program.py"), MYPYPATH=str(ROOT))
    errors = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    first = PROGRAM.count("\n") + 2
    assert errors == set(range(first, first + 4)), done.stdout
