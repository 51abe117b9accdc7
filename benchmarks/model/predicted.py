"""What the paper model predicted beside what a GPU measured, and what that says of the model.

    python -m benchmarks.predicted gpu-check/results.jsonl
    python -m benchmarks.predicted --rehearse h200      # made-up times of the cases that a GPU measures; needs none

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

# The figures of gpus.py that a resource takes its time from.
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
NEAR = 1.1  # a speed within this of what was predicted is as predicted
ALIKE = 1.3  # speeds of a group within this of each other are one rate that is wrong
FARTHEST = 12
COLUMNS = ("what", "bound by", "cases", "its speed over the predicted one", "slowest to fastest", "what it means")


@dataclass(frozen=True)
class Compared:
    kind: str  # "gemm bfloat16"
    name: str
    binding: str
    predicted: float  # seconds
    measured: float

    @property
    def speed(self) -> float:
        """Of the one that was predicted: above 1 the kernel is faster than the model thinks."""
        return self.predicted / self.measured


def predict(gpu: Gpu, key: measured.Key) -> prediction.Prediction | None:
    """Of a key of `measured.key_of`; None for what is not modelled."""
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
    """What is predicted of the measurements of ours; the newest of a case counts."""
    found = []
    for sides in results.by_case(measurements).values():
        m = sides.get(OURS)
        key = measured.key_of(m) if m is not None and m.seconds and m.device == "cuda" else None
        predicted = predict(gpu, key) if key is not None else None
        if m is None or m.seconds is None or predicted is None:
            continue
        phase = m.phase if m.suite == "attention" else ""
        kind = " ".join(filter(None, (m.suite, phase, m.op if m.suite == "bucket" else m.dtype)))
        name = " ".join(filter(None, (m.op, phase, m.case, m.dtype)))
        found.append(Compared(kind, name, predicted.binding, predicted.seconds, m.seconds))
    return found


def meaning(gpu: Gpu, binding: str, speeds: Sequence[float]) -> str:
    """What a group of cases that one resource binds says of the model."""
    speed = statistics.median(speeds)
    if 1 / NEAR <= speed <= NEAR:
        return "as predicted"
    if max(speeds) > ALIKE * min(speeds):
        return "not one rate: the kernels or what the model counts of them, case by case"
    names = FIGURES[binding]
    figures = " x ".join(f"`{name}`" for name in names)
    if binding == "latency":
        return f"{' or '.join(f'`{name}`' for name in names)} in gpus.py is {1 / speed:.2f} times as long"
    value = f" ({getattr(gpu, names[0]):.4g} -> {speed * getattr(gpu, names[0]):.4g})" if len(names) == 1 else ""
    slower = "less of it is reached, or something binds that is not counted" if speed < 1 else "more of it is reached"
    return f"{slower}: {figures} in gpus.py times {speed:.2f}{value}"


def ceilings(measurements: Sequence[Measurement], gpu: Gpu) -> list[list[str]]:
    """Rows of what PyTorch reaches, beside what gpus.py says that a library does."""
    rows = []
    of_16_bits = [m.peak_flops for m in measurements if m.dtype in ("bfloat16", "float16")]
    for title, figure, reached in (
        ("copy of PyTorch", "memory_bytes", [m.peak_bandwidth for m in measurements]),
        ("largest product of PyTorch", "library_flops", of_16_bits),
    ):
        if best := max(reached, default=0.0):
            speed = best / getattr(gpu, figure)
            says = "as in gpus.py" if 1 / 1.05 <= speed <= 1.05 else f"`{figure}` is {best:.4g}, not what gpus.py has"
            rows.append([title, "", "1", f"{speed:.2f}", "", says])
    return rows


def compare_tables(measurements: Sequence[Measurement], gpu: Gpu) -> str:
    found = compare(measurements, gpu)
    groups: dict[tuple[str, str], list[float]] = {}
    for each in found:
        groups.setdefault((each.kind, each.binding), []).append(each.speed)
    rows = ceilings([m for m in measurements if m.device == "cuda"], gpu)
    for (kind, binding), speeds in sorted(groups.items()):
        spread = f"{min(speeds):.2f} to {max(speeds):.2f}" if len(speeds) > 1 else ""
        middle = f"{statistics.median(speeds):.2f}"
        rows.append([kind, binding, str(len(speeds)), middle, spread, meaning(gpu, binding, speeds)])
    text = f"Of {gpu.name}, {len(found)} cases that are modelled (docs/model.md).\n\n{tables.markdown(COLUMNS, rows)}"
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
        head = ("farthest from it", "bound by", "predicted, µs", "came, µs", "speed over predicted")
        text += f"\n{tables.markdown(head, cells)}"
    return text


def gpu_of(measurements: Sequence[Measurement]) -> Gpu | None:
    names = {results.slug(str(m.environment.get("device", ""))) for m in measurements if m.device == "cuda"}
    return next((gpu for gpu in GPUS.values() if gpu.folder in names), None)


def made_up(gpu: Gpu) -> list[Measurement]:
    """The cases that a GPU measures, each exactly as long as predicted."""
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
    parser.add_argument("results", nargs="?", type=Path, help="a results.jsonl, or a folder with some")
    parser.add_argument("--rehearse", choices=list(GPUS), help="without results, for this GPU")
    parser.add_argument("--to", type=Path, metavar="FILE", help="also write it there")
    options = parser.parse_args(arguments)
    if (options.results is None) == (options.rehearse is None):
        parser.error("expected either results or --rehearse GPU")
    try:
        if options.rehearse:
            gpu, measurements = GPUS[options.rehearse], made_up(GPUS[options.rehearse])
            text = f"A rehearsal with made-up times, each as predicted. {compare_tables(measurements, gpu)}"
        else:
            measurements = results.read(options.results)
            known = gpu_of(measurements)
            if known is None:
                names = ", ".join(gpu.name for gpu in GPUS.values())
                text = f"Measured on no GPU that benchmarks/model/gpus.py has ({names}): nothing is predicted.\n"
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
