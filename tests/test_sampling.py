"""The samples that stand for large test matrices in a run without --full."""

from __future__ import annotations

import itertools

import pytest
from conftest import sample

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
