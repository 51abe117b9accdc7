"""One model of all ops under the parts of PyTorch that change how a program runs."""

from __future__ import annotations

import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cuda_ext
import cuda_ext.ops

RunPython = Callable[..., subprocess.CompletedProcess[str]]
OPS = ("gemm", "linear", "gated_linear", "mlp", "gated_mlp", "flash_attention", "flash_attention_varlen")
# Below autograd both forms of attention are one op.
FORWARD = {f"{name}_forward": 1 + (name == "flash_attention") for name in OPS if not name.endswith("varlen")}


class EveryOp(nn.Module):
    """Calls each op once. (batch, length, 16) -> (batch, length, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        shapes = {"up": (48, 32), "down": (32, 48), "gate": (64, 32), "gates_and_up": (96, 32), "last": (32, 16)}
        self.weights = nn.ParameterDict({name: torch.randn(shape) / 6 for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        h = cuda_ext.linear(x, self.first.weight, self.first.bias, activation="gelu")
        heads = h.unflatten(-1, (4, 8))
        h = h + cuda_ext.flash_attention(heads, heads, heads, causal=True).flatten(-2)
        h = cuda_ext.mlp(h, w["up"], w["down"], residual=h)
        h = cuda_ext.gated_linear(h, w["gate"])
        batch, length = x.shape[:2]
        packed = h.reshape(batch * length, 4, 8)
        ends = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length
        h = h + cuda_ext.flash_attention_varlen(
            packed, packed, packed, ends, ends, max_seqlen_q=length, max_seqlen_k=length, window=(3, 0)
        ).reshape(h.shape)
        return cuda_ext.gemm(cuda_ext.gated_mlp(h, w["gates_and_up"], w["down"]), w["last"])


def model_and_inputs(dtype: torch.dtype = torch.float32) -> tuple[EveryOp, Tensor]:
    return EveryOp().to(dtype), torch.randn(2, 11, 16, dtype=dtype, requires_grad=True)


def results(model: Callable[[Tensor], Tensor], of: EveryOp, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    out = model(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *of.parameters()])]


class Called(TorchDispatchMode):
    """Counts the ops of this package below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cuda_ext":
            self.counts[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def test_the_model_calls_every_op() -> None:
    model, x = model_and_inputs()
    with Called() as called:
        model(x)
    assert called.counts == FORWARD


@pytest.mark.sampled
def test_a_package_of_ahead_of_time_compiled_code(tmp_path: Path, run_python: RunPython) -> None:
    """torch.export, AOTInductor, and a new process that runs the package with other lengths."""
    model, x = model_and_inputs()
    x = x.detach()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}})
    package = tmp_path / "model.pt2"
    quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # half the time
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=quickly)
    inputs = [x, torch.randn(2, 29, 16), torch.randn(2, 2, 16)]
    with torch.no_grad():
        torch.save([(each, model(each)) for each in inputs], tmp_path / "cases.pt")
    code = (
        "import torch, cuda_ext.ops\n"
        f"model = torch._inductor.aoti_load_package({str(package)!r})\n"
        f"for x, expected in torch.load({str(tmp_path / 'cases.pt')!r}):\n"
        "    torch.testing.assert_close(model(x), expected)\n"
        "    print(len(x[0]), 'equal')\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0 and "11 equal\n29 equal\n2 equal\n" in done.stdout, done.stdout


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_of_compile(mode: str) -> None:
    torch.compiler.reset()
    model, x = model_and_inputs()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for tensor in (x, torch.randn(2, 19, 16, requires_grad=True)):
        torch.testing.assert_close(results(compiled, model, tensor), results(model, model, tensor))


def test_selective_checkpointing_runs_each_product_once() -> None:
    model, x = model_and_inputs()
    expected = results(model, model, x)
    contexts = partial(create_selective_checkpoint_contexts, cuda_ext.ops.compute_intensive_ops())
    with Called() as called:
        found = results(partial(checkpoint, model, use_reentrant=False, context_fn=contexts), model, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {name: count for name, count in called.counts.items() if name.endswith("_forward")} == FORWARD
    with Called() as called:
        results(partial(checkpoint, model, use_reentrant=False), model, x)
    assert called.counts["linear_forward"] == 2, "a plain checkpoint recomputes it: this test would not see it"


def test_names_in_a_profile() -> None:
    model, x = model_and_inputs()
    with profile() as profiled:
        results(model, model, x)
    names = {event.key for event in profiled.key_averages()}
    assert {f"cuda_ext::{name}" for name in OPS} <= names
    backward = {"gemm", "linear", "flash_attention"}
    assert {f"cuda_ext::{name}_backward" for name in backward} <= names


def test_threads_at_once() -> None:
    """Several threads, each with its own model, forward and backward; and one model that several threads run."""
    models = [model_and_inputs() for _ in range(4)]
    expected = [results(model, model, x) for model, x in models]
    found: dict[int, list[list[Tensor]]] = {}

    def work(index: int) -> None:
        model, x = models[index % len(models)]
        found[index] = [results(model, model, x) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for index, several in found.items():
        for each in several:
            torch.testing.assert_close(each, expected[index % len(models)])


def _in_another_process(method: str, model: EveryOp, x: Tensor, expected: list[Tensor], queue: Any) -> None:
    torch.set_num_threads(1)  # as DataLoader's workers do: the OpenMP threads of the parent do not exist after a fork
    try:
        torch.testing.assert_close(model(x), expected[0])
        if method == "spawn":  # after a fork PyTorch refuses to run backward
            torch.testing.assert_close(results(model, model, x), expected)
        queue.put("equal")
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(method: str) -> None:
    model, x = model_and_inputs()
    x = x.detach().requires_grad_()
    expected = [tensor.detach() for tensor in results(model, model, x)]
    context = mp.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(method, model, x, expected, queue))
    process.start()
    assert queue.get(timeout=120) == "equal"
    process.join(60)
    assert process.exitcode == 0


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = EveryOp()
        x = torch.randn(2, 11, 16, requires_grad=True)
    found = results(model, model, x)
    real, y = model_and_inputs()
    for meta, tensor in zip(found, results(real, real, y), strict=True):
        assert meta.is_meta
        assert (meta.shape, meta.stride(), meta.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


@pytest.mark.parametrize("randomness", ["error", "different"])
def test_vmap_of_a_gradient(randomness: str) -> None:
    model, _ = model_and_inputs(torch.float64)
    x = torch.randn(3, 2, 5, 16, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return model(x).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), randomness=randomness)(x)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(each) for each in x]))
