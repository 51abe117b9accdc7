"""Compares GPU measurements with the paper model, and shows which of its figures are wrong.

    python -m benchmarks.predicted gpu-check/results.jsonl
    python -m benchmarks.predicted --rehearse h200      # with predicted times as measurements

It prints Markdown. The results must be from a GPU of benchmarks/model/gpus.py. This command itself needs no GPU; its
first use compiles the emulator, which the model queries.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.model import measured, prediction, tables
from benchmarks.model.bucket_work import Pack
from benchmarks.model.evidence import DTYPES, ModelError, NotModelledError
from benchmarks.model.gpus import GPUS, Gpu
from benchmarks.results import OURS, Measurement
from benchmarks.suites.bench_attention import Problem

# resource -> the figures of gpus.py that determine its time
FIGURES = {
    "tensor": ("multiply_adds", "clock"),
    "shared": ("shared_bytes",),
    "issue": ("issued",),
    "special": ("special",),
    "l2": ("l2_bytes",),
    "reduce": ("reduced_bytes",),
    "memory": ("memory_bytes",),
    "latency": ("memory_latency", "launch"),
}
# The same for kernels on wgmma, where they differ.
FIGURES_WGMMA = {"tensor": ("wgmma_multiply_adds", "wgmma_clock"), "l2": ("l2_bytes", "port_bytes")}
NEAR = 1.1  # measured and predicted speeds within this factor agree
ALIKE = 1.3  # if the speeds of a group are within this factor of each other, one rate is wrong
FARTHEST = 12
GROUPS = ("group", "bound by", "cases", "measured / predicted speed", "slowest to fastest")


@dataclass(frozen=True)
class Compared:
    kind: str  # "gemm bfloat16", "gemm bfloat16 wgmma"
    name: str
    binding: str
    predicted: float  # seconds
    measured: float

    @property
    def speed(self) -> float:
        """Measured / predicted speed: above 1 the kernel is faster than predicted."""
        return self.predicted / self.measured


def predict(gpu: Gpu, key: measured.Key) -> prediction.Prediction | None:
    """The prediction for a key of `measured.key_of`; None if it is not modelled."""
    kind, *what = key
    try:
        if kind == "attention":
            problem, backward, dtype = what
            assert isinstance(problem, Problem)
            return prediction.predict_attention(gpu, problem, bool(backward), str(dtype))
        if kind == "gemm":
            *shape, dtype, layout = what
            m, n, k = (int(size) for size in shape)  # type: ignore[call-overload]
            return prediction.predict_gemm(gpu, m, n, k, str(dtype), str(layout))[0] if dtype in DTYPES else None
        elements, entries, tensors, of_bucket = what
        pack = Pack(str(kind), str(tensors), str(of_bucket), elements, entries)  # type: ignore[arg-type]
        return prediction.predict_bucket(gpu, pack)
    except NotModelledError:
        return None


def compare(measurements: Iterable[Measurement], gpu: Gpu) -> list[Compared]:
    """Pairs the measurements of ours with predictions; the newest of a case counts."""
    found = []
    for sides in results.by_case(measurements).values():
        m = sides.get(OURS)
        key = measured.key_of(m) if m is not None and m.seconds and m.device == "cuda" else None
        predicted = predict(gpu, key) if key is not None else None
        if m is None or m.seconds is None or predicted is None:
            continue
        phase = m.phase if m.suite == "attention" else ""
        instruction = "wgmma" if predicted.wgmma else ""
        kind = " ".join(filter(None, (m.suite, phase, m.op if m.suite == "bucket" else m.dtype, instruction)))
        name = " ".join(filter(None, (m.op, phase, m.case, m.dtype)))
        found.append(Compared(kind, name, predicted.binding, predicted.seconds, m.seconds))
    return found


def meaning(gpu: Gpu, kind: str, binding: str, speeds: Sequence[float]) -> str:
    """What the speeds of a group of cases of a kind with the same limiting resource mean for the model."""
    speed = statistics.median(speeds)
    if 1 / NEAR <= speed <= NEAR:
        return "as predicted"
    if max(speeds) > ALIKE * min(speeds):
        return "no single rate is wrong: look at the kernels, or at their counted work, case by case"
    names = (FIGURES | FIGURES_WGMMA if kind.endswith(" wgmma") else FIGURES)[binding]
    figures = " x ".join(f"`{name}`" for name in names)
    if binding == "latency":
        return f"{' or '.join(f'`{name}`' for name in names)} in gpus.py should be {1 / speed:.2f} times as long"
    value = f" ({getattr(gpu, names[0]):.4g} -> {speed * getattr(gpu, names[0]):.4g})" if len(names) == 1 else ""
    slower = "the rate is lower, or something that is not modelled is the limit" if speed < 1 else "the rate is higher"
    return f"{slower}: {figures} in gpus.py should be {speed:.2f} times as high{value}"


def ceilings(measurements: Sequence[Measurement], gpu: Gpu) -> list[list[str]]:
    """Rows that compare the rates of PyTorch with those of libraries in gpus.py."""
    rows = []
    of_16_bits = [m.peak_flops for m in measurements if m.dtype in ("bfloat16", "float16")]
    for title, figure, reached in (
        ("PyTorch's copy", "memory_bytes", [m.peak_bandwidth for m in measurements]),
        ("PyTorch's largest product", "library_flops", of_16_bits),
    ):
        if best := max(reached, default=0.0):
            speed = best / getattr(gpu, figure)
            says = "as in gpus.py" if 1 / 1.05 <= speed <= 1.05 else f"`{figure}` in gpus.py should be {best:.4g}"
            rows.append([title, "", "1", f"{speed:.2f}", "", says])
    return rows


def speeds_of_groups(found: Iterable[Compared]) -> dict[tuple[str, str], list[float]]:
    """(kind, limiting resource) -> measured / predicted speed of each case."""
    speeds: dict[tuple[str, str], list[float]] = {}
    for each in sorted(found, key=lambda each: (each.kind, each.binding)):
        speeds.setdefault((each.kind, each.binding), []).append(each.speed)
    return speeds


def groups(found: Iterable[Compared]) -> list[list[str]]:
    """Rows of GROUPS; the speed is the median."""
    rows = []
    for (kind, binding), speeds in speeds_of_groups(found).items():
        spread = f"{min(speeds):.2f} to {max(speeds):.2f}" if len(speeds) > 1 else ""
        rows.append([kind, binding, str(len(speeds)), f"{statistics.median(speeds):.2f}", spread])
    return rows


def compare_tables(measurements: Sequence[Measurement], gpu: Gpu) -> str:
    found = compare(measurements, gpu)
    meanings = [meaning(gpu, *group, speeds) for group, speeds in speeds_of_groups(found).items()]
    rows = ceilings([m for m in measurements if m.device == "cuda"], gpu)
    rows += [[*row, means] for row, means in zip(groups(found), meanings)]
    text = f"{gpu.name}: {len(found)} modelled cases (docs/model.md).\n\n"
    text += tables.markdown((*GROUPS, "meaning"), rows)
    far = sorted((each for each in found if not 1 / NEAR <= each.speed <= NEAR), key=lambda each: each.speed)
    if far := far if len(far) <= FARTHEST else [*far[: FARTHEST // 2], *far[-(FARTHEST // 2) :]]:
        cells = [
            [
                each.name,
                each.binding,
                *map(tables.microseconds, (each.predicted, each.measured)),
                f"{each.speed:.2f}",
            ]
            for each in far
        ]
        head = ("farthest from predictions", "bound by", "predicted, µs", "measured, µs", "measured / predicted speed")
        text += f"\n{tables.markdown(head, cells)}"
    return text


def gpu_of(measurements: Sequence[Measurement]) -> Gpu | None:
    names = {results.slug(str(m.environment.get("device", ""))) for m in measurements if m.device == "cuda"}
    return next((gpu for gpu in GPUS.values() if gpu.folder in names), None)


def made_up(gpu: Gpu) -> list[Measurement]:
    """The GPU cases of the suites, with predicted times instead of measurements."""
    from benchmarks.suites.worker import selected

    found = []
    for suite in ("gemm", "attention", "bucket"):
        for case in selected(suite, "cuda", ""):
            m = Measurement(
                suite,
                case.op,
                case.phase,
                case.group,
                case.name,
                case.dtype,
                OURS,
                "cuda",
                extra=case.extra,
                seconds=1.0,
            )
            key = measured.key_of(m)
            predicted = predict(gpu, key) if key is not None else None
            if predicted is not None:
                found.append(Measurement(**{**vars(m), "seconds": predicted.seconds}))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a results.jsonl, or a folder that contains some")
    parser.add_argument("--rehearse", choices=list(GPUS), help="use predicted times of this GPU instead of results")
    parser.add_argument("--to", type=Path, metavar="FILE", help="also write the output to this file")
    options = parser.parse_args(arguments)
    if (options.results is None) == (options.rehearse is None):
        parser.error("expected either results or --rehearse GPU")
    try:
        if options.rehearse:
            gpu, measurements = GPUS[options.rehearse], made_up(GPUS[options.rehearse])
            text = f"A rehearsal: the measurements are predicted times. {compare_tables(measurements, gpu)}"
        else:
            measurements = results.read(options.results)
            known = gpu_of(measurements)
            if known is None:
                names = ", ".join(gpu.name for gpu in GPUS.values())
                text = f"No measurement is from a GPU of benchmarks/model/gpus.py ({names}): nothing is predicted.\n"
            else:
                text = compare_tables(measurements, known)
    except (results.ResultsError, ModelError, OSError) as error:
        print(f"benchmarks.predicted: {error}", file=sys.stderr)
        return 2
    print(text)
    if options.to:
        options.to.parent.mkdir(parents=True, exist_ok=True)
        options.to.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
