"""The kernels that convert to FP8: tiles that are not full, every width of a load, schedules, races, removed
synchronisation. tests/test_scaled_mm.py compares their numbers with the definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import unnoticed_removals
from torch import Tensor

from cuda_ext import testing
from cuda_ext.fp8 import quantize, quantize_both

SCALINGS = ("TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128")
# Several tiles along both dims, of which the last are not full; one row; one column; lines of 16 bytes and others.
KINDS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "stochastic": {"stochastic": True},
    "activation": {"activation": "gelu"},
    "gated": {"activation": "silu", "gated": True},
}
SHAPES = [(300, 264), (1, 500), (500, 1), (129, 127), (128, 256)]


def run(
    x: Tensor, scaling: str, both: bool = True, kind: str = "nearest", **emulation: Any
) -> tuple[list[Tensor], list[Any]]:
    """The bits, so that NaNs can be compared."""
    torch.manual_seed(1)
    with testing.emulated(emulation.pop("arch", "sm_90a"), **emulation) as emulated:
        found = (quantize_both if both else quantize)(x, scaling, **KINDS[kind])
        return [each.view(torch.uint8) if each.element_size() == 1 else each for each in found], emulated.sync_sites


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_any_schedule_gives_the_bits_of_the_cpu(scaling: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    if random.random() < 0.5:  # rows that do not begin at multiples of 16 bytes
        x = torch.zeros(shape[0], shape[1] + 3, dtype=dtype)[:, 3:].copy_(x)
    expected = [each.view(torch.uint8) if each.element_size() == 1 else each for each in quantize_both(x, scaling)]
    arch = random.choice(("sm_75", "sm_80", "sm_89", "sm_90a", "sm_120"))
    seed = random.randrange(2**31)
    found, _ = run(x, scaling, arch=arch, mode="lazy", schedule="pct", seed=seed)
    assert all(mine.equal(theirs) for mine, theirs in zip(found, expected, strict=True))
    alone, _ = run(x, scaling, both=False, arch=arch)
    assert all(mine.equal(theirs) for mine, theirs in zip(alone, expected[:2], strict=True))


@pytest.mark.sampled(check="races")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_races(scaling: str, kind: str) -> None:
    x = torch.randn(300, 264, dtype=torch.bfloat16)
    expected, _ = run(x, scaling, kind=kind, check_races=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        found, _ = run(x, scaling, kind=kind, mode=mode, schedule=schedule, seed=random.randrange(2**31))
        assert all(mine.equal(theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.sampled(check="races", slow=True)
def test_removal_of_any_synchronisation_is_noticed() -> None:
    x = torch.randn(140, 264, dtype=torch.bfloat16)

    def of(scaling: str) -> Any:
        kind = random.choice([*KINDS])
        return lambda **emulation: run(x, scaling, kind=kind, **emulation)

    calls, unnoticed = unnoticed_removals([of(each) for each in SCALINGS], lambda name: name.startswith("quantize"))
    assert calls >= 4 and not unnoticed, unnoticed
