"""The quick cases of the GPU check: the emulated kernels pass, and each kind of error is named."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

import cuda_ext
from benchmarks.gpu_check import correct
from cuda_ext import _emulator, testing


@pytest.mark.parametrize("family", correct.FAMILIES)
def test_the_kernels_are_right(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert correct.main(family, "simt") == 0
    *cases, last = capsys.readouterr().out.splitlines()[1:]
    assert len(cases) >= 6 and all(line.endswith(": right") for line in cases)
    assert last == f"correct: {len(cases)} right, 0 not"


@pytest.mark.parametrize("family", correct.FAMILIES)
def test_large_cases_are_more(family: str) -> None:
    small, large = ([name for name, _ in correct.FAMILIES[family](large)] for large in (False, True))
    assert set(small) < set(large)
    assert len(set(large)) == len(large)


def test_a_wrong_element_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(*tensors, **options):
        out = testing.reference_linear(*tensors, **options)
        return out + torch.zeros_like(out).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(9.0).to(out))

    monkeypatch.setattr(cuda_ext, "linear", wrong)
    cases = (case for case in correct.gemm_cases(False) if case[0].startswith(("linear", "gated_mlp")))
    assert correct.run(cases, on_gpu=False) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "linear bfloat16 gelu 33 x 72 x 40: WRONG: output: 1 of 2376 elements are wrong by more than "
    )
    assert ", the first at (3, 5): expected " in first and second.endswith(": right")
    assert last == "correct: 1 right, 1 not"


def test_infinities_are_compared_and_nan_is_wrong() -> None:
    exact = torch.tensor([1.0, -torch.inf, 0.5], dtype=torch.float64)
    correct.expect("lse", exact.float(), exact, tf32=False)
    for value, i in ((torch.nan, 0), (torch.inf, 2), (0.0, 1), (torch.nan, 1)):
        got = exact.float()
        got[i] = value
        with pytest.raises(AssertionError, match=rf"^lse: 1 of 3 elements are wrong by more .* first at \({i},\): exp"):
            correct.expect("lse", got, exact, tf32=False)
    with pytest.raises(AssertionError, match=r"^lse: expected shape \(3,\), got \(2,\)"):
        correct.expect("lse", exact[:2].float(), exact, tf32=False)


def test_an_error_of_forward_is_not_attributed_to_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*tensors, **options):
        raise AssertionError("the forward was run")

    monkeypatch.setattr(cuda_ext, "flash_attention", broken)
    assert correct.run(itertools.islice(correct.attention_cases(False, backward=True), 1), on_gpu=False) == 0
    assert correct.run(itertools.islice(correct.attention_cases(False, backward=False), 1), on_gpu=False) == 1


def test_head_dims_that_are_not_in_the_build_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def left_out():
        raise RuntimeError("flash_attention: expected head dims whose CUDA kernels are in this library, those of 64")

    right = torch.ones(1)
    cases = [("a", left_out), ("b", lambda: {"output": (right, right.double())})]
    assert correct.run(iter(cases), on_gpu=False) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("a: not in this build: flash_attention: expected")
    assert correct.run(iter(cases[:1]), on_gpu=False) == 1  # nothing was right


def test_a_lost_gpu_is_attributed_to_the_case_that_lost_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand much more")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert correct.run(iter([("a", fails), ("b", dict), ("c", dict)]), on_gpu=True) == 3
    assert capsys.readouterr().out.splitlines() == [
        "a: FAILED: CUDA error: an illegal memory access was encountered",
        "b: NOT RUN: the GPU was lost in a",
        "c: NOT RUN: the GPU was lost in a",
        "correct: 0 right, 3 not",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("capability", "processors"), [(90, 132), (80, 108)])
def test_large_cases_cover_split_and_unsplit_kernels(capability: int, processors: int, backward: bool) -> None:
    """On an H100 and an A100: split kernels store their results through other code."""
    choose = _emulator.load().attention_choice
    splits: dict[int, set[bool]] = {}
    for name, _ in correct.attention_cases(True, backward):
        found = re.fullmatch(r"\w+ (\w+) B=(\d+) S=(\d+) H=(\d+)/(\d+) D=(\d+)/(\d+).*", name)
        assert found
        batch, length, heads, heads_kv, dim, dim_v = map(int, found.groups()[1:])
        window = (-1, 0 if "causal" in name else -1)
        sizes = ((length, length), (heads, heads_kv), (dim, dim_v), batch)
        choice = choose(backward, found[1], *sizes, window, capability, processors)
        splits.setdefault(choice.tile["dim"], set()).add(choice.splits > 1)
    assert splits == {dim: {False, True} for dim in (64, 96, 128, 192, 256)}
