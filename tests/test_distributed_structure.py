"""The sources of cuda_ext.distributed: no import circles, planning below the rest, notes that exist."""

from __future__ import annotations

import ast
import graphlib
import re

from conftest import ROOT

FOLDER = ROOT / "cuda_ext" / "distributed"


def test_no_module_imports_one_that_imports_it() -> None:
    """Imports inside functions and for type checkers count too."""
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in FOLDER.rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for module, text in sources.items():
        found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in found for alias in node.names}
        imports[module] = (names | {node.module or "" for node in found}) & sources.keys()
    assert len(imports) > 30 and imports["cuda_ext.distributed.__main__"]
    order = graphlib.TopologicalSorter(imports)
    order.prepare()  # raises CycleError with the modules
    planning = "cuda_ext.distributed.planning"
    for module in filter(lambda name: name.startswith(planning), imports):
        assert all(used.startswith(planning) for used in imports[module]), f"{module} uses the wrapper"


def test_notes_exist() -> None:
    notes = re.findall(r"^\[Note (\d+): ", (FOLDER / "reducer.py").read_text(), re.MULTILINE)
    used = {number for path in FOLDER.glob("*.py") for number in re.findall(r"\[Note (\d+)\]", path.read_text())}
    assert notes == [str(n) for n in range(1, len(notes) + 1)]
    assert used == set(notes)
