"""The sources of cuda_ext.distributed: no import circles, bucketing and prediction below the rest, notes that exist."""

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
    bucketing, prediction = "cuda_ext.distributed.bucketing", "cuda_ext.distributed.prediction"
    for folder, may_use in ((bucketing, (bucketing,)), (prediction, (bucketing, prediction))):
        inside = [name for name in imports if name.startswith(folder)]
        assert len(inside) > 5
        for module in inside:
            assert all(used.startswith(may_use) for used in imports[module]), f"{module} uses another part"


def test_notes_exist() -> None:
    notes = re.findall(r"^\[Note (\d+): ", (FOLDER / "reducer.py").read_text(), re.MULTILINE)
    used = {number for path in FOLDER.glob("*.py") for number in re.findall(r"\[Note (\d+)\]", path.read_text())}
    assert notes == [str(n) for n in range(1, len(notes) + 1)]
    assert used == set(notes)
