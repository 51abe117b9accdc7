"""Loss scaling for float16 that checks for infinities without a pass over the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler

from cuda_ext.distributed.wrapper import BucketedDataParallel


class GradScaler(grad_scaler.GradScaler):
    """`torch.amp.GradScaler` for a `BucketedDataParallel`, whose buckets already know whether gradients are finite.

    It is used like torch's, with the same results. Gradients are averages over the ranks, so an infinity on one rank
    appears on all of them: all skip the step and reduce their scale alike. An optimizer whose kernel unscales gradients
    (``fused=True``) receives the scale; for others the gradients are multiplied once.

    Args:
        model: the wrapped model. If an optimizer has other parameters with gradients than exactly those of ``model``,
            torch's own pass over its gradients decides whether to skip its step.
        device: ``"cuda"`` or ``"cpu"``; default that of the parameters.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch, with the same defaults.

    Raises what torch's raises: ValueError for float16 gradients, which cannot be unscaled, and RuntimeError for a
    second `unscale_` or `step` before `update`; TypeError for a ``model`` that is not wrapped.
    """

    def __init__(
        self,
        model: BucketedDataParallel,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        # Not an isinstance check, so that a compiled wrapper is accepted, too.
        if not isinstance(model, nn.Module) or not hasattr(model, "found_nonfinite"):
            raise TypeError(
                "cuda_ext.distributed.GradScaler: expected model to be a BucketedDataParallel, got "
                f"{type(model).__name__}; wrap it first, or use torch.amp.GradScaler"
            )
        device = device or next(model.parameters()).device.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._model = model

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self._owns_all_gradients(optimizer):
            return super()._check_inf_per_device(optimizer)
        found = self._found_inf()
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not self._owns_all_gradients(optimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = self._found_inf()  # before the gradients change: the buckets know the answer for the averages
        gradients = list(_gradients(optimizer).values())
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in gradients):
            raise ValueError(
                "cuda_ext.distributed.GradScaler: expected gradients that can be unscaled without underflow, got "
                "float16 ones; keep the parameters in float32 and compute under torch.autocast"
            )
        self._model.scale_gradients_(inv_scale.to(gradients[0].device))
        return found

    def _found_inf(self) -> dict[torch.device, Tensor]:
        found = self._model.found_nonfinite().float()
        return {found.device: found}

    def _owns_all_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        wrapped = {id(p) for p in self._model.parameters() if p.grad is not None}
        return bool(wrapped) and _gradients(optimizer).keys() == wrapped


def _gradients(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
