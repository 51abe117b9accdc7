"""Measures cuda_ext against its baselines, interleaved in one process, and shows the results.

    python -m benchmarks                        # all suites, on the GPU if there is one
    python -m benchmarks gemm attention         # some of: gemm attention masks loss experts fp8 bucket train overhead
                                                #   build plans
    python -m benchmarks report DIR             # writes an HTML page from any results
    python -m benchmarks compare OLD NEW        # lists what became slower, beyond noise
    python -m benchmarks model                  # predicts times on a GPU; needs none
    python -m benchmarks readme                 # writes benchmarks/results/README.md, and the README's summary of it

The last four have their own --help. A baseline that is not installed gets a line that says so; none is required.
Results are written as one JSON object per line, each with its environment.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import environment, results
from benchmarks.results import OURS, UNFINISHED, Measurement
from benchmarks.suites import runner
from benchmarks.suites.measure import AGAIN

OTHER_COMMANDS = {
    "report": "benchmarks.presentation.report",
    "compare": "benchmarks.presentation.compare",
    "model": "benchmarks.model.command",
    "readme": "benchmarks.presentation.readme",
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in OTHER_COMMANDS:
        return importlib.import_module(OTHER_COMMANDS[arguments[0]]).main(arguments[1:])
    options = parse(arguments)
    plan = runner.Plan(
        suites=options.suites,
        device=options.device,
        minutes=options.minutes,
        only=options.only,
        without=options.without,
        timer=options.timer,
        against_itself=options.aa,
        threads=options.threads,
        seed=options.seed,
    )
    if options.list:
        return list_cases(plan)
    folder: Path = options.out or Path("runs", "benchmarks", results.slug(environment.device_name(options.device)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = (folder / "results.jsonl").open("a")
    except OSError as error:
        print(
            f"benchmarks: cannot write to {folder}: {error.strerror}; choose another folder by --out", file=sys.stderr
        )
        return 2
    plan.log = folder / "log.txt"
    if options.resume:
        try:
            earlier = results.read(folder / "results.jsonl")
        except results.ResultsError as error:
            print(f"benchmarks: --resume: {error}; choose another folder by --out", file=sys.stderr)
            return 2
        plan.done = {m.problem for m in earlier if not m.failure.startswith(results.OUT_OF_TIME)}
    measured = run(plan, target)
    if options.resume:
        measured = earlier + measured
    if not measured:
        print("benchmarks: nothing was measured", file=sys.stderr)
        return 1
    if not options.no_plots:
        show_files(folder, measured)
    if options.record:
        record(measured)
    if options.aa:
        return judge(measured)
    if not any(m.seconds for m in measured):
        return 1
    return UNFINISHED if options.resume and unfinished(measured, plan.suites) else 0


def unfinished(measured: list[Measurement], suites: Sequence[str]) -> bool:
    """Whether the time ran out before every case was measured."""
    done = {m.problem for m in measured if not m.failure.startswith(results.OUT_OF_TIME)}
    return any(m.problem not in done for m in measured if m.suite in suites)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="default: all but plans")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit of the whole run (default 9); cases without time are reported as out of time",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose op, shape, group or dtype matches")
    parser.add_argument(
        "--without", default="", metavar="REGEX", help="leave out baselines whose name matches, such as torch.compile"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for plots, page and results.jsonl, which is appended to (default: runs/benchmarks/DEVICE)",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="also store the results in benchmarks/results, from which the README is generated",
    )
    parser.add_argument(
        "--aa",
        action="store_true",
        help="compare ours with itself: shows the error of the method; exit status 0 if it is below 3 %%",
    )
    parser.add_argument(
        "--timer",
        choices=("clock", "events", "do_bench"),
        default="",
        help="default: the clock on a CPU; CUDA events on a GPU, or a captured graph if calls are short",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: PyTorch's default)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random inputs (default: random)")
    parser.add_argument("--list", action="store_true", help="list the cases without measuring them")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only cases that results.jsonl in the folder lacks; exit status 75 if the time did not suffice",
    )
    parser.add_argument("--no-plots", action="store_true", help="write only results.jsonl")
    options = parser.parse_args(arguments)
    unknown = [suite for suite in options.suites if suite not in runner.SUITES]
    if unknown:
        parser.error(f"expected suites of {', '.join(runner.SUITES)}, got {', '.join(unknown)}")
    options.suites = [suite for suite in runner.SUITES if suite in (options.suites or runner.DEFAULT_SUITES)]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: PyTorch finds no GPU; run `python -m cuda_ext.info` to see why, or use --device cpu"
        )
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("only", "without"):
        try:
            re.compile(getattr(options, name))
        except re.error as error:
            parser.error(f"--{name} {getattr(options, name)}: expected a regular expression: {error}")
    if options.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {options.minutes:g}")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def list_cases(plan: runner.Plan) -> int:
    from benchmarks.suites.worker import selected

    for suite in plan.suites:
        for case in selected(suite, plan.device, plan.only, plan.without):
            sides = ", ".join(side for side in case.sides if side != OURS)
            print(f"{suite:<10} {case.op} | {case.phase} | {case.name} | {case.dtype} | {sides}")
    return 0


def run(plan: runner.Plan, target: object) -> list[Measurement]:
    from benchmarks.presentation import table

    print(
        f"{environment.device_name(plan.device)}, torch {torch.__version__}, "
        f"{plan.threads or torch.get_num_threads()} threads; at most {plan.minutes:g} minutes, --seed {plan.seed}"
    )
    measured: list[Measurement] = []
    with _progress(plan) as progress, contextlib.suppress(KeyboardInterrupt), _interrupted_by_signals():
        for rows in runner.run(plan, progress):
            measured += rows
            for row in rows:
                target.write(row.to_json() + "\n")  # type: ignore[attr-defined]
            target.flush()  # type: ignore[attr-defined]
    table.show(measured)
    return measured


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C: the measuring process is stopped, and its results so far are shown. A signal
    that is ignored, such as SIGHUP under nohup, stays ignored."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    asked = [number for number, handler in previous.items() if handler != signal.SIG_IGN]
    for number in asked:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, previous[number])


class _Lines:
    """Prints a line per case, if rich is not installed or the output is not a terminal."""

    def __init__(self, minutes: float) -> None:
        self._suite, self._total, self._number = "", 0, 0
        self._began = time.time()

    def start(self, suite: str, total: int) -> None:
        self._suite, self._total, self._number = suite, total, 0

    def case(self, text: str) -> None:
        self._number += 1
        elapsed = time.time() - self._began
        total = f"/{self._total}" if self._total else ""
        print(f"{elapsed:5.0f} s  {self._suite} {self._number}{total}  {text}", flush=True)

    def side(self, name: str) -> None:
        pass

    def done(self, rows: list[Measurement]) -> None:
        pass


@contextlib.contextmanager
def _progress(plan: runner.Plan) -> Iterator[runner.Progress]:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _Lines(plan.minutes)
        return
    if not sys.stdout.isatty():
        yield _Lines(plan.minutes)
        return

    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[case]}")) as bar:
        suites = (runner.CEILINGS, *plan.suites)
        tasks = {suite: bar.add_task(suite, total=None, start=False, case="") for suite in suites}

        class Bar:
            def start(self, suite: str, total: int) -> None:
                self.task = tasks[suite]
                bar.start_task(self.task)
                bar.update(self.task, total=total or None)

            def case(self, text: str) -> None:
                self.text = text
                bar.update(self.task, case=text)

            def side(self, name: str) -> None:
                bar.update(self.task, case=f"{self.text}: {name}" if name else self.text)

            def done(self, rows: list[Measurement]) -> None:
                bar.update(self.task, advance=1, case="")

        yield Bar()


def show_files(folder: Path, measured: list[Measurement]) -> None:
    """Writes plots of this run, and the page of all results in the folder."""
    from benchmarks.presentation import report

    try:
        from benchmarks.presentation import plots

        plots.write_plots(measured, folder)
    except ImportError as error:
        print(f"no plots: {error}; pip install matplotlib")
    report.main([str(folder), "--out", str(folder / "report.html")])
    print(f"results, plots and report.html are in {folder}")


def record(measured: list[Measurement]) -> None:
    """Writes to the file of this device and day, replacing its results of the same suites."""
    folder = results.ROOT / results.slug(environment.device_name(measured[0].device))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}.jsonl"
    suites = {m.suite for m in measured}
    earlier = [m for m in results.read(path) if m.suite not in suites] if path.exists() else []
    path.write_text("".join(m.to_json() + "\n" for m in [*earlier, *measured]))
    print(f"recorded in {os.path.relpath(path)}; `python -m benchmarks readme` updates the README")


def judge(measured: list[Measurement]) -> int:
    """The exit status of a comparison of ours with itself."""
    import statistics

    ratios = [m.ratio for m in measured if m.side == AGAIN and m.ratio is not None]
    if not ratios:
        print("benchmarks: nothing was measured", file=sys.stderr)
        return 1
    median = statistics.median(ratios)
    largest = max(ratios, key=lambda r: abs(r - 1))
    print(f"ours against itself: median ratio {median:.4f} of {len(ratios)} cases; farthest from 1: {largest:.3f}")
    return 0 if abs(median - 1) < 0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
