"""The pages of docs: links have targets, the overview names what exists, and the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from conftest import ROOT

import cuda_ext
from cuda_ext.distributed import context_parallel

sys.path.insert(0, str(ROOT / "tools"))
import build_docs
import static_gates
import support_matrix

DOCS, CSRC, PACKAGE = ROOT / "docs", ROOT / "csrc", ROOT / "cuda_ext"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
OVERVIEW = (DOCS / "architecture.md").read_text()
SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".inc"}
FILE = re.compile(r"[\w./*-]+\.(?:py|h|cuh|cu|cpp|inc|md|json|txt|svg)")


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


def test_names_in_the_figures_exist() -> None:
    figures = list((DOCS / "figures").iterdir())
    assert {f"figures/{figure.name}" for figure in figures} <= set(links(DOCS / "architecture.md"))
    texts = [unescape(text) for figure in figures for text in re.findall(r">([^<]+)<", figure.read_text())]
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


def test_every_page_is_in_the_menu_of_the_site() -> None:
    sources = {*DOCS.rglob("*.md"), *(ROOT / name for name in build_docs.MOVED)} - {ROOT / "README.md"}
    pages = {build_docs.page_of(source).relative_to(build_docs.PAGES).with_suffix("").as_posix() for source in sources}
    entries = [entry.rpartition("<")[2].rstrip(">") for chapter in build_docs.CONTENTS.values() for entry in chapter]
    assert sorted(entries) == sorted({*pages, *(f"api/{name}" for name in build_docs.API)})


@pytest.mark.sampled
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/build_docs.py", "--out", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    pages = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index", "overview", "architecture", "support", *(f"api/{name}" for name in build_docs.API)} <= pages
    for page, module in (
        ("ops", cuda_ext),
        ("nn", cuda_ext.nn),
        ("distributed", cuda_ext.distributed),
        ("context_parallel", context_parallel),
    ):
        text = (tmp_path / "api" / f"{page}.html").read_text()
        public = [name for name in module.__all__ if callable(getattr(module, name))]
        assert len(public) >= 3 and not [name for name in public if f'id="{module.__name__}.{name}"' not in text]


def test_the_support_matrix_is_what_the_ops_do() -> None:
    assert support_matrix.page() == support_matrix.PAGE.read_text(), "run python tools/support_matrix.py --write"


def test_the_table_of_kernels_is_of_the_golden_kernels() -> None:
    assert static_gates.with_table() == static_gates.DOCUMENT.read_text(), "run python tools/static_gates.py --write"


def test_the_hooks_of_a_commit_have_the_versions_of_the_linters() -> None:
    pinned = set((ROOT / "constraints.txt").read_text().split())
    hooks = re.findall(r"additional_dependencies: \[(.*)\]", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hooks and set(hooks) <= pinned


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {cuda_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
