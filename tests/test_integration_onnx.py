"""ONNX export: the exported models in onnxruntime against the ops."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cuda_ext

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from cuda_ext._activations import ACTIVATIONS  # noqa: E402
from cuda_ext.integrations.onnx import translation_table  # noqa: E402


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def exported(function: Callable[..., Any], *inputs: Tensor, dynamic: Any = None) -> Any:
    model = function if isinstance(function, nn.Module) else Call(function)
    program = torch.onnx.export(
        model.eval(),
        inputs,
        dynamo=True,
        opset_version=23,
        custom_translation_table=translation_table(),
        dynamic_shapes=None if dynamic is None else (dynamic if isinstance(function, nn.Module) else (dynamic,)),
        verbose=False,
    )
    file = io.BytesIO()
    program.save(file)
    return onnx.load_from_string(file.getvalue())


def operators(model: Any) -> set[str]:
    return {node.op_type for node in model.graph.node}


def run(model: Any, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    assert len(names) == len(inputs)
    return [torch.from_numpy(np.asarray(each)) for each in session.run(None, dict(zip(names, map(np.asarray, inputs))))]


def check(function: Callable[..., Any], *inputs: Tensor, dynamic: Any = None, other: tuple[Tensor, ...] = ()) -> Any:
    """Exports with `inputs`, and compares on these and on `other`; returns the model."""
    model = exported(function, *inputs, dynamic=dynamic)
    for tensors in (inputs, other) if other else (inputs,):
        expected = function(*tensors)
        torch.testing.assert_close(run(model, *tensors), [expected] if isinstance(expected, Tensor) else [*expected])
    assert {opset.domain for opset in model.opset_import} <= {""}, "an operator that is not of ONNX"
    return model


def qkv(b: int = 2, sq: int = 7, sk: int = 7, h: int = 4, hk: int = 2, d: int = 8, dv: int = 8) -> list[Tensor]:
    return [torch.randn(b, sq, h, d), torch.randn(b, sk, hk, d), torch.randn(b, sk, hk, dv)]


@pytest.mark.sampled
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_products(activation: str | None) -> None:
    x, w, b = torch.randn(2, 5, 8), torch.randn(12, 8), torch.randn(12)
    w2, b2 = torch.randn(6, 12), torch.randn(6)
    half = w2[:, :6].contiguous()

    def model(x: Tensor) -> tuple[Tensor, ...]:
        return (
            cuda_ext.linear(x, w, b, activation=activation),
            cuda_ext.gated_linear(x, w, b, activation=activation),
            cuda_ext.mlp(x, w, w2, b, b2, residual=x[..., :6], activation=activation),
            cuda_ext.gated_mlp(x, w, half, b, activation=activation),
            cuda_ext.gemm(x, w.T, b, bias=b, activation=activation, alpha=0.5, beta=-2.0),
        )

    found = operators(check(model, x, dynamic=({1: torch.export.Dim.DYNAMIC},), other=(torch.randn(2, 9, 8)[..., :8],)))
    assert ("Gelu" in found) == ("gelu" in str(activation))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "shape", "fused"),
    [
        ({}, {}, True),
        ({"causal": True}, {}, True),
        ({"causal": True}, {"sq": 3, "sk": 9}, True),
        ({"causal": True}, {"sq": 9, "sk": 3}, True),  # rows that see no key
        ({"window": (2, 1), "scale": 0.3}, {"sq": 9, "sk": 6, "dv": 5, "hk": 1}, True),
        ({"causal": True, "window": (3, None), "softcap": 2.0}, {}, False),
        ({"causal": True, "sinks": True}, {"sq": 9, "sk": 3}, False),
        ({"alibi_slopes": True, "attn_bias": True, "causal": True}, {}, True),
        ({"attn_mask": True, "attn_bias": True}, {"hk": 4}, True),
    ],
)
def test_attention(options: dict[str, Any], shape: dict[str, int], fused: bool) -> None:
    tensors = qkv(**shape)
    b, sq, h, sk = *tensors[0].shape[:3], tensors[1].shape[1]
    mask = torch.rand(b, 1, sq, sk) > 0.4
    mask[0, 0, 1] = False
    drawn = {
        "alibi_slopes": torch.rand(h),
        "sinks": torch.randn(h),
        "attn_bias": torch.randn(h, sq, sk),
        "attn_mask": mask,
    }
    options = {name: drawn.get(name, value) for name, value in options.items()}

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cuda_ext.flash_attention(q, k, v, **options, return_lse=True)

    assert ("Attention" in operators(check(model, *tensors))) == fused


@pytest.mark.sampled
def test_attention_of_any_length() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cuda_ext.flash_attention(q, k, v, causal=True, window=(4, 0))

    queries, keys = torch.export.Dim("queries"), torch.export.Dim("keys")
    dynamic = ({1: queries}, {1: keys}, {1: keys})
    model = check(model, *qkv(), dynamic=dynamic, other=tuple(qkv(sq=3, sk=19)))
    assert "Exp" not in operators(model), "the exporter kept the log-sum-exp, which the model does not return"


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 2), "softcap": 3.0}])
def test_packed_sequences(options: dict[str, Any]) -> None:
    lengths = torch.tensor([0, 3, 3, 10, 16], dtype=torch.int32), torch.tensor([0, 5, 6, 12, 14], dtype=torch.int32)
    q, k, v = torch.randn(16, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)

    def model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        return cuda_ext.flash_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=7, max_seqlen_k=7, **options, return_lse=True
        )

    check(model, q, k, v, *lengths)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": torch.randn(4)}], ids=["", "sinks"])
def test_rows_after_the_last_sequence(options: dict[str, Any]) -> None:
    lengths = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = torch.randn(16, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    q[10:] = k[12:] = v[12:] = torch.nan

    def model(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        return cuda_ext.flash_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=7, max_seqlen_k=7, **options, return_lse=True
        )

    check(model, q, k, v, *lengths)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "softcap": 5.0, "scale": 0.7},
        {"label_smoothing": 0.1, "z_loss": 0.1, "return_lse": True, "return_entropy": True},
    ],
    ids=["plain", "each row", "all outputs"],
)
@pytest.mark.sampled(slow=True)
def test_losses(options: dict[str, Any]) -> None:
    target = torch.tensor([3, -100, 10, 0, 7])

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return cuda_ext.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

    check(loss, torch.randn(5, 8), torch.randn(11, 8), torch.randn(11))


def test_modules() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = cuda_ext.nn.SelfAttention(32, 4, causal=True)
            self.mlp = cuda_ext.nn.GatedMLP(32, 48)
            self.head = cuda_ext.nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return self.head(x + self.mlp(x))

    block = Block()
    with torch.no_grad():
        check(block, torch.randn(2, 9, 32), dynamic=({1: torch.export.Dim.DYNAMIC},), other=(torch.randn(2, 21, 32),))


@pytest.mark.sampled
def test_float64_keeps_its_digits() -> None:
    tensors = [tensor.double() for tensor in qkv()]
    out = exported(lambda q, k, v: cuda_ext.flash_attention(q, k, v, causal=True, softcap=2.5, scale=0.1), *tensors)
    reference = onnx.reference.ReferenceEvaluator(out)
    names = [each.name for each in out.graph.input]
    (found,) = reference.run(None, dict(zip(names, (tensor.numpy() for tensor in tensors))))
    expected = cuda_ext.flash_attention(*tensors, causal=True, softcap=2.5, scale=0.1)
    torch.testing.assert_close(torch.from_numpy(found), expected)


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_gemm_of_another_output_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 64).to(dtype), torch.randn(64, 5).to(dtype)
    check(lambda a, b: cuda_ext.gemm(a, b, activation="gelu", out_dtype=out_dtype), a, b)


@pytest.mark.sampled
def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"expected opset_version of at least 23.*got 18"):
        translation_table(18)
    q, k, v = qkv()
    with pytest.raises(Exception, match=r"expected dropout_p = 0 for ONNX, got 0\.5"):
        exported(lambda q, k, v: cuda_ext.flash_attention(q, k, v, dropout_p=0.5), q, k, v)


def test_every_op_has_a_translation() -> None:
    names = {op.name() for op in translation_table()}
    public = ("gemm", "linear", "gated_linear", "mlp", "gated_mlp", "flash_attention", "flash_attention_varlen")
    public += ("logit_statistics", "linear_loss")
    assert names == {f"cuda_ext::{name}" for name in public}
