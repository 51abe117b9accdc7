"""What the benchmarks do on a GPU, rehearsed without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode

import cuda_ext
from benchmarks import environment
from benchmarks.presentation.sides import REFERENCES
from benchmarks.results import OURS, Measurement
from benchmarks.suites import bench_overhead, bench_train, measure, runner


class Gpu:
    """Streams and graphs as CUDA has them, of calls that do nothing."""

    def __init__(self) -> None:
        self.streams = ["default"]
        self.captured = ""
        self.replays = 0

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    @contextmanager
    def graph(self, graph: object, stream: str = "of captures") -> Iterator[None]:
        if stream == "default":
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured = stream
        with self.stream(stream):
            yield
        self.captured = ""

    def launch(self, stream: str) -> None:
        if self.captured and stream != self.captured:
            raise RuntimeError(f"a launch on stream {stream} while {self.captured} is captured")

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 1.0

    fakes = {
        "Stream": lambda: "side",
        "stream": gpu.stream,
        "current_stream": lambda: gpu.streams[-1],
        "CUDAGraph": lambda: gpu,
        "graph": gpu.graph,
        "Event": Event,
        "synchronize": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(environment, "state", lambda device: {})
    measure._stream.cache_clear()
    yield gpu
    measure._stream.cache_clear()


def test_backward_is_timed_by_a_graph(gpu: Gpu) -> None:
    """Backward runs on the stream of its forward."""

    def backward(_: object) -> measure.Call:
        stream = torch.cuda.current_stream()
        return lambda: gpu.launch(stream)

    def forward(_: object) -> measure.Call:
        return lambda: gpu.launch(torch.cuda.current_stream())

    for side in (forward, backward):
        case = measure.Case("op", "phase", "", "", "float32", {OURS: side})
        base = Measurement("", "", "", "", "", "float32", OURS, "cuda")
        (row,) = measure.measure(case, base, measure.Method("cuda"), 0.01, lambda side: None, {})
        assert (row.failure, row.timer) == ("", "graph")
    assert gpu.replays > 2 and gpu.streams == ["default"]


def test_overhead_asks_attention_for_a_dtype_it_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cuda_ext, "flash_attention", lambda *tensors: seen.extend(tensor.dtype for tensor in tensors))
    with FakeTensorMode():
        cases = {(case.op, case.phase): case for case in bench_overhead.cases("cuda")}
        case = cases["flash_attention", "forward"]
        case.sides[OURS](None)()
        assert case.sides["PyTorch"](None)().dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 3 and case.dtype == "bfloat16"
    assert cases["gemm", "forward"].dtype == "float32"
    assert {case.dtype for case in bench_overhead.cases("cpu")} == {"float32"}


def test_names_of_algorithms() -> None:
    """Sockets are what gloo uses, not NCCL."""
    assert not [name for name in bench_train.algorithms("cuda") if "sockets" in name]
    for device in ("cpu", "cuda"):
        assert sorted(bench_train.algorithms(device).values()) == ["all_reduce", "float32"]
        assert set(bench_train.algorithms(device)) <= set(REFERENCES)


def test_patience() -> None:
    plan = runner.Plan(["gemm"], "cuda", minutes=1)
    assert plan.patience("gemm") == plan.patience("gemm", "torch.matmul") == plan.patience(runner.CEILINGS) == 20
    assert plan.patience("gemm", "torch.compile") == plan.patience("attention", "FlexAttention") == 150
    assert plan.patience("train") == 60 and plan.patience("build") == 900
    assert runner.Plan(["gemm"], "cpu", minutes=1).patience("gemm") == 150
    assert runner.Plan(["gemm"], "cuda", minutes=1, silence=3).patience("build") == 3
