"""What a run without --full leaves out: parts of large test matrices, of slow tests, and all but one check."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sampling import CHECKS, EVERY_VALUE, MOST_CASES, ONE_IN, ROOT, left_out, sample, seed_of

ROWS = [{"op": op, "options": {"size": size}} for op, size in itertools.product("abcde", (1, 2, 3))]


@pytest.mark.parametrize("seed", map(str, range(20)))
def test_a_sample_has_every_value_of_every_parameter(seed: str) -> None:
    rows = [ROWS[index] for index in sample(ROWS, EVERY_VALUE, seed)]
    assert {row["op"] for row in rows} == set("abcde")
    assert {row["options"]["size"] for row in rows} == {1, 2, 3}
    assert len(rows) < len(ROWS)


def test_a_sample_of_a_fixed_size() -> None:
    assert len(sample(ROWS, 4, "seed")) == 4
    assert sample(ROWS[:3], 4, "seed") == {0, 1, 2}


@pytest.mark.parametrize("count", [EVERY_VALUE, 4])
def test_samples_depend_only_on_the_seed(count: int | str) -> None:
    samples = [sample(ROWS, count, str(seed)) for seed in range(20)]
    assert samples == [sample(ROWS, count, str(seed)) for seed in range(20)]
    assert set.union(*samples) == set(range(len(ROWS))), "every row runs sooner or later"


class Item:
    """What the draw reads of a test."""

    def __init__(self, nodeid: str, *settings: dict[str, Any], on_gpu: bool = False) -> None:
        self.nodeid, self.on_gpu = nodeid, on_gpu
        self.markers = [pytest.mark.sampled(**each).mark for each in settings]

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        assert name == "sampled"
        return self.markers

    def get_closest_marker(self, name: str) -> bool:
        return name == "cuda" and self.on_gpu


def drawn(seed: int, items: list[Item]) -> set[str]:
    left = left_out(items, seed)  # type: ignore[arg-type]
    return {item.nodeid for item in items if item not in left}


@pytest.mark.parametrize("settings", [{}, {"slow": True}])
def test_one_of_ten_slow_tests_runs_and_sooner_or_later_all(settings: dict[str, Any]) -> None:
    items = [Item(f"slow {index}", settings) for index in range(20 * ONE_IN)]
    runs = [drawn(seed, items) for seed in range(80)]
    assert all(5 < len(run) < 40 for run in runs)
    assert set.union(*runs) == {item.nodeid for item in items}
    assert drawn(3, items) == runs[3]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_large_matrix_without_a_marker_is_sampled(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = {"large": range(MOST_CASES // 2), "small": range(math.isqrt(MOST_CASES))}
    rows = {f"{name}[{a}-{b}]": {"a": a, "b": b} for name, side in sides.items() for a in side for b in side}
    monkeypatch.setattr("sampling.parameters_of", lambda item: rows[item.nodeid])
    kept = drawn(0, [Item(name, on_gpu=on_gpu) for name in rows])
    small = {name for name in rows if name.startswith("small")}
    assert small <= kept
    assert all({rows[name][side] for name in kept - small} == set(sides["large"]) for side in "ab")
    assert (kept == rows.keys()) == on_gpu


def test_each_run_makes_one_check() -> None:
    items = [Item(name, {"check": name}) for name in CHECKS]
    runs = [drawn(seed, items) for seed in range(30)]
    assert all(len(run) == 1 for run in runs) and set.union(*runs) == set(CHECKS)


def test_markers_of_a_test_and_of_its_class_add_up() -> None:
    items = [Item(f"{name} {index}", {}, {"check": name}) for name in CHECKS for index in range(10 * ONE_IN)]
    run = drawn(0, items)
    assert 0 < len(run) < 30 and len({name.rpartition(" ")[0] for name in run}) == 1


def test_a_gpu_is_fast_and_full_is_full() -> None:
    assert drawn(0, [Item(name, {"check": name, "slow": True}, on_gpu=True) for name in CHECKS]) == set(CHECKS)
    assert drawn(0, [Item("one", {"full": True}), Item("two")]) == {"two"}


def test_the_marker_takes_no_other_argument() -> None:
    with pytest.raises(AssertionError, match="expected sampled"):
        drawn(0, [Item("one", {"count": 3})])


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_the_seed_follows_from_the_commit(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "test_x.py"
    file.parent.mkdir()
    file.write_text("def test(): pass\n")
    without_git = seed_of(tmp_path)
    assert 0 <= without_git < 2**31 and seed_of(tmp_path) == without_git
    git(tmp_path, "init")
    assert seed_of(tmp_path) == without_git, "there is no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "one")
    first = seed_of(tmp_path)
    assert seed_of(tmp_path) == first != without_git
    file.write_text("def test(): return\n")
    assert seed_of(tmp_path) == first, "until it is committed"
    assert seed_of(file.parent) not in (first, without_git), "a folder of a repository is none"
    git(tmp_path, "commit", "--all", "--message", "two")
    assert seed_of(tmp_path) != first
    (tmp_path / ".git").rename(tmp_path / "git")
    assert seed_of(tmp_path) != without_git, "a source has changed"


def collected(seed: str, *arguments: str) -> tuple[list[str], list[str]]:
    """The tests that a run of two files would run, and the last lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_EXT_TEST_SEED"}
    files = ("tests/test_kvcache.py", "tests/simt/test_proof.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments, *files],
        cwd=ROOT,
        env={**environment, **({"CUDA_EXT_TEST_SEED": seed} if seed else {})},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line for line in lines if "::" in line], [line for line in lines if "::" not in line]


@pytest.mark.sampled
def test_two_runs_of_a_commit_run_the_same_tests() -> None:
    (first, printed), (again, _), (other, _) = collected(""), collected(""), collected("1")
    everything, printed_by_full = collected("", "--full")
    assert first == again != other
    assert {*first, *other} < set(everything) and Counter(everything).most_common(1)[0][1] == 1
    (total,) = [line for line in printed if line.startswith("This commit leaves out")]
    assert total == f"This commit leaves out {len(everything) - len(first):,} tests:"
    assert any("ARGS='--full" in line for line in printed) and not any("leaves out" in line for line in printed_by_full)
