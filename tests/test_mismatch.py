"""What the GPU check says of a wrong result: enough to find the fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_check.mismatch import compare, indices_in_words

EXACT = torch.randn(200, 136, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def got() -> Tensor:
    return EXACT.to(torch.bfloat16)


def said(actual: Tensor, exact: Tensor = EXACT) -> str:
    text, error = compare("output", actual, exact, 3e-2)
    assert text and error > 3e-2
    return text


def test_what_is_right() -> None:
    assert compare("output", got(), EXACT, 3e-2) == ("", 0.0)
    text, error = compare("output", got() * 1.01, EXACT, 3e-2)
    assert not text and 5e-3 < error < 1.5e-2
    assert compare("output", torch.zeros(0, 3), torch.zeros(0, 3), 1e-2) == ("", 0.0)
    infinite = torch.tensor([1.0, -torch.inf])
    assert compare("lse", infinite, infinite.double(), 1e-4) == ("", 0.0)


@pytest.mark.parametrize(("value", "i"), [(torch.nan, 0), (torch.inf, 2), (0.0, 1), (torch.nan, 1), (torch.inf, 1)])
def test_infinities_are_compared_and_nan_is_wrong(value: float, i: int) -> None:
    exact = torch.tensor([1.0, -torch.inf, 0.5], dtype=torch.float64)
    actual = exact.float()
    actual[i] = value
    assert said(actual, exact).startswith("output: 1 of 3 elements are wrong by more than 0.03, the first at (")
    assert f"the first at ({i},): expected {float(exact[i]):g}, got {value:g}" in said(actual, exact)


def test_a_wrong_shape() -> None:
    assert said(got()[1:]) == "output: expected shape (200, 136), got (199, 136)"


def test_the_largest_error() -> None:
    actual = got()
    actual[3, 4], actual[100, 7] = 8, 80
    text = said(actual)
    assert text.startswith("output: 2 of 27200 elements are wrong by more than ")
    assert "; largest error 79" in text or "; largest error 80" in text or "; largest error 81" in text
    assert " at (100, 7): expected " in text and ", got 80; " in text
    assert "in dim 0: 3, 100 of 200, dim 1: 4, 7 of 136, 50.0 % of these" in text
    assert "tiles of 64 x 64: x../x../.../...; places within 8 x 8: ......../....X.../......" not in text
    assert "tiles of 64 x 64: x../x../.../...; places within 8 x 8: ......../" in text


def test_a_tail() -> None:
    actual = got()
    actual[192:] = torch.nan
    assert said(actual).endswith("; all NaN; in dim 0: 192-199 of 200, dim 1: all 136, all of these")


def test_tiles_and_zeros() -> None:
    actual = got()
    actual[64:128, :128] = 0
    text = said(actual)
    assert "; all zero; in dim 0: 64-127 of 200, dim 1: 0-127 of 136, 9" in text
    assert "tiles of 64 x 64: .../xx./.../..." in text


def test_columns_and_a_factor() -> None:
    actual = got()
    actual[:, ::2] *= 0.5
    text = said(actual)
    assert "got 0.5 times what was expected" in text and "dim 1: 0 mod 2 of 136" in text
    assert f"places within 8 x 8: {'/'.join(['X.X.X.X.'] * 8)}" in text


def test_places_of_a_fragment() -> None:
    actual = got()
    rows, columns = torch.arange(200)[:, None] % 8 // 4, torch.arange(136) % 8 // 4
    actual[rows == columns] = 9
    assert f"places within 8 x 8: {'/'.join(['XXXX....'] * 4 + ['....XXXX'] * 4)}" in said(actual)


@pytest.mark.parametrize("transposed", [False, True])
def test_lines_at_the_wrong_place(transposed: bool) -> None:
    exact = EXACT.t() if transposed else EXACT
    actual = got().t() if transposed else got()
    part = actual.t() if transposed else actual
    part[8:16] = EXACT[16:24].to(torch.bfloat16)
    name = "columns" if transposed else "rows"
    assert said(actual, exact).endswith(
        f"8 {name} are those of other places: 8 from 16, 9 from 17, 10 from 18, 11 from 19, all by -8"
    )


def test_of_attention_the_matrix_is_sequence_and_head_dim() -> None:
    exact = torch.randn(2, 72, 4, 64, dtype=torch.float64)
    actual = exact.float()
    actual[:, 64:, 1] = 0
    text = said(actual, exact)
    assert "dim 0: all 2, dim 1: 64-71 of 72, dim 2: 1 of 4, dim 3: all 64" in text
    assert "tiles of 64 x 64: ./" in text


def test_a_single_element() -> None:
    assert said(torch.tensor([2.0]), torch.tensor([1.0]).double()).endswith(
        "largest error 1 at (0,): expected 1, got 2"
    )


def test_indices() -> None:
    assert indices_in_words([], 9) == "none"
    assert indices_in_words([0, 1, 2, 7], 9) == "0-2, 7"
    assert indices_in_words([i for i in range(100) if i % 16 in (4, 5, 6, 7)], 100) == "4-7 mod 16"
    assert indices_in_words(list(range(0, 99, 11)), 100) == "0, 11, 22, 33, 44, 55 and 3 more spans"
