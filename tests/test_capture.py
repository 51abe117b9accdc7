"""What a CUDA graph must not contain: the host reads no data of the device, through any integration.

A graph repeats launches, so a value that the host read while it was captured would be that of the first run for ever;
PyTorch refuses to capture such a read. Here the CUDA kernels run on the emulator, on tensors of the CPU, where reading
is allowed: a dispatch mode finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import transformers_models as models
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import enabled  # noqa: F401

import cuda_ext
from cuda_ext import compat, testing
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.integrations import sdpa
from cuda_ext.integrations.transformers import NAME

pytestmark = pytest.mark.usefixtures("enabled")

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
READS |= {aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.nonzero_numpy}


class HostReads(TorchDispatchMode):
    """Records the ops whose result, or whose shape, the host takes from the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        if func.overloadpacket in READS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def reads_of(step: Callable[[], Tensor], backward: bool = True) -> list[str]:
    """In a second run: one runs before the capture, as PyTorch wants it. Libraries ask whether a stream captures."""
    with testing.emulated("sm_90a"):
        step()
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True), HostReads() as reads:
            out = step()
            if backward:
                out.float().sum().backward()
    return reads.found


def test_reads_are_found() -> None:
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    assert reads_of(lambda: values * values.detach().sum().item()) == ["aten._local_scalar_dense.default"]
    assert reads_of(lambda: values[values > 0]) == ["aten.index.Tensor"]


def llama(implementation: str = NAME) -> Any:
    return models.decoder("llama", implementation).to(torch.bfloat16)


@pytest.mark.parametrize("mask", [False, True])
def test_transformers(mask: bool) -> None:
    model, ids = llama(), models.ids()
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)} if mask else {}
    assert reads_of(lambda: model(ids, **inputs, use_cache=False).logits) == []


def test_transformers_with_lengths() -> None:
    """Packed sequences with their lengths given; from position_ids alone, they have to be found."""
    model, ids = llama(), models.ids().reshape(1, -1)
    starts = torch.tensor([0, 3, ids.numel()], dtype=torch.int32)
    positions = torch.cat([torch.arange(3), torch.arange(ids.numel() - 3)])[None]
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 20, "max_length_k": 20}
    assert reads_of(lambda: model(ids, position_ids=positions, use_cache=False, **lengths).logits) == []


@torch.no_grad()
def test_a_token_with_a_static_cache() -> None:
    model, ids = llama(), models.ids()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    model(ids, past_key_values=cache)
    token, position = ids[:, -1:], torch.tensor([[ids.shape[1]]])
    step = lambda: model(token, past_key_values=cache, position_ids=position).logits  # noqa: E731
    assert reads_of(step, backward=False) == []


def test_sdpa() -> None:
    query, key, value = (torch.randn(2, 3, 20, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    with sdpa.enable():
        for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.bfloat16()}, {"dropout_p": 0.1}):
            attend = nn.functional.scaled_dot_product_attention
            assert reads_of(lambda options=options, attend=attend: attend(query, key, value, **options)) == []


def test_patched_model() -> None:
    model = llama("eager")
    report = cuda_ext.patch(model)
    assert report.swapped
    assert reads_of(lambda: model(models.ids(), use_cache=False).logits) == []


@pytest.mark.parametrize("bucket_cap_mb", ["auto", 1e-3])  # auto: one bucket
def test_data_parallel(group: None, bucket_cap_mb: float | str) -> None:
    """With a parameter that no rank uses, and the norm."""
    layers = nn.ModuleList(cuda_ext.nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(3))
    layers.forward = lambda x: layers[1](layers[0](x))  # type: ignore[method-assign]
    model = BucketedDataParallel(layers, bucket_cap_mb=bucket_cap_mb)
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    for _ in range(4):  # they determine the buckets
        model(x).sum().backward()
    assert (len(model._reducer.buckets) == 1) == (bucket_cap_mb == "auto")
    for bucket in model._reducer.buckets:
        bucket._is_read_at_once = False  # as on a GPU

    def step() -> Tensor:
        model(x).sum().backward()
        return model.clip_grad_norm_(1e9)

    with (
        mock.patch("cuda_ext.distributed.gradient_bucket.is_captured", lambda device: True),
        mock.patch.object(Tensor, "tolist", side_effect=AssertionError("the host read values")),
    ):
        reads = reads_of(step, backward=False)
    assert reads == ["aten._local_scalar_dense.default"]  # whether to scale, only on a CPU
    assert all(layer.weight.grad is not None for layer in layers)


def test_flash_attn() -> None:
    query, key, value = (torch.randn(30, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 7, 28], dtype=torch.int32)  # two rows are after the last sequence
    with compat.install():
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]
    attend = lambda: flash_attn_varlen_func(query, key, value, starts, starts, 23, 23, causal=True)  # noqa: E731
    assert reads_of(attend) == []
    assert reads_of(lambda: flash_attn_func(query[None], key[None], value[None], dropout_p=0.1)) == []
