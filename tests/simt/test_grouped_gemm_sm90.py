"""Grouped products on wgmma: groups that end within slabs and tiles, both tile shapes, clusters, more groups than a
warp has lanes; schedules, races, removed synchronisation. tests/test_grouped_mm.py has what every device must do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_sm90_cases import unnoticed_removals
from torch import Tensor

import cuda_ext
from cuda_ext import grouped_mm, testing

# Rows of the groups, columns, terms, SMs. A group of one row, of a slab and its neighbours, of a tile and its
# neighbours, of several tiles; none; rows after the last group.
SHAPES: dict[str, tuple[list[int], int, int, int, int]] = {
    "one consumer's tile, several items": ([1, 15, 16, 17, 0, 130, 127], 120, 72, 2, 9),
    "both consumers' tile": ([1, 0, 128, 129, 33, 257], 264, 200, 3, 0),
    "clusters": ([600, 0, 513, 700], 136, 64, 4, 40),
    "clusters of wide tiles": ([515, 700], 392, 136, 4, 3),
    "more groups than lanes": ([3] * 50 + [0] * 10 + [20] * 5, 72, 40, 4, 1),
    "one group of all": ([300], 256, 512, 1, 0),
    "no rows in any group": ([0, 0, 0], 64, 64, 2, 50),
}
Options = dict[str, Any]


def problem(shape: str, dtype: torch.dtype, along_k: bool, small_integers: bool) -> tuple[list[Tensor], Options, int]:
    rows, n, k, processors, rest = SHAPES[shape]

    def matrix(*size: int) -> Tensor:
        numbers = torch.randint(-4, 5, size) if small_integers else torch.randn(size)
        return numbers.to(dtype)

    offs = torch.tensor(rows).cumsum(0).to(torch.int32)
    a = matrix(sum(rows) + rest, k)
    b = matrix(len(rows), n, k).transpose(1, 2) if along_k else matrix(len(rows), k, n)
    options: Options = {"offs": offs}
    if random.random() < 0.5:
        options["bias"] = matrix(len(rows), n)
    if random.random() < 0.5:
        options["out_dtype"] = torch.float32
    return [a, b], options, processors


def run(operands: list[Tensor], options: Options, **emulation: Any) -> tuple[Tensor, dict[str, int], list[Any]]:
    with testing.emulated("sm_90a", **emulation) as emulated:
        out = grouped_mm(*operands, **options)
        return out, dict(emulated.counters), emulated.sync_sites


@pytest.mark.parametrize("along_k", [False, True], ids=["b along n", "b along k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact(shape: str, dtype: torch.dtype, along_k: bool) -> None:
    operands, options, processors = problem(shape, dtype, along_k, small_integers=True)
    seed = random.randrange(2**31)
    out, counters, _ = run(operands, options, processors=processors, mode="lazy", schedule="pct", seed=seed)
    a, b = operands
    expected = torch.zeros(len(a), b.shape[2], dtype=torch.float64)
    begin = 0
    for group, end in enumerate(options["offs"].tolist()):
        expected[begin:end] = a[begin:end].double() @ b[group].double()
        if "bias" in options:
            expected[begin:end] += options["bias"][group].double()
        begin = end
    assert out.equal(expected.to(out.dtype))  # sums of at most 512 products of 16 are exact in float32
    assert counters["mma"] == 0 and (counters["wgmma"] > 0) == (begin > 0)


# Terms of the groups, rows, columns, SMs, terms after the last group. Around a k tile and its multiples; none.
TERMS: dict[str, tuple[list[int], int, int, int, int]] = {
    "one consumer's tile, several items": ([1, 63, 64, 65, 0, 130, 127], 120, 72, 2, 9),
    "both consumers' tile": ([100, 0, 128, 129, 33], 136, 264, 3, 0),
    "clusters": ([70, 0, 200], 256, 72, 4, 40),
    "clusters of wide tiles": ([5, 300], 200, 392, 4, 3),
    "more groups than SMs": ([3] * 20 + [0] * 10, 16, 40, 4, 1),
    "one group of all": ([300], 256, 512, 1, 0),
    "no terms in any group": ([0, 0, 0], 64, 64, 2, 50),
}


EPILOGUES: dict[str, tuple[str | None, bool]] = {
    "relu": ("relu", False),  # saves no product
    "relu2": ("relu2", False),
    "gate": (None, True),
    "relu2 and gate": ("relu2", True),
}


def problem_of_epilogue(
    shape: str, epilogue: str, dtype: torch.dtype, along_k: bool, small_integers: bool
) -> tuple[list[Tensor], Options, int]:
    """With two matrices, of gate and up, side by side; outputs that TMA can store."""
    (a, b), options, processors = problem(shape, dtype, along_k, small_integers)
    activation, gated = EPILOGUES[epilogue]
    if gated:
        b = torch.cat([b.mT, b.flip(0).mT], 1).mT if along_k else torch.cat([b, b.flip(0)], 2)
        if "bias" in options:
            options["bias"] = torch.cat([options["bias"], options["bias"].flip(0)], 1)
        options.pop("out_dtype", None)
    return [a, b], {**options, "activation": activation, "gated": gated}, processors


def run_forward(operands: list[Tensor], options: Options, **emulation: Any) -> tuple[list[Tensor], Any, list[Any]]:
    """The result and what is saved for backward."""
    given = dict(options)
    with testing.emulated("sm_90a", **emulation) as emulated:
        out = torch.ops.cuda_ext.grouped_mm_forward(*operands, given.pop("offs"), given.pop("bias", None), **given)
        return list(out), dict(emulated.counters), emulated.sync_sites


@pytest.mark.parametrize("along_k", [False, True], ids=["b along n", "b along k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES)
def test_epilogues_of_integers_are_exact(shape: str, epilogue: str, dtype: torch.dtype, along_k: bool) -> None:
    """Of a product that is exact in float32 the activation is too, before it is rounded; slabs of all outputs end where
    their group does."""
    operands, options, processors = problem_of_epilogue(shape, epilogue, dtype, along_k, small_integers=True)
    emulation = {"mode": "lazy", "schedule": "pct", "seed": random.randrange(2**31)}
    (out, product), counters, _ = run_forward(operands, options, processors=processors, **emulation)
    options = {**options, "out_dtype": torch.float32}
    if "bias" in options:
        options["bias"] = options["bias"].float()
    exact = testing.reference_grouped_mm(*(t.float() for t in operands), **options)
    z = testing.reference_grouped_mm(*(t.float() for t in operands), **{**options, "activation": None, "gated": False})
    assert out.equal(exact.to(out.dtype))
    assert product.equal(z.to(out.dtype)) if product.numel() else options["activation"] == "relu"
    assert counters["mma"] == 0 and (counters["wgmma"] > 0) == bool(z.any())


@pytest.mark.sampled(check="races", slow=True)
@pytest.mark.parametrize("epilogue", ["relu2", "relu2 and gate"])
@pytest.mark.parametrize("shape", ["one consumer's tile, several items", "both consumers' tile", "clusters"])
def test_no_races_in_epilogues(shape: str, epilogue: str) -> None:
    along_k = random.random() < 0.5
    operands, options, processors = problem_of_epilogue(shape, epilogue, torch.bfloat16, along_k, small_integers=False)
    expected, _, _ = run_forward(operands, options, processors=processors, check_races=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        emulation = {"mode": mode, "schedule": schedule, "seed": random.randrange(2**31)}
        assert all(map(torch.equal, run_forward(operands, options, processors=processors, **emulation)[0], expected))


@pytest.mark.parametrize(("k", "tile"), [(256, (128, 128, 64)), (16384, (128, 256, 64))])
def test_the_tile_depends_on_the_epilogue(k: int, tile: tuple[int, int, int]) -> None:
    """Narrow tiles hide an activation, unless the products take so long that it does not matter."""
    of_experts = {"dtype": torch.bfloat16, "device": "meta"}
    a, b = torch.empty(8192, k, **of_experts), torch.empty(8, 4096, k, **of_experts).mT  # type: ignore[call-overload]
    offs = torch.empty(8, dtype=torch.int32, device="meta")
    plan = cuda_ext.gemm_plan(a, b, offs=offs, device="h200", activation="gelu", gated=True)
    assert plan.tile == tile
    assert cuda_ext.gemm_plan(a, b, offs=offs, device="h200").tile == (128, 256, 64)


def problem_of_terms(shape: str, dtype: torch.dtype, small_integers: bool) -> tuple[list[Tensor], Options, int]:
    terms, m, n, processors, rest = TERMS[shape]

    def matrix(*size: int) -> Tensor:
        numbers = (torch.randint(-4, 5, size) if small_integers else torch.randn(size)).to(dtype)
        numbers[sum(terms) :] = torch.nan  # these belong to no group
        return numbers

    options: Options = {"offs": torch.tensor(terms).cumsum(0).to(torch.int32)}
    if random.random() < 0.5:
        options["out_dtype"] = torch.float32
    return [matrix(sum(terms) + rest, m).t(), matrix(sum(terms) + rest, n)], options, processors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", TERMS)
def test_sums_of_groups_of_terms_are_exact(shape: str, dtype: torch.dtype) -> None:
    (a, b), options, processors = problem_of_terms(shape, dtype, small_integers=True)
    b[0] = torch.inf  # of the first group with terms only
    seed = random.randrange(2**31)
    out, counters, _ = run([a, b], options, processors=processors, mode="lazy", schedule="pct", seed=seed)
    begin = 0
    for group, end in enumerate(options["offs"].tolist()):
        expected = (a[:, begin:end].double() @ b[begin:end].double()).to(out.dtype)
        torch.testing.assert_close(out[group], expected, rtol=0, atol=0, equal_nan=True)
        begin = end
    assert counters["mma"] == 0 and counters["wgmma"] > 0


# Rows at indices, which warps beside the producer's load.


def with_indices(problem: tuple[list[Tensor], Options, int], terms: bool) -> tuple[list[Tensor], Options, int]:
    """The same product, of an operand whose rows are in another order, some of them several times. Rows that no group
    reads are NaN, and have indices that are out of range."""
    operands, options, processors = problem
    rows = operands[terms]
    read = int(options["offs"][-1])
    sources = random.choice((len(rows), len(rows) + 50, 1 + len(rows) // 3))
    indices = torch.randint(0, sources, (len(rows),)) if sources <= len(rows) else torch.randperm(sources)[: len(rows)]
    memory = torch.full((sources, rows.shape[1] + random.choice((0, 8))), torch.nan, dtype=rows.dtype)
    memory[indices[:read], : rows.shape[1]] = rows[:read]
    indices[read:] = random.choice((-1, sources, 2**31 - 1))
    options["indices"] = indices.to(random.choice((torch.int32, torch.int64)))
    operands[terms] = memory[:, : rows.shape[1]]
    return operands, options, processors


def copied(operands: list[Tensor], options: Options, terms: bool) -> tuple[list[Tensor], Options]:
    rows = operands[terms]
    safe = options["indices"].clamp(0, len(rows) - 1).long()
    result = list(operands)
    result[terms] = rows[safe]
    return result, {name: option for name, option in options.items() if name != "indices"}


@pytest.mark.parametrize("layout", ["b along n", "b along k", "terms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_rows_have_the_bits_of_copies(shape: str, dtype: torch.dtype, layout: str) -> None:
    terms = layout == "terms"
    shape = list(TERMS)[list(SHAPES).index(shape)] if terms else shape
    plain = problem_of_terms(shape, dtype, False) if terms else problem(shape, dtype, layout == "b along k", False)
    operands, options, processors = with_indices(plain, terms)
    out, counters, _ = run(
        operands, options, processors=processors, mode="lazy", schedule="pct", seed=random.randrange(2**31)
    )
    of_copies, options_of_copies = copied(operands, options, terms)
    expected, of_plain, _ = run(of_copies, options_of_copies, processors=processors)
    assert out.equal(expected) and out.isfinite().all()
    assert counters["mma"] == 0 and counters["wgmma"] == of_plain["wgmma"]
    # TMA loads the other operand only.
    assert (counters["cp_async_bytes"] > 0) == (counters["wgmma"] > 0) and of_plain["cp_async_bytes"] == 0
    assert counters["tma_load_bytes"] < of_plain["tma_load_bytes"] or counters["wgmma"] == 0


@pytest.mark.parametrize("terms", [False, True], ids=["rows", "terms"])
def test_gathered_lines_end_with_the_matrix(terms: bool) -> None:
    """Of rows whose length is no multiple of 16 bytes, in a memory with NaN between them; no rows at all."""
    offs, indices = torch.tensor([70, 70, 200]), torch.randint(0, 60, (200,))
    memory = torch.full((60, 136), torch.nan, dtype=torch.bfloat16)
    rows = memory[:, : 132 if terms else 125]
    rows.copy_(torch.randint(-4, 5, rows.shape))
    other = torch.randint(-4, 5, (200, 64) if terms else (3, 125, 64)).bfloat16()
    operands = [other.t(), rows] if terms else [rows, other]
    options: Options = {"offs": offs, "indices": indices, "out_dtype": torch.float32}
    out, counters, _ = run(operands, options, check_races=True)
    assert counters["wgmma"] > 0
    expected = grouped_mm(*(t.double() for t in copied(operands, options, terms)[0]), offs=offs)
    assert out.equal(expected.float())
    none = [other.t(), rows[:0]] if terms else [rows[:0], other]
    out, counters, _ = run(none, options)
    assert not out.any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 100}, "rows of the output that do not begin at multiples of 16 bytes"),
        ({"k": 100}, "rows of a that do not"),
        ({"dtype": torch.float32}, "float32"),
    ],
    ids=str,
)
def test_other_products_run_on_mma_sync(change: dict[str, Any], reason: str) -> None:
    sizes = {"n": 64, "k": 64, "dtype": torch.bfloat16} | change
    a = torch.randint(-4, 5, (70, sizes["k"])).to(sizes["dtype"])
    b = torch.randint(-4, 5, (2, sizes["k"], sizes["n"])).to(sizes["dtype"])
    offs = torch.tensor([30, 70], dtype=torch.int32)
    out, counters, _ = run([a, b], {"offs": offs, "out_dtype": torch.float32})
    assert out.equal(torch.cat([a[:30].float() @ b[0].float(), a[30:].float() @ b[1].float()]))
    assert counters["wgmma"] == 0, reason


@pytest.mark.parametrize("along_k", [False, True], ids=["b along n", "b along k"])
def test_gradients(along_k: bool) -> None:
    (a, b), options, processors = problem("both consumers' tile", torch.bfloat16, along_k, small_integers=True)
    leaves = [
        a.requires_grad_(),
        b.requires_grad_(),
        *([options["bias"].requires_grad_()] if "bias" in options else []),
    ]
    grad = torch.randint(-4, 5, (len(a), b.shape[2]))
    grads = []
    for emulated in (True, False):
        if emulated:
            with testing.emulated("sm_90a", processors=processors) as device:
                out = grouped_mm(*leaves[:2], **options)
                grads.append(torch.autograd.grad(out, leaves, grad.to(out.dtype)))
                assert device.counters["wgmma"] > 0
        else:
            out = grouped_mm(*leaves[:2], **options)
            grads.append(torch.autograd.grad(out, leaves, grad.to(out.dtype)))
    assert all(map(torch.equal, *grads))


RACES = ("one consumer's tile, several items", "both consumers' tile", "clusters", "clusters of wide tiles")


def race_problem(shape: str, terms: bool, gathers: bool) -> tuple[list[Tensor], Options, int]:
    if terms:
        found = problem_of_terms(shape, torch.bfloat16, small_integers=False)
    else:
        found = problem(shape, torch.bfloat16, random.random() < 0.5, small_integers=False)
    return with_indices(found, terms) if gathers else found


GATHERS = pytest.mark.parametrize("gathers", [False, True], ids=["in place", "gathered"])


@pytest.mark.sampled(check="races")
@GATHERS
@pytest.mark.parametrize("terms", [False, True], ids=["rows", "terms"])
@pytest.mark.parametrize("shape", RACES)
def test_no_races(shape: str, terms: bool, gathers: bool) -> None:
    operands, options, processors = race_problem(shape, terms, gathers)
    expected, _, _ = run(operands, options, processors=processors, check_races=True)
    for mode, schedule in (("lazy", "fifo"), ("lazy", "pct"), ("eager", "pct")):
        seed = random.randrange(2**31)
        out, _, _ = run(operands, options, processors=processors, mode=mode, schedule=schedule, seed=seed)
        assert out.equal(expected)


def test_lanes_of_the_producer_stay_together() -> None:
    """A lane that lags behind by a round of the ring would wait for a release that has been: 1 in 8 of these schedules
    ended so."""
    rows = torch.tensor([64, 15, 8, 115, 1, 17])
    a, b = torch.randint(-4, 5, (225, 128)).bfloat16(), torch.randint(-4, 5, (6, 104, 128)).bfloat16().mT
    options: Options = {"offs": rows.cumsum(0)}
    expected, _, _ = run([a, b], options, processors=4)
    first = random.randrange(2**30)
    for seed in range(first, first + 40):
        out, _, _ = run([a, b], options, processors=4, mode="eager", schedule="pct", seed=seed)
        assert out.equal(expected)


# Calls whose removal nothing notices, with the reason.
HARMLESS = {
    "arch::grid_dependency_wait();": "here the kernel before it, which clears other rows, has ended",
    "arch::grid_launch_dependents();": "lets the next kernel begin sooner",
    "arch::sync_warp();  // a lane that came later": "few schedules need it; those of the test above do",
    "kTurnBarriers + ConsumerThreads::consumer()": "only the order in which consumers multiply depends on it",
}


@pytest.mark.sampled(check="races", slow=True)
@GATHERS
@pytest.mark.parametrize("terms", [False, True], ids=["rows", "terms"])
def test_removal_of_any_synchronisation_is_noticed(terms: bool, gathers: bool) -> None:
    def once(shape: str) -> Any:
        operands, options, processors = race_problem(shape, terms, gathers)

        def of(**emulation: Any) -> tuple[list[Tensor], list[Any]]:
            out, _, sites = run(operands, options, processors=processors, **emulation)
            return [out], sites

        return of

    files = ("gemm_sm90", "groups_sm90", "gather_sm90", "epilogue_sm90")
    calls, unnoticed = unnoticed_removals([once(shape) for shape in RACES], lambda name: name.startswith(files))
    assert calls >= (13 if gathers else 8)
    assert all(any(code in line for code in HARMLESS) for line in unnoticed), unnoticed
