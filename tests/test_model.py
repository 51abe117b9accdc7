"""The paper model: every cost affects it, its choices are the launchers', and it agrees with known measurements."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import ROOT

import cuda_ext
from benchmarks.model import attention_work, document, gemm_sm90_work, gemm_work, gpus, l2
from benchmarks.model.bucket_work import Pack
from benchmarks.model.cases import LENGTHS, PROBLEMS, SHAPES
from benchmarks.model.compiled import Kernel, blocks_per_sm
from benchmarks.model.evidence import (
    DTYPES,
    LAYOUTS,
    Counters,
    Evidence,
    GemmConfig,
    ModelError,
    NotModelledError,
    fit,
)
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.model.prediction import predict_attention, predict_bucket, predict_gemm
from benchmarks.model.work import Amounts, Work, time_of
from benchmarks.suites.bench_attention import Problem
from cuda_ext import info, testing

SMALL_SMS = (86, 89, 120, 121)  # 100 KiB of shared memory
ON_EVERY_GPU = pytest.mark.parametrize("gpu", list(GPUS.values()), ids=list(GPUS))
# Whose tiles of attention are counted: all but those of sm_75.
FROM_SM_80 = pytest.mark.parametrize(
    "gpu", [gpu for gpu in GPUS.values() if gpu.has_cp_async], ids=[name for name in GPUS if GPUS[name].has_cp_async]
)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence.recorded()


# Ways in which a kernel may become more expensive. Each returns evidence of kernels that are worse in one way only.


def more(counter: str, factor: float) -> Callable[[Evidence], Evidence]:
    def plant(evidence: Evidence) -> Evidence:
        def worse(cases: Counters) -> Counters:
            return {
                case: {name: int(count * factor) if name == counter else count for name, count in cost.items()}
                for case, cost in cases.items()
            }

        changed = {name: worse(getattr(evidence, name)) for name in ("gemm", "bucket", "attention")}
        return dataclasses.replace(evidence, **changed)

    return plant


def other_kernels(**changes: Callable[[Any], Any]) -> Callable[[Evidence], Evidence]:
    def plant(evidence: Evidence) -> Evidence:
        kernels = {
            arch: {
                name: dataclasses.replace(kernel, **{f: change(getattr(kernel, f)) for f, change in changes.items()})
                for name, kernel in of_arch.items()
            }
            for arch, of_arch in evidence.kernels.items()
        }
        return dataclasses.replace(evidence, kernels=kernels)

    return plant


def other_loops(**changes: Callable[[int], int]) -> Callable[[Evidence], Evidence]:
    return other_kernels(
        loop=lambda loop: dataclasses.replace(loop, **{f: change(getattr(loop, f)) for f, change in changes.items()})
    )


def other_configs(**changes: Callable[[int], int]) -> Callable[[Evidence], Evidence]:
    def changed(config: GemmConfig) -> GemmConfig:
        return dataclasses.replace(config, **{f: change(getattr(config, f)) for f, change in changes.items()})

    def plant(evidence: Evidence) -> Evidence:
        # The names of compiled kernels contain the configuration.
        kernels = {arch: dict(of_arch) for arch, of_arch in evidence.kernels.items()}
        for configs, arithmetic in zip(evidence.configs, ("bfloat16", "tf32", "float32")):
            for config in configs:
                for layout in LAYOUTS:
                    old, new = (c.kernel_name(DTYPES[arithmetic], layout) for c in (config, changed(config)))
                    for of_arch in kernels.values():
                        of_arch[new] = of_arch[old]
        configs = [[changed(config) for config in configs] for configs in evidence.configs]
        return dataclasses.replace(evidence, kernels=kernels, configs=configs)

    return plant


LARGE, SHALLOW = (8192, 8192, 8192), (8192, 8192, 64)
# name -> change, a product that shows it, its tile (index in configs), and the least slowdown.
WORSE = {
    "bytes from L2": (more("global_load_sectors", 1.25), LARGE, 0, 1.03),
    "bank conflicts": (more("matrix_wavefronts", 2), LARGE, 0, 1.3),
    "conflicts in the epilogue": (more("shared_wavefronts", 2), SHALLOW, 0, 1.05),
    "bytes written": (more("global_store_sectors", 2), SHALLOW, 0, 1.05),
    "products": (more("mma", 1.1), LARGE, 0, 1.03),
    "instructions": (other_loops(instructions=lambda n: 2 * n), LARGE, 0, 1.02),
    "a lead": (other_loops(lead=lambda n: n + 94), LARGE, 0, 1.15),
    "registers": (other_kernels(registers=lambda n: min(255, n + 30)), SHALLOW, 2, 1.005),
    "shared memory": (other_configs(shared_bytes=lambda n: 3 * n), LARGE, 1, 1.02),
    "stages": (other_configs(stages=lambda n: n - 1), LARGE, 1, 1.02),
}


@pytest.mark.parametrize("cost", WORSE)
def test_a_kernel_that_costs_more_is_predicted_to_be_slower(evidence: Evidence, cost: str) -> None:
    plant, shape, tile, least = WORSE[cost]
    gpu = GPUS["h100"]
    works = [
        gemm_work.gemm_work(e, gpu, *shape, "bfloat16", "nn", e.configs[0][tile], 1)
        for e in (evidence, plant(evidence))
    ]
    before, after = (time_of(work, gpu) for work in works)
    assert after.seconds > least * before.seconds
    assert (after.waves > before.waves) == (cost in ("registers", "shared memory")), "fewer blocks fit"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_leads_are_short_with_the_large_tile(evidence: Evidence, gpu: str, layout: str) -> None:
    """Products take at least 0.99 of an iteration of 128 x 256, whose block has its SM to itself;
    at least 0.95 for 16-bit types if all warps reach the longest pause at once."""
    for dtype, least in (("bfloat16", 0.99), ("float16", 0.99), ("tf32", 0.99)):
        config = evidence.configs[DTYPES[dtype].index][0]
        assert (config.block_m, config.block_n) == (128, 256)
        work = gemm_work.gemm_work(evidence, GPUS[gpu], 8192, 8192, 8192, dtype, layout, config, 1)
        products = work.iteration.tensor / GPUS[gpu].multiply_adds
        assert work.blocks_per_sm == 1 and products / (products + work.lead) >= least
        if dtype != "tf32":
            kernel = evidence.kernel(GPUS[gpu], config.kernel_name(DTYPES[dtype], layout))
            pause = kernel.loop.pause * config.warps_m * config.warps_n / GPUS[gpu].issued
            assert products / (products + pause) >= 0.95


def test_a_lead_counts_if_no_other_block_fills_it(evidence: Evidence) -> None:
    for tile, slower in ((0, True), (1, False)):
        config = evidence.configs[0][tile]
        before, after = (
            time_of(gemm_work.gemm_work(e, GPUS["h100"], *LARGE, "bfloat16", "nn", config, 1), GPUS["h100"])
            for e in (evidence, other_loops(lead=lambda n: n + 94)(evidence))
        )
        assert (after.seconds > before.seconds) == slower


def test_a_bucket_kernel_that_moves_more_is_predicted_to_be_slower(evidence: Evidence) -> None:
    pack = Pack("pack", "float32", "bfloat16", 50_000_000, 100)
    before = predict_bucket(GPUS["a100"], pack, evidence)
    assert before.binding == "memory"
    for counter in ("global_load_sectors", "global_store_sectors"):
        after = predict_bucket(GPUS["a100"], pack, more(counter, 1.2)(evidence))
        assert after.seconds > 1.05 * before.seconds
    many = predict_bucket(GPUS["a100"], dataclasses.replace(pack, entries=3000), evidence)
    assert many.seconds == pytest.approx(before.seconds + 2 * GPUS["a100"].launch)  # three launches write the table


# On a device like this, forward runs on mma.sync.
WITHOUT_WGMMA = dataclasses.replace(GPUS["h100"], compute_capability=80)
SHORT = 512
# name -> change, whether backward shows it, the length, and the least slowdown.
WORSE_ATTENTION = {
    "bytes from L2": (more("global_load_sectors", 2), False, 4096, 1.02),
    "bank conflicts": (more("matrix_wavefronts", 2), False, 4096, 1.3),
    "conflicts in the backward": (more("shared_wavefronts", 4), True, 4096, 1.3),
    "conflicts in the epilogue": (more("shared_wavefronts", 4), False, SHORT, 1.05),
    "gradients written": (more("global_store_sectors", 2), True, SHORT, 1.1),
    "products": (more("mma", 1.2), False, 4096, 1.05),
    "reductions": (more("atomic", 2), True, 4096, 1.2),
    "instructions": (other_loops(instructions=lambda n: 2 * n), False, 4096, 1.1),
    "registers": (other_kernels(registers=lambda n: 255, threads=lambda n: 256), False, 4096, 1.1),
}


@pytest.mark.parametrize("cost", WORSE_ATTENTION)
def test_attention_that_costs_more_is_predicted_to_be_slower(evidence: Evidence, cost: str) -> None:
    plant, backward, length, least = WORSE_ATTENTION[cost]
    problem = Problem(16384 // length, length, 16, 128)
    before, after = (
        predict_attention(WITHOUT_WGMMA, problem, backward, evidence=e) for e in (evidence, plant(evidence))
    )
    assert after.seconds > least * before.seconds
    assert (after.blocks_at_once < before.blocks_at_once) == (cost == "registers"), "fewer blocks fit"


def test_an_improvement_lowers_the_prediction(evidence: Evidence) -> None:
    better = other_loops(instructions=lambda n: n // 2)(evidence)
    (before,), (after,) = (
        predict_gemm(GPUS["h100"], 4096, 4096, 4096, "float32", evidence=e) for e in (evidence, better)
    )
    assert before.binding == "issue" and after.binding == "tensor"
    assert after.seconds < 0.9 * before.seconds


@pytest.mark.parametrize("dtype", DTYPES)
def test_costs_of_a_k_tile_follow_from_the_tile(evidence: Evidence, dtype: str) -> None:
    arithmetic = DTYPES[dtype]
    for config in evidence.configs[arithmetic.index]:
        for layout in LAYOUTS:
            k_tile, rest = gemm_work.block_costs(evidence, dtype, layout, config)
            products = config.block_m * config.block_n * config.block_k * arithmetic.products
            assert k_tile["mma"] * arithmetic.multiply_adds == products
            sectors = (config.block_m + config.block_n) * config.block_k * config.element_bytes / 32
            assert k_tile["global_load_sectors"] == sectors
            assert (rest["mma"], rest["global_load_sectors"]) == (0, 0)
            assert rest["global_store_sectors"] == config.block_m * config.block_n * config.element_bytes / 32
            for of_arch in ("sm_80", "sm_90a"):
                # At least one instruction per mma of a warp.
                kernel = evidence.kernels[of_arch][config.kernel_name(arithmetic, layout)]
                assert kernel.loop.instructions > k_tile["mma"] / (config.warps_m * config.warps_n)
                assert kernel.threads == 32 * config.warps_m * config.warps_n


TILE_DIMS = [64, 128, 256]


@pytest.mark.parametrize("dtype", attention_work.ATTENTION_DTYPES)
@pytest.mark.parametrize("dim", TILE_DIMS)
def test_costs_of_a_step_follow_from_the_tile(evidence: Evidence, dim: int, dtype: str) -> None:
    problem = Problem(4, 1024, 8, dim)
    for backward in (False, True):
        choice = attention_work.attention_choice(evidence, GPUS["a100"], problem, dtype, backward)
        tile = choice.tile
        assert tile.dim == tile.dim_v == dim
        step, of_queries, of_keys = attention_work.attention_costs(evidence, tile, backward)
        products = (5 if backward else 2) * tile.block_m * tile.block_n * dim
        assert step["mma"] * DTYPES[dtype].multiply_adds == products
        # Per step: keys and values; in backward queries, gradients of the output, and two floats per row.
        read = tile.block_m * (2 * dim * 2 + 2 * 4) if backward else tile.block_n * 2 * dim * 2
        assert step["global_load_sectors"] == read / 32
        assert step.get("atomic", 0) == (tile.block_m * dim if backward else 0)
        assert (step["blocks"], step["global_store_sectors"]) == (0, 0)
        assert (of_queries["mma"], of_keys["mma"], of_queries["blocks"]) == (0, 0, 2 if backward else 1)
        if backward:
            # A block reads keys and values, and writes their gradients.
            assert of_keys["global_load_sectors"] == of_keys["global_store_sectors"] == tile.block_n * 2 * dim * 2 / 32
            assert of_keys["blocks"] == 1
        else:
            assert set(of_keys.values()) == {0}
        for of_arch in ("sm_80", "sm_90a"):
            kernel = evidence.kernels[of_arch][f"attention_{'bwd' if backward else 'fwd'}_sm80<{choice.kernel}>"]
            assert kernel.loop.instructions > (step["mma"] + step["ldmatrix"]) / tile.warps
            assert kernel.threads == 32 * tile.warps


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_blocks_have_as_many_steps_as_in_the_kernel(
    evidence: Evidence, backward: bool, causal: bool, window: int | None
) -> None:
    """Compared with the number of products on the emulator's device, which has 4 SMs."""
    gpu = dataclasses.replace(GPUS["a100"], sms=4)
    heads, kv_heads = random.choice([(8, 8), (16, 8)])
    problem = Problem(
        1,
        random.randint(129, 400),
        heads,
        random.choice((64, 128)),
        kv_heads=kv_heads,
        causal=causal,
        window=window,
        keys=random.randint(129, 400),
    )
    choice = attention_work.attention_choice(evidence, gpu, problem, "bfloat16", backward)
    step, of_queries, _ = attention_work.attention_costs(evidence, choice.tile, backward)
    shapes = ((problem.length, heads), (problem.keys, kv_heads), (problem.keys, kv_heads))
    tensors = [torch.randn(1, *shape, problem.dim).bfloat16().requires_grad_(backward) for shape in shapes]
    with testing.emulated() as emulation:
        options = {"causal": causal, "window": None if window is None else (window, None)}
        out = cuda_ext.flash_attention(*tensors, **options)
        before = dict(emulation.counters)
        if backward:
            torch.autograd.grad(out, tensors, torch.randn(out.shape).bfloat16())
    counted = {n: value - backward * before[n] for n, value in emulation.counters.items()}
    assert counted["mma"] == sum(choice.steps) * step["mma"], problem
    tiles = heads * -(-problem.length // choice.tile.block_m)
    assert counted["blocks"] == len(choice.steps) + backward * of_queries["blocks"] * tiles, problem


def test_steps_of_a_causal_mask_come_longest_first(evidence: Evidence) -> None:
    """Longest first among the heads whose operands fit in L2 together: this keeps the tail short."""
    for backward in (False, True):
        problem = Problem(1, 2048, 16, 128, causal=True)
        choice = attention_work.attention_choice(evidence, GPUS["h100"], problem, "bfloat16", backward)
        assert list(choice.steps) == sorted(choice.steps, reverse=True)
        assert len(set(choice.steps)) == 2048 // (choice.tile.block_n if backward else choice.tile.block_m)
        assert choice.by_wgmma
    full, causal = (predict_attention(GPUS["h100"], Problem(1, 32768, 16, 128, causal=c), False) for c in (False, True))
    # Without a mask the busiest SMs have 32 equal blocks; the average is 31.
    assert 0.97 < causal.seconds / (full.seconds / 2) < 1.02


@pytest.mark.parametrize("backward", [False, True])
def test_padding_multiplies_as_much_and_reads_less(backward: bool) -> None:
    whole = predict_attention(GPUS["a100"], Problem(16, 1024, 16, 128), backward)
    narrow = predict_attention(GPUS["a100"], Problem(16, 1024, 16, 112), backward)
    short = predict_attention(GPUS["a100"], Problem(16, 1024 - 25, 16, 128), backward)
    for padded, part in ((narrow, 112 / 128), (short, 999 / 1024)):
        for name in ("tensor", "shared", "issue", "special", "reduce"):
            assert padded.resources[name] == whole.resources[name]
        assert padded.resources["l2"] == pytest.approx(part * whole.resources["l2"], rel=0.01)
        assert padded.resources["memory"] < whole.resources["memory"]


def test_a_lone_block_of_attention_overlaps_nothing() -> None:
    """The latency of one block is the sum of products and softmax; two blocks halve it."""
    for gpu, length in itertools.product((GPUS["a100"], GPUS["4090"], WITHOUT_WGMMA), (4096, 16384)):
        p = predict_attention(gpu, Problem(16384 // length, length, 8, 256), False)
        assert p.blocks_at_once == 1
        assert p.resources["latency"] > p.resources["tensor"] + p.resources["special"]
        pair = predict_attention(gpu, Problem(16384 // length, length, 16, 128), False)
        assert pair.blocks_at_once == 2
        assert pair.resources["tensor"] / 2 < pair.resources["latency"] < pair.resources["tensor"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", TILE_DIMS)
def test_forward_on_wgmma_is_what_the_kernel_does(evidence: Evidence, dim: int, causal: bool) -> None:
    """Compared with the emulator's counters, on a device of 4 SMs."""
    gpu = dataclasses.replace(GPUS["h200"], sms=4)
    problem = Problem(2, random.randint(129, 500), 4, dim, causal=causal)
    choice = attention_work.attention_choice(evidence, gpu, problem, "bfloat16", False)
    (work,) = attention_work.attention_work(evidence, gpu, problem, "bfloat16", False)
    assert choice.by_wgmma and work.persistent and work.persistent.workers == 4
    tensors = [torch.randn(2, problem.length, 4, dim).bfloat16() for _ in range(3)]
    with testing.emulated("sm_90a") as emulation:
        cuda_ext.flash_attention(*tensors, causal=causal)
    steps, tile = sum(choice.steps), choice.tile
    products = steps * (tile.block_m // 64) * (dim // 16 + tile.block_n // 16)
    assert emulation.counters["wgmma"] == products
    queries = len(choice.steps) * tile.block_m * dim * 2
    assert emulation.counters["tma_load_bytes"] == steps * work.iteration.l2 + queries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_backward_on_wgmma_is_what_the_kernel_does(evidence: Evidence, dim: int, causal: bool) -> None:
    """Compared with the emulator's counters, on a device of 4 SMs."""
    gpu = dataclasses.replace(GPUS["h200"], sms=4)
    problem = Problem(2, random.randint(129, 400), 4, dim, causal=causal)
    choice = attention_work.attention_choice(evidence, gpu, problem, "bfloat16", True)
    work, around = attention_work.attention_work(evidence, gpu, problem, "bfloat16", True)
    assert choice.by_wgmma and work.persistent and around.launches == 2
    tensors = [torch.randn(2, problem.length, 4, dim).bfloat16().requires_grad_() for _ in range(3)]
    with testing.emulated("sm_90a"):
        out = cuda_ext.flash_attention(*tensors, causal=causal)
    with testing.emulated("sm_90a") as emulation:
        torch.autograd.grad(out, tensors, torch.randn(out.shape).bfloat16())
    counters, steps, tile = emulation.counters, sum(choice.steps), choice.tile
    step = 2 * dim // 16 + 2 * tile.block_m // 16 + tile.block_n // 16
    consumers, blocks = tile.block_n // 64, len(choice.steps)
    assert counters["wgmma"] == consumers * (steps * step + blocks * dim // 16), "with scores after the last step"
    keys = blocks * tile.block_n * 2 * dim * 2
    assert counters["tma_load_bytes"] == steps * work.iteration.l2 + keys
    assert counters["tma_store_bytes"] == steps * work.iteration.reduce + keys
    assert counters["blocks"] == work.blocks + around.blocks


@pytest.mark.parametrize("causal", [False, True])
def test_backward_with_a_kernel_for_dq_is_what_the_kernels_do(evidence: Evidence, causal: bool) -> None:
    gpu = dataclasses.replace(GPUS["h200"], sms=4)
    problem = Problem(2, random.randint(129, 400), 4, 256, causal=causal)
    choice = attention_work.attention_choice(evidence, gpu, problem, "bfloat16", True)
    keys, queries, around = attention_work.attention_work(evidence, gpu, problem, "bfloat16", True)
    assert choice.has_kernel_for_queries
    tensors = [torch.randn(2, problem.length, 4, 256).bfloat16().requires_grad_() for _ in range(3)]
    with testing.emulated("sm_90a"):
        out = cuda_ext.flash_attention(*tensors, causal=causal)
    with testing.emulated("sm_90a") as emulation:
        torch.autograd.grad(out, tensors, torch.randn(out.shape).bfloat16())
    counters, tile = emulation.counters, choice.tile
    steps = [sum([each.iterations] * each.blocks if isinstance(each.iterations, int) else each.iterations)
             for each in (keys, queries)]  # fmt: skip
    scores = 2 * 256 // 16
    assert counters["wgmma"] == steps[0] * (scores + 2 * tile.block_m // 16) + steps[1] * 2 * (scores + 4)
    kept = (keys.blocks * tile.block_n + queries.blocks * attention_work.QUERIES_OF_SEPARATE) * 2 * 256 * 2
    streamed = sum(count * each.iteration.l2 for count, each in zip(steps, (keys, queries), strict=True))
    assert counters["tma_load_bytes"] == streamed + kept
    assert counters["blocks"] == keys.blocks + queries.blocks + around.blocks


def test_attention_on_wgmma_that_costs_more_is_slower(evidence: Evidence) -> None:
    problem, gpu = Problem(4, 4096, 16, 128), GPUS["h200"]
    (work,) = attention_work.attention_work(evidence, gpu, problem, "bfloat16", False)
    before = time_of(work, gpu).seconds
    assert work.persistent
    for changes in ({"iteration": work.iteration + Amounts(issue=2000)}, {"iteration": work.iteration * 1.1},
                    {"persistent": dataclasses.replace(work.persistent, restart=9000)}):  # fmt: skip
        assert time_of(dataclasses.replace(work, **changes), gpu).seconds > 1.03 * before


@FROM_SM_80
def test_exponentials_and_reductions_of_attention(gpu: Gpu) -> None:
    batch, length, heads, dim = 4, 4096, 16, 128
    logits = batch * heads * length**2
    forward, backward = (predict_attention(gpu, Problem(batch, length, heads, dim), b) for b in (False, True))
    clock = gpu.wgmma_clock or gpu.clock
    for phase in (forward, backward):
        # The busiest SM has slightly more than its share.
        part = gpu.special * clock * gpu.sms * 1.0001
        assert logits / part < phase.resources["special"] < 1.1 * logits / part
    block_n = 128 if gpu.wgmma_clock else 64
    sums = logits / block_n * dim * 4 / (gpu.reduced_bytes * clock * gpu.sms * 1.0001)
    assert sums < backward.resources["reduce"] < 1.1 * sums
    assert forward.resources["reduce"] == 0


def test_sums_of_a_split_cross_l2_once_each_way(evidence: Evidence) -> None:
    stored, summed = gemm_work.split_bytes(evidence)
    assert summed == 4
    assert 4 <= stored < 4.01  # including the reset of the arrival counters


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_choices_are_those_of_the_launcher(evidence: Evidence, dtype: str) -> None:
    """Compared with the number of blocks on the emulator's device, which has 4 SMs."""
    arithmetic = DTYPES[dtype]
    seen = set()
    for m, n, k in ((256, 512, 64), (256, 256, 64), (64, 64, 64), (64, 64, 2048), (130, 70, 900), (20, 20, 2400)):
        choice = evidence.simt.gemm_choice(arithmetic.index, m, n, k, 80, 4)
        config = evidence.configs[arithmetic.index][choice["shape"]]
        with testing.emulated() as emulation:
            cuda_ext.gemm(torch.ones(m, k, dtype=getattr(torch, dtype)), torch.ones(k, n, dtype=getattr(torch, dtype)))
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        clears = choice["splits"] > 1
        assert emulation.counters["blocks"] == tiles * choice["splits"] + clears
        assert emulation.counters["atomic"] == tiles * choice["splits"] * clears
        seen.add((str(config), clears))
    assert len({config for config, _ in seen}) == len(evidence.configs[arithmetic.index])
    assert {clears for _, clears in seen} == {False, True}


def test_the_order_of_tiles_is_that_of_the_kernel() -> None:
    source = (ROOT / "csrc" / "gemm" / "gemm_sm80.cuh").read_text()
    assert re.findall(r"constexpr int kBand = (\d+);", source) == [str(gemm_work.GROUP_ROWS)]


@ON_EVERY_GPU
def test_as_many_gemm_blocks_fit_as_the_launcher_assumes(evidence: Evidence, gpu: Gpu) -> None:
    for dtype, arithmetic in DTYPES.items():
        for config in evidence.configs[arithmetic.index]:
            kernel = evidence.kernel(gpu, config.kernel_name(arithmetic, "nn"))
            if not gpu.has_cp_async and config.shared_bytes > 64 << 10:
                continue  # the launcher does not choose it
            blocks_per_sm = fit(kernel, gpu, config.shared_bytes)
            # 99 KiB of shared memory fit two blocks of 48 KiB, 64 KiB one.
            few = 2 if gpu.has_cp_async else 1
            least = min(config.min_blocks, few) if gpu.compute_capability in (75, *SMALL_SMS) else config.min_blocks
            assert blocks_per_sm >= least, f"{dtype} {config}"


def test_blocks_that_fit() -> None:
    def blocks(registers: int, threads: int, shared: int, arch: str = "sm_90a") -> int:
        return blocks_per_sm(Kernel(arch, "k", registers, threads), arch, shared)

    assert blocks(64, 256, 0) == 4  # registers: 64 * 256 * 4 = 65536
    assert blocks(65, 256, 0) == 3  # 72 of them are allocated
    assert blocks(16, 1024, 0) == 2  # threads
    assert blocks(16, 32, 0) == 32  # blocks
    assert blocks(16, 128, 113 * 1024) == 2  # shared memory: 228 KiB, 1 of each block for the system
    assert blocks(16, 128, 113 * 1024, "sm_80") == 1


@FROM_SM_80
def test_as_many_attention_blocks_fit_as_its_tiles_declare(evidence: Evidence, gpu: Gpu) -> None:
    for dim, backward in itertools.product(TILE_DIMS, (False, True)):
        problem = Problem(16, 1024, 8, dim)
        tile = attention_work.attention_choice(evidence, gpu, problem, "bfloat16", backward).tile
        predicted = predict_attention(gpu, problem, backward, evidence=evidence)
        # In backward one block fits on a 4090 if D is 128 or more.
        least = 1 if gpu.compute_capability in SMALL_SMS and backward and dim > 64 else tile.min_blocks
        assert predicted.blocks_at_once >= least, f"{dim} {backward}"


# TFLOP/s of other kernels with the same instructions and similar tiles, measured by their authors (matmul_v6 and v6b of
# gau-nernst/learn-cuda, spatters/mma-matmul), so within 8 %.
KNOWN = [("a100", 4096, 221), ("a100", 8192, 240), ("4090", 4096, 153.6)]


@pytest.mark.parametrize(("gpu", "size", "tflops"), KNOWN)
def test_agrees_with_published_kernels_of_the_same_kind(gpu: str, size: int, tflops: float) -> None:
    (p,) = predict_gemm(GPUS[gpu], size, size, size)
    assert p.flops / p.seconds / 1e12 == pytest.approx(tflops, rel=0.08)


# TFLOP/s of kernels on wgmma on an H100 SXM, bfloat16, random numbers: github.com/pranjalssh/fast.cu, whose tile and
# cluster ours has. cuBLAS reached 765 and 759 on an H200.
WITH_WGMMA = [(4096, 764), (8192, 808)]


@pytest.mark.parametrize(("size", "tflops"), WITH_WGMMA)
def test_agrees_with_published_kernels_on_wgmma(size: int, tflops: float) -> None:
    (p,) = predict_gemm(GPUS["h100"], size, size, size, layout="nt")
    assert p.config == "128x256x64 cluster 2"
    assert p.flops / p.seconds / 1e12 == pytest.approx(tflops, rel=0.05)


@pytest.mark.parametrize(("size", "tflops"), [(4096, 740), (8192, 750)])
def test_large_products_on_an_h200(size: int, tflops: float) -> None:
    for layout in LAYOUTS:
        (p,) = predict_gemm(GPUS["h200"], size, size, size, layout=layout)
        assert p.flops / p.seconds > tflops * 1e12 and p.binding == "tensor"


# Decoding: few rows, square weights of language models.
DECODE_SHAPES = [(m, size, size) for size in (4096, 5120, 6144, 8192, 14336) for m in (1, 16, 64)]


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [*SHAPES, *DECODE_SHAPES], ids=lambda s: "x".join(map(str, s)))
def test_the_plan_is_near_the_best(shape: tuple[int, int, int]) -> None:
    taken, *others = predict_gemm(GPUS["h200"], *shape, layout="nt", all_configs=True)
    assert len(others) >= 4
    assert taken.seconds <= 1.05 * min(p.seconds for p in others)


def test_few_rows_at_the_speed_of_memory() -> None:
    """For small weights the launch and shared memory count too: docs/model.md, Findings."""
    gpu = GPUS["h200"]
    for shape in DECODE_SHAPES:
        (p,) = predict_gemm(gpu, *shape, layout="nt")
        # 0.66: more blocks for k would need clusters of 4, of which not enough run at once (docs/gpu.md).
        least = {4096: 0.66, 5120: 0.76, 6144: 0.84}.get(shape[1], 0.9)
        assert p.bytes / gpu.memory_bytes / p.seconds > least, shape


def test_each_cost_of_wgmma_counts() -> None:
    """A GPU on which one rate is lower, or a plan that is worse in one way, gives a longer time."""
    gpu, order = GPUS["h200"], Evidence.recorded().simt.gemm_order
    plan = gemm_sm90_work.choose(gpu, *LARGE, "bfloat16", "nt")
    assert plan is not None

    def seconds(gpu: Gpu = gpu, shape: tuple[int, int, int] = LARGE, **changes: int) -> float:
        changed = gemm_sm90_work.PlanSm90({**plan.numbers, **changes}, 0.0)
        return time_of(gemm_sm90_work.gemm_sm90_work(gpu, order, *shape, "bfloat16", changed), gpu).seconds

    before = seconds()
    assert seconds(tma_store=0) > 1.005 * before
    for figure, less in (("wgmma_clock", 0.9), ("wgmma_multiply_adds", 0.9), ("shared_bytes", 0.8), ("l2_bytes", 0.7)):
        slower = dataclasses.replace(gpu, **{figure: less * getattr(gpu, figure)})
        assert seconds(slower) > 1.02 * before, figure
    assert seconds(dataclasses.replace(gpu, memory_bytes=gpu.memory_bytes / 8)) > 1.02 * before
    short = (8192, 8192, 512)
    ping_pong = gemm_sm90_work.choose(gpu, *short, "bfloat16", "nt")
    assert ping_pong is not None and ping_pong.ping_pong
    exposed = gemm_sm90_work.PlanSm90({**ping_pong.numbers, "ping_pong": 0}, 0.0)
    assert seconds(shape=short, **exposed.numbers) > 1.02 * seconds(shape=short, **ping_pong.numbers)


# Product -> bytes from and to memory over those of reading each operand once, at most; with all of L2. K beyond what
# fits reads more: the row above all of 8192^3 would need 134 MB.
RASTER = {
    (4096, 4096, 4096): 1.03,
    (2048, 2048, 2048): 1.03,
    (8192, 4096, 4096): 1.03,
    (2048, 128256, 4096): 1.03,
    (512, 4096, 14336): 1.03,
    (8192, 14336, 4096): 1.43,
    (8192, 28672, 4096): 1.39,
    (12288, 12288, 4096): 1.67,
    (8192, 8192, 8192): 3.05,
}


@pytest.mark.parametrize("shape", RASTER, ids=lambda s: "x".join(map(str, s)))
def test_the_raster_reads_little_from_memory(shape: tuple[int, int, int]) -> None:
    gpu, simt = GPUS["h200"], Evidence.recorded().simt
    m, n, k = shape
    plan = gemm_sm90_work.choose(gpu, *shape, "bfloat16", "nt")
    assert plan is not None

    def relative(raster: int) -> float:
        numbers = {**plan.numbers, "raster": raster}
        read = l2.bytes_read(numbers, simt.gemm_order(numbers), gpu.l2_capacity, 2)
        return (read + 2 * m * n) / (2 * (m * k + n * k + m * n))

    ours = relative(plan.raster)
    assert 0.999 < ours <= RASTER[shape]
    others = [relative(raster) for raster in (1, 2, 4, 8, 16, 32) if raster <= plan.row_groups]
    assert ours <= 1.001 * min(others)


def test_every_tile_is_computed_once() -> None:
    simt = Evidence.recorded().simt
    for _ in range(20):
        rows, columns, raster = random.randint(1, 9), random.randint(1, 9), random.randint(1, 9)
        plan = {"row_groups": rows, "column_tiles": columns, "raster": min(raster, rows), "items": 2 * rows * columns}
        order = [tuple(place) for place in simt.gemm_order(plan)]
        assert sorted(order) == [(s, 0, r, c) for s in range(2) for r in range(rows) for c in range(columns)]


def test_a_cache_evicts_what_was_used_least_recently() -> None:
    cache = l2.Cache(3)
    for key in "abcacdab":
        cache.touch((key,), 1)
    assert cache.missed == 3 + 1 + 1, "d evicts b, and b evicts c"


# (head dim, causal) -> TFLOP/s of FlashAttention-2 on an A100 80GB SXM4, forward and backward together, for LENGTHS:
# read from the charts in assets/ of github.com/Dao-AILab/flash-attention, precise within 2.
FLASH_ATTENTION_2 = {
    (64, False): (132, 153, 162, 171, 175, 176),
    (64, True): (88, 119, 140, 156, 165, 171),
    (128, False): (150, 173, 187, 196, 201, 203),
    (128, True): (99, 133, 155, 173, 182, 189),
}


def test_attention_is_about_as_fast_as_flash_attention_2() -> None:
    """FlashAttention-2 has different tiles and order, so within a quarter."""
    for (dim, causal), theirs in FLASH_ATTENTION_2.items():
        for length, tflops in zip(LENGTHS, theirs, strict=True):
            (problem,) = (p for p in PROBLEMS if (p.dim, p.causal, p.length) == (dim, causal, length))
            both = [predict_attention(GPUS["a100"], problem, backward) for backward in (False, True)]
            ours = sum(p.flops for p in both) / sum(p.seconds for p in both) / 1e12
            assert 0.8 * tflops < ours < 1.25 * tflops, problem


def test_hopper_stays_below_what_mma_sync_can_do() -> None:
    """642 TFLOP/s is 64.9 % of wgmma's 989; FlashAttention-2 reaches 370 with mma.sync, including softmax."""
    (p,) = predict_gemm(GPUS["h100"], 8192, 8192, 8192, wgmma=False)
    assert 370 < p.flops / p.seconds / 1e12 < 642


def test_rates_of_products_on_sm_75() -> None:
    """A tile of 128 x 128 multiplies as much in every arithmetic; three tf32 products are one of float32 there."""
    gpu, size = GPUS["t4"], 4096
    for dtype, rate in (("float16", 512), ("bfloat16", 32), ("tf32", 32), ("float32", 32)):
        (p,) = predict_gemm(gpu, size, size, size, dtype)
        assert p.resources["tensor"] == pytest.approx(size**3 / (rate * gpu.clock * gpu.sms), rel=0.02)


def test_copies_through_registers_are_waited_for(evidence: Evidence) -> None:
    config = evidence.configs[0][1]
    t4, asynchronous = GPUS["t4"], dataclasses.replace(GPUS["t4"], compute_capability=86)
    work = [
        gemm_work.gemm_work(evidence, gpu, 4096, 4096, 4096, "float16", "nn", config, 1) for gpu in (t4, asynchronous)
    ]
    assert work[0].in_flight == 1 < work[1].in_flight and work[0].lead == work[1].lead + t4.memory_latency
    # A second product for each of sm_80's, and a store for each copy of 16 bytes.
    copies = (config.block_m + config.block_n) * config.block_k * 2 / (16 * 32)
    products = config.block_m * config.block_n * config.block_k / (16 * 8 * 16)
    assert work[0].iteration.issue == pytest.approx(work[1].iteration.issue + copies + products)


@ON_EVERY_GPU
def test_the_report_of_an_installation_agrees_with_the_model(gpu: Gpu) -> None:
    text = info.EXPECTATIONS[gpu.compute_capability // 10]
    stated = re.search(r"about (0\.\d+) of the fastest", text)
    assert stated is not None
    large = statistics.median(share for share in document.shared_of(gpu)[:3] if share is not None)
    assert float(stated[1]) == pytest.approx(large, abs=0.1), text
    if not gpu.has_cp_async:
        both = [predict_gemm(gpu, 4096, 4096, 4096, dtype)[0].seconds for dtype in ("float16", "bfloat16", "float32")]
        assert both[1] == pytest.approx(10 * both[0], rel=0.15) and both[2] == pytest.approx(10 * both[0], rel=0.15)


def test_large_tiles_where_small_ones_read_too_much() -> None:
    """An A10 and an L4 multiply twice as fast as an RTX 3090 and 4090 of the same compute capability."""
    for name in ("a10", "l4", "3090", "4090"):
        chosen, *others = predict_gemm(GPUS[name], 4096, 4096, 4096, all_configs=True)
        assert chosen.seconds < 1.1 * min(p.seconds for p in others), chosen.kernel


def test_other_configurations_have_their_best_splits(evidence: Evidence) -> None:
    assert len(predict_gemm(GPUS["a100"], 8, 8, 8, all_configs=True)) == 3, "nothing but the choice with that tile"
    chosen, *others = predict_gemm(GPUS["a100"], 64, 4096, 4096, all_configs=True)
    assert chosen.chosen and not any(p.chosen for p in others)
    assert [p.config for p in others] == [str(config) for config in evidence.configs[0]]
    work = [
        gemm_work.gemm_work(evidence, GPUS["a100"], 64, 4096, 4096, "bfloat16", "nn", evidence.configs[0][1], splits)
        for splits in range(1, 33)
    ]
    best = min(time_of(w, GPUS["a100"]).seconds for w in work)
    assert others[1].splits > 1 and others[1].seconds < 1.05 * best


@pytest.mark.sampled
def test_more_bandwidth_is_not_slower() -> None:
    for shape in SHAPES:
        h100, h200 = (predict_gemm(GPUS[name], *shape)[0] for name in ("h100", "h200"))
        assert h200.seconds <= h100.seconds
    for problem, backward in itertools.product(PROBLEMS, (False, True)):
        h100, h200 = (predict_attention(GPUS[name], problem, backward) for name in ("h100", "h200"))
        assert h200.seconds <= h100.seconds


def test_a_lone_block_overlaps_nothing() -> None:
    gpu = GPUS["a100"]
    work = Work(
        blocks=4 * gpu.sms,
        blocks_per_sm=1,
        iterations=10,
        iteration=Amounts(tensor=gpu.multiply_adds * 1000),
        outside=Amounts(l2=gpu.l2_bytes * 500),
        in_flight=3,
        memory_bytes=0,
    )
    alone = time_of(work, gpu)
    cycles = 4 * (10 * 1000 + 500 + gpu.memory_latency)
    assert alone.seconds == pytest.approx(gpu.launch + cycles / gpu.clock, rel=0.001)
    assert (alone.waves, alone.binding) == (4, "tensor")
    together = time_of(dataclasses.replace(work, blocks_per_sm=2), gpu)
    assert together.seconds < alone.seconds - 1.9 * 500 / gpu.clock


def test_the_busiest_sm_determines_the_time() -> None:
    gpu = GPUS["a100"]
    iteration = Amounts(tensor=gpu.multiply_adds * 1000)
    even = Work(2 * gpu.sms, 2, 10, iteration, Amounts(), 3, 0)
    seconds = time_of(even, gpu).seconds
    for iterations in ([10] * 2 * gpu.sms, [20] + [10] * (2 * gpu.sms - 2)):
        work = dataclasses.replace(even, blocks=len(iterations), iterations=iterations)
        assert time_of(work, gpu).seconds == pytest.approx(seconds, rel=0.02)
    longest_first = [40] + [10] * (2 * gpu.sms - 4)
    first, last = (
        time_of(dataclasses.replace(even, blocks=len(steps), iterations=steps), gpu).resources["tensor"] * gpu.clock
        for steps in (longest_first, longest_first[::-1])
    )
    assert (first, last) == (pytest.approx(40 * 1000), pytest.approx(50 * 1000))


def test_a_lone_block_waits_for_each_iteration() -> None:
    gpu = GPUS["a100"]
    work = Work(4 * gpu.sms, 1, 10, Amounts(tensor=gpu.multiply_adds * 1000), Amounts(), 1, 0, lone_cycles=1500)
    one, two = (time_of(dataclasses.replace(work, blocks_per_sm=n), gpu) for n in (1, 2))
    assert one.binding == "latency" and one.resources["latency"] * gpu.clock > 4 * 10 * 1500
    assert two.binding == "tensor" and two.seconds < 0.85 * one.seconds


@pytest.mark.parametrize("field", dataclasses.fields(Gpu), ids=lambda f: f.name)
def test_every_figure_has_a_source(field: dataclasses.Field[object]) -> None:
    if field.name in ("name", "folder", "arch", "compute_capability", "sources"):
        return
    for gpu in GPUS.values():
        if field.name.startswith(("wgmma", "port")) and gpu.compute_capability != 90:
            continue
        if field.name == "float32_multiply_adds" and gpu.has_cp_async:
            assert gpu.float32_multiply_adds == 0
            continue
        assert getattr(gpu, field.name) > 0
        assert len(gpu.sources[field.name]) > 10
        assert field.name in {name for name, _, _ in gpus.figures(gpu)}


def test_errors_for_missing_evidence_say_how_to_get_it(evidence: Evidence) -> None:
    fewer = {case: cost for case, cost in evidence.gemm.items() if not case.endswith("x128")}
    with pytest.raises(ModelError, match=r"golden_counters/gemm.json, got 1; record them with"):
        predict_gemm(GPUS["h100"], *LARGE, wgmma=False, evidence=dataclasses.replace(evidence, gemm=fewer))
    with pytest.raises(ModelError, match=r"expected gemm_sm80<Gemm<bfloat16_t, 0, true, false, .* of sm_90a"):
        predict_gemm(GPUS["h100"], *LARGE, wgmma=False, evidence=dataclasses.replace(evidence, kernels={"sm_90a": {}}))
    with pytest.raises(ModelError, match="expected a block to fit on an SM of H100 SXM"):
        predict_gemm(
            GPUS["h100"], *LARGE, wgmma=False, evidence=other_configs(shared_bytes=lambda n: 300_000)(evidence)
        )


def test_attention_that_is_not_modelled(evidence: Evidence) -> None:
    few = {case: cost for case, cost in evidence.attention.items() if not case.endswith("8x256x128")}
    gpu, problem = WITHOUT_WGMMA, Problem(4, 4096, 16, 128)
    with pytest.raises(ModelError, match=r"attention.json, got 2; record them with"):
        predict_attention(gpu, problem, True, evidence=dataclasses.replace(evidence, attention=few))
    for unknown in (Problem(1, 1, 8, 128, keys=4096), dataclasses.replace(problem, deterministic=True)):
        with pytest.raises(NotModelledError, match=r"S=.*: expected enough tiles to fill H100 SXM, in any order"):
            predict_attention(gpu, unknown, False)
