"""The short programs of examples/, on small inputs: the loss with cuda_ext is the loss without it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import on_ranks

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "tools"))
import example_pages

TINY = ("--steps", "3", "--batch", "4", "--context", "32")


def run(name: str, out: Path, *options: str) -> Any:
    """What `main` of the example returns."""
    with mock.patch.object(sys, "argv", [f"{name}.py", "--out", str(out), "--device", "cpu", *options]):
        return importlib.import_module(name).main()


def assert_same_losses(first: Sequence[float], second: Sequence[float], rtol: float = 1e-4) -> None:
    assert len(first) > 1 and first[0] != first[-1]
    torch.testing.assert_close(torch.tensor(second), torch.tensor(first), rtol=rtol, atol=0)


def test_every_example_has_a_page() -> None:
    modules = {"checkpoint", "common", "gpt", "report", "text", "train_gpt", "training"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - modules == set(example_pages.TITLES)
    for name in example_pages.TITLES:
        assert f"examples/{name}.py" in (ROOT / "docs" / "examples" / f"{name}.md").read_text()


@pytest.mark.sampled
def test_finetune_transformers(tmp_path: Path) -> None:
    losses = run("finetune_transformers", tmp_path, *TINY, "--hidden", "128", "--layers", "2")
    assert_same_losses(losses["sdpa"], losses["cuda_ext"])
    assert (tmp_path / "finetune_transformers.png").exists()


def test_vit_timm(tmp_path: Path) -> None:
    losses = run("vit_timm", tmp_path, "--steps", "3", "--batch", "4", "--width", "64", "--depth", "2").losses
    assert_same_losses(losses["timm"], losses["cuda_ext"])


@pytest.mark.sampled
def test_amp_loop(tmp_path: Path) -> None:
    losses = run("amp_loop", tmp_path, *TINY).losses
    # Both round to bfloat16, though not in the same places: 2**-8 for each element, less for the mean of many.
    assert_same_losses(losses["PyTorch"], losses["cuda_ext"], rtol=2**-9)


@pytest.mark.sampled
@pytest.mark.parametrize("mask", ["documents", "prefix-lm"])
def test_train_packed(mask: str, tmp_path: Path) -> None:
    tiny = ("--steps", "12", "--documents", "6", "--longest", "150", "--features", "32")
    runs, differences = run("train_packed", tmp_path, "--mask", mask, *tiny)
    losses = runs.losses["cuda_ext"]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    # Sums are of the same terms in another order: a few 2**-24 of logits of at most about 8.
    assert differences[mask] < 2**-17 and differences["causal"] > 2**-7


@pytest.mark.sampled
def test_train_fp8(tmp_path: Path) -> None:
    runs, last = run("train_fp8", tmp_path, *TINY, "--features", "64", "--layers", "1")
    losses = runs.losses
    assert list(losses) == list(last) == ["bfloat16", "tensorwise", "rowwise", "blockwise"]
    for recipe in list(losses)[1:]:
        assert losses[recipe] != losses["bfloat16"]
        assert_same_losses(losses["bfloat16"], losses[recipe], rtol=0.02)  # 4 bits, in a mean of 128 losses
    assert (tmp_path / "train_fp8.png").exists()


@pytest.mark.sampled
def test_train_moe(tmp_path: Path) -> None:
    runs, last = run("train_moe", tmp_path, *TINY, "--features", "64", "--layers", "1", "--experts", "4")
    assert list(runs.losses) == list(last) == ["bfloat16", "FP8"]
    assert runs.losses["FP8"] != runs.losses["bfloat16"]
    assert_same_losses(runs.losses["bfloat16"], runs.losses["FP8"], rtol=0.02)  # as above
    assert (tmp_path / "train_moe.png").exists()


@pytest.mark.sampled
def test_lightning_training(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses = run("lightning_training", tmp_path, *TINY)
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.sampled
@on_ranks(2)
def test_fsdp2(tmp_path: Path) -> None:
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        losses = run("fsdp2", tmp_path, *TINY).losses["FSDP2"]
    assert len(losses) == 3 and losses[-1] < losses[0]


@on_ranks(4)
def test_train_long(tmp_path: Path) -> None:
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        losses = run("train_long", tmp_path, "--steps", "3", "--batch", "2", "--context", "24").losses
    assert len(losses["4 ranks"]) == 3
    if dist.get_rank() == 0:
        assert_same_losses(losses["alone"], losses["4 ranks"])


def test_embed_bert(tmp_path: Path) -> None:
    vectors = run("embed_bert", tmp_path, "--repeat", "1", "--times", "1")
    for name in ("sdpa", "cuda_ext"):
        torch.testing.assert_close(vectors[name], vectors["eager"], rtol=0, atol=1e-5)


@pytest.mark.sampled
def test_write_gpt(tmp_path: Path) -> None:
    written = run("write_gpt", tmp_path, "--run", str(tmp_path), "--steps", "3", "--tokens", "12")
    assert {name: text.shape for name, text in written.items()} == dict.fromkeys(written, (4, 12))
    assert all(torch.equal(text, written["no cache"]) for text in written.values())


def test_generate_gpt2(tmp_path: Path) -> None:
    written = run("generate_gpt2", tmp_path, *TINY, "--tokens", "8", "--width", "64", "--layers", "2")
    assert written["cuda_ext"].shape == (2, 28 + 8)
    assert torch.equal(written["cuda_ext"], written["eager"])
