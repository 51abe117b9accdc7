"""Weights that FSDP2 gathers in FP8: half of the bytes of bfloat16, and nothing to quantise after that.

FSDP2 asks the local tensor of a parameter for what is sent, and for the parameter that is made of what came
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`). A layer multiplies by it as it is; backward, which sums over the other
dim, by its transpose, number by number. So the scales have to be those of the transpose, too: of the whole, or of
square blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["GatheredWeight", "gather", "is_gathered", "reason_not_to_gather"]

_FORMAT = torch.float8_e4m3fn
_LARGEST, _LEAST_SCALE = torch.finfo(_FORMAT).max, 2.0**-126
_BLOCK, _PITCH = 128, 16  # of scales; of rows in memory, in bytes
_BLOCKS = "BlockWise128x128"
_SCALINGS = ("TensorWise", _BLOCKS)
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class GatheredWeight(Tensor):
    """A matrix (N, K) of float8_e4m3fn numbers with scales, as `cuda_ext.fp8.quantize` gives them. Operations that do
    not know of it have the products of both, in its dtype."""

    numbers: Tensor
    scales: Tensor
    scaling: str

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor, scaling: str, dtype: torch.dtype) -> GatheredWeight:
        made: GatheredWeight = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=dtype, device=numbers.device
        )
        made.numbers, made.scales, made.scaling = numbers, scales, scaling
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["numbers", "scales"], (self.scaling, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], options: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> GatheredWeight:
        return GatheredWeight(inner["numbers"], inner["scales"], *options)

    def _in_high_precision(self) -> Tensor:
        scales = self.scales
        if self.scaling == _BLOCKS:
            rows, columns = self.numbers.shape
            scales = scales.t().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        return (self.numbers.float() * scales).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0] if args else None
        if isinstance(weight, GatheredWeight):
            size_and_stride = [[*weight.shape], [*weight.stride()]]
            as_it_is = function is torch.ops.aten.as_strided.default and [*args[1:3]] == size_and_stride
            if function in _ALIASES or as_it_is:
                return GatheredWeight(weight.numbers, weight.scales, weight.scaling, weight.dtype)
        args, kwargs = pytree.tree_map_only(GatheredWeight, GatheredWeight._in_high_precision, (args, kwargs or {}))
        return function(*args, **kwargs)


def reason_not_to_gather(weight: Tensor, scaling: str) -> str:
    """Why a weight of this scaling cannot be gathered in FP8; empty if it can."""
    from torch.distributed.tensor import DTensor, Replicate, Shard  # slow to import, and few need it

    if not isinstance(weight, DTensor):
        return "not a weight that fully_shard has sharded"
    if scaling not in _SCALINGS:
        return "the transpose has scales of its own; recipes 'tensorwise' and 'blockwise' can be gathered"
    mesh, placements = weight.device_mesh, weight.placements
    sharded = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(sharded) != 1 or placements[sharded[0]] != Shard(0):
        return f"placed as {', '.join(map(str, placements))}, not sharded by rows alone"
    ranks, (rows, columns) = mesh.size(sharded[0]), weight.shape
    if rows % ranks:
        return f"{ranks} ranks do not divide {rows} rows"
    if scaling == _BLOCKS and rows // ranks % _BLOCK:
        return f"{rows // ranks} rows on a rank are no blocks of {_BLOCK}"
    if columns % _PITCH:
        return f"rows of {columns} elements, no multiple of {_PITCH}"
    if weight.to_local().device.type != mesh.device_type:
        return f"offloaded to {weight.to_local().device.type}"
    return ""


def gather(weight: Any, scaling: str, quantize: Quantize) -> None:
    """Makes FSDP2 gather it in FP8 from the next time on; `quantize` is `cuda_ext.fp8.quantize` with this scaling."""
    hooks, local = _Hooks(scaling, quantize), weight._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = hooks.before, hooks.after


def is_gathered(weight: Any) -> bool:
    return hasattr(getattr(weight, "_local_tensor", None), "fsdp_pre_all_gather")


class _Hooks:
    """What FSDP2 calls. They have no tensor, so that a local tensor can be pickled with them."""

    def __init__(self, scaling: str, quantize: Quantize) -> None:
        self._scaling, self._quantize = scaling, quantize

    @torch.no_grad()
    def before(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """The numbers of this rank's rows, and their scales."""
        weight: Any = module.weight
        local: Tensor = weight._local_tensor
        if self._scaling == _BLOCKS:
            numbers, scales = self._quantize(local)
            return (numbers, scales.t().contiguous()), None
        magnitudes = local.detach().abs()
        largest = magnitudes.where(magnitudes.isfinite(), 0).amax().float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        # As `quantize` defines them, of a matrix of which this is a part.
        scale = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp_min(_LEAST_SCALE))
        numbers = (local.float() * scale.reciprocal()).clamp_(-_LARGEST, _LARGEST).to(_FORMAT)
        return (numbers, scale.view(1, 1)), None

    def after(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[GatheredWeight, tuple[()]] | None:
        if out is not None:  # its parts are the memory that was gathered to again
            return None
        numbers, scales = gathered
        scales = scales.t() if self._scaling == _BLOCKS else scales[:1]
        return GatheredWeight(numbers, scales, self._scaling, param_dtype), ()
