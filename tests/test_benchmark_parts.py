"""The parts of benchmarks/ and which of them may import which."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

from conftest import ROOT

FOLDER = ROOT / "benchmarks"
# From top to bottom, as in the table of benchmarks/__init__.py. Entry points may import everything.
PARTS = re.findall(r"^  (\w+)(?:\.py)?  +\S", (FOLDER / "__init__.py").read_text(), re.MULTILINE)
ENTRY_POINTS = ("__init__", "__main__", "predicted")


def imports(file: Path) -> set[tuple[str, str]]:
    """(module, name) of all imports from benchmarks, also of those inside functions."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {(n.module, a.name) for n in nodes for a in n.names if n.module and n.module.split(".")[0] == "benchmarks"}


def module_of(module: str, name: str) -> str:
    """The file that an import reads: `from benchmarks.model import gpus` reads model/gpus.py."""
    path = [*module.split(".")[1:], name]
    return "/".join(path if (FOLDER.joinpath(*path).with_suffix(".py")).is_file() else path[:-1])


def test_parts_import_only_from_parts_below_them() -> None:
    assert PARTS == ["gpu_check", "model", "suites", "presentation", "comparison", "results", "environment"]
    graph: dict[str, set[str]] = {}
    for file in FOLDER.rglob("*.py"):
        here = str(file.relative_to(FOLDER).with_suffix(""))
        graph[here] = {module_of(*found) for found in imports(file)}
        assert not [name for _, name in imports(file) if name.startswith("_") and name != "__main__"], here
        if here in ENTRY_POINTS:
            continue
        for other in graph[here]:
            ours, theirs = (PARTS.index(path.split("/")[0]) for path in (here, other))
            assert theirs >= ours, f"{here} imports {other}, which is above it"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
