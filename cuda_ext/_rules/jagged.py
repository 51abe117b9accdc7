"""linear, gated_linear, mlp and gated_mlp on jagged nested tensors: the op runs on their packed rows, without padding.

PyTorch's nested tensors look up their kernels in a table. `cuda_ext._rules` imports this module when PyTorch imports
that table.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nested._internal.ops import extract_kwargs, register_jagged_func

from cuda_ext._checks import check
from cuda_ext._load import ops

_PER_ROW = ("input", "residual", "grad_out", "preact")  # arguments with one row per row of the input
_RESULTS = ("out", "preact", "grad_input", "grad_preact", "")  # the same for results; that of X itself has no name


def _register(op: Any, public_name: str) -> None:
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    per_row = [result.name in _RESULTS for result in schema.returns]

    def run(func: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        like = args[0]
        for name, tensor in given.items():
            if isinstance(tensor, Tensor) and tensor.numel() > 0:
                _check(public_name, name, tensor, like)
        values = (arg._values if isinstance(arg, NestedTensor) else arg for arg in args)
        results = op(*values, **options)
        if isinstance(results, Tensor):
            return _nested(results, like)
        return tuple(
            _nested(result, like) if is_per_row and result.dim() == like._values.dim() else result
            for result, is_per_row in zip(results, per_row, strict=True)
        )

    register_jagged_func(op, "...")(run)


def _check(op: str, name: str, tensor: Tensor, like: Any) -> None:
    if name not in _PER_ROW:
        check(not isinstance(tensor, NestedTensor), op, f"expected {name} to be dense, got a nested tensor")
        return
    check(
        isinstance(tensor, NestedTensor) and isinstance(like, NestedTensor),
        op,
        f"expected both input and residual to be jagged nested tensors, got a dense {name}",
    )
    assert isinstance(tensor, NestedTensor)
    check(
        tensor.lengths() is None and tensor._ragged_idx < tensor.dim() - 1,
        op,
        f"expected {name} to be contiguous, and jagged in a dimension before the last; call contiguous()",
    )
    check(
        tensor._size[: tensor._ragged_idx + 1] == like._size[: like._ragged_idx + 1],
        op,
        f"expected {name} with the same offsets as input, got others; create it with those of input "
        "(torch.nested.nested_tensor_from_jagged)",
    )


def _nested(values: Tensor, like: Any) -> Tensor:
    return NestedTensor(values, **extract_kwargs(like))


for _op in ("linear", "gated_linear", "mlp", "gated_mlp"):
    for _suffix in ("", "_forward"):
        _register(getattr(ops, _op + _suffix).default, _op)
for _backward in ("activation_backward", "linear_backward", "mlp_hidden_backward"):
    _register(getattr(ops, _backward).default, _backward)


def _refuse_dense_query(func: Any, *args: Any, **options: Any) -> Any:
    check(False, "flash_attention", "expected query, key and value to be nested tensors, got a dense query")


# The Python function `flash_attention` handles jagged queries with the packed op.
for _attention in (ops.flash_attention.default, ops.flash_attention_forward.default):
    register_jagged_func(_attention, "...")(_refuse_dense_query)
