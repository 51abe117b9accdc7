"""`attention_plan` tells what the launchers do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.plan import GPUS, AttentionPlan, attention_plan

BOTH = pytest.mark.parametrize("backward", [False, True])


def qkv(*sizes: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> list[Tensor]:
    batch, queries, keys, heads, heads_kv, dim, dim_v = sizes
    shapes = ((batch, queries, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim_v))
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def test_long_sequences_on_hopper() -> None:
    tensors = qkv(2, 4096, 4096, 32, 8, 128, 128)
    with testing.emulated():
        forward = attention_plan(*tensors, causal=True, device="H200")
        backward = attention_plan(*tensors, causal=True, device="h200", backward=True)
    common = {"kernel": "sm_90", "dims": (128, 128), "threads": 384}
    shape = tuple(tensors[0].shape)
    assert forward == AttentionPlan(
        shape, torch.bfloat16, "h200", False, **common, tile=(128, 128), tiles=2048, blocks=132
    )
    size = backward.workspace
    assert backward == AttentionPlan(
        shape, torch.bfloat16, "h200", True, **common, tile=(64, 128), tiles=512, blocks=512, workspace=size
    )
    assert size >= 2 * 4096 * 32 * 128 * 4, "the sums of dQ"
    assert str(forward).splitlines() == [
        "attention forward, query 2 x 4096 x 32 x 128 bfloat16 on h200: sm_90, wgmma",
        "  tile of 128 queries by 128 keys, head dims up to 128, 128; 2048 tiles, 132 blocks of 384 threads; "
        "no workspace",
    ]


@BOTH
@pytest.mark.parametrize("device", GPUS)
def test_the_kernel_follows_the_device(device: str, backward: bool) -> None:
    with testing.emulated():
        plan = attention_plan(*qkv(1, 512, 512, 4, 4, 64, 64), device=device, backward=backward)
    hopper = device in ("h100", "h200")
    assert plan.kernel == ("sm_90" if hopper else "sm_80")
    assert ("no wgmma" in plan.refusal) == (not hopper)
    assert hopper or str(plan).splitlines()[-1] == f"  not wgmma: {plan.refusal}"


# Problem -> phases in which wgmma does not serve it, and a part of the reason.
REFUSED: dict[str, tuple[list[Tensor], tuple[bool, ...], str]] = {
    "no keys": (qkv(1, 64, 0, 1, 1, 64, 64), (False, True), "no keys"),
    "equal keys": (
        [each[:, :1].expand(1, 64, 1, 64) for each in qkv(1, 64, 64, 1, 1, 64, 64)], (False, True), "stride of 0",
    ),
    "rows of no elements": (qkv(1, 64, 64, 1, 1, 64, 0), (False, True), "no elements"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_for_the_other_kernel(name: str, backward: bool) -> None:
    tensors, phases, reason = REFUSED[name]
    with testing.emulated():
        plan = attention_plan(*tensors, device="h200", backward=backward)
    assert (plan.kernel, reason in plan.refusal) == (("sm_80", True) if backward in phases else ("sm_90", False))


@BOTH
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"causal": True}], ids=str)
def test_what_it_says_is_what_runs(arch: str, options: dict[str, Any], backward: bool) -> None:
    heads_kv, group, dim = random.choice([1, 2]), random.choice([1, 2, 4]), random.choice([64, 192, 256])
    sizes = (random.randint(1, 2), random.randint(1, 300), random.randint(1, 300), heads_kv * group, heads_kv, dim, dim)
    tensors = [each.normal_().requires_grad_() for each in qkv(*sizes, device="cpu")]
    with testing.emulated(arch) as emulation:
        plan = attention_plan(*tensors, backward=backward, **options)
        out = cuda_ext.flash_attention(*tensors, **options)
        before = dict(emulation.counters)
        if backward:
            torch.autograd.grad(out, tensors, torch.ones_like(out))
    counted = {name: value - backward * before[name] for name, value in emulation.counters.items()}
    on_wgmma = plan.kernel == "sm_90"
    assert on_wgmma == (arch == "sm_90a") and plan.with_options == ("softcap" in options)
    assert (counted["wgmma"] > 0, counted["mma"] > 0) == (on_wgmma, not on_wgmma)
    assert counted["blocks"] >= plan.blocks
    if not backward and plan.splits == 1:
        assert (counted["blocks"], plan.workspace) == (plan.blocks, 0)
    if on_wgmma and not backward:
        assert plan.blocks <= 4, "SMs of the emulated device"


@BOTH
def test_wgmma_can_be_switched_off(backward: bool) -> None:
    tensors = [each.normal_().requires_grad_() for each in qkv(1, 100, 100, 2, 2, 64, 64, device="cpu")]
    with testing.emulated("sm_90a") as emulation, testing.attention_without_wgmma():
        plan = attention_plan(*tensors, backward=backward)
        out = cuda_ext.flash_attention(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert (plan.kernel, plan.refusal) == ("sm_80", "wgmma is switched off for attention")
    assert emulation.counters["wgmma"] == 0 < emulation.counters["mma"]
    with testing.emulated("sm_90a"):
        assert attention_plan(*tensors, backward=backward).kernel == "sm_90"


def test_a_few_queries_share_a_tile_and_split_the_keys() -> None:
    with testing.emulated():
        plan = attention_plan(*qkv(1, 1, 8192, 32, 8, 128, 128), device="h200")
    assert (plan.pack_gqa, plan.tiles) == (4, 8) and plan.splits > 4 and plan.blocks <= 132 and plan.workspace > 0
    assert f"4 heads share a tile; keys split among {plan.splits} blocks" in str(plan)


def test_packed_sequences() -> None:
    begins = torch.tensor([0, 100, 300], dtype=torch.int32)
    tensors = [torch.zeros(300, 4, 64).half() for _ in range(3)]
    with testing.emulated("sm_90a"):
        plan = attention_plan(*tensors, begins, begins)
        assert (plan.shape, plan.kernel, plan.tile, plan.tiles) == ((300, 4, 64), "sm_90", (192, 112), 2 * 4 * 2)
        longer = attention_plan(*tensors, begins, begins, max_seqlen_q=300, max_seqlen_k=300)
    assert longer.tiles == 2 * 4 * 2


def test_nothing_to_run_and_the_cpu() -> None:
    plan = attention_plan(*qkv(1, 5, 5, 1, 1, 8, 8, dtype=torch.float32, device="cpu"))
    assert (plan.kernel, plan.tiles) == ("cpu", 0) and str(plan).endswith("on cpu: the CPU kernels")
    with testing.emulated("sm_90a"):
        plan = attention_plan(*qkv(1, 0, 5, 1, 1, 8, 8, device="cpu"))
    assert plan.kernel == "none" and str(plan).endswith("nothing runs, the output is empty")


def test_what_has_no_kernel_is_composed() -> None:
    with testing.emulated():
        plan = attention_plan(*qkv(1, 5, 5, 1, 1, 300, 12), device="h200")
        assert plan.kernel == "composed" and "kernels up to head dims 256" in str(plan)
        in_float32 = [tensor.float() for tensor in qkv(1, 5, 5, 1, 1, 136, 136)]
        assert attention_plan(*in_float32, device="h200").kernel == "sm_80"
        assert attention_plan(*in_float32, device="h200", backward=True).kernel == "composed"
        assert attention_plan(*qkv(1, 5, 5, 1, 1, 12, 20), device="h200").dims == (64, 64)


def test_bad_arguments() -> None:
    tensors = qkv(1, 5, 5, 1, 1, 8, 8)
    with testing.emulated():
        for options, told in (
            ({"device": "v100"}, "expected device to be None or one of 't4', 'a100', '3090'"),
            ({"device": "h200", "window": 5}, "expected window to be None or"),
            ({"device": "h200", "softcap": -1.0}, "softcap"),
        ):
            with pytest.raises(RuntimeError, match="attention_plan: ") as error:
                attention_plan(*tensors, **options)  # type: ignore[arg-type]
            assert told in str(error.value)
        with pytest.raises(NotImplementedError, match="attention_plan: expected tensors on a CUDA device or the CPU"):
            attention_plan(*tensors)
