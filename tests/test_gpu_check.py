"""The GPU check keeps its limits whatever a stage does, and its dry run passes."""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from processes import is_alive

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import build_in_time, machine, stage_table
from benchmarks.gpu_check import report as gpu_report
from benchmarks.gpu_check import stages as stages_module
from benchmarks.gpu_check.report import MAX_BYTES, FolderError, prepare, tidy
from benchmarks.gpu_check.stages import LOG_HEAD, LOG_TAIL, Log, Outcome, Stage
from benchmarks.gpu_check.state import State
from benchmarks.results import OURS, Measurement, read
from cuda_ext import _toolchain

# Ignores SIGTERM, as does its child in a separate session; both print their ids.
HANG = """
import os, signal, subprocess, sys, time
def hang():
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), file=file, flush=True)
    while True:
        time.sleep(9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
hang()
"""


FORK = multiprocessing.get_context("fork")


def python(name: str, code: str, *arguments: str, estimate: float = 1.0, **options: object) -> Stage:
    return Stage(name, (("{python}", "-c", code, *arguments),), estimate, **options)  # type: ignore[arg-type]


def drive(stages: list[Stage], options: list[str], terminal: Path, probe: Callable[[float], Any]) -> None:
    file = os.open(terminal, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    gpu_check.probe = probe
    sys.exit(gpu_check.main(options, stages))


def stand_in(patience: float) -> dict[str, Any]:
    """A fake machine; the real probe is tested separately."""
    return {"device": "a stand-in"}


def start(
    out: Path, stages: list[Stage], *arguments: str, minutes: float = 0.5, probe: Callable[[float], Any] = stand_in
) -> ForkProcess:
    """Starts a check in a forked process, because it adopts and kills processes; PyTorch is already loaded."""
    options = ["--dry-run", "--out", str(out), "--minutes", str(minutes), *arguments]
    if "--state" not in arguments:
        options += ["--state", str(out.with_name(f"{out.name}.state"))]
    process = FORK.Process(target=drive, args=(stages, options, out.with_name("terminal"), probe))
    process.start()
    return process


def check(out: Path, stages: list[Stage], *arguments: str, minutes: float = 0.5) -> tuple[int, str, dict[str, str]]:
    """Returns the exit status, the terminal output, and the verdicts in the report."""
    process = start(out, stages, *arguments, minutes=minutes)
    process.join(60 * minutes + 60)
    assert process.exitcode is not None, "it has not ended"
    terminal = out.with_name("terminal")
    text = terminal.read_text()
    terminal.unlink()
    return process.exitcode, text, verdicts(out)


def verdicts(out: Path) -> dict[str, str]:
    if not (out / "report.md").exists():
        return {}
    table = (out / "report.md").read_text().partition("### Stages")[2].partition("|---|")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| ([\w-]+) \| ([\w ]+) \|", table, re.MULTILINE))


def wait_for(path: Path, lines: int) -> list[str]:
    end = time.monotonic() + 100
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < end, f"{path} has not come"
        time.sleep(0.05)
    return path.read_text().splitlines()


def test_a_failure_does_not_stop_the_next(tmp_path: Path) -> None:
    stages = [
        python("breaks", "import sys; print('the reason'); sys.exit(3)"),
        python("needy", "print('never')", needs=("breaks",)),
        Stage("absent", (("no-such-command",), ("{python}", "-c", "print('still')")), 1),
        python("last", "print('fine')"),
    ]
    status, terminal, found = check(tmp_path / "out", stages)
    assert status == 1, terminal
    assert found == {"breaks": "FAILED", "needy": "not run", "absent": "FAILED", "last": "passed"}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "the reason" in report and "exit status 3" in report and "needs breaks" in report
    log = (tmp_path / "out" / "logs.txt").read_text()
    assert "still" in log and "fine" in log and "never" not in log
    assert "a stand-in" in report and "so far" not in report


@pytest.mark.sampled
def test_a_hang_ends_with_all_its_processes(tmp_path: Path) -> None:
    stages = [python("hangs", HANG, str(tmp_path / "pids"), most=4, least=1), python("last", "print('fine')")]
    status, terminal, found = check(tmp_path / "out", stages)
    assert (status, found) == (1, {"hangs": "STOPPED", "last": "passed"}), terminal
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(pid)]
    assert "not finished within 4 s" in (tmp_path / "out" / "report.md").read_text()


def test_processes_left_by_a_stage_are_killed(tmp_path: Path) -> None:
    code = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, '-c', {HANG!r}, sys.argv[1]])
pids = pathlib.Path(sys.argv[1])
while not pids.exists() or pids.read_text().count("\\n") < 2:
    time.sleep(0.01)
"""
    status, _, found = check(tmp_path / "out", [python("leaves", code, str(tmp_path / "pids"))])
    assert (status, found) == (0, {"leaves": "passed"})
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if is_alive(int(pid))]


@pytest.mark.sampled
def test_total_time_is_kept_even_if_all_stages_hang(tmp_path: Path) -> None:
    stages = [python(f"hangs{i}", HANG, str(tmp_path / "pids"), least=1) for i in range(9)]
    status, terminal, found = check(tmp_path / "out", stages, minutes=0.1)
    assert "no time left" in terminal
    passed = re.search(r"^\[0:(\d\d) of 0:06\] .*report.md$", terminal, re.MULTILINE)
    assert passed and int(passed[1]) < 20, terminal  # a busy machine may take longer
    assert status == 1
    assert set(found.values()) == {"STOPPED", "not run"}, terminal
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if is_alive(int(pid))]


def test_unused_time_goes_to_later_stages(tmp_path: Path) -> None:
    stages = [python("long", "", estimate=3), python("next", ""), python("small", "", most=7.5)]
    _, terminal, _ = check(tmp_path / "out", stages)
    limits = dict(re.findall(r"\] (\w+), at most (\S+) \.\.\.", terminal))
    # Of 27 s, after a reserve of 3: 3/5, then 1/2 of nearly all of it, instead of 1/5.
    seconds = {name: int(limit.removeprefix("0:")) for name, limit in limits.items()}
    assert 14 <= seconds["long"] <= 16 and 8 <= seconds["next"] <= 13 and seconds["small"] == 7


def test_a_crash_is_reported_with_its_last_output(tmp_path: Path) -> None:
    code = "import os, signal; print('forward D=64:', end=' ', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    stages = [python("crashes", code, key=":$"), python("last", "print('fine')")]
    status, terminal, found = check(tmp_path / "out", stages)
    assert (status, found) == (1, {"crashes": "FAILED", "last": "passed"})
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.splitlines()[2] == "- **BROKEN: crashes**: ended by SIGSEGV: forward D=64:"
    assert "**BROKEN: crashes**: ended by SIGSEGV: forward D=64:" in terminal


BROKEN_GEMM = """
import sys
import cuda_ext
from cuda_ext import testing
cuda_ext.gated_mlp = lambda *tensors, **options: -testing.reference_gated_mlp(*tensors, **options)
from benchmarks.gpu_check import correct
sys.exit(correct.main(["all", "simt", "ga"]))
"""


@pytest.mark.sampled
def test_the_first_lines_name_the_family_that_is_broken(tmp_path: Path) -> None:
    (known,) = [stage for stage in stage_table.stages_of_dry_run() if stage.name == "correct"]
    stages = [python("environment", ""), replace(known, commands=(("{python}", "-c", BROKEN_GEMM),), needs=())]
    status, _, found = check(tmp_path / "out", [*stages, python("last", "")], minutes=2)
    assert (status, found["correct"], found["last"]) == (1, "FAILED", "passed")
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    assert lines[0] == "# GPU check: a stand-in, dry run"
    named = "- **BROKEN: correct**: exit status 1: gemm: gated_mlp 33 x 72 x 40: WRONG: output: "
    assert lines[2].startswith(named), lines[2]
    assert lines[3] == "- Of 3 stages: 2 passed, 1 FAILED"


@pytest.mark.sampled
def test_a_stage_that_fills_the_disk_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flood = tmp_path / "flood"

    def disk_usage(path: object) -> SimpleNamespace:
        return SimpleNamespace(free=(1 << 20) if flood.exists() else (64 << 30))

    monkeypatch.setattr(stages_module.shutil, "disk_usage", disk_usage)
    floods = f"import pathlib, time; pathlib.Path({str(flood)!r}).touch(); time.sleep(99)"
    # Its files in the scratch folder are removed at once.
    fills = "import pathlib, sys; pathlib.Path(sys.argv[1], 'much').write_bytes(bytes(1 << 20))"
    looks = f"import os, sys; os.remove({str(flood)!r}); sys.exit(len(os.listdir(sys.argv[1])))"
    stages = [python("fills", fills, "{scratch}"), python("floods", floods), python("looks", looks, "{scratch}")]
    status, _, found = check(tmp_path / "out", stages)
    assert (status, found) == (1, {"fills": "passed", "floods": "STOPPED", "looks": "passed"})
    assert "only 1 MiB are free on the disk of " in (tmp_path / "out" / "report.md").read_text()


def test_a_full_disk_does_not_stop_the_check(tmp_path: Path) -> None:
    with Log(Path("/dev/full")) as log:
        log.say("lost")
        log.say("last words")
    assert list(log.tail) == ["lost", "last words"]


def test_without_pytest_the_tests_are_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.py").write_text("raise ModuleNotFoundError(\"No module named 'pytest'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    for table in (stage_table.stages_of_dry_run(), stage_table.stages_on_gpu(2)):
        (tests,) = [stage for stage in table if stage.name == "tests"]
        stages = [replace(tests, needs=(), least=1), python("last", "")]
        status, _, found = check(tmp_path / "out", stages)
        assert (status, found) == (0, {"tests": "not available", "last": "passed"})
        assert "No module named 'pytest'" in (tmp_path / "out" / "report.md").read_text()


def test_it_needs_neither_git_nor_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, terminal, _ = check(tmp_path / "out", [python("a", "")])
    assert status == 0 and "Source: not a git checkout, csrc " in terminal


@pytest.mark.sampled
def test_an_enormous_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    code = "print('first'); [print(f'{i:099}') for i in range(400_000)]; print('x' * 10_000_000); print('last words')"
    status, terminal, _ = check(tmp_path / "out", [python("talks", code)])
    assert status == 0, terminal
    log = (tmp_path / "out" / "logs.txt").read_bytes()
    assert len(log) < LOG_HEAD + LOG_TAIL + 1000
    assert b"first" in log and b"last words" in log
    left_out = re.search(rb"\[\.\.\. (\d+) bytes left out \.\.\.\]", log)
    assert left_out and int(left_out[1]) > 49_000_000
    assert (tmp_path / "out" / "report.md").stat().st_size < 20_000


MEASURE = """
import sys, time
with open(sys.argv[1] + "/results.jsonl", "a") as file:
    print(sys.argv[2], file=file, flush=True)
    print('{"half a li', end="", file=file, flush=True)
print("measured", flush=True)
"""


SLEEPS = "import os; print(os.getpid(), file=open(sys.argv[3], 'w'), flush=True); time.sleep(99)"


def measurement(side: str, ratio: float | None = None, failure: str = "") -> str:
    seconds = None if failure else 1e-3
    m = Measurement(
        "gemm", "gemm", "forward", "g", "64", "bfloat16", side, "cpu", seconds=seconds, ratio=ratio, failure=failure
    )
    return m.to_json()


def test_partial_results_are_there_when_it_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = [
        python("gemm", MEASURE, "{out}", measurement("torch", 2.0)),
        python("more", MEASURE + SLEEPS, "{out}", measurement("other", 0.5), str(tmp_path / "pid")),
    ]
    process = start(out, stages)
    (pid,) = wait_for(tmp_path / "pid", 1)
    process.kill()
    process.join()
    end = time.monotonic() + 60
    while is_alive(int(pid)):  # an orphan, reaped by init
        assert time.monotonic() < end
        time.sleep(0.01)
    assert verdicts(out) == {"gemm": "passed", "more": "running"}
    assert "| gemm | bfloat16 | torch | 2.00 | 1 |" in (out / "report.md").read_text()
    lines = (out / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["side"] for line in lines[:2]] == ["torch", "other"]
    assert "measured" in (out / "logs.txt").read_text()
    # A second call has the finished stage and the measurements of the other, in a new folder.
    stages[1] = python("more", MEASURE, "{out}", measurement("third", 4.0))
    status, terminal, found = check(tmp_path / "new", stages, "--state", str(tmp_path / "out.state"))
    assert (status, found) == (0, {"gemm": "passed", "more": "passed"})
    assert "Finished by an earlier call (--again repeats them): gemm\n" in terminal
    assert [m.side for m in read(tmp_path / "new" / "results.jsonl")] == ["torch", "third"]


def test_a_report_is_there_from_the_first_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(patience: float) -> None:
        (tmp_path / "asked").touch()
        time.sleep(60)

    process = start(tmp_path / "out", [python("a", "")], probe=probe)
    while not (tmp_path / "asked").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert (tmp_path / "out" / "report.md").read_text().startswith("# GPU check: querying the machine\n")
    assert verdicts(tmp_path / "out") == {"a": "to come"}


def test_a_report_grows_while_a_stage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "REWRITE", 0.1)
    out = tmp_path / "out"
    process = start(out, [python("more", MEASURE + "time.sleep(99)", "{out}", measurement("torch", 2.0))])
    end = time.monotonic() + 60
    wait_for(out / "report.md", 1)
    while "| gemm | bfloat16 | torch | 2.00 | 1 |" not in (out / "report.md").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    process.kill()
    process.join()
    assert verdicts(out) == {"more": "running"}


COUNTS = """
import pathlib, sys
runs = pathlib.Path(sys.argv[1])
runs.write_text((runs.read_text() if runs.exists() else "") + sys.argv[2] + " ")
"""
GOES_ON = (
    COUNTS
    + """
import time
halfway = pathlib.Path(sys.argv[3], "halfway")
if not halfway.exists():
    halfway.touch()
    time.sleep(99)
print("went on")
"""
)
TAKES_ITS_TIME = (
    COUNTS
    + """
part = pathlib.Path(sys.argv[3], "part")
if not part.exists():
    part.touch()
    sys.exit(75)
"""
)


@pytest.mark.sampled
def test_a_second_call_continues_where_the_first_stopped(tmp_path: Path) -> None:
    runs, state = tmp_path / "runs", ("--state", str(tmp_path / "state"))
    golden = "pathlib.Path(sys.argv[3], 'answer').touch(); print('golden')"
    stages = [
        python("fails", COUNTS + "sys.exit(3)", str(runs), "fails"),
        python("records", COUNTS + golden, str(runs), "records", "{scratch}", archive="golden.tar.gz"),
        python("measures", MEASURE, "{out}", measurement("torch", 2.0)),
        python("hangs", GOES_ON, str(runs), "hangs", "{state}", most=6, least=1),
        python("partial", TAKES_ITS_TIME, str(runs), "partial", "{state}"),
        python("always", COUNTS, str(runs), "always", repeats=True),
    ]
    names = [stage.name for stage in stages]
    status, terminal, found = check(tmp_path / "first", stages, *state)
    assert found == dict(zip(names, ["FAILED", "passed", "passed", "STOPPED", "in part", "passed"])), terminal
    assert runs.read_text() == "fails records hangs partial always "
    lines = (tmp_path / "first" / "report.md").read_text().splitlines()
    assert lines[2] == "- **BROKEN: fails**: exit status 3"
    assert lines[3].startswith("- **STOPPED: hangs**: not finished within 6 s")
    assert "- Not finished: hangs, partial; the same command continues with them" in lines

    status, terminal, found = check(tmp_path / "second", stages, *state)
    assert (status, found) == (1, dict(zip(names, ["FAILED", *["passed"] * 5]))), terminal
    assert runs.read_text().split()[5:] == ["hangs", "partial", "always"]
    report = (tmp_path / "second" / "report.md").read_text()
    assert "**BROKEN: fails**" in report and "by a call of 20" in report and "Not finished" not in report
    assert "| gemm | bfloat16 | torch | 2.00 | 1 |" in report
    log = (tmp_path / "second" / "logs.txt").read_text()
    assert "=== From an earlier call:" in log and "golden" in log and "went on" in log
    with tarfile.open(tmp_path / "second" / "golden.tar.gz") as tar:
        assert tar.getnames() == ["answer"]

    check(tmp_path / "third", stages, *state, "--again", "fails")
    assert runs.read_text().split()[8:] == ["fails", "always"]
    check(tmp_path / "fourth", stages[:2], *state, "--again", "all")
    assert runs.read_text().split()[10:] == ["fails", "records"]
    status, terminal, _ = check(tmp_path / "none", stages, *state, "--again", "nothing")
    assert status == 2 and "--again: expected some of fails, records, " in terminal


def test_a_fresh_machine_goes_on_with_a_file_of_the_first(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    stages = [python("gemm", COUNTS, str(runs), "gemm"), python("more", COUNTS, str(runs), "more")]
    check(tmp_path / "first", stages, "--only", "gemm")
    resume = ("--resume", str(tmp_path / "first" / "state.tar.gz"), "--state", str(tmp_path / "of another machine"))
    status, terminal, found = check(tmp_path / "second", stages, *resume)
    assert (status, found) == (0, {"gemm": "passed", "more": "passed"}), terminal
    assert runs.read_text().split() == ["gemm", "more"]
    (tmp_path / "broken").write_text("no archive")
    status, terminal, _ = check(tmp_path / "third", stages, "--resume", str(tmp_path / "broken"))
    assert status == 2 and "expected a check's state.tar.gz" in terminal


def test_parts_that_were_not_selected_run_later(tmp_path: Path) -> None:
    runs, state = tmp_path / "runs", ("--state", str(tmp_path / "state"))
    stages = [python("benchmarks", COUNTS, str(runs), "{parts}", parts=("gemm", "train"))]
    for i, (only, ran) in enumerate([("gemm", 1), ("gemm", 1), ("gemm,train", 2), ("train", 2)]):
        check(tmp_path / f"out{i}", stages, *state, "--only", only)
        assert len(runs.read_text().split()) == ran


@pytest.mark.sampled
def test_a_library_with_other_head_dims_is_tested_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, dims, state = tmp_path / "runs", tmp_path / "dims", ("--state", str(tmp_path / "state"))
    dims.write_text("64, 128")
    monkeypatch.setattr(gpu_check, "head_dims", dims.read_text)
    stages = [
        python("build", "", repeats=True),
        python("tests", COUNTS, str(runs), "tests", needs=("build",)),
        python("conformance", COUNTS, str(runs), "conformance"),
    ]
    for name in ("first", "second"):
        check(tmp_path / name, stages, *state)
        report = (tmp_path / name / "report.md").read_text()
        assert "- The library has attention's CUDA kernels for head dims 64, 128 only: tests of others fail" in report
    assert runs.read_text() == "tests conformance "
    stages[0] = python("build", f"open({str(dims)!r}, 'w')", repeats=True)
    check(tmp_path / "third", stages, *state)
    assert runs.read_text() == "tests conformance tests "
    assert "head dims" not in (tmp_path / "third" / "report.md").read_text()


def test_changed_sources_restart_a_stage(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("csrc/a.cu", "cuda_ext/b.py", "tests/c.py", "tests/d.png", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("before")
    (tmp_path / "out").mkdir()
    stages = [Stage("correct", (("a",),), 1), Stage("tests", (("b",),), 1, sources=("tests",))]

    def finished(*facts: str) -> list[str]:
        state = State(tmp_path / "state", root, facts, tmp_path / "out")
        return [stage.name for stage in stages if state.earlier(stage)]

    def finish() -> None:
        state = State(tmp_path / "state", root, ["GPU"], tmp_path / "out")
        for stage in stages:
            state.begin(stage)
            state.end(Outcome(stage, "passed"))

    finish()
    assert finished("GPU") == ["correct", "tests"] and finished("another GPU") == []
    for name, left in (("tests/c.py", ["correct"]), ("csrc/a.cu", []), ("setup.py", []), ("tests/d.png", None)):
        finish()
        (root / name).write_text("after")
        assert finished("GPU") == (["correct", "tests"] if left is None else left)
    finish()
    stages[0] = replace(stages[0], commands=(("other",),))
    assert finished("GPU") == ["tests"]


def test_a_read_only_checkout_affects_only_the_second_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = ("--state", str(tmp_path / "file" / "state"))
    stages = [python("gemm", MEASURE, "{out}", measurement("torch", 2.0))]
    for name in ("first", "second"):
        assert check(tmp_path / name, stages, *state)[::2] == (0, {"gemm": "passed"})


def test_estimates_are_printed_first_and_next_to_the_times(tmp_path: Path) -> None:
    stages = [python("short", "", estimate=3), python("long", "", estimate=40)]
    _, terminal, _ = check(tmp_path / "out", stages)
    assert "Estimated seconds: short 3, long 40; 43 of 30\n" in terminal
    report = (tmp_path / "out" / "report.md").read_text()
    assert re.search(r"^\| long \| passed \| 40 \| 2\d \| \d\.\d \|  \|$", report, re.MULTILINE)
    assert re.search(r"^\| all \| \| 43 \| \| \d\.\d \| \|$", report, re.MULTILINE)


def test_early_stages_get_what_they_need_and_later_ones_wait(tmp_path: Path) -> None:
    stages = [
        python("builds", "", estimate=6),
        python("measures", "", estimate=6, fills=True),
        python("tests", "", estimate=100, least=50),
    ]
    _, terminal, found = check(tmp_path / "out", stages)
    limits = dict(re.findall(r"\] (\w+), at most (\S+) \.\.\.", terminal))
    # Twice its estimate, even with a hundred seconds to come; but not if the stage fills its time.
    assert limits["builds"] in ("0:11", "0:12") and limits["measures"] in ("0:04", "0:05", "0:06")
    assert found["tests"] == "not run"


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_a_report(tmp_path: Path, number: signal.Signals) -> None:
    out, pids = tmp_path / "out", tmp_path / "pids"
    stages = [
        python("gemm", MEASURE, "{out}", measurement("torch", failure="not installed")),
        python("hangs", HANG, str(pids)),
        python("last", ""),
    ]
    process = start(out, stages)
    found = wait_for(pids, 2)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 1
    assert verdicts(out) == {"gemm": "passed", "hangs": "STOPPED", "last": "not run"}
    report = (out / "report.md").read_text()
    assert f"interrupted by {number.name}" in report
    assert "1 measurements, 1 of them without a time" in report and "1 × gemm, torch: not installed" in report
    assert not [pid for pid in found if is_alive(int(pid))]


def test_a_tool_that_does_not_work_here_is_no_failure(tmp_path: Path) -> None:
    fails = "import sys; sys.exit(1)"
    stages = [
        python("refused", f"print('Device not supported'); {fails}", sign="^small cases on "),
        Stage("absent", (("no-such-sanitizer",),), 1, sign="^small cases on "),
    ]
    status, _, found = check(tmp_path / "out", stages)
    assert (status, found) == (0, {"refused": "not available", "absent": "not available"})
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Device not supported" in report and "cannot be started" in report
    works = python("works", f"print('small cases on cuda:0'); {fails}", sign="^small cases on ")
    assert check(tmp_path / "again", [works])[::2] == (1, {"works": "FAILED"})


FAULTS = {
    "hang": python("faulty", HANG, "{state}/pids", most=3, least=1),
    "crash": python("faulty", "import os; os.abort()"),
    "wrong result": python("faulty", "print('gemm: 8 x 8: WRONG: all NaN'); exit(1)", key="WRONG"),
    "missing sanitizer": Stage("faulty", (("no-such-sanitizer",),), 1, sign="^small cases on "),
    "prints without end": python("faulty", "while True: print('x' * 1000)", most=3, least=1),
}
NOTES_TIME = "import sys, time; print(time.time(), file=open(sys.argv[1], 'a'))"


@pytest.mark.sampled
@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_stage_begins_soon_after_a_fault(tmp_path: Path, fault: str) -> None:
    times, faulty = tmp_path / "times", FAULTS[fault]
    stages = [python(name, NOTES_TIME, str(times)) for name in ("before", "after")]
    stages.insert(1, faulty)
    check(tmp_path / "out", stages)
    began, ended = map(float, times.read_text().split())
    assert ended - began < 10 + (faulty.most if faulty.most < 60 else 0)


@pytest.mark.sampled
def test_a_fresh_machine_begins_soon_after_one_that_died(tmp_path: Path) -> None:
    times = tmp_path / "times"
    stages = [python("first", NOTES_TIME, str(times)), python("dies", HANG, str(tmp_path / "pids"), least=1)]
    stages.append(python("last", NOTES_TIME, str(times)))
    process = start(tmp_path / "out", stages)
    hanging = wait_for(tmp_path / "pids", 2)
    process.kill()
    process.join()
    for pid in map(int, hanging):
        os.kill(pid, signal.SIGKILL)
    died = time.time()
    stages[1] = python("dies", "print('not on this machine')", least=1)
    resume = ("--resume", str(tmp_path / "out" / "state.tar.gz"), "--state", str(tmp_path / "of another machine"))
    status, terminal, found = check(tmp_path / "second", stages, *resume)
    assert (status, found) == (0, dict.fromkeys(("first", "dies", "last"), "passed")), terminal
    first, last = map(float, times.read_text().split())
    assert first < died < last < died + 10


PLOTS = """
import pathlib, sys
out = pathlib.Path(sys.argv[1])
(out / "plots" / "a" / "b").mkdir(parents=True)
for name in ("train.png", "attention.png", "gemm.png", "gemm.svg", "attention.svg", "a name.png", "a/b/deep.png"):
    (out / "plots" / name).write_bytes(b"plot")
(out / "plots" / "gemm large.png").touch()
(out / "plots" / "gemm-huge.png").write_bytes(bytes(17 << 20))
(out / "elsewhere.png").symlink_to("/etc/passwd")
for i in range(20):
    (out / f"{i:02}.svg").touch()
pathlib.Path(sys.argv[2], "answer").touch()
"""


def test_at_most_8_files_of_at_most_16_mib(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = [
        python("gemm", MEASURE, "{out}", measurement("torch", 2.0)),
        python("attention", PLOTS, "{out}", "{scratch}", archive="golden.tar.gz"),
    ]
    status, terminal, _ = check(out, stages)
    assert status == 0, terminal
    kept = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    ours = {"report.md", "logs.txt", "results.jsonl", "golden.tar.gz", "state.tar.gz"}
    assert kept == ours | {f"plots/{name}" for name in ("gemm.png", "attention.png", "train.png")}
    report = (out / "report.md").read_text()
    assert "- `plots/gemm-huge.png`: 17 MiB, more than 16" in report
    for name in ("gemm.svg", "attention.svg"):
        assert f"- `plots/{name}`: there are 8 more important files" in report
    assert "- `plots/a name.png`: a link, too deep, or with an unusual name" in report
    with tarfile.open(out / "golden.tar.gz") as tar:
        assert tar.getnames() == ["answer"]


def test_logs_of_commands_are_merged(tmp_path: Path) -> None:
    code = """
import pathlib, sys
pathlib.Path(sys.argv[1], "log.txt").write_text("what a worker said\\n" + "x" * 20_000_000)
pathlib.Path(sys.argv[1], "log-2.txt").touch()
"""
    assert check(tmp_path / "out", [python("measures", code, "{out}"), python("more", "print('later')")])[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs.txt", "report.md", "state.tar.gz"]
    log = (tmp_path / "out" / "logs.txt").read_text()
    assert log.index("=== log.txt") < log.rindex("what a worker said") < log.rindex("later")
    assert "=== log-2" not in log and len(log) < 1 << 20


def test_results_are_cut_at_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes((b"x" * 999 + b"\n") * (MAX_BYTES // 1000 + 5))
    assert tidy(tmp_path, []) == []
    data = (tmp_path / "results.jsonl").read_bytes()
    assert len(data) == MAX_BYTES // 1000 * 1000 and data.endswith(b"x\n")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, terminal, _ = check(tmp_path / "unused", [python("a", "")], "--out", str(tmp_path / "file" / "out"))
    assert status == 2
    assert "file/out: expected a folder that can be written" in terminal
    with pytest.raises(FolderError, match="expected an empty folder or an earlier check, found file"):
        prepare(tmp_path)
    assert (tmp_path / "file").exists()


@pytest.mark.sampled
def test_an_earlier_check_is_moved_aside(tmp_path: Path) -> None:
    for _ in range(2):
        assert check(tmp_path / "out", [python("a", "")])[0] == 0
        time.sleep(1)
    (earlier,) = tmp_path.glob("out-*")
    assert verdicts(earlier) == verdicts(tmp_path / "out") == {"a": "passed"}


def test_only_some_stages(tmp_path: Path) -> None:
    stages = [python(name, "", always=name == "build") for name in ("build", "tests", "memcheck")]
    stages.append(python("benchmarks", "import sys; print(sys.argv)", "{parts}", parts=("gemm", "bucket", "train")))
    status, _, found = check(tmp_path / "out", stages, "--only", "train,gemm,tests")
    assert (status, list(found)) == (0, ["build", "tests", "benchmarks"])
    assert "['-c', 'gemm', 'train']" in (tmp_path / "out" / "logs.txt").read_text()
    for only, what in (("gem", "gem"), ("tests,a,b", "a, b"), (",", "none")):
        status, terminal, _ = check(tmp_path / "unused", stages, "--only", only)
        assert status == 2
        expected = "build, tests, memcheck, benchmarks, gemm, bucket, train"
        assert f"--only: expected some of {expected}; got {what}\n" in terminal
    assert not (tmp_path / "unused").exists()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    # Twenty processes that record coverage take twice as long; other tests cover these lines.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, timeout=1800
    )


@pytest.mark.sampled
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: expected a CUDA GPU, found none (torch ")
    assert "--dry-run needs none" in done.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.startswith("# GPU check: not run: expected a CUDA GPU, found none (torch ")


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_invalid_minutes(minutes: str) -> None:
    done = run("--minutes", minutes)
    assert done.returncode == 2
    assert f"argument --minutes: invalid positive value: '{minutes}'" in done.stderr


def test_builds_on_every_core_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_toolchain, "available_cores", lambda: 16)
    monkeypatch.setattr(_toolchain, "available_memory_gib", lambda: 1.0)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert machine.build_variables("9.0a")["MAX_JOBS"] == "16"
    monkeypatch.setenv("MAX_JOBS", "3")
    assert machine.build_variables("9.0a")["MAX_JOBS"] == "3"


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def as_shells_start_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sampled
@pytest.mark.usefixtures("as_shells_start_jobs")
def test_a_build_that_takes_too_long_has_fewer_head_dims(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import os, pathlib, sys, time
dims, built = os.environ["CUDA_EXT_HEAD_DIMS"], pathlib.Path(sys.argv[1])
built.write_text((built.read_text() if built.exists() else "") + f"[{dims}]")
if not dims or len(sys.argv) > 2:
    time.sleep(99)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "built")]
    assert build_in_time.main(["--minutes", "0.2"], command) == 0
    assert (tmp_path / "built").read_text() == "[][64,128]"
    assert "cuda_ext: all head dims take longer than 8 s; building 64,128, the next call" in capfd.readouterr().out
    assert build_in_time.main(["--minutes", "0.05"], [*command, "hangs"]) == 1
    assert "the next call continues with the files left to compile" in capfd.readouterr().out
    (tmp_path / "built").unlink()
    assert build_in_time.main(["--minutes", "1"], [sys.executable, "-c", "import sys; sys.exit(3)"]) == 3


def test_copied_sources_keep_their_times(tmp_path: Path) -> None:
    folder, record = tmp_path / "csrc", tmp_path / "build" / "times.json"
    (folder / "gemm").mkdir(parents=True)
    same, changed = folder / "gemm" / "same.cu", folder / "changed.h"

    def times(copied: float) -> list[float]:
        for path in (same, changed):
            os.utime(path, (copied, copied))
        build_in_time.keep_times(folder, record)
        return [path.stat().st_mtime for path in (same, changed)]

    same.write_text("as it was")
    changed.write_text("before")
    assert times(10) == [10, 10] and times(20) == [10, 10]
    changed.write_text("after")
    assert times(30) == [10, 30] and times(40) == [10, 30]


def test_chosen_head_dims_are_built_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_EXT_HEAD_DIMS", "256")
    code = "import os, sys; sys.exit(os.environ['CUDA_EXT_HEAD_DIMS'] != '256')"
    assert build_in_time.main(["--minutes", "1"], [sys.executable, "-c", code]) == 0


def test_the_document_has_the_stages_and_their_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_table.carried, "ARCHIVE", tmp_path / "none")
    monkeypatch.setattr(stage_table.variants, "archives", dict)
    rows = re.findall(
        r"^\| (`.*`) \| .* \| ([\d, each]+) \|$", (ROOT / "docs" / "gpu-check.md").read_text(), re.MULTILINE
    )
    told: dict[str, float] = {}
    for names, seconds in rows:
        stages = re.findall(r"`([\w-]+)`", names)
        numbers = [float(number) for number in re.findall(r"\d+", seconds)]
        told |= zip(stages, numbers if len(numbers) == len(stages) else numbers * len(stages))
    expected = {stage.name: stage.estimate for stage in stage_table.stages_on_gpu(16)}
    assert list(told) == list(expected)
    assert {name: abs(told[name] - expected[name]) <= 5 for name in told} == dict.fromkeys(told, True), expected


def test_output_folder_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--dry-run", OUT=str(tmp_path / "file" / "out"))
    assert done.returncode == 2
    assert f"gpu_check: --out {tmp_path / 'file' / 'out'}: expected a folder that can be written" in done.stderr
    for out in ({}, {"OUT": ""}):
        help_text = run("--help", **out).stdout
        assert "default: $OUT, else gpu-check" in " ".join(help_text.split())


def test_builds_for_the_present_gpu() -> None:
    assert machine.arch_of({"device": "NVIDIA H100", "capability": "9.0"}) == "9.0a"
    assert machine.arch_of({"device": "NVIDIA A100", "capability": "8.0"}) == "8.0"
    with pytest.raises(machine.Refusal, match=r"7\.5 or newer, got Tesla V100 \(7\.0\)"):
        machine.arch_of({"device": "Tesla V100", "capability": "7.0"})


def test_a_torch_that_does_not_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROBE", "import no_such_torch")
    with pytest.raises(machine.Refusal, match="No module named 'no_such_torch'; choose another Python with PYTHON="):
        machine.probe(60)
    monkeypatch.setattr(machine, "PROBE", "import time; time.sleep(60)")
    with pytest.raises(machine.Refusal, match="torch did not report within 0 s"):
        machine.probe(0.2)


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not [item for item in machine.missing() if not item.startswith(("hypothesis", "matplotlib"))]
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine._build, "add_scripts_to_path", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {item.partition(":")[0] for item in machine.missing()}
    assert {"pytest", "numpy", "hypothesis", "ninja"} < found
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "68.1.2")
    problem = next(item for item in machine.missing() if item.startswith("setuptools"))
    assert "the library cannot be built; expected setuptools 77 or newer, got 68.1.2; install it with" in problem


@pytest.mark.parametrize("table", [stage_table.stages_on_gpu, stage_table.stages_of_dry_run])
def test_stages_refer_to_existing_files(table) -> None:
    stages = table() if table is stage_table.stages_of_dry_run else table(16)
    names = [stage.name for stage in stages]
    assert len(set(names)) == len(names)
    on_gpu = table is stage_table.stages_on_gpu
    first, profile, more = (["first-tests"], ["profile"], ("train", "overhead", "plans")) if on_gpu else ([], [], ())
    more_suites = ["masks", "loss", "experts", "fp8"] * on_gpu
    later = [*first, "benchmarks", *profile, "tests", "memcheck", "racecheck"]
    assert names == ["environment", "build", *([] if on_gpu else ["emulator"]), "conformance", "correct", *later]
    (measures,) = [stage for stage in stages if stage.parts]
    assert measures.parts == ("gemm", "attention", *more_suites, "bucket", *more)
    assert all(stage.estimate >= 1 for stage in stages)
    for i, stage in enumerate(stages):
        assert set(stage.needs) <= set(names[:i])
        for name in stage.sources:
            assert (ROOT / name).exists()
        for word in {word for command in stage.commands for word in command}:
            assert not word.endswith(".py") or (ROOT / word).is_file()
            known = {"{python}", "{out}", "{scratch}", "{minutes}", "{parts}", "{sanitizer}", "{state}"}
            assert set(re.findall(r"\{\w+\}", word)) <= known


@pytest.mark.sampled(check="races", slow=True)
def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # It ends as soon as all stages are done; the limit is for slow machines.
    done = run("--dry-run", "--minutes", "28", "--out", str(out), "--state", str(tmp_path / "state"))
    names = [stage.name for stage in stage_table.stages_of_dry_run()]
    assert done.returncode == 0, done.stdout + (out / "report.md").read_text()
    assert verdicts(out) == dict.fromkeys(names, "passed")
    tables = re.findall(r"^### (\w+)", (out / "report.md").read_text(), re.MULTILINE)
    assert tables == ["Products", "Attention", "Bytes", "Stages"]
    with tarfile.open(out / "golden.tar.gz") as tar:
        assert "emulator/shuffle.npz" in tar.getnames()
    measured = read(out / "results.jsonl")
    assert {m.suite for m in measured if m.seconds and m.side == OURS} == {"gemm", "attention", "bucket"}
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 8
    report = (out / "report.md").read_text()
    assert f"- Of {len(names)} stages: {len(names)} passed\n- 20" in report
