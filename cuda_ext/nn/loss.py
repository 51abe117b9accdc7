"""The output layer of a language model and its loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ext._checks import check, shape_of
from cuda_ext.loss import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy of ``scale * linear(input)``, capped by ``softcap``, without these logits in memory: see
    `cuda_ext.linear_cross_entropy`. The arguments up to ``options``, the parameters and the state dict are those of
    `torch.nn.LinearCrossEntropyLoss` (PyTorch 2.13).

    Args:
        in_features: K, the size of the last dimension of the input.
        num_classes: V.
        out_features: default ``()``; ``(d1, ..., dn)`` for a K-dimensional loss: so many independent predictions from
            each input, with the logits ``linear(input).view(-1, V, d1, ..., dn)``.
        bias: whether the layer has a bias. Default False.
        device, dtype: of the parameters.
        reduction: ``"mean"`` (default), ``"sum"`` or ``"none"``.
        weight: ``(V,)``, a weight of each class; a buffer.
        ignore_index: default None: -100. Not together with probabilities.
        label_smoothing: in [0, 1]. Default 0.
        options: nothing here depends on it. In PyTorch it chooses the form in chunks.
        softcap, scale, z_loss, method, memory_limit, filter_gradients: as those of `cuda_ext.linear_cross_entropy`.

    Shape: input ``(..., K)``; target ``(...)`` of dtype int64, or floating ``(..., V)``, probabilities. The result is
    float32 (float64 for float64), a number or ``(...)``. With ``out_features`` the input is ``(N, K)``, the target
    ``(N, d1, ..., dn)`` or ``(N, V, d1, ..., dn)``.

    State dict: ``linear.weight`` (V d1 ... dn, K), ``linear.bias`` if there is one, ``weight`` if it is given.

    Raises:
        RuntimeError: wrong values, shapes or dtypes, here or in `forward`.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        softcap: float = 0.0,
        scale: float = 1.0,
        z_loss: float = 0.0,
        method: str = "auto",
        memory_limit: int | None = None,
        filter_gradients: bool = False,
    ) -> None:
        super().__init__()
        if weight is not None:
            fits = shape_of(weight) == (num_classes,)
            check(fits, _NAME, f"expected weight of shape ({num_classes},), got {shape_of(weight)}")
        self.num_classes, self.out_features, self.options = num_classes, tuple(out_features), options
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.softcap, self.scale, self.z_loss = softcap, scale, z_loss
        self.method, self.memory_limit, self.filter_gradients = method, memory_limit, filter_gradients
        self.linear = nn.Linear(in_features, math.prod(self.out_features, start=num_classes), bias, device, dtype)
        self.register_buffer("weight", weight)
        # Raises what `forward` would raise.
        row, layer, target = (torch.empty(shape, device="cpu", dtype=torch.float32) for shape in ((0, 1), (1, 1), (0,)))
        linear_cross_entropy(row, layer, target.long(), **{**self._arguments(), "weight": None})

    def _arguments(self) -> dict[str, Any]:
        of_torch = ("weight", "reduction", "label_smoothing")
        ours = ("softcap", "scale", "z_loss", "method", "memory_limit", "filter_gradients")
        index = -100 if self.ignore_index is None else self.ignore_index
        return {"ignore_index": index, **{name: getattr(self, name) for name in (*of_torch, *ours)}}

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        check(
            self.ignore_index is None or not target.is_floating_point(),
            _NAME,
            f"expected no ignore_index with target probabilities, got {self.ignore_index}",
        )
        layer = self.linear
        if self.out_features:
            return self._of_several(input, target)
        loss: Any = linear_cross_entropy(input, layer.weight, target, linear_bias=layer.bias, **self._arguments())
        return loss

    def _of_several(self, input: Tensor, target: Tensor) -> Tensor:
        """A loss of each prediction, one after the other."""
        count, rows = math.prod(self.out_features), input.shape[0]
        is_index = not target.is_floating_point()
        classes = () if is_index else (self.num_classes,)
        expected = (rows, *classes, *self.out_features)
        fits = input.dim() == 2 and tuple(target.shape) == expected
        got = f"{shape_of(input)} and {shape_of(target)}"
        check(fits, _NAME, f"expected input (N, K) and target {('N', *expected[1:])} for out_features, got {got}")
        targets = target.reshape(rows, *classes, count)
        weights = self.linear.weight.view(self.num_classes, count, -1)
        bias = None if self.linear.bias is None else self.linear.bias.view(self.num_classes, count)
        arguments = {**self._arguments(), "reduction": "none", "z_loss": 0.0, "method": "recompute"}
        found = [
            linear_cross_entropy(
                input,
                weights[:, n],
                targets[..., n],
                linear_bias=None if bias is None else bias[:, n],
                return_lse=True,
                **arguments,
            )
            for n in range(count)
        ]
        losses, lse = (torch.stack(each, -1) for each in zip(*found))  # (N, count)
        valid = targets != arguments["ignore_index"] if is_index else torch.ones_like(losses, dtype=torch.bool)
        squares = self.z_loss * torch.where(valid, lse.square(), 0.0)
        if self.reduction == "mean":
            total = valid.sum()
            if self.weight is not None and is_index:
                total = (self.weight[torch.where(valid, targets, 0)] * valid).sum()
            return losses.sum() / total + squares.sum() / valid.sum()
        losses = losses + squares
        return losses.sum() if self.reduction == "sum" else losses.view(rows, *self.out_features)

    def extra_repr(self) -> str:
        arguments = {name: value for name, value in self._arguments().items() if name != "weight"}
        return ", ".join(f"{name}={value}" for name, value in {"out_features": self.out_features, **arguments}.items())


_NAME = "LinearCrossEntropyLoss"
