"""Measurements made up for tests of what reads them: all suites, several baselines, failures, and known noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.results import OURS, Measurement, quartile_spread

CPU = "Made-up Processor, 2 cores"
GPU = "NVIDIA H100 (made up)"
PEAKS = {"cpu": ({"float32": 1.4e11, "bfloat16": 3e11}, 12e9), "cuda": ({"float32": 6e13, "bfloat16": 6.5e14}, 2.6e12)}
ABSENT = {"flash_attn": "not installed", "xformers": "not installed"}
Slower = Callable[[Measurement], float]


def _problems(device: str) -> Iterator[tuple[Measurement, dict[str, float]]]:
    """Cases without times, and how many times as long as ours their baselines take."""
    scale = 1 if device == "cpu" else 8

    def case(suite: str, op: str, phase: str, group: str, name: str, **values: object) -> Measurement:
        return Measurement(suite, op, phase, group, name, side=OURS, device=device, **values)

    for dtype, bytes_each in (("float32", 4), ("bfloat16", 2)):
        for op, others in (
            ("gemm", {"torch.matmul": 1.02}),
            ("linear bias gelu", {"torch": 1.3, "torch.compile": 1.12}),
        ):
            for m, group in [(64 * 2**i * scale, "squares") for i in range(5)] + [(2**i, "skinny") for i in range(9)]:
                n = m if group == "squares" else 512 * scale
                yield (
                    case(
                        "gemm", op, "forward", group, f"{m} × {n} × {n}", dtype=dtype,
                        size=m, size_name="M = N = K" if group == "squares" else "M",
                        flops=2.0 * m * n * n, bytes=float(bytes_each * (2 * m * n + n * n)),
                    ),
                    others,
                )  # fmt: skip
    for phase, factor in (("forward", 1.0), ("backward", 2.5)):
        for causal in (False, True):
            for dim in (64, 128):
                for length in (512, 1024, 2048, 4096):
                    flops = 4.0 * length * 4096 * scale * 2048 * factor / (1 + causal)
                    others = {"SDPA FLASH": 1.25 + 0.2 * causal, "SDPA MATH": 6.0, **dict.fromkeys(ABSENT, 1.0)}
                    if device == "cuda":
                        others |= {"SDPA CUDNN": 0.9, "FlexAttention": 1.3, "flashinfer": 1.05}
                    yield (
                        case(
                            "attention", "flash_attention" + " causal" * causal, phase, "paper grid",
                            f"S={length} D={dim}", dtype="bfloat16", size=length, size_name="S",
                            flops=flops, bytes=4.0 * 4096 * scale * 2048 * 2 * factor,
                        ),
                        others,
                    )  # fmt: skip
    for op in ("pack", "unpack"):
        for i, name in enumerate(("ResNet-50", "GPT-2", "Llama-8B layer")):
            count = float(26e6 * 4**i)
            others = {"torch._foreach_copy_": 1.1, "passes": 3.2}
            yield (
                case("bucket", op, "forward", "parameter sets", name, dtype="float32", bytes=8 * count, size=count,
                     size_name="parameters"),
                others,
            )  # fmt: skip
    yield (
        case("train", "GPT, 2 processes", "step", "gpt", "4 layers of 256", dtype="float32"),
        {"DDP": 1.1, "DDP views": 1.06},
    )
    for op, factor in (("linear", 0.5), ("flash_attention", 0.33)):
        yield case("overhead", op, "forward", "calls", "tiny tensors", dtype="float32"), {"torch.mul": factor}
    yield case("build", "whole library", "", "build", "from nothing", dtype=""), {}


def _seconds(m: Measurement) -> float:
    """The roofline with a latency."""
    if not (m.flops or m.bytes):
        return {"train": 0.31, "overhead": 4e-6, "build": 140.0}[m.suite]
    peaks, bandwidth = PEAKS[m.device]
    return 3e-6 + max(m.flops / peaks[m.dtype], m.bytes / bandwidth) / 0.8


def sample(
    device: str = "cpu",
    *,
    seed: int = 0,
    date: str = "2026-11-20T10:00:00",
    commit: str = "0123456789ab",
    noise: float = 0.01,
    rounds: int = 11,
    machine: float = 1.0,
    slower: Slower = lambda ours: 1.0,
    torch: str = "2.11.0",
) -> list[Measurement]:
    """One run. `noise` is the deviation of a round's logarithm, `machine` multiplies all times, `slower` ours."""
    generator = random.Random(seed)
    name = CPU if device == "cpu" else GPU
    environment = {
        "device": name,
        "commit": commit,
        "torch": torch,
        "cuda_ext": "0.1.0",
        "python": "3.11.7",
        "cores": 2,
    }
    measurements = []
    for ours, others in _problems(device):
        truth = _seconds(ours) * machine

        def draw(seconds: float) -> list[float]:
            return [seconds * generator.lognormvariate(0, noise) for _ in range(rounds)]

        peaks, bandwidth = PEAKS[device]
        common = vars(ours) | {
            "peak_flops": peaks.get(ours.dtype, 0.0), "peak_bandwidth": bandwidth, "environment": environment,
            "date": date, "timer": "clock" if device == "cpu" else "events", "rotation": 3,
        }  # fmt: skip
        times = {OURS: draw(truth * slower(ours))}
        for side, factor in others.items():  # in truth not the same in all cases, but in all runs
            varied = factor * random.Random(f"{ours.problem} {side}").lognormvariate(0, 0.1)
            times[side] = draw(truth * varied)
        for side, seconds in times.items():
            values = common | {"side": side, "error": 2e-3}
            failure = ABSENT.get(side, "")
            if side == "SDPA MATH" and ours.size >= 4096:
                failure = "RuntimeError: expected 64 GiB of free memory,\ngot 12 GiB"
            if failure:
                measurements.append(Measurement(**values | {"failure": failure, "error": None}))
                continue
            ratios = [theirs / own for theirs, own in zip(seconds, times[OURS])]
            median = statistics.median(seconds)
            values |= {"seconds": median, "spread": quartile_spread(seconds) / median, "rounds": rounds}
            if side != OURS:
                values |= {"ratio": statistics.median(ratios), "ratio_spread": quartile_spread(ratios)}
            measurements.append(Measurement(**values))
    return measurements


def write(path: Path, *measurement_lists: list[Measurement]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(m.to_json() + "\n" for each in measurement_lists for m in each))
    return path
