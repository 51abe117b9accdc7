"""What a run without --full leaves out, and the seed of a run.

Both follow from the commit: two runs of it run the same tests on the same inputs, another commit draws others.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("benchmarks", "csrc", "cuda_ext", "examples", "tests", "tools")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".inc", ".py"}
GENERATED = "_build_info.py"

# Each compiles all kernels once more, or reads the machine code of all: about a minute of two cores.
CHECKS = ("races", "nvcc's ops", "nvcc's code for sm_75", "nvcc's primitives", "machine code")
ONE_IN = 10  # slow tests: as many as fit into 20 minutes
EVERY_VALUE = "every value"
MOST_CASES = 8  # a test with more combinations of parameters is sampled by EVERY_VALUE unless its marker says otherwise
MARKER = (
    "sampled(cases=N or 'every value', slow=True, check='races', full=True): without --full run only N random "
    "combinations of the parameters, or as many as contain every value of every parameter, on each backend; only one "
    f"of {ONE_IN} slow tests (over a second each), which is also what `sampled` without arguments means; only one of "
    "the checks in sampling.CHECKS; nothing"
)
LEFT_OUT = pytest.StashKey[Counter[str]]()


def seed_of(root: Path) -> int:
    """A hash of the commit that is checked out in `root`, or of the sources where that is no git repository."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD^{tree}"]
    try:
        top, tree = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        if Path(top).resolve() == root.resolve():
            return int(tree[:8], 16) >> 1
    except (OSError, subprocess.CalledProcessError):
        pass
    files = [path for name in SOURCES for path in root.joinpath(name).rglob("*") if path.suffix in SUFFIXES]
    digest = hashlib.sha1()
    for path in sorted(path for path in files if path.name != GENERATED):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return int(digest.hexdigest()[:8], 16) >> 1


# In the environment, so that all processes of a run share it.
SEED = int(os.environ.get("CUDA_EXT_TEST_SEED") or seed_of(ROOT))
os.environ["CUDA_EXT_TEST_SEED"] = str(SEED)


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def settings_of(item: pytest.Item) -> dict[str, Any]:
    """The arguments of all markers `sampled` of a test, of its parameters and of its class."""
    settings: dict[str, Any] = {}
    for marker in item.iter_markers("sampled"):
        assert not marker.args and marker.kwargs.keys() <= {"cases", "slow", "check", "full"}, f"expected {MARKER}"
        settings = (marker.kwargs or {"slow": True}) | settings  # the closest marker comes first
    return settings


def left_out(items: Sequence[pytest.Item], seed: int = SEED) -> dict[pytest.Item, str]:
    """The tests that a run without --full leaves out, each with its kind; the same in all processes of a run."""
    found: dict[pytest.Item, str] = {}
    matrices: dict[tuple[str, str], list[pytest.Item]] = {}
    check = random.Random(f"{seed} check").choice(CHECKS)
    for item in items:
        settings, parameters = settings_of(item), parameters_of(item)
        on_gpu = item.get_closest_marker("cuda")  # slow is only what is emulated or compiled
        assert settings.get("check", check) in CHECKS
        if settings.get("full"):
            found[item] = "tests that run only with --full"
        elif settings.get("check", check) != check and not on_gpu:
            found[item] = f"tests of the check {settings['check']!r}"
        elif settings.get("slow") and not on_gpu and random.Random(f"{seed} {item.nodeid}").randrange(ONE_IN):
            found[item] = "slow tests"
        if parameters and not settings.get("full") and ("cases" in settings or not on_gpu):
            key = (item.nodeid.partition("[")[0], parameters.get("backend", "cpu"))
            matrices.setdefault(key, []).append(item)
    for key, matrix in matrices.items():
        cases = settings_of(matrix[0]).get("cases", EVERY_VALUE if len(matrix) > MOST_CASES else len(matrix))
        kept = sample([parameters_of(item) for item in matrix], cases, f"{seed} {key}")
        found |= {item: "combinations of parameters" for index, item in enumerate(matrix) if index not in kept}
    return found


def sample(rows: Sequence[Mapping[str, object]], count: int | str, seed: str) -> set[int]:
    """Indices of `count` random rows, or of random rows that contain every value of every name."""
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))
    if count != EVERY_VALUE:
        assert isinstance(count, int)
        return set(shuffled[:count])
    kept, used = set(), set()
    for index in shuffled:
        values = {(name, repr(value)) for name, value in rows[index].items()}
        if not values <= used:
            kept.add(index)
        used |= values
    return kept


def summary(kinds: Mapping[str, int]) -> list[str]:
    """What to print at the end of a run that has left out so many tests of each kind."""
    if not kinds:
        return []
    counts = [f"  {count:6,} {kind}" for kind, count in sorted(kinds.items(), key=lambda each: -each[1])]
    return [
        f"This commit leaves out {sum(kinds.values()):,} tests:",
        *counts,
        "All of them: make test ARGS=--full. Those of a file: make test ARGS='--full tests/test_gemm.py'",
    ]
