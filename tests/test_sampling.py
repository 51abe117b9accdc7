"""What a run without --full draws: samples of large test matrices, slow tests, and one of the deep checks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import conftest
import pytest
from conftest import DEEP_CHECKS, is_left_to_other_runs, sample

ROWS = [{"op": op, "options": {"size": size}} for op, size in itertools.product("abcde", (1, 2, 3))]


@pytest.mark.parametrize("seed", map(str, range(20)))
def test_a_sample_has_every_value_of_every_parameter(seed: str) -> None:
    rows = [ROWS[index] for index in sample(ROWS, None, seed)]
    assert {row["op"] for row in rows} == set("abcde")
    assert {row["options"]["size"] for row in rows} == {1, 2, 3}
    assert len(rows) < len(ROWS)


def test_a_sample_of_a_fixed_size() -> None:
    assert len(sample(ROWS, 4, "seed")) == 4
    assert sample(ROWS[:3], 4, "seed") == {0, 1, 2}


@pytest.mark.parametrize("count", [None, 4])
def test_samples_depend_only_on_the_seed(count: int | None) -> None:
    samples = [sample(ROWS, count, str(seed)) for seed in range(20)]
    assert samples == [sample(ROWS, count, str(seed)) for seed in range(20)]
    assert set.union(*samples) == set(range(len(ROWS))), "every row runs sooner or later"


class Item:
    """What the draw reads of a test."""

    path = Path("tests/test_x.py")

    def __init__(self, fraction: float, name: str, **markers: Any) -> None:
        self.nodeid, self.markers, self.fraction = name, markers, fraction
        self.config = self

    def getoption(self, name: str) -> float:
        assert name == "--draw-slow"
        return self.fraction

    def get_closest_marker(self, name: str) -> Any:
        return self.markers.get(name)


def drawn(monkeypatch: pytest.MonkeyPatch, seed: int, items: list[Item]) -> set[str]:
    monkeypatch.setattr(conftest, "SEED", seed)
    return {item.nodeid for item in items if not is_left_to_other_runs(item)}  # type: ignore[arg-type]


def test_about_a_quarter_of_the_slow_tests_run_and_sooner_or_later_all(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(0.25, f"slow {index}", slow=pytest.mark.slow.mark) for index in range(200)]
    runs = [drawn(monkeypatch, seed, items) for seed in range(50)]
    assert all(20 < len(run) < 80 for run in runs)
    assert set.union(*runs) == {item.nodeid for item in items}
    assert drawn(monkeypatch, 3, items) == runs[3]


def test_each_run_makes_one_deep_check(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(0.25, name, deep=pytest.mark.deep(name).mark) for name in DEEP_CHECKS]
    runs = [drawn(monkeypatch, seed, items) for seed in range(30)]
    assert all(len(run) == 1 for run in runs) and set.union(*runs) == set(DEEP_CHECKS)


def test_everything_runs_without_draw_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item(1.0, name, deep=pytest.mark.deep(name).mark, slow=pytest.mark.slow.mark) for name in DEEP_CHECKS]
    assert len(drawn(monkeypatch, 0, items)) == len(items)
