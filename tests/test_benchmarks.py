"""`python -m benchmarks`: how it measures, what it does with sides that fail, and its cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command
from benchmarks import (
    bench_attention,
    bench_bucket,
    bench_build,
    bench_gemm,
    bench_overhead,
    bench_train,
    environment,
    measure,
    opponents,
    results,
    runner,
)
from benchmarks.measure import AGAIN, Case, Failure, Method
from benchmarks.results import OURS, Measurement

SUITES = {
    "gemm": bench_gemm,
    "attention": bench_attention,
    "bucket": bench_bucket,
    "train": bench_train,
    "overhead": bench_overhead,
    "build": bench_build,
}
BASE = Measurement("suite", "", "", "", "", "", OURS, "cpu", peak_flops=1e9, peak_bandwidth=1e9)


def measured(case: Case, seconds: float = 0.05, method: Method | None = None) -> dict[str, Measurement]:
    rows = measure.measure(case, BASE, method or Method("cpu"), seconds, lambda side: None, set())
    return {row.side: row for row in rows}


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def case(self, **milliseconds: float) -> Case:
        """Sides whose calls take as long as given."""

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
        assert measured(clock.case(cuda_ext=4000, slow=8000), seconds=1.0)[OURS].rounds == 2

    def test_sides_take_turns_and_each_begins_equally_often(self, clock: Clock) -> None:
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

    def test_short_calls_are_repeated_until_the_clock_sees_them(self) -> None:
        calls = itertools.count()
        row = measured(Case("", "", "", "", "float32", {OURS: lambda _: lambda: next(calls)}))[OURS]
        assert row.seconds is not None and row.seconds < 1e-5
        assert next(calls) > 100 * row.rounds

    def test_ours_against_ours_differs_by_nothing(self) -> None:
        x = torch.randn(300, 300)
        case = Case("", "", "", "", "float32", {OURS: lambda _: lambda: x @ x, "theirs": lambda _: lambda: x})
        rows = measured(case, seconds=1.0, method=Method("cpu", against_itself=True))
        assert set(rows) == {OURS, AGAIN}
        assert rows[AGAIN].ratio == pytest.approx(1, rel=0.1)

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


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Measurement]]:
    """What a run makes of the planted suite, by case and side."""
    worker = [sys.executable, str(ROOT / "tests" / "planted_suite.py")]
    plan = runner.Plan(["gemm"], "cpu", minutes=3, silence=30.0, command=worker)
    progress = Recorder()
    found: dict[str, dict[str, Measurement]] = {}
    for rows in runner.run(plan, progress):
        for row in rows:
            assert row.side not in found.setdefault(row.case, {}), f"two rows of {row.side} in {row.case}"
            found[row.case][row.side] = row
    assert progress.total == 8 and progress.cases == 8
    return found


class Recorder:
    total = cases = 0

    def start(self, suite: str, total: int) -> None:
        self.total = total

    def case(self, text: str) -> None:
        pass

    def done(self, rows: list[Measurement]) -> None:
        self.cases += 1


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
    def test_has_a_row_that_says_so_and_the_others_go_on(
        self, planted: dict[str, dict[str, Measurement]], case: str, side: str, reason: str
    ) -> None:
        rows = planted[case]
        assert rows[side].failure == reason and rows[side].seconds is None and rows[side].ratio is None
        assert rows[OURS].seconds and rows["good"].ratio and not rows["good"].failure

    def test_a_side_after_one_that_crashes_is_measured(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["crash"]["after it"].seconds

    def test_what_an_opponent_prints_does_no_harm(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["chatty"]["prints"].seconds

    def test_a_crash_while_timing_is_nobodys(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["late"][OURS].failure == "while timing: crashed: exit status 7"

    def test_the_run_comes_to_its_end(self, planted: dict[str, dict[str, Measurement]]) -> None:
        assert planted["last"]["good"].seconds
        assert planted["last"][OURS].of_ceiling and planted["last"][OURS].environment["cpu"]

    def test_a_suite_that_cannot_be_imported(self) -> None:
        broken = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
        plan = runner.Plan(["gemm", "bucket"], "cpu", minutes=1, command=broken)
        rows = [row for rows in runner.run(plan, Recorder()) for row in rows]
        assert [(row.suite, row.failure) for row in rows] == [
            ("gemm", "crashed: exit status 3"),
            ("bucket", "crashed: exit status 3"),
        ]

    def test_no_time_is_said_of_every_case(self) -> None:
        plan = runner.Plan(["overhead"], "cpu", minutes=1e-6)
        rows = [row for rows in runner.run(plan, Recorder()) for row in rows]
        assert len(rows) == len(list(bench_overhead.cases("cpu"))) and {row.failure for row in rows} == {"out of time"}


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
    *bench_overhead.cases("cpu"),
]


class TestCases:
    @pytest.mark.parametrize("case", SMALL_CASES, ids=lambda c: f"{c.op} {c.phase} {c.name} {c.dtype}")
    def test_all_sides_compute_the_same(self, case: Case) -> None:
        case = dataclasses.replace(case, input_bytes=0.0)  # one set of inputs will do
        rows = measured(case, seconds=0.0)
        assert OURS in rows
        for side, row in rows.items():
            assert row.seconds and not row.failure, f"{side}: {row.failure}"

    def test_a_data_parallel_step_of_two_ranks(self) -> None:
        case = bench_train.data_parallel("cpu", "tiny", chain=[8, 16, 4], batch=2)
        rows = measured(case, seconds=0.1)
        assert {OURS, "DDP", "DDP, bucket views", "DDP, bf16 hook", "no communication"} <= set(rows)
        assert all(row.seconds for row in rows.values())
        assert len({row.rounds for row in rows.values()}) == 1

    def test_import_is_timed(self) -> None:
        rows = measured(next(iter(bench_build.cases("cpu"))), seconds=0.0)
        assert (
            rows[OURS].seconds
            and rows["torch alone"].seconds
            and rows[OURS].seconds > 0.5 * rows["torch alone"].seconds
        )

    def test_a_build_that_fails_says_how(self) -> None:
        with pytest.raises(Failure, match="failed: ValueError: 5"):
            bench_build._seconds([sys.executable, "-c", "raise ValueError(5)"], ROOT, {})
        with pytest.raises(Failure, match="took longer than 1 s"):
            bench_build._seconds([sys.executable, "-c", "import time; time.sleep(9)"], ROOT, {}, limit=1)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("suite", ["gemm", "attention", "bucket", "train", "build"])
    def test_names_tell_cases_apart(self, suite: str, device: str) -> None:
        cases = list(SUITES[suite].cases(device))
        names = [(c.op, c.phase, c.name, c.dtype, c.group) for c in cases]
        keys = [(c.op, c.phase, c.name, c.dtype) for c in cases]
        assert len(set(keys)) == len(keys), [n for n in names if keys.count((n[0], n[1], n[2], n[3])) > 1]
        assert all(OURS in c.sides or c.samples for c in cases)

    def test_flops_are_counted_as_the_field_does(self) -> None:
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

    def test_documents_have_the_lengths_of_real_ones(self) -> None:
        lengths = bench_attention.lengths_of_documents(4096)
        assert sum(lengths) == 4096 and len(lengths) > 3 and max(lengths) > 2 * sorted(lengths)[len(lengths) // 2]
        assert lengths == bench_attention.lengths_of_documents(4096)


class TestOpponents:
    """Stand-ins with the interfaces of packages that need a GPU, so that what is handed to them is checked."""

    def test_deep_gemm_gets_operands_as_they_lie_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module: Any = types.ModuleType("deep_gemm")
        for layout in ("nn", "nt", "tn", "tt"):

            def product(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, layout: str = layout) -> None:
                assert a.is_contiguous() and b.is_contiguous()
                d.copy_((a.t() if layout[0] == "t" else a) @ (b.t() if layout[1] == "t" else b))

            setattr(module, f"bf16_gemm_{layout}", product)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        for layout in ("nn", "nt", "tn", "tt"):
            a, b = bench_gemm._operands((8, 5, 3), layout, "bfloat16", "cpu")
            assert torch.equal(opponents.deep_gemm(a, b)(), a @ b), layout
        with pytest.raises(Failure, match="bfloat16 only"):
            opponents.deep_gemm(a.float(), b.float())

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
            for maker in (opponents.flash_attn, opponents.flash_attn_3):
                call = maker(q, k, v, causal=True, window=window)
                assert torch.equal(call(), expected)
                for a, b in zip(opponents.backward(call, grad)(), gradients, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        with pytest.raises(Failure, match="float16 and bfloat16 only"):
            opponents.flash_attn(q.float(), k.float(), v.float(), causal=True)
        packed = [t.detach().flatten(0, 1) for t in (q, k, v)]
        cu_seqlens = torch.tensor([0, 16, 32], dtype=torch.int32)
        out = opponents.flash_attn_varlen("flash_attn", *packed, cu_seqlens, 16, causal=True)()
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
        call = opponents.flashinfer(q, k, v, causal=True)
        assert torch.equal(call(), cuda_ext.flash_attention(q, k, v, causal=True))
        with pytest.raises(Failure, match="one sequence a call"):
            opponents.flashinfer(*(t.expand(2, -1, -1, -1) for t in (q, k, v)), causal=True)
        with pytest.raises(Failure, match="no backward"):
            opponents.backward(call, q)

    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_sdpa_in_its_own_layout(self, kv_heads: int) -> None:
        import cuda_ext

        q, k, v = (torch.randn(2, 16, heads, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads))
        for backend in ("", "MATH"):
            call = opponents.sdpa(backend, q, k, v, causal=True)
            torch.testing.assert_close(call.to_ours(call()), cuda_ext.flash_attention(q, k, v, causal=True))  # type: ignore[attr-defined]
        with pytest.raises(Failure, match="top-left"):
            opponents.sdpa("", q, k[:, :8], v[:, :8], causal=True)


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
            (["gem"], "expected suites of gemm, attention, bucket, train, overhead, build, got gem"),
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

    def test_measures(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        arguments = ["overhead", "--device", "cpu", "--minutes", "0.4", "--only", "linear forward"]
        status, output = self.run(capsys, *arguments, "--out", str(tmp_path), "--no-plots", "--seed", "5")
        assert status == 0 and "--seed 5" in output and "torch.mul" in output
        rows = results.read(tmp_path)
        assert {row.side for row in rows} == {OURS, "PyTorch", "torch.mul"}
        assert all(row.seconds and row.environment["torch"] == torch.__version__ for row in rows)
        # a second run adds to the file
        self.run(capsys, *arguments, "--out", str(tmp_path), "--no-plots", "--aa")
        assert len(results.read(tmp_path)) > len(rows)

    def test_what_was_measured_before_an_interrupt_is_kept(self, tmp_path: Path) -> None:
        import subprocess

        arguments = ["-m", "benchmarks", "overhead", "--device", "cpu", "--minutes", "2", "--no-plots"]
        process = subprocess.Popen(
            [sys.executable, *arguments, "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        file = tmp_path / "results.jsonl"
        deadline = time.time() + 60
        while time.time() < deadline and not (file.exists() and len(file.read_text().splitlines()) > 5):
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and "torch.mul" in output
        assert len(results.read(file)) > 5

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
    def test_lines_come_back_as_they_were(self, tmp_path: Path) -> None:
        row = dataclasses.replace(BASE, seconds=1.5, extra={"wire MiB": 25}, environment={"torch": "2"})
        (tmp_path / "a.jsonl").write_text(row.to_json() + "\n\n" + row.to_json() + "\n")
        assert results.read(tmp_path) == [row, row]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"a.jsonl:1: expected one JSON object a line"),
            ("[1]", r"a.jsonl:1: expected a measurement"),
            ('{"format": 0}', r"a.jsonl:1: expected format 1, got 0; measure anew"),
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
