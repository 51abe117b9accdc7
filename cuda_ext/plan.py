"""What a matrix product or an attention call would run, and why, without running it.

>>> print(cuda_ext.gemm_plan(a, b, device="h200"))
4096 x 4096 x 4096 bfloat16 on h200: sm_90, wgmma
  tile 128 x 256 x 64, 4 stages, cooperative; clusters of 2; 128 blocks of 384 threads; no workspace
  303 thousand cycles predicted, limited by tensor cores
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cuda_ext._attention_options import VarlenOptions, op_arguments
from cuda_ext._checks import check, dtype_name
from cuda_ext._load import ops

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GPUS", "AttentionPlan", "GemmPlan", "attention_plan", "gemm_plan"]


class _Gpu(NamedTuple):
    compute_capability: int
    sms: int
    shared_kib: int  # of shared memory per SM


GPUS = {
    "t4": _Gpu(75, 40, 64),
    "a100": _Gpu(80, 108, 164),
    "3090": _Gpu(86, 82, 100),
    "a10": _Gpu(86, 72, 100),
    "l4": _Gpu(89, 58, 100),
    "4090": _Gpu(89, 128, 100),
    "h100": _Gpu(90, 132, 228),
    "h200": _Gpu(90, 132, 228),
    "b200": _Gpu(100, 148, 228),
    "5090": _Gpu(120, 170, 100),
    "spark": _Gpu(121, 48, 100),
}

_KERNELS = {
    "sm_90": "sm_90, wgmma",
    "sm_80": "sm_80, mma.sync",
    "sm_89": "sm_89, mma.sync of FP8",
    "cpu": "the CPU kernels",
    "none": "nothing runs, the output is empty",
    "composed": "no kernel; composed of other ops",
}
_WITHOUT_PLAN = ("cpu", "none", "composed")


@dataclass(frozen=True)
class GemmPlan:
    """The kernel of a product, and how it divides the work. Sizes in elements, `workspace` in bytes."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str
    #: "sm_90": wgmma and TMA. "sm_80": mma.sync; "sm_89": that of FP8. "cpu": the CPU kernels, which choose at run
    #: time. "none": the output is empty, and nothing runs. "composed": there is no kernel for the dtype, and other ops
    #: compute the same. But for `refusal` the fields below keep their defaults in these three cases.
    kernel: str
    #: Why wgmma does not serve the product, or why no kernel does; empty if wgmma does.
    refusal: str = ""
    #: ``(M, N, K)`` of a block's step. If `swapped`, M is the tile's extent along the columns of the output.
    tile: tuple[int, int, int] = (0, 0, 0)
    swapped: bool = False
    #: "cooperative": two warpgroups share a tile. "ping-pong": each has its own, and stores it while the other
    #: multiplies. "multistage": the warps of a block share a tile (sm_80, sm_89).
    schedule: str = ""
    stages: int = 0
    #: Blocks of a cluster that share what they load of b.
    cluster: int = 1
    #: Blocks of a cluster that divide K of one tile, and add their sums in shared memory.
    k_blocks: int = 1
    #: Blocks that divide K of one tile, and add their sums in the workspace.
    splits: int = 1
    #: Of "a" and "b" those that are copied first, because the kernel cannot read them where they are.
    copies: str = ""
    grid: tuple[int, int] = (0, 0)
    threads: int = 0
    workspace: int = 0
    #: Predicted by the plan, which compares its choices with it; 0 for FP8 on wgmma. docs/model.md predicts times.
    cycles: float = 0.0
    #: What most of the cycles are spent on.
    limit: str = ""

    def __str__(self) -> str:
        of = f"{self.m} x {self.n} x {self.k} {dtype_name(self.dtype)} on {self.device}: "
        if self.kernel in _WITHOUT_PLAN:
            return of + _KERNELS[self.kernel] + f": {self.refusal}" * bool(self.refusal)
        sizes = " x ".join(map(str, self.tile))
        blocks = " x ".join(map(str, self.grid if self.grid[1] > 1 else self.grid[:1]))
        parts = [f"tile {sizes}{' of the transposed product' * self.swapped}, {self.stages} stages, {self.schedule}"]
        parts += [f"clusters of {self.cluster}"] * (self.cluster > 1)
        parts += [f"k split among {self.k_blocks} blocks of a cluster"] * (self.k_blocks > 1)
        parts += [f"k split among {self.splits} blocks"] * (self.splits > 1)
        parts += [f"{blocks} blocks of {self.threads} threads"]
        parts += [_workspace(self.workspace)]
        lines = [of + _KERNELS[self.kernel], "; ".join(parts)]
        lines += [f"copies {' and '.join(self.copies)} first, which the kernel cannot read in place"] * bool(
            self.copies
        )
        predicted = f"{self.cycles / 1e3:.3g} thousand cycles predicted, limited by {self.limit}"
        lines += [predicted] * (self.cycles > 0)
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
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    device: str | None = None,
) -> GemmPlan:
    """The plan of `cuda_ext.gemm` for these arguments: kernel, tile, division of the work, predicted cost.

    It comes from the code that launches the kernels. It depends on shapes, strides, dtypes and addresses, on whether a
    tensor requires grad (an activation is then saved for backward), on `torch.set_float32_matmul_precision` and on
    `cuda_ext.batch_invariant`; values are not read, so tensors may be on the meta device, if `device` is given.

    The other ops run the same kernels: for ``linear(x, w)`` ask for ``gemm_plan(x, w.mT)``; for ``gated_linear(x, w)``
    the same with ``gated=True``; for ``grouped_mm(a, b, offs=offs)`` with these arguments, whose ``offs`` are not
    read: the plan is for groups of one size, and has as many work items as any groups could need. Operands in FP8
    are those of ``scaled_mm``, whose plan does not depend on the scales.

    Args:
        a, b, c, bias, activation, alpha, beta, out_dtype: as in `cuda_ext.gemm`.
        residual: as in `cuda_ext.linear`.
        offs, indices: as in `cuda_ext.grouped_mm`, then without c and residual. Rows that are gathered by a copy are
            among the plan's `copies`.
        gated: the columns of b are ``[gate, up]``, as in `cuda_ext.gated_linear`; without c.
        device: a GPU to plan for, such as "a100" or "h100" (all: `cuda_ext.plan.GPUS`); default the device of the
            tensors.

    Returns:
        A `GemmPlan`; ``print`` shows it.

    Raises:
        RuntimeError: as `cuda_ext.gemm`, and for an unknown device.
        NotImplementedError: as `cuda_ext.gemm`; for tensors on the meta device without `device`.
    """
    name, gpu = _named_gpu("gemm_plan", device)
    is_fp8 = a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    others: dict[str, object] = {"c": c, "residual": residual}
    if is_fp8:
        others |= {"activation": activation, "gated": gated or None}
    given = [name for name, value in others.items() if value is not None]
    alone = offs is not None or is_fp8
    check(not (alone and given), "gemm_plan", f"expected no {', '.join(given)} with offs, or operands in FP8")
    check(offs is not None or indices is None, "gemm_plan", "expected no indices without offs")
    tensors = [tensor for tensor in (a, b, c, bias, residual) if tensor is not None]
    for_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    kernel, limit, refusal, numbers, cycles = ops._gemm_plan(
        a, b, c, bias, residual, offs, indices, activation, alpha, beta, out_dtype, gated, for_backward, *gpu[:2]
    )
    found = {
        "m": (1 if alone else math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])))
        * (len(indices) if indices is not None and b.dim() == 3 else a.shape[-2]),
        "n": b.shape[-1],
        "k": a.shape[-1],
        "dtype": a.dtype,
        "device": name or str(a.device),
        "kernel": kernel,
    }
    if not numbers:
        return GemmPlan(**found, refusal=refusal)
    schedule = "multistage" if kernel in ("sm_80", "sm_89") else "ping-pong" if numbers["ping_pong"] else "cooperative"
    return GemmPlan(
        **found,
        refusal=refusal,
        tile=(numbers["block_m"], numbers["block_n"], numbers["block_k"]),
        swapped=bool(numbers.get("swapped", 0)),
        schedule=schedule,
        copies="".join(name for bit, name in enumerate("ab") if numbers.get("copies", 0) >> bit & 1),
        grid=(numbers["grid_x"], numbers["grid_y"]),
        cycles=cycles,
        limit=limit,
        **{field: numbers[field] for field in ("stages", "cluster", "k_blocks", "splits", "threads", "workspace")},
    )


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel of an attention call, and how it divides the work. Sizes in elements, `workspace` in bytes."""

    shape: tuple[int, ...]  #: of query
    dtype: torch.dtype
    device: str
    backward: bool
    #: "sm_90": wgmma and TMA. "sm_80": mma.sync. "cpu": the CPU kernels, which choose at run time. "none": the output
    #: is empty, and nothing runs. "composed": there is no kernel for the dtype or head dims, and other ops compute the
    #: same. But for `refusal` the fields below keep their defaults in these three cases.
    kernel: str
    #: Why wgmma does not serve the call, or why no kernel does; empty if wgmma does.
    refusal: str = ""
    #: ``(D, Dv)`` of the tile, to which the head dims are padded with zeros.
    dims: tuple[int, int] = (0, 0)
    #: Queries and keys of a step. A block owns queries in forward, and keys in backward, and loops over the others.
    tile: tuple[int, int] = (0, 0)
    #: The kernel that serves all options. Without it only causal, window, sinks and positive scales.
    with_options: bool = False
    #: Heads whose queries share a tile, because they read the same keys.
    pack_gqa: int = 1
    #: Blocks that share the loop of a tile, and combine what they compute in the workspace.
    splits: int = 1
    #: Blocks that share a list of a block mask, if it is much longer than others.
    most_parts: int = 1
    tiles: int = 0
    #: Of the main kernel. If there are fewer than tiles, each computes several.
    blocks: int = 0
    threads: int = 0
    workspace: int = 0

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.shape))
        of = f"attention {'backward' * self.backward or 'forward'}, query {sizes} {dtype_name(self.dtype)} "
        of += f"on {self.device}: {_KERNELS[self.kernel]}"
        if self.kernel in _WITHOUT_PLAN:
            return of + f": {self.refusal}" * bool(self.refusal)
        parts = [
            f"tile of {self.tile[0]} queries by {self.tile[1]} keys, head dims up to {self.dims[0]}, {self.dims[1]}"
        ]
        parts += ["kernel with options"] * self.with_options
        parts += [f"{self.pack_gqa} heads share a tile"] * (self.pack_gqa > 1)
        parts += [f"{'queries' if self.backward else 'keys'} split among {self.splits} blocks"] * (self.splits > 1)
        parts += [f"much longer lists than others divided among up to {self.most_parts} blocks"] * (self.most_parts > 1)
        parts += [f"{self.tiles} tiles, {self.blocks} blocks of {self.threads} threads", _workspace(self.workspace)]
        return "\n  ".join([of, "; ".join(parts)] + [f"not wgmma: {self.refusal}"] * bool(self.refusal))


def attention_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    backward: bool = False,
    device: str | None = None,
    **options: Unpack[VarlenOptions],
) -> AttentionPlan:
    """The plan of `cuda_ext.flash_attention` for these arguments: kernel, tile, division of the work.

    It comes from the code that launches the kernels. It depends on shapes, strides, dtypes and addresses; of the
    tensors only `cu_seqlens_q` and `cu_seqlens_k` are read, and only without `max_seqlen_q` and `max_seqlen_k`, so the
    others may be on the meta device, if `device` is given.

    Args:
        query, key, value: as in `cuda_ext.flash_attention` or, with `cu_seqlens_q` and `cu_seqlens_k`, as in
            `cuda_ext.flash_attention_varlen`.
        backward: plan for the gradients, given a gradient of the output with dense rows; default: for the output.
        device: a GPU to plan for, such as "a100" or "h100" (all: `cuda_ext.plan.GPUS`); default the device of the
            tensors.

    `options`: the remaining arguments of these two functions.

    Returns:
        An `AttentionPlan`; ``print`` shows it.

    Raises:
        RuntimeError: as these functions, and for an unknown device.
        NotImplementedError: as these functions; for a `device` if the build has no CUDA kernels, outside
            `cuda_ext.testing.emulated`.
    """
    name, gpu = _named_gpu("attention_plan", device)
    tensors, scalars = op_arguments("attention_plan", options)
    kernel, refusal, numbers = ops._attention_plan(
        query,
        key,
        value,
        backward,
        gpu.compute_capability,
        gpu.sms,
        gpu.shared_kib * 1024,
        cu_seqlens_q,
        cu_seqlens_k,
        *tensors,
        **scalars,
    )
    plan = AttentionPlan(tuple(query.shape), query.dtype, name or str(query.device), backward, kernel, refusal)
    if not numbers:
        return plan
    return replace(
        plan,
        dims=(numbers["dim"], numbers["dim_v"]),
        tile=(numbers["block_m"], numbers["block_n"]),
        with_options=bool(numbers["with_options"]),
        **{
            field: numbers[field]
            for field in ("pack_gqa", "splits", "most_parts", "tiles", "blocks", "threads", "workspace")
        },
    )


def _named_gpu(op: str, device: str | None) -> tuple[str | None, _Gpu]:
    """The name in GPUS and its entry; zeros without a name."""
    name = device if device is None else device.lower()
    expected = ", ".join(map(repr, GPUS))
    check(name is None or name in GPUS, op, f"expected device to be None or one of {expected}, got {device!r}")
    return name, GPUS[name] if name is not None else _Gpu(0, 0, 0)


def _workspace(size: int) -> str:
    return f"{size} bytes of workspace" if size else "no workspace"
