"""Predictions: the time of an op on a GPU, with what limits it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.model.attention_work import attention_choice, attention_work
from benchmarks.model.bucket_work import Pack, bucket_work
from benchmarks.model.evidence import DTYPES, Evidence, GemmConfig
from benchmarks.model.gemm_sm90_work import MAX_K_BLOCKS, NUM_CONFIGS, PlanSm90, choose, gemm_sm90_work
from benchmarks.model.gemm_work import gemm_work
from benchmarks.model.gpus import Gpu
from benchmarks.model.work import RESOURCES, Work, time_of
from benchmarks.suites.bench_attention import Problem

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # that are compared with the launcher's choice


@dataclass(frozen=True)
class Prediction:
    gpu: str
    op: str
    case: str
    dtype: str
    config: str
    splits: int
    chosen: bool  # by the launcher; otherwise listed for comparison
    waves: float
    blocks_at_once: int
    seconds: float
    flops: float
    bytes: float  # each input read once and each output written once
    of_library: float  # roofline time of the fastest library and a copy / predicted time
    binding: str
    resources: dict[str, float]  # seconds that each would take alone
    aligned: bool = True  # rows are multiples of 16 bytes; the cost of others is not modelled
    wgmma: bool = False
    measured: float | None = None  # seconds

    @property
    def ratio(self) -> float | None:
        """Predicted / measured time: above 1 the kernel is faster than predicted."""
        return self.seconds / self.measured if self.measured else None

    @property
    def kernel(self) -> str:
        return self.config + (f" / {self.splits}" if self.splits > 1 else "")

    @property
    def rate(self) -> str:
        if self.flops:
            return f"{self.flops / self.seconds / 1e12:.3g} TFLOP/s"
        return f"{self.bytes / self.seconds / 1e12:.2f} TB/s"


def predict_gemm(
    gpu: Gpu,
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    layout: str = "nn",
    evidence: Evidence | None = None,
    all_configs: bool = False,
    wgmma: bool = True,
) -> list[Prediction]:
    """The prediction for the launcher's choice, then, if all_configs, for the others, each with its best split. Without
    wgmma: for the kernel on mma.sync."""
    evidence = evidence or Evidence.recorded()
    arithmetic = DTYPES[dtype]
    size = evidence.configs[arithmetic.index][0].element_bytes
    lines = (k if layout[0] == "n" else m, n if layout[1] == "n" else k)
    flops, moved = 2.0 * m * n * k, float((m * k + k * n + m * n) * size)
    ideal = max(flops * arithmetic.products / gpu.library_flops, moved / gpu.memory_bytes)

    def predict(work: Work, config: str, splits: int, chosen: bool, wgmma: bool = False) -> Prediction:
        time = time_of(work, gpu)
        return Prediction(
            gpu=gpu.name,
            op="gemm",
            case=f"{m} x {n} x {k}",
            dtype=dtype,
            config=config,
            splits=splits,
            chosen=chosen,
            waves=time.waves,
            blocks_at_once=work.blocks_per_sm,
            seconds=time.seconds,
            flops=flops,
            bytes=moved,
            of_library=ideal / time.seconds,
            binding=time.binding,
            resources=time.resources,
            aligned=wgmma or all(line * size % 16 == 0 for line in lines),
            wgmma=wgmma,
        )

    def with_wgmma(plan: PlanSm90, chosen: bool) -> Prediction:
        work = gemm_sm90_work(gpu, evidence.simt.gemm_order, m, n, k, dtype, plan)
        return predict(work, str(plan), plan.splits, chosen, wgmma=True)

    def with_mma_sync(config: GemmConfig, splits: int, chosen: bool) -> Prediction:
        work = gemm_work(evidence, gpu, m, n, k, dtype, layout, config, splits)
        return predict(work, str(config), splits, chosen)

    def best(predictions: list[Prediction]) -> list[Prediction]:
        return sorted(predictions, key=lambda p: p.seconds)[:1]

    if wgmma and (plan := choose(gpu, m, n, k, dtype, layout)):
        found = [with_wgmma(plan, True)]
        for index, cluster in itertools.product(range(NUM_CONFIGS), (1, 2)) if all_configs else ():
            parts = [(1, splits) for splits in SPLITS] + [(blocks, 1) for blocks in range(2, MAX_K_BLOCKS + 1)]
            plans = [choose(gpu, m, n, k, dtype, layout, index, cluster, *part) for part in parts]
            others = [p for p in plans if p and p.numbers != plan.numbers]
            # More than four waves of blocks would only make split sums.
            found += best([with_wgmma(p, False) for p in others if p.splits == 1 or p.waves(gpu.sms) <= 4])
        return found
    choice = evidence.simt.gemm_choice(arithmetic.index, m, n, k, gpu.compute_capability, gpu.sms)
    configs = evidence.configs[arithmetic.index]
    taken = (configs[choice["shape"]], choice["splits"])
    found = [with_mma_sync(*taken, True)]
    for config in configs if all_configs else ():
        splits = [s for s in SPLITS if s == 1 or s * 4 * config.block_k <= k]
        found += best([with_mma_sync(config, s, False) for s in splits if (config, s) != taken])
    return found


def predict_bucket(gpu: Gpu, pack: Pack, evidence: Evidence | None = None) -> Prediction:
    work = bucket_work(evidence or Evidence.recorded(), gpu, pack)
    time = time_of(work, gpu)
    return Prediction(
        gpu=gpu.name,
        op=pack.op,
        case=str(pack),
        dtype=pack.dtypes,
        config="bucket",
        splits=1,
        chosen=True,
        waves=time.waves,
        blocks_at_once=work.blocks_per_sm,
        seconds=time.seconds,
        flops=0.0,
        bytes=work.memory_bytes,
        of_library=work.memory_bytes / gpu.memory_bytes / time.seconds,
        binding=time.binding,
        resources=time.resources,
    )


def predict_attention(
    gpu: Gpu, problem: Problem, backward: bool, dtype: str = "bfloat16", evidence: Evidence | None = None
) -> Prediction:
    evidence = evidence or Evidence.recorded()
    works = attention_work(evidence, gpu, problem, dtype, backward)
    times = [time_of(work, gpu) for work in works]
    seconds = sum(time.seconds for time in times)
    resources = {name: sum(time.resources[name] for time in times) for name in RESOURCES}
    flops, moved = problem.flops(backward), 2 * problem.elements() * (2 if backward else 1)
    return Prediction(
        gpu=gpu.name,
        op=problem.op(),
        case=f"{problem.name()} {'backward' if backward else 'forward'}",
        dtype=dtype,
        config=str(attention_choice(evidence, gpu, problem, dtype, backward).tile),
        splits=1,
        chosen=True,
        waves=times[0].waves,
        blocks_at_once=works[0].blocks_per_sm,
        seconds=seconds,
        flops=flops,
        bytes=moved,
        of_library=max(flops / gpu.library_flops, moved / gpu.memory_bytes) / seconds,
        binding=max(resources, key=lambda name: resources[name]),
        resources=resources,
    )
