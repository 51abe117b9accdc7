"""The structure of the sources: layers, no cycle of imports, and files and functions that are read in one sitting."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES = 700, 80
# Kernels and their main loops, whose steps share many arrays in registers: a function for each step would have all of
# them as parameters.
LONG_FUNCTIONS = {"attention_fwd_sm80", "attention_bwd_sm80", "multiply_tiles"}
CXX = {".h", ".cuh", ".cu", ".cpp", ".inc"}
# Layer -> part -> the parts that it includes or imports. A part uses only parts that come after it.
LAYERS = {
    "6 integrations": {"integrations": "public ops, rules, support"},
    "5 on the ops": {
        "compat": "public ops, support",
        "nn": "distributed, public ops, support",
        "distributed": "prediction, bucketing, public ops, support",
        "prediction": "bucketing",
        "bucketing": "",
        "testing": "support",
    },
    "4 public ops": {"public ops": "rules, support", "rules": "support", "support": ""},
    "3 ops in C++": {
        "python": "ops",
        "emulated": "launchers, attention, gemm, bucket, simt",
        "ops": "launchers, attention, loss, gemm, bucket, cpu, base",
        "launchers": "attention, loss, gemm, bucket",
    },
    "2 kernels and launchers": {
        "attention": "tile, rt, arch, cpu, base",
        "loss": "gemm, rt, arch, cpu, base",
        "gemm": "tile, rt, arch, cpu, base",
        "bucket": "rt, arch, cpu, base",
        "tile": "arch",
    },
    "1 hardware": {"rt": "arch, simt, base", "arch": "simt, base", "cpu": "base"},
    "0 foundation": {"simt": "base", "base": ""},
}
PARTS = {part: set(uses.split(", ")) - {""} for parts in LAYERS.values() for part, uses in parts.items()}
# The files of parts that are no folder of csrc or cuda_ext.
FILES = {
    "prediction": "cuda_ext/distributed/prediction",
    "bucketing": "cuda_ext/distributed/bucketing",
    "public ops": (
        "cuda_ext/{_gemm,_grouped_mm,_scaled_mm,_quantize,_fp8_recipes,_fp8_weights,_experts,_expert_products,fp8,"
        "attention,kvcache,loss,bucket,ops}.py"
    ),
    "rules": "cuda_ext/_rules",
    "support": "cuda_ext/{_*,block_mask,dev,info}.py",
}


# Layers


def includes_of(csrc: Path) -> dict[str, list[str]]:
    sources = {path.relative_to(csrc).as_posix(): path.read_text() for path in csrc.rglob("*.*")}
    return {name: re.findall(r'^\s*#include "(\w+/[^"]+)"', text, re.MULTILINE) for name, text in sources.items()}


def with_users(csrc: Path, files: set[str]) -> set[str]:
    """`files` and all that include them, directly or not."""
    includes = includes_of(csrc)
    while more := {name for name, own in includes.items() if name not in files and not files.isdisjoint(own)}:
        files = files | more
    return files


def files_with(csrc: Path, pattern: str) -> set[str]:
    return {name for name in includes_of(csrc) if re.search(pattern, (csrc / name).read_text(), re.MULTILINE)}


def uses_of_csrc(csrc: Path) -> set[tuple[str, str]]:
    return {(name.split("/")[0], include.split("/")[0]) for name, own in includes_of(csrc).items() for include in own}


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str], *, typing: bool = False) -> Iterator[tuple[str, str]]:
    """(module, imported name or "") of each import in a file, also inside functions; `typing`: also those for types."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule, "") if submodule in known else (node.module or "", alias.name)


PUBLIC_OPS = FILES["public ops"].partition("{")[2].partition("}")[0].split(",")


def part_of_module(module: str) -> str:
    _, name, *inner = module.split(".")
    if inner and inner[0] in ("bucketing", "prediction"):
        return inner[0]
    if name in PUBLIC_OPS:
        return "public ops"
    return name.removeprefix("_") if name.removeprefix("_") in PARTS else "support"


def uses_of_package(package: Path) -> set[tuple[str, str]]:
    known = modules(package)
    return {
        (part_of_module(module), part_of_module(imported))
        for module, path in known.items()
        if module not in ("cuda_ext", "cuda_ext._build_info")  # cuda_ext: the names of all others, loaded on demand
        for imported, _ in imports(path, set(known), typing=True)
        if imported.startswith("cuda_ext.") and imported in known
    }


def wrong_uses(csrc: Path, package: Path) -> set[tuple[str, str]]:
    """(user, used) of each include or import that LAYERS does not have."""
    uses = {(user, used) for user, used in uses_of_csrc(csrc) | uses_of_package(package) if user != used}
    return uses - {(user, used) for user, several in PARTS.items() for used in several}


def test_parts_use_what_the_table_says() -> None:
    assert not wrong_uses(ROOT / "csrc", ROOT / "cuda_ext")
    uses = uses_of_csrc(ROOT / "csrc") | uses_of_package(ROOT / "cuda_ext")
    assert {(user, used) for user, several in PARTS.items() for used in several} <= uses, "a use that nobody makes"


def test_no_part_uses_an_earlier_one() -> None:
    order = list(PARTS)
    assert not [
        (user, used) for user, several in PARTS.items() for used in several if order.index(used) <= order.index(user)
    ]


def test_contributing_has_the_layers() -> None:
    table = ""
    for layer, parts in LAYERS.items():
        folders = {part: "csrc" if (ROOT / "csrc" / part).is_dir() else "cuda_ext" for part in parts}
        places = ", ".join(f"`{FILES.get(part, f'{folder}/{part}')}`" for part, folder in folders.items())
        table += f"| {layer} | {places} |\n"
    assert table in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("csrc/gemm/gemm.h", '#include "ops/op.h"', ("gemm", "ops")),
        ("csrc/arch/mma.cuh", '#include "tile/products.cuh"', ("arch", "tile")),
        ("csrc/tile/products.cuh", '#include "gemm/gemm.h"', ("tile", "gemm")),
        ("cuda_ext/_gemm.py", "from cuda_ext.nn import Linear", ("public ops", "nn")),
        ("cuda_ext/_load.py", "def f():\n    import cuda_ext.distributed", ("support", "distributed")),
    ],
)
def test_a_planted_upward_use_is_found(tmp_path: Path, file: str, line: str, found: tuple[str, str]) -> None:
    for folder in ("csrc", "cuda_ext"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    path = tmp_path / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    assert wrong_uses(tmp_path / "csrc", tmp_path / "cuda_ext") == {found}


def test_only_ops_include_torch() -> None:
    torch = with_users(ROOT / "csrc", files_with(ROOT / "csrc", r"#include <(torch|ATen|c10)/"))
    assert {name.split("/")[0] for name in torch} == {"ops", "python"}
    assert {Path(name).suffix for name in torch} == {".cpp", ".h"}  # nvcc compiles .cu, .cuh and .inc


def test_variants_of_cpu_kernels_end_what_their_first_include_begins() -> None:
    """clang refuses a file that does not pop what it pushed."""
    variants = [path for path in sources("csrc") if re.search(r"_cpu_\w+\.cpp$", path.name)]
    assert len(variants) > 10
    for path in variants:
        first, *_, last = re.findall(r'^#include "(\S+)"', path.read_text(), re.MULTILINE)
        pushes = "#pragma clang attribute push" in (ROOT / "csrc" / first).read_text()
        assert pushes == (last == "cpu/isa_end.h"), path


# nvcc parses a file once for each architecture and twice for the host. These headers took a quarter of its time.
SLOW_HEADERS = r"algorithm|atomic|functional|iostream|map|memory|ranges|sstream|unordered_map|vector"
SLOW_HEADERS += r"|cuda\.h|cuda_bf16\.h|cuda_fp16\.h"


def test_kernels_include_no_header_that_compiles_slowly() -> None:
    csrc = ROOT / "csrc"
    kernels = {name for name in with_users(csrc, files_with(csrc, r"^GLOBAL\(")) if name.endswith(".cu")}
    assert len(kernels) > 60
    assert not kernels & with_users(csrc, files_with(csrc, rf"^#include <({SLOW_HEADERS})>"))


# Imports between modules


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle; empty if there is none."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for used in sorted(graph.get(module, ())):
            if found := search(used, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := search(module, []))), [])


@pytest.mark.parametrize("package", ["cuda_ext", "benchmarks"])
def test_no_cycle_of_imports(package: str) -> None:
    known = modules(ROOT / package)
    graph = {
        module: {name for name, _ in imports(path, set(known)) if name in known and name != module}
        for module, path in known.items()
        if module != package
    }
    assert sum(map(len, graph.values())) > 30
    assert cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("package", ["cuda_ext", "benchmarks"])
def test_nothing_private_is_imported_across_folders(package: str) -> None:
    """A name with a leading underscore serves its folder; a module with one, its folder and those inside."""
    known = modules(ROOT / package)
    wrong = []
    for module, path in known.items():
        for imported, name in imports(path, set(known), typing=True):
            if imported not in known:
                continue
            if name.startswith("_") and not name.startswith("__") and path.parent != known[imported].parent:
                wrong.append((module, f"{imported}.{name}"))
            parts = imported.split(".")
            for number, part in enumerate(parts):
                if part.startswith("_") and ROOT.joinpath(*parts[:number]) not in path.parents:
                    wrong.append((module, imported))
    assert not wrong


# Sizes


def sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in CXX | {".py"} and path.name != "_build_info.py"
    ]


def blanked(pattern: str, text: str, flags: re.RegexFlag) -> str:
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=flags)


def cxx_functions(text: str) -> Iterator[tuple[str, int]]:
    """The head and the number of lines of every function outside another, by the braces."""
    text = blanked(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', text, re.DOTALL)
    text = blanked(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", text, re.MULTILINE)
    blocks: list[tuple[str, int] | None] = []  # of a function its head and first line
    start = 0
    for match in re.finditer(r"[{};]", text):
        head = text[start : match.start()]
        in_function = any(block is not None for block in blocks)
        if match[0] == "{":
            scope = re.search(r"\b(namespace|struct|class|union|enum|extern)\b[^()]*$", head)
            if in_function or scope or "(" not in head:
                blocks.append(None)
            else:
                first = start + len(head) - len(head.lstrip())
                blocks.append((" ".join(head.split()), text.count("\n", 0, first)))
        elif match[0] == "}" and (function := blocks.pop()) is not None:
            yield function[0], text.count("\n", 0, match.end()) - function[1] + 1
        if not any(block is not None for block in blocks):
            start = match.end()


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) else None
            documented = docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - documented


def test_files_are_read_in_one_sitting() -> None:
    lengths = {path: path.read_text().count("\n") for path in sources("csrc", "cuda_ext", "benchmarks")}
    assert len(lengths) > 150
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    found = 0
    for path in sources("csrc", "cuda_ext", "benchmarks"):
        for name, lines in (python_functions if path.suffix == ".py" else cxx_functions)(path.read_text()):
            found += 1
            kernel = any(re.search(rf"\b{kernel}\(", name) for kernel in LONG_FUNCTIONS)
            assert lines <= MAX_FUNCTION_LINES or kernel, f"{path}: {name} has {lines} lines"
    assert found > 1500


def test_long_functions_are_found() -> None:
    body = "\n".join("  if (x) { y(); }" for _ in range(5))
    function = f"int f(int x) {{\n{body}\n  }}"
    text = f'namespace a {{\nstruct B {{\n  {function}\n}};\n// int g() {{\nconst char* s = "{{";\n}}'
    assert list(cxx_functions(text)) == [("int f(int x)", 7)]
    assert list(python_functions('def f():\n    """Three\n    lines.\n    """\n    return 1\n')) == [("f", 2)]


def test_compiled_files_have_unique_names() -> None:
    names = [path.name for path in sources("csrc") if path.suffix in {".cpp", ".cu"}]
    assert len(names) == len(set(names))  # a just-in-time build names object files after them


def test_lines_fit_120_columns() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources("csrc", "tests")
        if path.suffix in CXX
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not wide
