"""The GEMM ops as PyTorch sees them: opcheck, fake kernels, torch.compile, export, devices without a kernel."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_common import ACTIVATIONS, OPS, REFERENCES, arguments, rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from cuda_ext._gemm import gemm, linear
from cuda_ext._load import ops
from cuda_ext._toolchain import NAMESPACE

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def calls() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """One way or more of calling each op: ten forward, four backward, and the two of these that write to slots."""
    a, b, c, bias = rand(2, 3, 4), rand(4, 5), rand(3, 1), rand(5)
    x, w, residual = rand(2, 3, 4), rand(5, 4), rand(2, 3, 5)
    gated_w, gated_bias = rand(10, 4), rand(10)
    w1, w2, b1, b2 = rand(6, 4), rand(5, 6), rand(6), rand(5)
    gated_w1, gated_b1 = rand(12, 4), rand(12)
    grad, preact = rand(2, 3, 5, grad=False), rand(2, 3, 5, grad=False)
    some, every = [True, False, True, False], [True] * 5
    hidden = {n: rand(2, 3, n, grad=False) for n in (6, 10, 12)}
    gelu = {"activation": "gelu"}
    frozen = [t.detach() for t in (x, w, bias)]
    slot = {"weight_slot": rand(5, 4, grad=False), "slot_alpha": 0.5, "slot_beta": 1.0}
    return {
        "gemm": (ops.gemm.default, (a, b, c, bias), {**gelu, "alpha": 0.5, "beta": 2.0}),
        "gemm transposed": (ops.gemm.default, (a.mT, rand(1, 5, 3).mT), {"out_dtype": torch.bfloat16}),
        "gemm empty": (ops.gemm.default, (rand(0, 3, 4), b), {}),
        "gemm_forward": (ops.gemm_forward.default, (a.detach(), b.detach()), gelu),
        "gemm_forward relu": (ops.gemm_forward.default, (a.detach(), b.detach()), {"activation": "relu"}),
        "gemm_backward": (
            ops.gemm_backward.default,
            (grad, a.detach(), b.detach(), bias.detach()),
            {"alpha": 0.5, "beta": 2.0, "output_mask": every[:4]},
        ),
        "gemm_backward masked": (
            ops.gemm_backward.default,
            (grad, a.detach(), b.detach(), None),
            {"alpha": 1.0, "beta": 1.0, "output_mask": some},
        ),
        "activation_backward": (
            ops.activation_backward.default,
            (grad, preact),
            {**gelu, "gated": False, "bias_dtype": torch.bfloat16},
        ),
        "activation_backward gated": (
            ops.activation_backward.default,
            (grad, hidden[10]),
            {"activation": None, "gated": True, "bias_dtype": None},
        ),
        "linear": (ops.linear.default, (x, w, bias, residual), gelu),
        "linear plain": (ops.linear.default, (x.transpose(0, 1), w), {}),
        "linear_forward": (ops.linear_forward.default, tuple(frozen), gelu),
        "linear_backward": (ops.linear_backward.default, (grad, *frozen), {"output_mask": every[:3]}),
        "linear_backward masked": (ops.linear_backward.default, (grad, *frozen), {"output_mask": some[:3]}),
        "linear_backward.slot": (ops.linear_backward.slot, (grad, *frozen), {"output_mask": every[:3], **slot}),
        "gated_linear": (ops.gated_linear.default, (x, gated_w, gated_bias), {}),
        "gated_linear_forward": (ops.gated_linear_forward.default, (x.detach(), gated_w.detach()), {}),
        "mlp": (ops.mlp.default, (x, w1, w2, b1, b2, residual), {}),
        "mlp_forward": (ops.mlp_forward.default, (x.detach(), w1.detach(), w2.detach()), {}),
        "mlp_hidden_backward": (
            ops.mlp_hidden_backward.default,
            (grad, w2.detach(), hidden[6], b1.detach(), b2.detach()),
            {**gelu, "gated": False, "output_mask": every[:4]},
        ),
        "mlp_hidden_backward gated": (
            ops.mlp_hidden_backward.default,
            (grad, w2.detach(), hidden[12], None, None),
            {"activation": "silu", "gated": True, "output_mask": some},
        ),
        "mlp_hidden_backward.slot": (
            ops.mlp_hidden_backward.slot,
            (grad, w2.detach(), hidden[6], b1.detach(), b2.detach()),
            {**gelu, "gated": False, "output_mask": every[:4], **slot, "weight_slot": rand(5, 6, grad=False)},
        ),
        "gated_mlp": (ops.gated_mlp.default, (x, gated_w1, w2, gated_b1, b2), {}),
        "gated_mlp_forward": (ops.gated_mlp_forward.default, (x.detach(), gated_w1.detach(), w2.detach()), {}),
    }


@pytest.mark.parametrize("call", calls())
def test_opcheck(call: str) -> None:
    op, args, kwargs = calls()[call]
    opcheck(op, args, kwargs)


def test_every_op_is_checked() -> None:
    checked = {op.name() for op, _, _ in calls().values()}
    every = {f"{op}{suffix}" for op in OPS for suffix in ("", "_forward")}
    every |= {"activation_backward", "gemm_backward", "linear_backward", "mlp_hidden_backward"}
    every |= {"linear_backward.slot", "mlp_hidden_backward.slot"}
    assert checked == {f"{NAMESPACE}::{name}" for name in every}


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", OPS)
def test_compile_forward_and_backward(op: str, activation: str | None) -> None:
    torch._dynamo.reset()

    def call(tensors: dict[str, Tensor]) -> Tensor:
        return OPS[op](**tensors, activation=activation).sin()

    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    for sizes in ((2, 3, 4), (5, 7, 6)):
        tensors = arguments(op, (2,), *sizes)
        expected = call(tensors)
        actual = traced(tensors)
        weights = torch.randn_like(expected)
        assert torch.equal(actual, expected)
        leaves = list(tensors.values())
        grads, expected_grads = (torch.autograd.grad(out, leaves, weights) for out in (actual, expected))
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", OPS)
def test_compile_with_dynamic_shapes_traces_once(op: str) -> None:
    torch._dynamo.reset()

    def call(tensors: dict[str, Tensor]) -> Tensor:
        return OPS[op](**tensors, activation="gelu")

    traced = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, n, k in ((3, 4, 5), (6, 8, 7), (9, 5, 11)):
            tensors = arguments(op, (2,), m, n, k, f=k + 1)
            out = traced(tensors)
            torch.testing.assert_close(out, call(tensors))
            out.sum().backward()


@pytest.mark.sampled
def test_compile_with_inductor() -> None:
    """The default backend once, with code of its own around the ops."""
    torch._dynamo.reset()
    tensors = [rand(6, 8), rand(12, 8), rand(4, 12)]

    def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = linear(x * 2, w1, activation="gelu")
        return gemm(hidden.mul(0.5), w2.t(), x[:, :4].contiguous()).relu()

    expected = block(*tensors)
    actual = torch.compile(block, fullgraph=True)(*tensors)
    torch.testing.assert_close(actual, expected)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    for a, b in zip(torch.autograd.grad(actual.sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_compile_under_autocast() -> None:
    torch._dynamo.reset()
    tensors = arguments("gated_mlp", (2,), 3, 4, 5)

    def call() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return OPS["gated_mlp"](**tensors)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())


@pytest.mark.sampled
def test_export_with_a_dynamic_batch(tmp_path: Path, run_python: RunPython) -> None:
    """Also saved, and loaded in a process that imports the ops and nothing else."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return linear(x, weight, activation="silu")

    x, w = torch.randn(4, 5), torch.randn(3, 5)
    program = torch.export.export(Layer(), (x, w), dynamic_shapes={"x": {0: torch.export.Dim("batch")}, "weight": None})
    assert any(node.target is ops.linear.default for node in program.graph.nodes)
    other = torch.randn(9, 5)
    expected = linear(other, w, activation="silu")
    torch.testing.assert_close(program.module()(other, w), expected)

    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((other, w), tmp_path / "inputs.pt")
    code = "import torch, cuda_ext.ops; program = torch.export.load('program.pt2'); "
    code += "torch.save(program.module()(*torch.load('inputs.pt')), 'output.pt')"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout
    torch.testing.assert_close(torch.load(tmp_path / "output.pt"), expected)


@pytest.mark.parametrize("op", OPS)
def test_fake_kernels_refuse_wrong_shapes(op: str) -> None:
    with FakeTensorMode() as mode:
        tensors = {n: mode.from_tensor(t) for n, t in arguments(op, (), 3, 4, 5).items()}
        last = next(n for n in tensors if n in ("b", "weight", "weight2"))
        tensors[last] = mode.from_tensor(torch.randn(7, 9))
        with pytest.raises(RuntimeError, match=rf"{NAMESPACE}::{op}: expected {last} of shape"):
            OPS[op](**tensors)


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors(op: str) -> None:
    tensors = arguments(op, (2,), 3, 4, 5)
    out = OPS[op](**{n: t.detach().to("meta") for n, t in tensors.items()})
    assert out.device.type == "meta" and out.shape == REFERENCES[op](**tensors).shape


@pytest.mark.parametrize("call", calls())
def test_one_argument_on_meta_is_refused(call: str) -> None:
    op, args, kwargs = calls()[call]
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            with pytest.raises(
                RuntimeError, match=rf"{NAMESPACE}::\w+: expected \w+ on device .*got (meta|cpu)"
            ) as caught:
                op(**{**given, name: tensor.detach().to("meta")})
            assert f"expected {name} on device" in str(caught.value) or "on device meta to match" in str(caught.value)
