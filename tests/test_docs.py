"""The pages of docs: links have targets, the overview names what exists, and its figures agree with the sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import draw_figures

DOCS, CSRC, PACKAGE = ROOT / "docs", ROOT / "csrc", ROOT / "cuda_ext"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
OVERVIEW = (DOCS / "architecture.md").read_text()
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".inc"}
FILE = re.compile(r"[\w./*-]+\.(?:py|h|cuh|cu|cpp|inc|md|json|txt|svg)")
PARTS = {part.key: set(part.uses.split(", ")) - {""} for layer in draw_figures.LAYERS for part in layer.parts}


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub knows the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}")
def test_links_have_targets(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: no {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading for {link}"


def test_every_page_is_in_the_index() -> None:
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= set(links(DOCS / "README.md"))


def test_files_of_the_overview_exist() -> None:
    names = {code for code in re.findall(r"`([^`\n]+)`", OVERVIEW) if FILE.fullmatch(code)}
    assert len(names) > 60
    found = {name for name in names if any(ROOT.glob(name)) or any(path for path in CSRC.rglob(name))}
    found |= {name for name in names if any(ROOT.glob(f"tests/simt/{name}"))}
    assert names == found


def table_rows() -> Iterator[tuple[list[Path], list[str]]]:
    """Of each row of a table of the overview the files that it names, and the identifiers."""
    for row in re.findall(r"^\|(.*)\|$", OVERVIEW, re.MULTILINE):
        codes = re.findall(r"`([^`]+)`", row)
        files = [ROOT / code for code in codes if FILE.fullmatch(code) and (ROOT / code).is_file()]
        yield files, [code for code in codes if re.fullmatch(r"\w+", code)]


def test_functions_of_the_overview_are_in_their_files() -> None:
    checked = 0
    for files, identifiers in table_rows():
        texts = [file.read_text() for file in files]
        for identifier in identifiers if files else ():
            checked += 1
            assert any(re.search(rf"\b{identifier}\b", text) for text in texts), f"no {identifier} in {files}"
    assert checked > 60


def test_figures_are_those_that_are_drawn() -> None:
    drawn = {name: draw().svg() for name, draw in draw_figures.DRAWINGS.items()}
    committed = {path.name: path.read_text() for path in draw_figures.FIGURES.iterdir()}
    assert committed == drawn, "run python tools/draw_figures.py"
    assert {f"figures/{name}" for name in drawn} <= set(links(DOCS / "architecture.md"))


def test_the_table_of_layers_is_the_one_that_is_written() -> None:
    page = draw_figures.CONTRIBUTING.read_text()
    assert draw_figures.with_table_of_layers(page) == page, "run python tools/draw_figures.py"


def test_names_in_the_figures_exist() -> None:
    texts = [
        unescape(text) for draw in draw_figures.DRAWINGS.values() for text in re.findall(r">([^<]+)<", draw().svg())
    ]
    sources = {
        path.name: path.read_text()
        for folder in (CSRC, PACKAGE)
        for path in folder.rglob("*.*")
        if path.suffix in SUFFIXES
    }
    known = set(re.findall(r"\w+", " ".join(sources.values())))
    words = {word for text in texts for word in re.findall(r"[\w.]+", text) if "_" in word or "." in word}
    files = {word for word in words if Path(word).suffix in SUFFIXES}
    assert len(files) > 15 and len(words) > 50
    assert not {file for file in files if file not in sources}
    assert not {word for word in words - files if not set(word.strip(".").split(".")) <= known}


# The layers, as the sources have them.


def includes_of_csrc() -> dict[str, list[str]]:
    sources = {path.relative_to(CSRC).as_posix(): path.read_text() for path in CSRC.rglob("*.*")}
    return {name: re.findall(r'^\s*#include "(\w+/[^"]+)"', text, re.MULTILINE) for name, text in sources.items()}


def torch_files(includes: dict[str, list[str]]) -> set[str]:
    """Those that include torch, themselves or by what they include."""
    torch = {name for name in includes if re.search(r"#include <(torch|ATen|c10)/", (CSRC / name).read_text())}
    while more := {name for name, own in includes.items() if name not in torch and not torch.isdisjoint(own)}:
        torch |= more
    return torch


def uses_of_csrc() -> set[tuple[str, str]]:
    return {
        (name.split("/")[0], include.split("/")[0]) for name, own in includes_of_csrc().items() for include in own
    }


def uses_of_package() -> set[tuple[str, str]]:
    def part_of(module: str) -> str:
        name = module.split(".")[1]
        if name in ("gemm", "attention", "bucket", "ops"):
            return "public ops"
        return name if name in PARTS else "support"

    uses = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE and path.name in ("__init__.py", "_build_info.py"):
            continue  # the names of all others, loaded when they are asked for
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "cuda_ext":
                imported = [f"cuda_ext.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            uses |= {(part_of(module), part_of(name)) for name in imported if name.startswith("cuda_ext.")}
    return uses


def test_parts_use_what_the_figure_says() -> None:
    uses = {(user, used) for user, used in uses_of_csrc() | uses_of_package() if user != used}
    assert uses == {(user, used) for user, several in PARTS.items() for used in several}


def test_no_part_uses_an_earlier_one() -> None:
    order = list(PARTS)
    assert not [
        (user, used) for user, several in PARTS.items() for used in several if order.index(used) <= order.index(user)
    ]


def test_only_ops_include_torch() -> None:
    torch = torch_files(includes_of_csrc())
    assert {name.split("/")[0] for name in torch} == {"ops"}
    assert {Path(name).suffix for name in torch} == {".cpp", ".h"}  # nvcc compiles .cu, .cuh and .inc
