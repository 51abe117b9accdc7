"""What a matrix product would run, and why, without running it.

>>> print(cuda_ext.gemm_plan(a, b, device="h200"))
4096 x 4096 x 4096 bfloat16 on h200: sm_90, wgmma
  tile 128 x 256 x 64, 4 stages, cooperative; clusters of 2; 128 blocks of 384 threads; no workspace
  286 thousand cycles predicted, limited by tensor cores
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ext._checks import check, dtype_name
from cuda_ext._load import ops

__all__ = ["GPUS", "GemmPlan", "gemm_plan"]

# Name -> compute capability and number of SMs.
GPUS = {"a100": (80, 108), "4090": (89, 128), "h100": (90, 132), "h200": (90, 132)}


@dataclass(frozen=True)
class GemmPlan:
    """The kernel of a product, and how it divides the work. Sizes in elements, `workspace` in bytes."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str
    #: "sm_90": wgmma and TMA. "sm_80": mma.sync. "cpu": the CPU kernels, which choose at run time. "none": the output
    #: is empty, and nothing runs. Of the last two the fields below are empty.
    kernel: str
    #: Why the kernel on wgmma does not serve the product; empty if it does.
    refusal: str = ""
    #: ``(M, N, K)`` of a block's step. If `swapped`, M is the tile's extent along the columns of the output.
    tile: tuple[int, int, int] = (0, 0, 0)
    swapped: bool = False
    #: "cooperative": two warpgroups share a tile. "ping-pong": each has its own, and stores it while the other
    #: multiplies. "multistage": the warps of a block share a tile (sm_80).
    schedule: str = ""
    stages: int = 0
    #: Blocks of a cluster that share what they load of b.
    cluster: int = 1
    #: Blocks of a cluster that divide K of one tile, and add their sums in shared memory.
    k_blocks: int = 1
    #: Blocks that divide K of one tile, and add their sums in the workspace.
    splits: int = 1
    grid: tuple[int, int] = (0, 0)
    threads: int = 0
    workspace: int = 0
    #: Predicted by the plan, which compares its choices with it; docs/model.md predicts times.
    cycles: float = 0.0
    #: What most of the cycles are spent on.
    limit: str = ""

    def __str__(self) -> str:
        of = f"{self.m} x {self.n} x {self.k} {dtype_name(self.dtype)} on {self.device}: "
        if self.kernel in ("cpu", "none"):
            return of + {"cpu": "the CPU kernels", "none": "nothing runs, the output is empty"}[self.kernel]
        sizes = " x ".join(map(str, self.tile))
        blocks = " x ".join(map(str, self.grid if self.grid[1] > 1 else self.grid[:1]))
        parts = [f"tile {sizes}{' of the transposed product' * self.swapped}, {self.stages} stages, {self.schedule}"]
        parts += [f"clusters of {self.cluster}"] * (self.cluster > 1)
        parts += [f"k split among {self.k_blocks} blocks of a cluster"] * (self.k_blocks > 1)
        parts += [f"k split among {self.splits} blocks"] * (self.splits > 1)
        parts += [f"{blocks} blocks of {self.threads} threads"]
        parts += [f"{self.workspace} bytes of workspace" if self.workspace else "no workspace"]
        lines = [of + {"sm_90": "sm_90, wgmma", "sm_80": "sm_80, mma.sync"}[self.kernel], "; ".join(parts)]
        lines += [f"{self.cycles / 1e3:.3g} thousand cycles predicted, limited by {self.limit}"]
        lines += [f"not wgmma: {self.refusal}"] * bool(self.refusal)
        return "\n  ".join(lines)


def gemm_plan(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    device: str | None = None,
) -> GemmPlan:
    """The plan of `cuda_ext.gemm` for these arguments: kernel, tile, division of the work, predicted cost.

    It comes from the code that launches the kernels. It depends on shapes, strides, dtypes and addresses, on whether a
    tensor requires grad (an activation is then saved for backward), on `torch.set_float32_matmul_precision` and on
    `cuda_ext.batch_invariant`; values are not read, so tensors may be on the meta device, if `device` is given.

    The other ops run the same kernels: for ``linear(x, w)`` ask for ``gemm_plan(x, w.mT)``; for ``gated_linear(x, w)``
    the same with ``gated=True``.

    Args:
        a, b, c, bias, activation, alpha, beta, out_dtype: as in `cuda_ext.gemm`.
        residual: as in `cuda_ext.linear`.
        gated: the columns of b are ``[gate, up]``, as in `cuda_ext.gated_linear`; without c.
        device: a GPU to plan for, "a100", "4090", "h100" or "h200"; default the device of the tensors.

    Returns:
        A `GemmPlan`; ``print`` shows it.

    Raises:
        RuntimeError: as `cuda_ext.gemm`, and for an unknown device.
        NotImplementedError: as `cuda_ext.gemm`; for tensors on the meta device without `device`.
    """
    name = device if device is None else device.lower()
    check(
        name is None or name in GPUS,
        "gemm_plan",
        f"expected device to be None or one of {', '.join(map(repr, GPUS))}, got {device!r}",
    )
    tensors = [tensor for tensor in (a, b, c, bias, residual) if tensor is not None]
    for_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    capability, sms = GPUS[name] if name is not None else (0, 0)
    kernel, limit, refusal, numbers, cycles = ops._gemm_plan(
        a, b, c, bias, residual, activation, alpha, beta, out_dtype, gated, for_backward, capability, sms
    )
    found = {
        "m": math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * a.shape[-2],
        "n": b.shape[-1],
        "k": a.shape[-1],
        "dtype": a.dtype,
        "device": name or str(a.device),
        "kernel": kernel,
    }
    if not numbers:
        return GemmPlan(**found)
    schedule = "multistage" if kernel == "sm_80" else "ping-pong" if numbers["ping_pong"] else "cooperative"
    return GemmPlan(
        **found,
        refusal=refusal,
        tile=(numbers["block_m"], numbers["block_n"], numbers["block_k"]),
        swapped=bool(numbers.get("swapped", 0)),
        schedule=schedule,
        grid=(numbers["grid_x"], numbers["grid_y"]),
        cycles=cycles,
        limit=limit,
        **{field: numbers[field] for field in ("stages", "cluster", "k_blocks", "splits", "threads", "workspace")},
    )
