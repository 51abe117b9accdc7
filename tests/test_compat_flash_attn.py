"""`cuda_ext.compat.flash_attn` and `cuda_ext.compat.flash_attn_interface`: flash-attn's signatures, and what they
compute against the reference."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext.compat import _flash_attn_call, flash_attn_interface
from cuda_ext.compat import flash_attn as flash_attn_2
from cuda_ext.compat.flash_attn import bert_padding
from cuda_ext.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from cuda_ext.testing import assert_op_matches_reference, reference_attention, reference_attention_varlen

# As in flash-attn 2.8.4 and, for the second module, its hopper/flash_attn_interface.py of 2026-08.

OPTIONS_2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SEQUENCES = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
CACHE = "q, k_cache, v_cache, k=None, v=None"
OPTIONS_3 = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False"
)
SIGNATURES = [
    (flash_attn_2, "flash_attn_func", f"q, k, v, {OPTIONS_2}"),
    (flash_attn_2, "flash_attn_kvpacked_func", f"q, kv, {OPTIONS_2}"),
    (flash_attn_2, "flash_attn_qkvpacked_func", f"qkv, {OPTIONS_2}"),
    (flash_attn_2, "flash_attn_varlen_func", f"q, k, v, {SEQUENCES}, {OPTIONS_2}, block_table=None"),
    (flash_attn_2, "flash_attn_varlen_kvpacked_func", f"q, kv, {SEQUENCES}, {OPTIONS_2}"),
    (flash_attn_2, "flash_attn_varlen_qkvpacked_func", f"qkv, cu_seqlens, max_seqlen, {OPTIONS_2}"),
    (
        flash_attn_2,
        "flash_attn_with_kvcache",
        f"{CACHE}, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    ),
    (
        flash_attn_interface,
        "flash_attn_with_kvcache",
        f"{CACHE}, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
        "rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    ),
    (flash_attn_interface, "flash_attn_combine", "out_partial, lse_partial, out=None, out_dtype=None"),
    (flash_attn_interface, "flash_attn_func", f"q, k, v, {OPTIONS_3}"),
    (
        flash_attn_interface,
        "flash_attn_qkvpacked_func",
        "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    ),
    (
        flash_attn_interface,
        "flash_attn_varlen_func",
        f"q, k, v, {SEQUENCES}, seqused_q=None, seqused_k=None, {OPTIONS_3}",
    ),
    (bert_padding, "index_first_axis", "input, indices"),
    (bert_padding, "index_put_first_axis", "values, indices, first_axis_dim"),
    (bert_padding, "pad_input", "hidden_states, indices, batch, seqlen"),
    (bert_padding, "unpad_input", "hidden_states, attention_mask, unused_mask=None"),
    (bert_padding, "unpad_input_for_concatenated_sequences", "hidden_states, attention_mask_in_length"),
]


@pytest.mark.parametrize(("module", "name", "expected"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else "")
def test_signature(module: Any, name: str, expected: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    unannotated = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]
    assert ", ".join(unannotated) == expected


def test_every_function_is_in_the_table() -> None:
    assert {(module, name) for module, name, _ in SIGNATURES} == {
        (module, name)
        for module in (flash_attn_2, flash_attn_interface, bert_padding)
        for name in module.__all__
        if name not in ("bert_padding", "layers")
    }


def test_both_import_paths_of_flash_attn_2() -> None:
    assert flash_attn_2.flash_attn_interface.__all__ == [
        name for name in flash_attn_2.__all__ if name.startswith("flash")
    ]
    for name in flash_attn_2.flash_attn_interface.__all__:
        assert getattr(flash_attn_2, name) is getattr(flash_attn_2.flash_attn_interface, name)


# Values and gradients


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def qkv(batch: int, sq: int, sk: int, heads: int, heads_k: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "q": random(batch, sq, heads, dim, dtype=dtype),
        "k": random(batch, sk, heads_k, dim, dtype=dtype),
        "v": random(batch, sk, heads_k, dim, dtype=dtype),
    }


def cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: dict[str, Tensor],
    options: dict[str, Any] | None = None,
) -> None:
    """`function` with `options` gives the (out, lse) of `reference`, to which their meaning is already bound."""
    dtype = next(iter(tensors.values())).dtype
    # As for the op itself (test_attention.py): a gradient sums hundreds of terms of order sqrt(dim) in another order.
    roundings = {torch.float64: 4096, torch.float32: 64}.get(dtype, 1)
    assert_op_matches_reference(
        lambda **given: function(**given, **(options or {}), return_attn_probs=True)[:2],
        reference,
        tensors,
        gradient_factor=3.0,
        atol=roundings * torch.finfo(dtype).eps * 8,
    )


def dense_reference(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v: reference_attention(q, k, v, **options, return_lse=True)


# flash-attn's words, and the reference's
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3}, {"scale": 0.3}),
    ({"softcap": 2.0}, {"softcap": 2.0}),
    ({"window_size": (-1, -1), "causal": True}, {"causal": True}),
    ({"window_size": (9, 3)}, {"window": (9, 3)}),
    ({"window_size": (9, -1)}, {"window": (9, None)}),
    ({"window_size": (-1, 3)}, {"window": (None, 3)}),
    ({"window_size": (0, 0)}, {"window": (0, 0)}),
    ({"window_size": (-1, sys.maxsize)}, {}),
    ({"window_size": (sys.maxsize, 3)}, {"window": (None, 3)}),
    ({"window_size": [9, 3], "causal": True}, {"window": (9, 0)}),
    ({"window_size": (9, -1), "causal": True}, {"window": (9, 0)}),
    ({"window_size": (-1, 3), "causal": True}, {"causal": True}),
]


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize(("options", "meaning"), MEANINGS, ids=str)
@pytest.mark.parametrize("shape", [(2, 17, 41, 4, 2, 24), (1, 41, 17, 3, 1, 8)], ids=str)
def test_dense(module: Any, options: dict[str, Any], meaning: dict[str, Any], shape: tuple[int, ...]) -> None:
    check(module.flash_attn_func, dense_reference(**meaning), qkv(*shape, torch.float32), options)


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(module: Any, dtype: torch.dtype) -> None:
    check(module.flash_attn_func, dense_reference(causal=True), qkv(2, 33, 50, 4, 2, 40, dtype), {"causal": True})


@pytest.mark.parametrize("slopes_shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(slopes_shape: tuple[int, ...], causal: bool) -> None:
    slopes = torch.rand(slopes_shape)
    options = {"causal": causal, "alibi_slopes": slopes}
    check(flash_attn_2.flash_attn_func, dense_reference(**options), qkv(2, 17, 29, 4, 2, 16, torch.float32), options)


@pytest.mark.parametrize("dims", [(20, 20), (33, 65), (8, 12)], ids=str)
@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_interface], ids=lambda module: module.__name__)
def test_head_dims_that_are_padded(module: Any, dims: tuple[int, int]) -> None:
    tensors = {"q": random(2, 9, 4, dims[0]), "k": random(2, 13, 2, dims[0]), "v": random(2, 13, 2, dims[1])}
    check(module.flash_attn_func, dense_reference(), tensors)
    check(module.flash_attn_func, dense_reference(scale=0.5), tensors, {"softmax_scale": 0.5})


@pytest.mark.every_backend
def test_head_dims_that_only_padding_makes_possible(backend: str) -> None:
    tensors = {name: torch.randn(1, 19, 2, 20).half() for name in "qkv"}
    check(flash_attn_2.flash_attn_func, dense_reference(), tensors)


def test_padding_hides_no_wrong_head_dim() -> None:
    with pytest.raises(RuntimeError, match="expected key of head dim 20"):
        flash_attn_2.flash_attn_func(torch.ones(1, 3, 2, 20), torch.ones(1, 3, 2, 24), torch.ones(1, 3, 2, 24))


def test_positional_arguments() -> None:
    q, k, v = qkv(2, 17, 29, 2, 2, 16, torch.float32).values()
    slopes = torch.rand(2)
    actual = flash_attn_2.flash_attn_func(q, k, v, 0.0, 0.3, False, (5, 2), 1.5, slopes, True, True)
    expected = cuda_ext.flash_attention(
        q, k, v, scale=0.3, window=(5, 2), softcap=1.5, alibi_slopes=slopes, return_lse=True
    )
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1]) and actual[2] is None
    actual = flash_attn_interface.flash_attn_func(
        q, k, v, 0.3, True, None, None, None, None, (5, 2), 0, 1.5, 1, None, True, 0, True
    )
    expected = cuda_ext.flash_attention(q, k, v, scale=0.3, causal=True, window=(5, 0), softcap=1.5, return_lse=True)
    assert len(actual) == 2 and torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_hidden_rows() -> None:
    q, k, v = qkv(1, 5, 2, 1, 1, 8, torch.float32).values()
    out, lse, _ = flash_attn_2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(lse[0, 0].isneginf(), torch.tensor([True] * 3 + [False] * 2))
    assert not out[0, :3].any() and out[0, 3:].all()


def test_a_window_side_beyond_all_keys_is_taken_at_its_word() -> None:
    """Where flash-attn 2 sees more: more queries than keys, and a right side of at least the number of keys."""
    tensors = qkv(1, 10, 3, 1, 1, 8, torch.float32)
    check(flash_attn_2.flash_attn_func, dense_reference(window=(None, 3)), tensors, {"window_size": (-1, 3)})
    _, lse, _ = flash_attn_2.flash_attn_func(**tensors, window_size=(-1, 3), return_attn_probs=True)
    assert lse[0, 0, 0].isneginf()


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (4, 2), "softcap": 3.0}], ids=str)
def test_packed_projections(options: dict[str, Any]) -> None:
    meaning = {"window" if name == "window_size" else name: value for name, value in options.items()}

    def reference_kv(q: Tensor, kv: Tensor) -> Any:
        return reference_attention(q, *kv.unbind(2), **meaning, return_lse=True)

    def reference_qkv(qkv: Tensor) -> Any:
        return reference_attention(*qkv.unbind(2), **meaning, return_lse=True)

    def reference_heads(qkv: Tensor) -> Any:
        return reference_attention(*qkv.split([4, 2, 2], dim=2), **meaning, return_lse=True)

    kv = {"q": random(2, 13, 4, 16), "kv": random(2, 21, 2, 2, 16)}
    check(flash_attn_2.flash_attn_kvpacked_func, reference_kv, kv, options)
    packed = {"qkv": random(2, 13, 3, 4, 16)}
    check(flash_attn_2.flash_attn_qkvpacked_func, reference_qkv, packed, options)
    check(flash_attn_interface.flash_attn_qkvpacked_func, reference_qkv, packed, options)
    heads = {"qkv": random(2, 13, 8, 16)}
    check(flash_attn_interface.flash_attn_qkvpacked_func, reference_heads, heads, {**options, "num_heads_q": 4})


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 2)}], ids=str)
def test_varlen(options: dict[str, Any]) -> None:
    meaning = {"window" if name == "window_size" else name: value for name, value in options.items()}
    cu_q, cu_k = cumulative(13, 0, 1, 30), cumulative(9, 5, 0, 41)
    sequences = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 30, "max_seqlen_k": 41}

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return reference_attention_varlen(q, k, v, cu_q, cu_k, **meaning, return_lse=True)

    def reference_kv(q: Tensor, kv: Tensor) -> Any:
        return reference(q, *kv.unbind(1))

    def reference_qkv(qkv: Tensor) -> Any:
        return reference_attention_varlen(*qkv.unbind(1), cu_q, cu_q, **meaning, return_lse=True)

    tensors = {"q": random(44, 4, 16), "k": random(55, 2, 16), "v": random(55, 2, 16)}
    check(flash_attn_2.flash_attn_varlen_func, reference, tensors, {**sequences, **options})
    check(flash_attn_interface.flash_attn_varlen_func, reference, tensors, {**sequences, **options})
    kv = {"q": random(44, 4, 16), "kv": random(55, 2, 2, 16)}
    check(flash_attn_2.flash_attn_varlen_kvpacked_func, reference_kv, kv, {**sequences, **options})
    packed = {"qkv": random(44, 3, 4, 16)}
    of_packed = {"cu_seqlens": cu_q, "max_seqlen": 30, **options}
    check(flash_attn_2.flash_attn_varlen_qkvpacked_func, reference_qkv, packed, of_packed)


def in_chunks(size: int, queries: int, keys: int) -> Tensor:
    position = torch.arange(queries).unsqueeze(1) + keys - queries
    return position.div(size, rounding_mode="floor") == torch.arange(keys) // size


@pytest.mark.parametrize("size", [1, 16, 150])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_chunk(size: int, causal: bool) -> None:
    options = {"attention_chunk": size, "causal": causal}
    for queries, keys in ((170, 170), (30, 170), (170, 30)):
        reference = dense_reference(causal=causal, attn_mask=in_chunks(size, queries, keys))
        check(flash_attn_interface.flash_attn_func, reference, qkv(2, queries, keys, 4, 2, 16, torch.float32), options)
    lengths_q, lengths_k = (13, 0, 1, 130), (9, 5, 0, 141)
    cu_q, cu_k = cumulative(*lengths_q), cumulative(*lengths_k)
    mask = torch.zeros(4, 1, 130, 141, dtype=torch.bool)
    for n, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        mask[n, 0, :queries, :keys] = in_chunks(size, queries, keys)

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return reference_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=130, max_seqlen_k=141, causal=causal, attn_mask=mask, return_lse=True
        )

    tensors = {"q": random(144, 4, 16), "k": random(155, 2, 16), "v": random(155, 2, 16)}
    sequences = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 130, "max_seqlen_k": 141}
    check(flash_attn_interface.flash_attn_varlen_func, varlen, tensors, {**sequences, **options})


def test_varlen_alibi_of_every_sequence() -> None:
    cu, slopes = cumulative(13, 20), torch.rand(2, 4)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return reference_attention_varlen(q, k, v, cu, cu, alibi_slopes=slopes, return_lse=True)

    tensors = {"q": random(33, 4, 16), "k": random(33, 2, 16), "v": random(33, 2, 16)}
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 20, "max_seqlen_k": 20, "alibi_slopes": slopes}
    check(flash_attn_2.flash_attn_varlen_func, reference, tensors, options)


@pytest.mark.parametrize("which", ["q", "k", "qk"])
@pytest.mark.parametrize("causal", [False, True])
def test_seqused(which: str, causal: bool) -> None:
    lengths_q, lengths_k = [13, 4, 1, 30], [9, 5, 7, 41]
    used_q = [7, 0, 1, 30] if "q" in which else lengths_q
    used_k = [9, 2, 0, 17] if "k" in which else lengths_k
    cu_q, cu_k = cumulative(*lengths_q), cumulative(*lengths_k)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Sequence after sequence, each cut to its used length."""
        out, lse = q.new_zeros(q.shape), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        for start_q, n_q, start_k, n_k in zip(cu_q.tolist(), used_q, cu_k.tolist(), used_k, strict=False):
            rows, keys = slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
            pair = reference_attention(q[None, rows], k[None, keys], v[None, keys], causal=causal, return_lse=True)
            out[rows], lse[:, rows] = pair[0][0], pair[1][0]
        return out, lse

    options: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 30, "max_seqlen_k": 41}
    if "q" in which:
        options["seqused_q"] = torch.tensor(used_q, dtype=torch.int32)
    if "k" in which:
        options["seqused_k"] = torch.tensor(used_k, dtype=torch.int32)
    tensors = {"q": random(48, 4, 16), "k": random(62, 2, 16), "v": random(62, 2, 16)}
    check(flash_attn_interface.flash_attn_varlen_func, reference, tensors, {**options, "causal": causal})


@pytest.mark.parametrize("which", ["q", "k", "qk"])
def test_seqused_compiles_to_one_graph(which: str) -> None:
    tensors = [random(12, 4, 16), random(14, 2, 16), random(14, 2, 16)]
    used = {"seqused_q": torch.tensor([3, 0, 7]).int(), "seqused_k": torch.tensor([2, 5, 0]).int()}
    options = {name: lengths for name, lengths in used.items() if name[-1] in which}

    def f(q: Tensor, k: Tensor, v: Tensor, **lengths: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attn_interface.flash_attn_varlen_func(
            q, k, v, cumulative(4, 1, 7), cumulative(2, 6, 6), 7, 6, causal=True, return_attn_probs=True, **lengths
        )

    results = []
    for op in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        out, lse = op(*tensors, **options)
        results.append([out, lse, *torch.autograd.grad(out.square().sum(), tensors)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize("window", [torch.tensor([3, -1]), (torch.tensor(3), torch.tensor([-1])), [3, None]], ids=str)
def test_a_window_of_tensors(module: Any, window: Any) -> None:
    q, k, v = qkv(2, 17, 29, 4, 2, 16, torch.float32).values()
    expected = cuda_ext.flash_attention(q, k, v, window=(3, None))
    assert torch.equal(module.flash_attn_func(q, k, v, window_size=window), expected)


def test_dropout_is_that_of_the_op() -> None:
    q, k, v = qkv(2, 17, 29, 4, 2, 16, torch.float32).values()
    grad = torch.randn(2, 17, 4, 16)
    results = []
    for attention in (flash_attn_2.flash_attn_func, cuda_ext.flash_attention):
        torch.manual_seed(5)
        out = attention(q, k, v, dropout_p=0.3)
        results.append([out, *torch.autograd.grad(out, [q, k, v], grad)])
    assert all(torch.equal(ours, the_op) for ours, the_op in zip(*results, strict=True))
    assert not torch.allclose(results[0][0], flash_attn_2.flash_attn_func(q, k, v))


def test_hints_have_no_effect() -> None:
    q, k, v = qkv(2, 17, 29, 4, 2, 16, torch.float32).values()
    plain = flash_attn_interface.flash_attn_func(q, k, v)
    hinted = flash_attn_interface.flash_attn_func(q, k, v, num_splits=4, pack_gqa=True, sm_margin=8)
    assert torch.equal(plain, hinted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What reaches the ops."""
    recorded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for name in ("attention_op", "flash_attention", "flash_attention_varlen"):
        op = getattr(_flash_attn_call, name)

        def record(*args: Any, op: Callable[..., Any] = op, **options: Any) -> Any:
            recorded.append((args, options))
            return op(*args, **options)

        monkeypatch.setattr(_flash_attn_call, name, record)
    return recorded


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_interface], ids=lambda module: module.__name__)
def test_deterministic(module: Any, calls: list[Any]) -> None:
    q, k, v = (torch.randn(1, 3, 1, 8) for _ in range(3))
    module.flash_attn_func(q, k, v)
    module.flash_attn_func(q, k, v, deterministic=True)
    assert [options.get("deterministic") for _, options in calls] == [None, True]


def test_packed_projections_are_read_in_place(calls: list[Any]) -> None:
    q, kv, qkv = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 2, 16), torch.randn(1, 5, 3, 2, 16)
    cu = cumulative(5)
    flash_attn_2.flash_attn_qkvpacked_func(qkv)
    flash_attn_interface.flash_attn_qkvpacked_func(qkv)
    flash_attn_interface.flash_attn_qkvpacked_func(qkv.flatten(2, 3), num_heads_q=2)
    flash_attn_2.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 5)
    row = qkv[0, 0, 0].nbytes
    for args, _ in calls:
        assert [tensor.data_ptr() - qkv.data_ptr() for tensor in args[:3]] == [0, row, 2 * row]
    calls.clear()
    flash_attn_2.flash_attn_kvpacked_func(q, kv)
    flash_attn_2.flash_attn_varlen_kvpacked_func(q[0], kv[0], cu, cu, 5, 5)
    assert len(calls) == 2
    for args, _ in calls:
        assert args[0].data_ptr() == q.data_ptr()
        assert [tensor.data_ptr() - kv.data_ptr() for tensor in args[1:3]] == [0, row]


def test_compiles_without_a_graph_break() -> None:
    q, k, v = qkv(2, 9, 13, 4, 2, 20, torch.float32).values()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_2.flash_attn_func(q, k, v, causal=True, window_size=(4, 0), return_attn_probs=True)[:2]

    expected, actual = layer(q, k, v), torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    for ours, compiled in zip(expected, actual, strict=True):
        assert torch.equal(ours, compiled)
    gradients = [torch.autograd.grad(out.sum(), [q, k, v]) for out in (expected[0], actual[0])]
    assert all(torch.equal(ours, compiled) for ours, compiled in zip(*gradients, strict=True))


# Refusals


@pytest.mark.parametrize("emulates", [False, True])
def test_qv_of_multi_head_latent_attention(emulates: bool) -> None:
    """DeepSeek's heads: a latent of 512, which is also the value, and 64 rotated elements of the key."""
    q, k = torch.randn(1, 3, 4, 64, requires_grad=True), torch.randn(1, 9, 1, 64, requires_grad=True)
    qv, v = torch.randn(1, 3, 4, 512, requires_grad=True), torch.randn(1, 9, 1, 512, requires_grad=True)
    with testing.emulated() if emulates else contextlib.nullcontext():
        out = flash_attn_interface.flash_attn_func(q, k, v, causal=True, qv=qv)
        grads = torch.autograd.grad(out.sum(), (q, k, v, qv))
        cached = flash_attn_interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True, qv=qv)
        flat = [each[0] for each in (q, k, v)]
        lengths = cumulative(3), cumulative(9), 3, 9
        packed = flash_attn_interface.flash_attn_varlen_func(*flat, *lengths, causal=True, qv=qv[0])
    logits = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) + qv.transpose(1, 2) @ v.permute(0, 2, 3, 1)) / 576**0.5
    hidden = torch.arange(9) > torch.arange(3)[:, None] + 6
    expected = (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    for got in (out, cached, packed[None]):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v, qv)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def refusals() -> list[Any]:
    q, flat, cu = torch.ones(1, 4, 2, 8), torch.ones(4, 2, 8), cumulative(4)
    sequences = (cu, cu, 4, 4)
    two, three = flash_attn_2, flash_attn_interface
    cases: list[tuple[type[Exception], str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (
            NotImplementedError,
            "flash_attn.flash_attn_varlen_func: expected dropout_p to be 0 with block_table, which is for inference, "
            "got 0.1; leave it out",
            two.flash_attn_varlen_func,
            (flat,) * 3 + sequences,
            {"block_table": cu[None, :1], "dropout_p": 0.1},
        ),
        (
            NotImplementedError,
            "flash_attn_interface.flash_attn_with_kvcache: expected cu_seqlens_k_new to be None, got a tensor of shape "
            "(2,); write packed keys into the cache yourself",
            three.flash_attn_with_kvcache,
            (q, q, q),
            {"cu_seqlens_k_new": cu},
        ),
    ]
    cases += [
        (
            NotImplementedError,
            "flash_attn_interface.flash_attn_with_kvcache: expected k to be None with qv, got a tensor of shape (1, 4, "
            "2, 8); write the new keys and values into the cache yourself",
            three.flash_attn_with_kvcache,
            (q, q, q, q, q),
            {"qv": q, "cache_seqlens": 0},
        ),
        (
            RuntimeError,
            "flash_attn_interface.flash_attn_func: expected qv of shape (1, 4, 2, 8) to match q and v, got (4, 2, 8)",
            three.flash_attn_func,
            (q, q, q),
            {"qv": flat},
        ),
    ]
    for name, value, words in [
        ("q_descale", cu, "expected q_descale to be None, because float8 is not supported, got a tensor of shape (2,)"),
        ("k_descale", cu, "expected k_descale to be None, because float8 is not supported, got a tensor of shape (2,)"),
        ("v_descale", cu, "; scale v itself and convert it"),
        ("attention_chunk", 16, "expected attention_chunk to be 0 with a cache, got 16; attend to the cache from the"),
    ]:
        for function, args in [
            (three.flash_attn_func, (q, q, q)),
            (three.flash_attn_varlen_func, (flat, flat, flat, *sequences)),
            (three.flash_attn_qkvpacked_func, (torch.stack([q, q, q], dim=2),)),
            (three.flash_attn_with_kvcache, (q, q, q)),
        ]:
            only_cache = name == "attention_chunk" and function is not three.flash_attn_with_kvcache
            if name in inspect.signature(function).parameters and not only_cache:
                full = f"flash_attn_interface.{function.__name__}: {words}" if words.startswith("expected") else words
                cases.append((NotImplementedError, full, function, args, {name: value}))
    for module in (two, three):
        stem = module.__name__.removeprefix("cuda_ext.compat.")
        for window in (3, (1, 2, 3), None):
            words = f"{stem}.flash_attn_func: expected window_size to be (left, right), each a number of keys or -1"
            cases.append((RuntimeError, words, module.flash_attn_func, (q, q, q), {"window_size": window}))
        words = f"{stem}.flash_attn_qkvpacked_func: expected qkv of shape (batch, seqlen, 3, heads, dim), got"
        cases.append((RuntimeError, words, module.flash_attn_qkvpacked_func, (torch.ones(1, 4, 2, 2, 8),), {}))
    words = "expected num_heads_q such that an even number of the 5 heads of qkv (1, 4, 5, 8) remain for key and value"
    heads = torch.ones(1, 4, 5, 8)
    for number in (None, 2, 7, -1):
        cases.append(
            (RuntimeError, f"{words}, got {number}", three.flash_attn_qkvpacked_func, (heads,), {"num_heads_q": number})
        )
    for function, args, words in [
        (two.flash_attn_qkvpacked_func, (heads,), "expected qkv of shape (batch, seqlen, 3, heads, dim)"),
        (two.flash_attn_kvpacked_func, (q, heads[None]), "expected kv of shape (batch, seqlen, 2, heads, dim)"),
        (two.flash_attn_varlen_kvpacked_func, (flat, flat, *sequences), "expected kv of shape (total, 2, heads, dim)"),
        (two.flash_attn_varlen_qkvpacked_func, (heads, cu, 4), "expected qkv of shape (total, 3, heads, dim)"),
    ]:
        cases.append((RuntimeError, words, function, args, {}))
    for used, words in [
        (
            torch.tensor([4]),
            "expected seqused_k of shape (1,), int32, on cpu to match cu_seqlens_k, got (1,), torch.int64",
        ),
        (torch.tensor([4, 4]).int(), "expected seqused_k of shape (1,), int32"),
        (torch.tensor([5]).int(), "expected seqused_k between 0 and the lengths of cu_seqlens_k, [4], got [5]"),
        (torch.tensor([-1]).int(), "expected seqused_k between 0 and the lengths of cu_seqlens_k, [4], got [-1]"),
    ]:
        function, args = three.flash_attn_varlen_func, (flat, flat, flat, *sequences)
        cases.append((RuntimeError, words, function, args, {"seqused_k": used}))
        cases.append((RuntimeError, words.replace("_k", "_q"), function, args, {"seqused_q": used}))
    return [
        pytest.param(*case, id=f"{case[2].__module__.removeprefix('cuda_ext.compat.')}-{case[2].__name__}-{n}")
        for n, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("error", "words", "function", "args", "options"), refusals())
def test_refusal(
    error: type[Exception], words: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        function(*args, **options)


# bert_padding


def test_index_first_axis_and_back() -> None:
    values, indices = random(11, 3, 2, dtype=torch.float64), torch.randperm(11)[:6]
    rows = index_first_axis(values, indices)
    assert torch.equal(rows, values[indices])
    placed = index_put_first_axis(rows, indices, 11)
    expected = torch.zeros(11, 3, 2, dtype=torch.float64)
    expected[indices] = values[indices].detach()
    assert torch.equal(placed, expected)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), values)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, indices, 11), rows.detach().requires_grad_())


def test_index_first_axis_adds_the_gradients_of_an_index_that_comes_twice() -> None:
    values = random(4, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, torch.tensor([1, 3, 1])), values)


def random_mask(batch: int, seqlen: int) -> Tensor:
    mask = torch.rand(batch, seqlen) < 0.6
    mask[1] = False  # nothing but padding
    return mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)], ids=str)
def test_unpad_and_pad(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    mask, hidden = random_mask(4, 9), random(4, 9, *trailing)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, mask.to(dtype))
    assert torch.equal(tokens, hidden[mask])
    assert torch.equal(hidden.flatten(0, 1)[indices], hidden[mask]) and indices.dtype == torch.int64
    lengths = mask.sum(dim=1).tolist()
    assert cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(5)] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == max(lengths) and type(max_seqlen) is int
    assert seqused.tolist() == lengths and seqused.dtype == torch.int32

    padded = pad_input(tokens, indices, 4, 9)
    where = mask.view(4, 9, *[1] * len(trailing))
    assert torch.equal(padded, hidden * where)
    grad = torch.randn_like(padded)
    (gradient,) = torch.autograd.grad(padded, hidden, grad)
    assert torch.equal(gradient, grad * where)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32], ids=str)
def test_unpad_with_tokens_that_are_not_used(dtype: torch.dtype) -> None:
    used, hidden = random_mask(4, 9), random(4, 9, 5)
    unused = (torch.rand(4, 9) < 0.5) & ~used
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, used.to(dtype), unused.to(dtype))
    packed = used | unused
    assert torch.equal(tokens, hidden[packed])
    assert torch.equal(pad_input(tokens, indices, 4, 9), hidden * packed[..., None])
    assert cu_seqlens.diff().tolist() == packed.sum(dim=1).tolist() and max_seqlen == packed.sum(dim=1).max()
    assert torch.equal(seqused, used.sum(dim=1).int())


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (2, 7)], ids=str)
def test_unpad_nothing(shape: tuple[int, int]) -> None:
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(random(*shape, 5), torch.zeros(shape))
    assert tokens.shape == (0, 5) and indices.shape == (0,) and max_seqlen == 0
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and seqused.tolist() == [0] * shape[0]
    assert torch.equal(pad_input(tokens, indices, *shape), torch.zeros(*shape, 5))


def test_unpad_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [0] * 6, [6, 0, 0, 0, 0, 0]])
    hidden = random(4, 6, 5)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert torch.equal(tokens, torch.cat([hidden[0, :5], hidden[1, :5], hidden[3]]))
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and max_seqlen == 6
    padded = pad_input(tokens, indices, 4, 6)
    assert torch.equal(padded, hidden * torch.tensor([5, 5, 0, 6])[:, None, None].gt(torch.arange(6)[:, None]))


def test_unpadded_attention_is_that_of_every_row_by_itself() -> None:
    hidden, mask = random(3, 12, 4 * 16), random_mask(3, 12)
    tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden, mask)
    q = tokens.unflatten(-1, (4, 16))
    out = flash_attn_2.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    padded = pad_input(out.flatten(1), indices, 3, 12)
    assert not padded[~mask].any()
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        alone = flash_attn_2.flash_attn_func(q[None, start:end], q[None, start:end], q[None, start:end], causal=True)
        torch.testing.assert_close(padded[row][mask[row]], alone[0].flatten(1))


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (unpad_input, (torch.ones(2, 3, 4), torch.ones(2, 4)), "unpad_input: expected attention_mask of shape"),
        (unpad_input, (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), "unpad_input: expected unused_mask of"),
        (unpad_input, (torch.ones(2), torch.ones(2)), "to match hidden_states (2,), got (2,)"),
        (
            unpad_input_for_concatenated_sequences,
            (torch.ones(2, 3, 4), torch.ones(3, 2)),
            "expected attention_mask_in_length of shape (batch, seqlen) to match hidden_states (2, 3, 4), got (3, 2)",
        ),
    ],
    ids=["mask", "unused mask", "hidden states", "mask in length"],
)
def test_wrong_mask(function: Callable[..., Any], args: tuple[Tensor, ...], words: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(words)):
        function(*args)
