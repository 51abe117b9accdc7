"""What the tests of attention forward and backward on wgmma share: tensors, random problems, and the search for
synchronisation calls whose removal no run notices."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKING = torch.tensor([0, 70, 180], dtype=torch.int32)
BEGINS = torch.tensor([0, 70, 71, 71, 200, 237], dtype=torch.int32)  # of sequences of which one has no row

Sizes = tuple[int, ...]  # batch, queries, keys, query heads, key heads, dim, dim of values


def qkv(batch: int, sq: int, sk: int, heads: int, heads_kv: int, dim: int, dim_v: int, dtype: torch.dtype) -> Any:
    shapes = ((batch, sq, heads, dim), (batch, sk, heads_kv, dim), (batch, sk, heads_kv, dim_v))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def random_problem(largest_dim: int) -> tuple[list[Tensor], dict[str, Any]]:
    heads_kv, group = random.choice([1, 2, 3]), random.choice([1, 2, 3, 4, 8])
    dim, dim_v = (8 * random.randint(1, largest_dim // 8) for _ in range(2))
    dim = max(dim, dim_v) if random.random() < 0.5 else dim
    queries, keys = (random.choice([1, 2, 63, 64, 65, 127, 129, random.randint(1, 400)]) for _ in range(2))
    dtype = random.choice([torch.bfloat16, torch.float16])
    tensors = qkv(random.choice([1, 2]), queries, keys, heads_kv * group, heads_kv, dim, dim_v, dtype)
    options: dict[str, Any] = {}
    if random.random() < 0.5:
        options["causal"] = True
    elif random.random() < 0.5:
        options["window"] = (random.choice([None, random.randint(0, 99)]), random.choice([None, random.randint(0, 99)]))
    if random.random() < 0.3:
        options["softcap"] = random.uniform(1, 20)
    if random.random() < 0.3:
        options["scale"] = random.uniform(-0.3, 0.3)
    if random.random() < 0.3:
        options["alibi_slopes"] = torch.rand(heads_kv * group)
    if random.random() < 0.3:
        options["sinks"] = torch.randn(heads_kv * group)
    if random.random() < 0.3:
        options["attn_bias"] = torch.randn(random.choice([1, tensors[0].shape[0]]), 1, queries, keys).to(dtype)
    return tensors, options


def rows_of_others(tensors: Sequence[Tensor], poison: float) -> Iterator[tuple[slice, list[Tensor]]]:
    """For each sequence of BEGINS, its rows, and the tensors (1, rows, ...) with other values in all other rows."""
    for begin, end in itertools.pairwise(BEGINS.tolist()):
        others = [torch.full_like(each, poison) for each in tensors]
        for to, source in zip(others, tensors, strict=True):
            to[:, begin:end] = source[:, begin:end]
        yield slice(begin, end), others


def assert_removals_are_noticed(
    races: Sequence[tuple[Sizes, dict[str, Any], int]],
    run: Callable[..., tuple[list[Tensor], list[Any]]],
    is_of_kernel: Callable[[str], bool],
    harmless: Collection[str],
) -> None:
    """In none of the runs of `races`, but for the lines of code in `harmless`. `run` takes tensors, options, and those
    of the emulator."""
    problems = [(qkv(*sizes, torch.bfloat16), options, processors) for sizes, options, processors in races]
    runs = [functools.partial(run, tensors, options, processors=count) for tensors, options, count in problems]
    calls, unnoticed = unnoticed_removals(runs, is_of_kernel)
    assert calls >= 25
    assert len(unnoticed) == len(harmless), unnoticed
    assert all(any(code in line for line in unnoticed) for code in harmless), unnoticed


def unnoticed_removals(
    runs: Sequence[Callable[..., tuple[list[Tensor], list[Any]]]], is_of_kernel: Callable[[str], bool]
) -> tuple[int, list[str]]:
    """The number of synchronisation calls in the files that `is_of_kernel` accepts, and the lines of those whose
    removal none of the runs notices: by wrong numbers, a deadlock, or the checker, which needs no luck. A run takes the
    options of `testing.emulated` and returns its results and the calls that it has reached."""
    cases: dict[Any, list[tuple[Callable[..., Any], list[Tensor]]]] = {}
    for run in runs:
        expected, sites = run()
        for site in sites:
            if is_of_kernel(Path(site[0]).name):
                cases.setdefault(site, []).append((run, expected))

    def is_noticed(site: Any) -> bool:
        for check_races in (False, True):
            for run, expected in cases[site]:
                try:
                    results, _ = run(mode="lazy", schedule="pct", check_races=check_races, skip=site)
                except RuntimeError:
                    return True
                if not all(map(torch.equal, results, expected)):
                    return True
        return False

    return len(cases), [f"{site[1]}: {line_of(site)}" for site in cases if not is_noticed(site)]


def line_of(site: tuple[str, int, str]) -> str:
    return Path(site[0]).read_text().splitlines()[site[1] - 1].strip()
