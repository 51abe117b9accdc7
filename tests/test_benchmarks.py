"""`python -m benchmarks`: measuring, failing sides, cases, the command, results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from processes import is_alive

sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command
from benchmarks import environment, results
from benchmarks.presentation import grouping
from benchmarks.results import OURS, Measurement
from benchmarks.suites import (
    baselines,
    bench_attention,
    bench_bucket,
    bench_build,
    bench_experts,
    bench_fp8,
    bench_gemm,
    bench_loss,
    bench_masks,
    bench_overhead,
    bench_train,
    measure,
    runner,
    worker,
)
from benchmarks.suites.measure import AGAIN, Case, Failure, Method

SUITES = {
    "gemm": bench_gemm,
    "attention": bench_attention,
    "loss": bench_loss,
    "experts": bench_experts,
    "fp8": bench_fp8,
    "masks": bench_masks,
    "bucket": bench_bucket,
    "train": bench_train,
    "overhead": bench_overhead,
    "build": bench_build,
}
BASE = Measurement("suite", "", "", "", "", "", OURS, "cpu", peak_flops=1e9, peak_bandwidth=1e9)


def measured(case: Case, seconds: float = 0.05, method: Method | None = None, **options: Any) -> dict[str, Measurement]:
    rows = measure.measure(case, BASE, method or Method("cpu"), seconds, lambda side: None, {}, **options)
    return {row.side: row for row in rows}


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def case(self, **milliseconds: float) -> Case:
        """A case with sides whose calls take the given times."""

        def side(duration: float) -> Any:
            def call() -> None:
                self.now += duration * 1e-3

            return lambda _: call

        sides = {name: side(duration) for name, duration in milliseconds.items()}
        return Case("wait", "forward", "", "", "float32", sides, flops=1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


class TestMeasure:
    def test_ratio_is_their_time_over_ours(self, clock: Clock) -> None:
        rows = measured(clock.case(cuda_ext=4, slow=12, fast=2), seconds=0.5)
        assert rows["slow"].ratio == pytest.approx(3) and rows["slow"].ratio_spread == pytest.approx(0, abs=1e-9)
        assert rows["fast"].ratio == pytest.approx(0.5)
        assert rows[OURS].ratio is None
        assert rows[OURS].seconds == pytest.approx(4e-3)
        assert rows[OURS].tflops == pytest.approx(1e6 / 4e-3 / 1e12)
        assert rows[OURS].rounds == pytest.approx(0.5 / 18e-3, abs=2)

    def test_inputs_that_do_not_fit_cost_their_case_only(self, clock: Clock) -> None:
        def inputs() -> None:
            raise torch.OutOfMemoryError("30 GiB")

        case = dataclasses.replace(clock.case(cuda_ext=4, slow=12), inputs=inputs)
        assert {name: row.failure for name, row in measured(case).items()} == {OURS: "its inputs: out of memory"}

    def test_a_machine_that_slows_down_does_not_change_the_ratio(self, clock: Clock) -> None:
        case = clock.case(cuda_ext=4, slow=8)
        pace = itertools.count(1)

        def slower(call: Any) -> Any:
            def run() -> None:
                before = clock.now
                call(None)()
                clock.now += (clock.now - before) * 0.01 * next(pace)

            return lambda _: run

        case.sides = {name: slower(maker) for name, maker in case.sides.items()}
        rows = measured(case, seconds=2.0)
        assert rows[OURS].spread > 0.1 and rows["slow"].ratio == pytest.approx(2, rel=0.02)

    def test_a_case_far_slower_than_its_share_is_cut_short(self, clock: Clock) -> None:
        assert measured(clock.case(cuda_ext=4000, slow=8000), seconds=1.0)[OURS].rounds == 1
        assert clock.now == pytest.approx(3 * 12), "to check it, to see how long it takes, and one round"

    def test_a_side_that_is_too_slow_is_not_timed(self, clock: Clock) -> None:
        rows = measured(clock.case(cuda_ext=4, slow=18000, fast=2), seconds=0.5, patience=1.0)
        assert rows["slow"].failure == "too slow: a call takes 18.0 s; raise --minutes to time it"
        assert rows["slow"].seconds is None and rows["fast"].ratio == pytest.approx(0.5)
        assert clock.now < 2 * 18 + 1

    def test_sides_alternate_and_each_starts_equally_often(self, clock: Clock) -> None:
        order: list[str] = []

        def side(name: str) -> Any:
            def call() -> None:
                order.append(name)
                clock.now += 2e-3

            return lambda _: call

        case = Case("", "", "", "", "float32", {name: side(name) for name in (OURS, "b", "c")})
        rows = measured(case, seconds=0.3)
        timed = order[-3 * rows[OURS].rounds :]
        rounds = [tuple(timed[i : i + 3]) for i in range(0, len(timed), 3)]
        assert {frozenset(turns) for turns in rounds} == {frozenset((OURS, "b", "c"))}
        first = [turns[0] for turns in rounds]
        assert max(map(first.count, first)) - min(map(first.count, (OURS, "b", "c"))) <= 1

    def test_inputs_rotate_over_more_than_twice_the_cache(self, clock: Clock) -> None:
        bytes_of_a_set = environment.cache_bytes("cpu") // 4
        seen: list[int] = []
        made = itertools.count()
        case = Case(
            *("", "", "", "", "float32"),
            {OURS: lambda n: lambda: (seen.append(n), setattr(clock, "now", clock.now + 2e-3))},
            inputs=lambda: next(made),
            input_bytes=bytes_of_a_set,
        )
        row = measured(case, seconds=0.2)[OURS]
        assert row.rotation * bytes_of_a_set > 2 * environment.cache_bytes("cpu")
        assert set(seen) == set(range(row.rotation)) == set(range(next(made)))

    def test_short_calls_are_repeated_until_the_clock_sees_them(self, clock: Clock) -> None:
        row = measured(clock.case(cuda_ext=1e-2))[OURS]
        assert row.seconds == pytest.approx(1e-5)
        assert clock.now > 100 * row.rounds * row.seconds

    def test_ours_against_itself_has_ratio_one(self, clock: Clock) -> None:
        method = Method("cpu", against_itself=True)
        rows = measured(clock.case(cuda_ext=4, theirs=9), seconds=1.0, method=method)
        assert set(rows) == {OURS, AGAIN}
        assert rows[AGAIN].ratio == pytest.approx(1)

    def test_samples_are_taken_as_they_are(self) -> None:
        times = {OURS: [1.0, 2.0, 3.0], "theirs": [2.0, 6.0, 3.0]}
        case = Case("", "", "", "", "", {}, samples=lambda seconds: times, extra={"peak": 3})
        rows = measured(case)
        assert rows["theirs"].ratio == 2.0 and rows["theirs"].seconds == 3.0 and rows[OURS].extra == {"peak": 3}
        assert rows["theirs"].ratio_spread == 0.5

    def test_do_bench_names_its_timer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        testing = types.ModuleType("triton.testing")
        testing.do_bench = lambda call, warmup, rep, return_mode: [call() or 2.0, 4.0, 3.0]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton.testing", testing)
        row = measured(Clock().case(cuda_ext=0), method=Method("cpu", timer="do_bench"))[OURS]
        assert row.timer == "do_bench" and row.seconds == pytest.approx(3e-3)

    def test_relative_error(self) -> None:
        x = torch.randn(10, dtype=torch.float64)
        assert measure.relative_error(x.float(), x) < 1e-7
        assert measure.relative_error((x, 1.5 * x), (x, x)) == pytest.approx(0.5)
        assert measure.relative_error(x.fill_(float("nan")), torch.ones(10)) == float("inf")
        with pytest.raises(Failure, match=r"wrong shape: \(9,\), expected \(10,\)"):
            measure.relative_error(x[1:], x)

    def test_failures_are_one_line(self) -> None:
        assert measure.describe_failure(ModuleNotFoundError("x", name="flash_attn")) == "not installed: flash_attn"
        assert (
            measure.describe_failure(ImportError("undefined symbol: f\nmore")) == "import failed: undefined symbol: f"
        )
        assert measure.describe_failure(torch.OutOfMemoryError("CUDA...")) == "out of memory"
        assert measure.describe_failure(ValueError("")) == "ValueError: "


class TestWorker:
    ORDER: dict[str, Any] = {  # noqa: RUF012
        "suite": "planted", "device": "cpu", "timer": "", "against_itself": False, "only": "", "without": "",
        "ceilings": {}, "done": [], "first": 0, "skip": {}, "deadline": 0.0,
    }  # fmt: skip

    def messages(self, monkeypatch: pytest.MonkeyPatch, cases: list[Case], **order: Any) -> list[dict[str, Any]]:
        suite: Any = types.ModuleType("benchmarks.suites.bench_planted")
        suite.cases = lambda device: iter(cases)
        monkeypatch.setitem(sys.modules, suite.__name__, suite)
        report = io.StringIO()
        worker.run(self.ORDER | order, report)
        return [json.loads(line) for line in report.getvalue().splitlines()]

    def rows(self, messages: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        rows = [row for message in messages for row in message.get("measurements", ())]
        return [(row["case"], row["side"], row["failure"] or "timed") for row in rows]

    @pytest.mark.parametrize("slow", ["bfloat16", "float32"])
    def test_ceilings_take_little_time_where_a_dtype_is_slow(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, slow: str
    ) -> None:
        """At 1 GFLOP/s a product of 2048³ takes 17 s, at 100 GFLOP/s 0.17 s."""

        def matmul(a: torch.Tensor, b: torch.Tensor) -> None:
            clock.now += 2.0 * a.shape[0] ** 3 / (1e9 if str(a.dtype) == f"torch.{slow}" else 1e11)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            clock.now += 8.0 * source.numel() / 1e10

        monkeypatch.setattr(torch, "matmul", matmul)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setitem(worker.COPIED, "cpu", 1 << 20)
        messages = list(worker.ceilings("cpu", seconds=0.3))
        begun = [message["begins"] for message in messages if "begins" in message]
        products = ["copy", *(f"{d} product of {n}³" for d in ("float32", "bfloat16") for n in (256, 512, 1024, 2048))]
        assert set(products) - set(begun) == {f"{slow} product of {n}³" for n in (1024, 2048)}
        found = [(m["ceiling"], m["rate"]) for m in messages if "ceiling" in m]
        assert len(found) == len(begun) and (slow, pytest.approx(1e9)) in found
        assert clock.now < 10

    def test_the_first_case_is_measured_and_the_others_are_out_of_time(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cases = [dataclasses.replace(clock.case(cuda_ext=4, slow=8), name=str(i)) for i in range(3)]
        messages = self.messages(monkeypatch, cases)
        assert messages[0] == {"total": 3}
        expected = [("0", OURS, "timed"), ("0", "slow", "timed"), *((i, OURS, "out of time") for i in "12")]
        assert self.rows(messages) == expected

    def test_a_side_that_would_be_too_slow_is_not_started(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        small, large = (
            dataclasses.replace(clock.case(cuda_ext=n, slow=100 * n), name=str(n), flops=1e6 * n) for n in (4, 4000)
        )
        found = self.rows(self.messages(monkeypatch, [small, large], deadline=9e99))
        assert found[:3] == [("4", OURS, "timed"), ("4", "slow", "timed"), ("4000", OURS, "timed")]
        assert found[3] == ("4000", "slow", "too slow: a call takes 400.0 s; raise --minutes to time it")
        assert clock.now < 100

    @pytest.mark.sampled
    def test_exits_when_its_input_closes(self) -> None:
        """As if the process that started it was killed, while a call hangs."""
        order = self.ORDER | {"suite": "gemm", "only": "hang", "deadline": 9e99, "seed": 0, "threads": 0}
        process = subprocess.Popen(PLANTED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        assert any(json.loads(line).get("side") == "hangs" for line in process.stdout)
        process.stdin.close()
        assert process.wait(60) == -signal.SIGKILL


class Recorder:
    """Progress for tests; `begins` is called with the text of each case and the name of each side."""

    def __init__(self, begins: Any = lambda text: None) -> None:
        self.begins, self.total, self.cases = begins, 0, 0

    def start(self, suite: str, total: int) -> None:
        self.total = total

    def case(self, text: str) -> None:
        self.begins(text)

    def side(self, name: str) -> None:
        self.begins(name)

    def done(self, rows: list[Measurement]) -> None:
        self.cases += 1


PLANTED = [sys.executable, str(ROOT / "tests" / "planted_suite.py")]


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Measurement]]:
    """Results of the planted suite: case -> side -> measurement."""
    plan = runner.Plan(["gemm"], "cpu", minutes=60, silence=600.0, command=PLANTED)

    def begins(text: str) -> None:
        # Do not wait long for sides that hang on purpose.
        plan.silence = 0.2 if text == "hangs" else 600.0

    progress = Recorder(begins)
    found: dict[str, dict[str, Measurement]] = {}
    for rows in runner.run(plan, progress):
        for row in rows:
            assert row.side not in found.setdefault(row.case, {}), f"two rows of {row.side} in {row.case}"
            found[row.case][row.side] = row
    assert progress.total == 8 and progress.cases == 8
    return found


class TestSidesThatFail:
    @pytest.mark.parametrize(
        ("case", "side", "reason"),
        [
            ("missing", "missing", "not installed: a_package_that_nobody_has"),
            ("missing", "raises", "RuntimeError: no such"),
            ("wrong", "wrong", "wrong: relative error 5.0e-03, expected at most 1e-04"),
            ("wrong", "NaN", "wrong: relative error inf, expected at most 1e-04"),
            ("shape", "shape", "wrong shape: (999,), expected (1000,)"),
            ("crash", "crashes", "crashed: SIGSEGV"),
            ("hang", "hangs", "hung"),
        ],
    )
    def test_has_a_row_with_the_reason_and_the_others_continue(
        self, planted: dict[str, dict[str, Measurement]], case: str, side: str, reason: str
    ) -> None:
        rows = planted[case]
        assert rows[side].failure == reason and rows[side].seconds is None and rows[side].ratio is None
        assert rows[OURS].seconds and rows["good"].ratio and not rows["good"].failure

    def test_a_side_after_one_that_crashes_is_measured(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["crash"]["after it"].seconds

    def test_output_of_a_baseline_does_no_harm(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["chatty"]["prints"].seconds

    def test_a_crash_while_timing_is_attributed_to_no_side(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["late"][OURS].failure == "while timing: crashed: exit status 7"

    def test_the_run_finishes(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["last"]["good"].seconds
        assert planted["last"][OURS].of_ceiling and planted["last"][OURS].environment["cpu"]

    def test_a_suite_that_cannot_be_imported(self) -> None:
        broken = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
        plan = runner.Plan(["gemm", "bucket"], "cpu", minutes=1, command=broken)
        rows = [row for rows in runner.run(plan, Recorder()) for row in rows]
        assert [(row.suite, row.failure) for row in rows] == [
            ("gemm", "crashed: exit status 3"),
            ("bucket", "crashed: exit status 3"),
        ]

    def test_a_slow_import_is_no_hang(self) -> None:
        code = "import sys, time; sys.stdin.readline(); time.sleep(0.5); print('{\"total\": 0}')"
        plan = runner.Plan(["gemm"], "cpu", minutes=1, silence=0.05, command=[sys.executable, "-c", code])
        assert list(runner.run(plan, Recorder())) == []


P = bench_attention.Problem
SMALL_CASES = [
    *(
        bench_gemm.product(device="cpu", dtype=d, shape=(33, 48, 70), group="")
        for d in ("float32", "bfloat16", "float16")
    ),
    *(
        bench_gemm.product(device="cpu", dtype="float32", shape=(33, 48, 70), group="", layout=x)
        for x in ("nt", "tn", "tt")
    ),
    bench_gemm.linear(device="cpu", dtype="float32", shape=(33, 48, 70), activation="gelu"),
    bench_gemm.linear(device="cpu", dtype="bfloat16", shape=(33, 48, 70), activation="gelu_tanh"),
    bench_gemm.gated(device="cpu", dtype="float32", tokens=33, hidden=64),
    bench_gemm.feed_forward(device="cpu", dtype="float32", tokens=33, hidden=64),
    *(
        bench_attention.attention(problem, "cpu", dtype, backward, "")
        for problem in (
            P(2, 100, 4, 32),
            P(2, 100, 4, 32, causal=True),
            P(1, 100, 4, 32, kv_heads=2, causal=True),
            P(1, 300, 2, 32, causal=True, window=31),
            P(1, 100, 2, 32, causal=True, deterministic=True),
        )
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
    ),
    bench_attention.attention(P(1, 1, 4, 32, keys=100), "cpu", "float32", False, ""),
    *(bench_attention.varlen("cpu", "float32", 700, 4, 2, 32, backward) for backward in (False, True)),
    *(
        bench_bucket.make_case(op, "cpu", "tiny", [(3, 5), (1,), (70,)], dtype, bucket_dtype)
        for op in ("pack", "unpack", "stats")
        for dtype, bucket_dtype in (("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"))
    ),
    *(
        bench_train.transformer("cpu", dtype, bench_train.Blocks(2, 32, heads, 48), batch=1, length=16)
        for dtype in ("float32", "bfloat16")
        for heads in (2, 0)
    ),
    *(
        bench_masks.masked(name, 700, 4, 2, 16, "cpu", "float32", backward)
        for name in bench_masks.NAMES
        for backward in (False, True)
    ),
    *(bench_masks.biased(300, 2, 16, "cpu", "float32", backward) for backward in (False, True)),
    *bench_overhead.cases("cpu"),
    *(
        make(device="cpu", rows=30, features=8, classes=70, dtype=dtype)
        for make in (bench_loss.step, bench_loss.forward)
        for dtype in ("float32", "bfloat16")
    ),
    *(
        make(device="cpu", dtype=dtype, trains=trains, tokens=64, k=32, hidden=16, experts=4)
        for make in (bench_experts.layer, bench_experts.product)
        for dtype in ("float32", "bfloat16")
        for trains in (False, True)
    ),
    *(
        make("cpu", recipe, 40, 30, 64)
        for make in (bench_fp8.product, bench_fp8.layer)
        for recipe in bench_fp8.SCALINGS
    ),
    *(bench_fp8.quantised("cpu", 30, 70, both) for both in (False, True)),
]


class TestCases:
    @pytest.mark.sampled(cases=24)
    @pytest.mark.parametrize("case", SMALL_CASES, ids=lambda c: f"{c.op} {c.phase} {c.name} {c.dtype}")
    def test_all_sides_compute_the_same(self, case: Case) -> None:
        case = dataclasses.replace(case, input_bytes=0.0)  # one set of inputs suffices
        rows = measured(case, seconds=0.0)
        assert OURS in rows
        if not hasattr(torch.nn.functional, "linear_cross_entropy") and case.op == "linear_cross_entropy":
            for side in [side for side in rows if side.startswith("linear_cross_entropy")]:
                assert rows.pop(side).failure == "not installed: PyTorch 2.13"
        for side, row in rows.items():
            assert row.seconds and not row.failure, f"{side}: {row.failure}"

    @pytest.mark.sampled
    def test_a_data_parallel_step_of_two_ranks(self) -> None:
        case = bench_train.data_parallel("cpu", "tiny", chain=[8, 16, 4], batch=2)
        rows = measured(case, seconds=0.1)
        assert {OURS, "DDP", "DDP, bucket views", "DDP, bf16 hook", "no communication"} <= set(rows)
        assert all(row.seconds for row in rows.values())
        assert len({row.rounds for row in rows.values()}) == 1

    @pytest.mark.sampled
    def test_import_is_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds, path = bench_build._seconds, {"PYTHONPATH": str(ROOT)}
        once = functools.cache(lambda program: seconds([sys.executable, "-c", program], ROOT, path))
        monkeypatch.setattr(bench_build, "_seconds", lambda command, *_: once(command[-1]))
        rows = measured(next(iter(bench_build.cases("cpu"))), seconds=0.0)
        assert rows[OURS].seconds == once("import cuda_ext; cuda_ext.linear") > 0.0
        assert rows["torch alone"].seconds == once("import torch") > 0.0 and rows[OURS].rounds == 3

    def test_a_failed_build_gives_its_reason(self) -> None:
        with pytest.raises(Failure, match="failed: ValueError: 5"):
            bench_build._seconds([sys.executable, "-c", "raise ValueError(5)"], ROOT, {})
        with pytest.raises(Failure, match="took longer than 1 s"):
            bench_build._seconds([sys.executable, "-c", "import time; time.sleep(9)"], ROOT, {}, limit=1)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("suite", ["gemm", "attention", "loss", "experts", "fp8", "bucket", "train", "build"])
    def test_names_of_cases_are_unique(self, suite: str, device: str) -> None:
        cases = list(SUITES[suite].cases(device))
        names = [(c.op, c.phase, c.name, c.dtype, c.group) for c in cases]
        keys = [(c.op, c.phase, c.name, c.dtype) for c in cases]
        assert len(set(keys)) == len(keys), [n for n in names if keys.count((n[0], n[1], n[2], n[3])) > 1]
        assert all(OURS in c.sides or c.samples for c in cases)

    def test_flops_are_counted_by_the_usual_convention(self) -> None:
        """FLOPs of an H100's 4096³ product, and of FlashAttention-2's published attention at S = 2048."""
        (gemm,) = [c for c in bench_gemm.cases("cuda") if c.name == "4096 × 4096 × 4096" and c.dtype == "bfloat16"]
        assert gemm.flops == 137438953472.0 and gemm.bytes == 3 * 2 * 4096**2
        problem = bench_attention.Problem(8, 2048, 16, 128, causal=False)
        assert problem.flops(backward=False) == 4 * 8 * 16 * 2048**2 * 128
        assert problem.flops(backward=True) == 2.5 * problem.flops(backward=False)
        causal = dataclasses.replace(problem, causal=True)
        assert causal.flops(backward=False) == problem.flops(backward=False) / 2
        windowed = dataclasses.replace(causal, window=1)
        assert windowed.pairs() == 2047 * 2 + 1

    def test_parameters_of_known_models(self) -> None:
        import math

        count = lambda sizes: sum(map(math.prod, sizes))  # noqa: E731
        assert count(bench_bucket.gpt2()) == 124_439_808
        assert count(bench_bucket.llama_8b()) == 8_030_261_248
        assert count(bench_bucket.resnet50()) == 25_557_032

    def test_documents_have_lengths_of_real_texts(self) -> None:
        lengths = bench_attention.lengths_of_documents(4096)
        assert sum(lengths) == 4096 and len(lengths) > 3 and max(lengths) > 2 * sorted(lengths)[len(lengths) // 2]
        assert lengths == bench_attention.lengths_of_documents(4096)


class TestBaselines:
    """Fake packages with the interfaces of those that need a GPU, to check the arguments they get."""

    def test_deep_gemm_gets_row_major_operands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = types.ModuleType("deep_gemm")
        for layout in ("nn", "nt", "tn", "tt"):

            def product(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, layout: str = layout) -> None:
                assert a.is_contiguous() and b.is_contiguous()
                d.copy_((a.t() if layout[0] == "t" else a) @ (b.t() if layout[1] == "t" else b))

            setattr(module, f"bf16_gemm_{layout}", product)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        for layout in ("nn", "nt", "tn", "tt"):
            a, b = bench_gemm._operands((8, 5, 3), layout, "bfloat16", "cpu")
            assert torch.equal(baselines.deep_gemm(a, b)(), a @ b), layout
        with pytest.raises(Failure, match="bfloat16 only"):
            baselines.deep_gemm(a.float(), b.float())

    def test_flash_attention_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import cuda_ext

        def attend(q: Any, k: Any, v: Any, causal: bool, window_size: Any, deterministic: bool) -> Any:
            window = None if window_size == (-1, -1) else window_size
            return cuda_ext.flash_attention(q, k, v, causal=causal, window=window, deterministic=deterministic)

        def varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, causal: bool) -> Any:
            lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
            return cuda_ext.flash_attention_varlen(q, k, v, cu_q, cu_k, causal=causal, **lengths)

        second, third = types.ModuleType("flash_attn"), types.ModuleType("flash_attn_interface")
        second.flash_attn_func, second.flash_attn_varlen_func = attend, varlen  # type: ignore[attr-defined]
        third.flash_attn_func = lambda *args, **options: (attend(*args, **options), None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", second)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
        q, k, v = (torch.randn(2, 16, heads, 8).half().requires_grad_() for heads in (4, 2, 2))
        grad = torch.randn_like(q)
        for window in (None, 3):
            options = {"causal": True, "window": None if window is None else (window, 0)}
            expected = cuda_ext.flash_attention(q, k, v, **options)
            gradients = torch.autograd.grad(expected, (q, k, v), grad)
            for maker in (baselines.flash_attn, baselines.flash_attn_3):
                call = maker(q, k, v, causal=True, window=window)
                assert torch.equal(call(), expected)
                for a, b in zip(baselines.backward(call, grad)(), gradients, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        with pytest.raises(Failure, match="float16 and bfloat16 only"):
            baselines.flash_attn(q.float(), k.float(), v.float(), causal=True)
        packed = [t.detach().flatten(0, 1) for t in (q, k, v)]
        cu_seqlens = torch.tensor([0, 16, 32], dtype=torch.int32)
        out = baselines.flash_attn_varlen("flash_attn", *packed, cu_seqlens, 16, causal=True)()
        torch.testing.assert_close(out.unflatten(0, (2, 16)), cuda_ext.flash_attention(q, k, v, causal=True))

    def test_single_sequence_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import cuda_ext

        def single(q: Any, k: Any, v: Any, causal: bool, window_left: int) -> Any:
            window = None if window_left < 0 else (window_left, 0)
            return cuda_ext.flash_attention(q[None], k[None], v[None], causal=causal, window=window)[0]

        module = types.ModuleType("flashinfer")
        module.single_prefill_with_kv_cache = single  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        q, k, v = (torch.randn(1, 16, heads, 8).half() for heads in (4, 2, 2))
        call = baselines.flashinfer(q, k, v, causal=True)
        assert torch.equal(call(), cuda_ext.flash_attention(q, k, v, causal=True))
        with pytest.raises(Failure, match="one sequence a call"):
            baselines.flashinfer(*(t.expand(2, -1, -1, -1) for t in (q, k, v)), causal=True)
        with pytest.raises(Failure, match="no backward"):
            baselines.backward(call, q)

    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_sdpa_in_its_own_layout(self, kv_heads: int) -> None:
        import cuda_ext

        q, k, v = (torch.randn(2, 16, heads, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads))
        for backend in ("", "MATH"):
            call = baselines.sdpa(backend, q, k, v, causal=True)
            torch.testing.assert_close(call.to_ours(call()), cuda_ext.flash_attention(q, k, v, causal=True))  # type: ignore[attr-defined]
        with pytest.raises(Failure, match="top-left"):
            baselines.sdpa("", q, k[:, :8], v[:, :8], causal=True)


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        try:
            status = command.main(arguments)
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            status = stop.code
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["gem"],
                "expected suites of gemm, attention, masks, loss, experts, fp8, bucket, train, overhead, build, plans, "
                "got gem",
            ),
            (["--only", "("], "expected a regular expression"),
            (["--minutes", "0"], "expected more than 0"),
            (["--device", "tpu"], "invalid choice"),
        ],
    )
    def test_refuses(self, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
        status, output = self.run(capsys, *arguments)
        assert status == 2 and message in output

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_refuses_cuda_without_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, output = self.run(capsys, "--device", "cuda")
        assert status == 2 and "finds no GPU; run `python -m cuda_ext.info` to see why" in output

    def test_refuses_a_folder_it_cannot_write(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        status, output = self.run(capsys, "--out", str(tmp_path / "file" / "folder"))
        assert status == 2 and "cannot write to" in output and "--out" in output

    def test_lists_cases(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, output = self.run(capsys, "gemm", "--device", "cpu", "--list", "--only", "skinny.*bfloat16")
        assert status == 0 and len(output.splitlines()) == 4 and "torch.matmul" in output

    @pytest.mark.sampled
    def test_measures(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        # Even in a short time it measures at least one case. It appends to existing results.
        earlier = dataclasses.replace(BASE, seconds=1.0)
        (tmp_path / "results.jsonl").write_text(earlier.to_json() + "\n")
        arguments = ["overhead", "--device", "cpu", "--minutes", "0.01", "--only", "linear forward small"]
        status, output = self.run(capsys, *arguments, "--out", str(tmp_path), "--no-plots", "--seed", "5")
        assert status == 0 and "--seed 5" in output and "torch.mul" in output
        assert output.index("ceilings 1  copy") < output.index("overhead 1/1  linear forward tiny float32")
        first, *rows = results.read(tmp_path)
        assert first == earlier and {row.side for row in rows} == {OURS, "PyTorch", "torch.mul"}
        assert all(row.seconds and row.environment["torch"] == torch.__version__ for row in rows)

    def test_resume_measures_the_remaining_cases(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def row(case: str, failure: str = "") -> Measurement:
            seconds = None if failure else 1e-3
            return Measurement(
                "gemm", "a", "forward", "g", case, "float32", OURS, "cpu", seconds=seconds, failure=failure
            )

        earlier = [row("measured"), row("wrong", "wrong: much"), row("left", results.OUT_OF_TIME)]
        (tmp_path / "results.jsonl").write_text("".join(m.to_json() + "\n" for m in earlier))
        asked: list[set[tuple[str, ...]]] = []

        found: list[Measurement] = []

        def run(plan: runner.Plan, target: object) -> list[Measurement]:
            asked.append({problem[4:5] for problem in plan.done})
            return found

        monkeypatch.setattr(command, "run", run)
        options = ("gemm", "--device", "cpu", "--no-plots", "--out", str(tmp_path), "--resume")
        for rows, status in (([], 75), ([row("left", results.OUT_OF_TIME)], 75), ([row("left")], 0)):
            found[:] = rows
            assert self.run(capsys, *options)[0] == status
        assert asked == [{("measured",), ("wrong",)}] * 3
        (tmp_path / "results.jsonl").write_text("no measurement\n")
        status, output = self.run(capsys, *options)
        assert status == 2 and "benchmarks: --resume: " in output and "choose another folder by --out" in output

    @pytest.mark.sampled
    def test_finished_cases_are_not_measured_again(self, planted: dict[str, dict[str, Measurement]]) -> None:
        done = {next(iter(sides.values())).problem for case, sides in planted.items() if case not in ("wrong", "last")}
        plan = runner.Plan(["gemm"], "cpu", minutes=60, silence=600.0, command=PLANTED, done=done)
        progress = Recorder()
        found = {row.case for rows in runner.run(plan, progress) for row in rows}
        assert found == {"wrong", "last"} and progress.total == progress.cases == 2

    def test_judges_ours_against_itself_by_the_median(self, capsys: pytest.CaptureFixture[str]) -> None:
        def rows(*ratios: float) -> list[Measurement]:
            return [dataclasses.replace(BASE, side=AGAIN, seconds=1.0, ratio=ratio) for ratio in ratios]

        assert command.judge(rows(0.99, 1.02, 1.5)) == 0
        assert "median ratio 1.0200 of 3 cases; farthest from 1: 1.500" in capsys.readouterr().out
        assert command.judge(rows(0.96)) == command.judge(rows(1.04)) == command.judge([BASE]) == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_keeps_results_and_leaves_no_process(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        number: signal.Signals,
    ) -> None:
        row = dataclasses.asdict(dataclasses.replace(BASE, case="first", seconds=1.0))
        code = f"""
import json, subprocess, sys, time
if json.loads(sys.stdin.readline())["suite"] == "gemm":
    child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    row = {row!r}
    for message in ({{"total": 2}}, {{"case": 0, "of": row}}, {{"measurements": [row]}}, {{"side": str(child.pid)}},
                    {{"case": 1, "of": {{**row, "case": "second"}}}}):
        print(json.dumps(message), flush=True)
    time.sleep(1000)
"""
        children: list[int] = []

        def begins(text: str) -> None:
            if text.isdigit():
                children.append(int(text))
            elif "second" in text:
                os.kill(os.getpid(), number)

        def not_asked(number: int, frame: object) -> None:
            pytest.fail("the command takes no notice of the signal")

        monkeypatch.setattr(command, "_progress", lambda plan: contextlib.nullcontext(Recorder(begins)))
        plan = runner.Plan(["gemm"], "cpu", minutes=1, command=[sys.executable, "-c", code])
        previous = signal.signal(number, not_asked if number != signal.SIGINT else signal.default_int_handler)
        try:
            with (tmp_path / "results.jsonl").open("a") as target:
                found = command.run(plan, target)
            assert signal.getsignal(number) in (not_asked, signal.default_int_handler)
        finally:
            signal.signal(number, previous)
        assert [row.case for row in found] == [row.case for row in results.read(tmp_path)] == ["first"]
        assert capsys.readouterr().out
        (child,) = children
        deadline = time.monotonic() + 60
        while is_alive(child):  # it has been sent SIGKILL
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_an_interrupt_before_the_first_case_is_reported(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(command, "run", lambda plan, target: [])
        status, output = self.run(capsys, "gemm", "--device", "cpu", "--record", "--out", str(tmp_path))
        assert (status, output) == (1, "benchmarks: nothing was measured\n")

    def test_records_by_device_and_day(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(results, "ROOT", tmp_path)
        old, gemm, bucket = (
            dataclasses.replace(BASE, suite=s, seconds=t) for s, t in (("gemm", 1), ("gemm", 2), ("b", 3))
        )
        for rows in ([old], [bucket], [gemm]):
            command.record(rows)
        (folder,) = results.iter_devices(tmp_path)
        assert folder.name == results.slug(environment.device_name("cpu"))
        assert results.read(folder) == [bucket, gemm]


class TestResults:
    def test_lines_are_read_as_written(self, tmp_path: Path) -> None:
        row = dataclasses.replace(BASE, seconds=1.5, extra={"wire MiB": 25}, environment={"torch": "2"})
        (tmp_path / "a.jsonl").write_text(row.to_json() + "\n\n" + row.to_json() + "\n")
        assert results.read(tmp_path) == [row, row]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"a.jsonl:1: expected one JSON object per line"),
            ("[1]", r"a.jsonl:1: expected a measurement"),
            ('{"format": 0}', r"a.jsonl:1: expected format 1, got 0; measure again"),
            ('{"format": 1, "suite": "gemm"}', r"a.jsonl:1: expected the fields \['case'"),
        ],
    )
    def test_refuses_other_files(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(results.ResultsError, match=message):
            results.read(tmp_path / "a.jsonl")

    def test_refuses_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(results.ResultsError, match="found none"):
            results.read(tmp_path)
        with pytest.raises(results.ResultsError, match="cannot be read"):
            results.read(tmp_path / "nothing.jsonl")

    def test_a_later_measurement_replaces_an_earlier_one(self) -> None:
        old = dataclasses.replace(BASE, seconds=2.0, date="2026-01-01")
        new = dataclasses.replace(BASE, seconds=1.0, date="2026-02-01")
        theirs = dataclasses.replace(BASE, side="a rival", ratio=2.0)
        (sides,) = results.by_case([theirs, new, old]).values()
        assert sides == {OURS: new, "a rival": theirs} and list(sides) == [OURS, "a rival"]

    def test_a_run_in_parts_is_one(self) -> None:
        """A short run completes no suite; later runs complete one suite each."""

        def part(hour: int, **failures: str) -> list[Measurement]:
            return [
                dataclasses.replace(
                    BASE, suite=name[0], case=name, date=f"2026-01-01T{hour:02}", failure=failure,
                    seconds=None if failure else float(hour),
                )
                for name, failure in failures.items()
            ]  # fmt: skip

        late = "out of time"
        parts = [
            part(1, a1="", a2=late, b1="", b2=late, b3=late),
            part(2, a1="", a2=""),
            part(3, b1="", b2="", b3=late),
        ]
        (run,) = grouping.split_into_runs(itertools.chain(*parts))
        found = {m.case: m.seconds for m in run.measurements}
        assert found == {"a1": 2.0, "a2": 2.0, "b1": 3.0, "b2": 3.0, "b3": None}
        # A complete suite that is measured again is another run, even if it fails.
        again = grouping.split_into_runs([*itertools.chain(*parts), *part(4, a1="crashed: SIGSEGV", a2="")])
        assert [len(run.measurements) for run in again] == [5, 2]

    def test_geometric_means(self) -> None:
        rows = [dataclasses.replace(BASE, case=str(r), side="a rival", ratio=r) for r in (0.5, 8.0)]
        assert results.geometric_means(rows) == {("suite", "", "a rival"): (pytest.approx(2.0), 2)}

    def test_fraction_of_the_ceilings(self) -> None:
        row = dataclasses.replace(BASE, seconds=1.0, flops=5e8, bytes=2e8)
        assert row.of_ceiling == 0.5 and dataclasses.replace(row, bytes=8e8).of_ceiling == 0.8
        assert dataclasses.replace(row, peak_flops=0.0).of_ceiling is None
        assert results.slug("NVIDIA H200") == "nvidia-h200"


class TestEnvironment:
    def test_is_json(self) -> None:
        described = json.loads(json.dumps(environment.describe("cpu") | environment.state("cpu")))
        assert described["device"].endswith("cores") and described["cache_bytes"] > 1 << 16

    def test_without_nvidia_smi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert environment.nvidia_smi("driver_version") == "" and environment.state("cuda") == {}

    def test_asks_for_the_gpu_in_use(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text('#!/bin/sh\necho "$1, 2, 3, 4"\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        assert environment.state("cuda")["sm_clock"] == "--id=3"
