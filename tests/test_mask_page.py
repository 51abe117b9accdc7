"""docs/masks.md: its programs run, its pictures are current, and it names every builder."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

from cuda_ext import BlockMask

sys.path.insert(0, str(ROOT / "tools"))
import mask_pictures

TEXT = mask_pictures.PAGE.read_text()


@pytest.fixture(scope="module")
def masks() -> dict[str, BlockMask]:
    return mask_pictures.masks(TEXT)


def test_the_programs_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = mask_pictures.names_of(TEXT)
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"^print\(.*?\) +# ([^:\n]+)", TEXT, re.MULTILINE)
    assert len(said) == 3 and [line.split(":")[0] for line in printed] == said
    assert (tmp_path / "mask.svg").read_text().startswith("<svg")
    assert names["out"].shape == (1, 2048, 4, 64) and names["q"].grad.isfinite().all()


def test_the_pictures_are_current(masks: dict[str, BlockMask]) -> None:
    drawn = {f"{name}.svg": mask_pictures.picture(mask) for name, mask in masks.items()}
    found = {path.name: path.read_text() for path in mask_pictures.PICTURES.iterdir()}
    assert found == drawn, "run python tools/mask_pictures.py"
    assert all(len(text) < 8192 for text in drawn.values())


def test_every_builder_has_a_picture() -> None:
    builders = {name for name, each in inspect.getmembers(BlockMask, inspect.ismethod) if not name.startswith("_")}
    shown = {name for call in mask_pictures.calls(TEXT).values() for name in re.findall(r"BlockMask\.(\w+)", call)}
    assert len(builders) >= 12 and shown == builders
    pictures = re.findall(r"\(masks/(\w+)\.svg\)", TEXT)
    assert pictures == list(mask_pictures.calls(TEXT))


# What the table says that query i sees, of S = 2048.
QUERY, KEY = torch.arange(2048).view(-1, 1), torch.arange(2048)
CAUSAL, BEFORE = QUERY >= KEY, QUERY - KEY
DOCUMENT = torch.bucketize(KEY, torch.tensor([300, 1100]), right=True)
PERSON = KEY // 256 % 3
SAME_DOCUMENT, SAME_PERSON = (each.view(-1, 1) == each for each in (DOCUMENT, PERSON))
NEAR_OR_GLOBAL = (BEFORE.abs() <= 300) | (QUERY < 100) | (KEY < 100)
DEFINITIONS: dict[str, Any] = {
    "causal": CAUSAL,
    "window": (BEFORE <= 500) & (BEFORE >= -100),
    "documents": SAME_DOCUMENT & CAUSAL,
    "ids": SAME_PERSON,
    "prefix_lm": (KEY < 700) | CAUSAL,
    "chunks": QUERY // 500 == KEY // 500,
    "window_with_global": NEAR_OR_GLOBAL,
    "from_dense": BEFORE.abs() % 1024 < 200,
    "from_column_ranges": CAUSAL & (KEY // 256 * 256 + 768 > QUERY),
    "and": NEAR_OR_GLOBAL & SAME_DOCUMENT,
    "or": (CAUSAL & (BEFORE <= 200)) | (SAME_PERSON & CAUSAL),
    "not": BEFORE >= 512,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_masks_show_what_the_table_says(name: str, masks: dict[str, BlockMask]) -> None:
    assert torch.equal(masks[name].to_dense()[0, 0], DEFINITIONS[name])


def test_the_tool_finds_what_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: dict[str, BlockMask]
) -> None:
    monkeypatch.setattr(mask_pictures, "PICTURES", tmp_path / "masks")
    monkeypatch.setattr(mask_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(mask_pictures, "masks", lambda text: {"causal": masks["causal"]})
    monkeypatch.setattr(sys, "argv", ["mask_pictures.py", "--check"])
    assert mask_pictures.main() == 1
    monkeypatch.setattr(sys, "argv", ["mask_pictures.py"])
    assert mask_pictures.main() == 0
    assert [path.name for path in (tmp_path / "masks").iterdir()] == ["causal.svg"]
    (tmp_path / "masks" / "of_before.svg").write_text("")
    monkeypatch.setattr(sys, "argv", ["mask_pictures.py", "--check"])
    assert mask_pictures.main() == 1
    (tmp_path / "masks" / "of_before.svg").unlink()
    assert mask_pictures.main() == 0
