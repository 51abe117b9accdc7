"""The Python blocks of pages that other tests do not run, in order, as one program a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = ("export", "transformers", "sdpa", "flex", "patch", "loss", "experts", "fp8")


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}.md block {number}", "exec"), names)
