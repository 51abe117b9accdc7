"""Calls of attention that are parts of a larger one, as context parallelism makes them: with its random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ext
from cuda_ext import testing
from cuda_ext._load import ops

pytestmark = pytest.mark.every_backend

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
HEADS, ROWS, KEYS = 4, 64, 64
DROPOUT = 0.4


@dataclass
class Part:
    """Ranges of a call: heads, rows of a head (with varlen of the packed tensor), keys."""

    heads: tuple[int, int] = (0, HEADS)
    rows: tuple[int, int] = (0, ROWS)
    keys: tuple[int, int] = (0, KEYS)
    all_rows: int = ROWS

    @property
    def place(self) -> list[int]:
        return [HEADS, self.heads[0], self.all_rows, self.rows[0], KEYS, self.keys[0]]

    def queries(self, tensor: Tensor) -> Tensor:  # (B, Sq, H, D), or (total, H, D)
        return tensor[..., slice(*self.rows), slice(*self.heads), :]

    def keys_of(self, tensor: Tensor) -> Tensor:
        return tensor[..., slice(*self.keys), slice(*self.heads), :]


PARTS = [
    Part(heads=(1, 3)),
    Part(rows=(13, 50)),
    Part(keys=(20, 64)),
    Part(keys=(0, 37)),
    Part(heads=(3, 4), rows=(63, 64), keys=(60, 63)),
    Part(heads=(2, 4), rows=(1, 64), keys=(4, 41)),
]


def inputs(dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and grad_out. Values and gradients of outputs tell keys and queries apart: out[i] and, as each
    head has its own keys, grad_value[j] are rows and columns of the probs, where dropped elements are 0."""
    query, key = (torch.randn(batch, length, HEADS, 64).to(dtype) / 3 for length in (ROWS, KEYS))
    value, grad_out = (torch.eye(64, dtype=dtype)[None, :, None].expand(batch, 64, HEADS, 64) for _ in range(2))
    return query, key, value, grad_out


def is_kept(probs: Tensor) -> Tensor:
    """Of some probs, those that dropout keeps; both kinds are there."""
    kept = probs != 0
    assert 0.3 < float(kept.float().mean()) < 0.9 or kept.numel() < 200
    return kept


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_drops_what_the_whole_drops(dtype: torch.dtype, part: Part) -> None:
    query, key, value, grad_out = inputs(dtype)
    rng = ops.draw_attention_rng(query.device)
    whole, whole_lse, _ = ops.flash_attention_forward(query, key, value, dropout_p=DROPOUT, rng_state=rng)
    own = part.queries(query), part.keys_of(key), part.keys_of(value)
    place = {"dropout_p": DROPOUT, "dropout_place": part.place}
    out, lse, state = ops.flash_attention_forward(*own, rng_state=rng, **place)
    assert torch.equal(state, rng)
    columns = slice(*part.keys)
    assert torch.equal(is_kept(out[..., columns]), is_kept(part.queries(whole)[..., columns]))

    expected = ops.flash_attention_backward(
        grad_out, None, query, key, value, whole, whole_lse, rng, dropout_p=DROPOUT
    )[2]
    actual = ops.flash_attention_backward(part.queries(grad_out), None, *own, out, lse, rng, **place)[2]
    columns = slice(*part.rows)
    assert torch.equal(is_kept(actual[..., columns]), is_kept(part.keys_of(expected)[..., columns]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_ranges_of_keys_add_up_to_the_whole(dtype: torch.dtype, options: dict[str, Any], heads_kv: int) -> None:
    """Of more keys than a tile has, in every gradient. Backward gets out and lse of the whole."""
    query, grad_out = (torch.randn(2, 70, 4, 64).to(dtype) for _ in range(2))
    key, value = (torch.randn(2, 301, heads_kv, 64).to(dtype) for _ in range(2))
    rng, options = ops.draw_attention_rng(query.device), {"dropout_p": DROPOUT, **options}
    out, lse, _ = ops.flash_attention_forward(query, key, value, rng_state=rng, **options)
    gradients = ops.flash_attention_backward(grad_out, None, query, key, value, out, lse, rng, **options)[:3]

    parts, backwards = [], []
    for first, end in ((0, 136), (136, 140), (140, 301)):
        own = query, key[:, first:end], value[:, first:end]
        place = {"dropout_place": [4, 0, 70, 0, 301, first], **options}
        parts.append(ops.flash_attention_forward(*own, rng_state=rng, **place)[:2])
        backwards.append(ops.flash_attention_backward(grad_out, None, *own, out, lse, rng, **place)[:3])
    tolerance: dict[str, Any] = {"atol": 12 * torch.finfo(dtype).eps, "rtol": 6 * torch.finfo(dtype).eps}
    merged, merged_lse = parts[0]
    for each in parts[1:]:
        merged, merged_lse = cuda_ext.merge_attention(merged, merged_lse, *each)
    torch.testing.assert_close(merged, out, **tolerance)
    torch.testing.assert_close(merged_lse, lse, **tolerance)
    grad_query = sum((each[0].double() for each in backwards), torch.zeros_like(query, dtype=torch.float64))
    torch.testing.assert_close(grad_query.to(dtype), gradients[0], **tolerance)
    for n in (1, 2):
        torch.testing.assert_close(torch.cat([each[n] for each in backwards], 1), gradients[n], **tolerance)


LENGTHS = ((30, 0, 34, 17), (12, 5, 64, 40))  # queries, keys


def packed_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `inputs`, of packed sequences, with cu_seqlens."""
    queries, keys = LENGTHS
    query, key = (torch.randn(sum(lengths), HEADS, 64).to(dtype) / 3 for lengths in LENGTHS)
    eye = torch.eye(64, dtype=dtype)
    value, grad_out = (
        torch.cat([eye[:n] for n in lengths])[:, None].expand(-1, HEADS, 64) for lengths in (keys, queries)
    )
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in LENGTHS)
    return query, key, value, grad_out, cu_q, cu_k


def packed_parts() -> Iterator[tuple[Part, tuple[int, int], tuple[int, int]]]:
    """Of the sequences [first, end), the rows of the part and the range of the packed keys."""
    for heads in ((0, HEADS), (1, 3)):
        yield Part(heads=heads, rows=(0, 81), all_rows=81), (0, 4), (0, 121)
        yield Part(heads=heads, rows=(30, 81), all_rows=81), (1, 4), (12, 121)
        yield Part(heads=heads, rows=(40, 64), all_rows=81), (2, 3), (17, 81)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("part", "sequences", "own_keys"), list(packed_parts()), ids=str)
def test_a_part_of_packed_sequences(
    dtype: torch.dtype, part: Part, sequences: tuple[int, int], own_keys: tuple[int, int]
) -> None:
    query, key, value, grad_out, cu_q, cu_k = packed_inputs(dtype)
    rng = ops.draw_attention_rng(query.device)
    options = {"dropout_p": DROPOUT, "rng_state": rng}
    whole, whole_lse, _ = ops.flash_attention_forward(query, key, value, cu_q, cu_k, **options)
    own_key, own_value = (tensor[slice(*own_keys), slice(*part.heads)] for tensor in (key, value))
    own = part.queries(query), own_key, own_value
    places = slice(sequences[0], sequences[1] + 1)
    cu = [(of[places] - start).clamp(min=0) for of, start in ((cu_q, part.rows[0]), (cu_k, own_keys[0]))]
    options = {"dropout_p": DROPOUT, "dropout_place": part.place}
    cu[0][-1] = part.rows[1] - part.rows[0]
    out, lse, _ = ops.flash_attention_forward(*own, *cu, rng_state=rng, **options)
    assert torch.equal(is_kept(out), is_kept(part.queries(whole)))

    expected = ops.flash_attention_backward(
        grad_out, None, query, key, value, whole, whole_lse, rng, False, cu_q, cu_k, dropout_p=DROPOUT
    )[2]
    actual = ops.flash_attention_backward(part.queries(grad_out), None, *own, out, lse, rng, False, *cu, **options)[2]
    # Rows that the part lacks are columns of the gradient of values that it lacks.
    has_rows = actual != 0
    expected = expected[slice(*own_keys), slice(*part.heads)]
    assert not (has_rows & (expected == 0)).any()
    if part.rows[0] in (0, 30):
        assert torch.equal(has_rows, expected != 0)
    assert has_rows.any()


def test_drawn_numbers_are_those_of_the_next_call() -> None:
    query, key, value, _ = inputs(torch.bfloat16)
    torch.manual_seed(5)
    expected, _, state = ops.flash_attention_forward(query, key, value, dropout_p=DROPOUT)
    following = ops.flash_attention_forward(query, key, value, dropout_p=DROPOUT)[2]
    torch.manual_seed(5)
    rng = ops.draw_attention_rng(query.device)
    assert torch.equal(rng, state)
    assert torch.equal(ops.draw_attention_rng(query.device), following) and not torch.equal(rng, following)
    out, _, returned = ops.flash_attention_forward(query, key, value, dropout_p=DROPOUT, rng_state=rng)
    assert torch.equal(out, expected) and torch.equal(returned, rng) and returned.data_ptr() != rng.data_ptr()


@pytest.mark.cpu_only("emulated as a test wants it")
def test_numbers_are_drawn_in_a_captured_graph() -> None:
    query, key, value, _ = inputs(torch.float16)
    generator = torch.tensor([7, 100])
    with testing.emulated("sm_80", "lazy", "pct"):
        ops._emulate_capture(generator)
        try:
            states = [ops.draw_attention_rng(query.device) for _ in range(2)]
            out, _, last = ops.flash_attention_forward(query, key, value, dropout_p=DROPOUT, rng_state=states[1])
        finally:
            ops._emulate_capture(None)
    assert [state.tolist() for state in states] == [[7, 100], [7, 104]] and last.tolist() == [7, 104]
    mask = testing.dropout_mask(DROPOUT, 7, 104, torch.arange(2 * HEADS * ROWS), KEYS)
    assert torch.equal(out.transpose(1, 2) != 0, mask.view(2, HEADS, ROWS, KEYS))


@pytest.mark.cpu_only("the checks are the same")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ([4, 0, 64, 0, 64], "dropout_place of 6 numbers, (heads, first_head, rows, first_row, keys, first_key), got 5"),
        (
            [4, 1, 64, 0, 64, 0],
            "where the 4 heads of the call are among those of the larger one, got 4 with the first at 1",
        ),
        (
            [4, 0, 70, 7, 64, 0],
            "where the 64 rows of the call are among those of the larger one, got 70 with the first at 7",
        ),
        (
            [4, 0, 64, 0, 66, 4],
            "where the 64 keys of the call are among those of the larger one, got 66 with the first at 4",
        ),
        (
            [4, 0, 64, -1, 64, 0],
            "where the 64 rows of the call are among those of the larger one, got 64 with the first at -1",
        ),
        (
            [4, 0, 64, 0, 80, 6],
            "dropout_place with a first_key that is a multiple of 4, because four keys share a counter, got 6; divide "
            "the keys at a multiple of 4",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused_places(place: list[int], message: str, device: str) -> None:
    query, key, value, grad_out = (tensor.to(device) for tensor in inputs(torch.float32))
    lse = torch.zeros(2, HEADS, ROWS, device=device)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    options = {"dropout_p": DROPOUT, "dropout_place": place}
    for call in (
        lambda: ops.flash_attention_forward(query, key, value, rng_state=rng, **options),
        lambda: ops.flash_attention_backward(grad_out, None, query, key, value, grad_out, lse, rng, **options),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert message in str(caught.value)


@pytest.mark.cpu_only("the checks are the same")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused_random_numbers(device: str) -> None:
    tensors = [tensor.to(device) for tensor in inputs(torch.float32)[:3]]
    for wrong in (torch.zeros(2), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"flash_attention: expected rng_state of shape \(2,\) and dtype int64"):
            ops.flash_attention_forward(*tensors, dropout_p=0.5, rng_state=wrong.to(device))


@pytest.mark.cpu_only("opcheck compares with fake tensors")
def test_opcheck() -> None:
    query, key, value, grad_out = inputs(torch.float32)
    rng = ops.draw_attention_rng(query.device)
    options = {"dropout_p": DROPOUT, "dropout_place": [6, 2, 70, 5, 80, 12]}
    torch.library.opcheck(ops.flash_attention_forward.default, (query, key, value), {**options, "rng_state": rng})
    out, lse, _ = ops.flash_attention_forward(query, key, value, rng_state=rng, **options)
    arguments = (grad_out, None, query, key, value, out, lse, rng)
    torch.library.opcheck(ops.flash_attention_backward.default, arguments, options)
    torch.library.opcheck(ops.draw_attention_rng.default, (torch.device("cpu"),))


# Results in float32


SIZES = [  # batch, Sq, Sk, H, Hk, D, Dv
    (2, 70, 130, 4, 2, 64, 64),
    (1, 3, 1000, 4, 4, 128, 128),  # keys are divided among blocks
    (1, 130, 70, 2, 1, 96, 72),
    (1, 129, 67, 1, 1, 192, 128),
    (1, 66, 130, 2, 2, 256, 256),
    (2, 1, 33, 4, 1, 60, 44),  # padded
    (1, 20, 30, 1, 1, 264, 264),  # composed of other ops on a GPU
]
VARIANTS: list[dict[str, Any]] = [{}, {"causal": True, "dropout_p": 0.3}, {"window_left": 33, "softcap": 3.0}]


def assert_rounds_to(exact: Tensor, rounded: Tensor) -> None:
    assert exact.dtype == torch.float32 and torch.equal(exact.to(rounded.dtype), rounded)
    assert not torch.equal(exact, rounded.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_float32_results_round_to_the_others(
    dtype: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    batch, rows, keys, heads, heads_kv, dim, dim_v = sizes
    shapes = (rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v), (rows, heads, dim_v)
    *tensors, grad_out = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    rng = ops.draw_attention_rng(grad_out.device)
    check_rounding(tensors, grad_out, rng, (None, None), options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_float32_results_of_packed_sequences(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """With rows after the last sequence, which are zeros."""
    queries, keys = ([40, 0, 75, 1], [35, 60, 131, 9])
    *tensors, grad_out = (
        torch.randn(sum(lengths) + 5, heads, 64).to(dtype)
        for lengths, heads in ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
    )
    cu = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    rng = ops.draw_attention_rng(grad_out.device)
    for exact in check_rounding(tensors, grad_out, rng, cu, options):
        assert not exact[-5:].any()


def test_float32_results_under_a_block_mask_of_long_lists() -> None:
    """A part of the keys sees all queries, so that lists are divided among blocks."""
    tensors = [torch.randn(1, 700, 1, 64).bfloat16() for _ in range(3)]
    mask = cuda_ext.BlockMask.window_with_global(700, window=64, global_tokens=1)
    names = ("block_keys", "block_queries", "block_tiles")
    options = {name: tensor.to(tensors[0].device) for name, tensor in zip(names, mask.op_tensors, strict=True)}
    check_rounding(tensors, torch.randn(1, 700, 1, 64).bfloat16(), None, (None, None), options)


def check_rounding(
    tensors: list[Tensor], grad_out: Tensor, rng: Tensor | None, cu: Any, options: dict[str, Any]
) -> list[Tensor]:
    """Returns out and the gradients in float32, whose order of additions is fixed."""
    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], **options}
    out, lse, _ = ops.flash_attention_forward(*tensors, rng_state=rng, **options)
    exact, exact_lse, _ = ops.flash_attention_forward(*tensors, rng_state=rng, out_dtype=torch.float32, **options)
    assert_rounds_to(exact, out)
    assert torch.equal(exact_lse, lse)
    arguments, options = (grad_out, None, *tensors, out, lse, rng), {**options, "deterministic": True}
    gradients = ops.flash_attention_backward(*arguments, **options)[:3]
    exacts = ops.flash_attention_backward(*arguments, grad_dtype=torch.float32, **options)[:3]
    for a, b in zip(exacts, gradients, strict=True):
        assert_rounds_to(a, b)
    return [exact, exacts[0]]


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("sizes", [(64, 128), (200, 64), (1, 512)], ids=str)
def test_float32_results_are_as_exact_as_their_sums(dims: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Logits of zero make all probs 1, or one over the number of keys, a power of two like the scale. With values of
    mean zero the gradients of logits are integers over it. So 16 bits hold every factor of every product."""
    (rows, keys), (dim, dim_v) = sizes, dims
    query, key = torch.randn(1, rows, 4, dim).bfloat16(), torch.randn(1, keys, 2, dim).bfloat16()
    signs = torch.randint(0, 2, (1, keys // 2, 2, dim_v)) * 2 - 1
    value = torch.cat([signs, -signs], 1).bfloat16()
    grad_out = torch.zeros(1, rows, 4, dim_v)
    grad_out[..., :16] = torch.randint(-7, 8, (1, rows, 4, 16))
    grad_out = grad_out.bfloat16()
    scale = 0.125
    tolerance: dict[str, Any] = {"atol": 1e-5, "rtol": 4e-6}

    any_value = torch.randn(1, keys, 2, dim_v).bfloat16()
    out, _, _ = ops.flash_attention_forward(torch.zeros_like(query), key, any_value, out_dtype=torch.float32)
    mean = any_value.double().mean(1, keepdim=True).repeat_interleave(2, 2).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, **tolerance)

    def gradients(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        out, lse, _ = ops.flash_attention_forward(query, key, value, scale=scale)
        assert out.abs().max() < 1e-7  # without the error of wgmma's sums: 0
        out = torch.zeros_like(out)
        return ops.flash_attention_backward(
            grad_out, None, query, key, value, out, lse, None, scale=scale, grad_dtype=torch.float32
        )[:3]

    by_keys = [tensor.double().repeat_interleave(2, 2) for tensor in (key, value)]
    grad_logits = torch.einsum("bihd,bjhd->bhij", grad_out.double(), by_keys[1]) / keys
    grad_query, _, grad_value = gradients(torch.zeros_like(query), key)
    torch.testing.assert_close(
        grad_query.double(), torch.einsum("bhij,bjhd->bihd", grad_logits, by_keys[0]) * scale, **tolerance
    )
    sums = grad_out.double().sum(1, keepdim=True).unflatten(2, (2, 2)).sum(3) / keys
    torch.testing.assert_close(grad_value.double(), sums.expand(grad_value.shape), **tolerance)
    _, grad_key, _ = gradients(query, torch.zeros_like(key))
    expected = torch.einsum("bhij,bihd->bjhd", grad_logits, query.double()).unflatten(2, (2, 2)).sum(3) * scale
    torch.testing.assert_close(grad_key.double(), expected, **tolerance)


@pytest.mark.cpu_only("the checks are the same")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused_dtypes(device: str) -> None:
    for dtype, wrong, allowed in (
        (torch.bfloat16, torch.float16, "bfloat16 or float32, got float16"),
        (torch.float32, torch.float64, "float32, got float64"),
        (torch.float64, torch.float32, "float64, got float32"),
    ):
        query, key, value, grad_out = (tensor.to(device) for tensor in inputs(dtype))
        lse = torch.zeros(2, HEADS, ROWS, device=device, dtype=torch.promote_types(dtype, torch.float32))
        with pytest.raises(RuntimeError, match=f"flash_attention: expected out_dtype to be None, {allowed}; convert"):
            ops.flash_attention_forward(query, key, value, out_dtype=wrong)
        with pytest.raises(RuntimeError, match=f"_backward: expected grad_dtype to be None, {allowed}; convert"):
            ops.flash_attention_backward(grad_out, None, query, key, value, grad_out, lse, None, grad_dtype=wrong)


@pytest.mark.cpu_only("opcheck compares with fake tensors")
def test_opcheck_of_float32_results() -> None:
    query, key, value, grad_out = inputs(torch.bfloat16)
    torch.library.opcheck(ops.flash_attention_forward.default, (query, key, value), {"out_dtype": torch.float32})
    out, lse, _ = ops.flash_attention_forward(query, key, value)
    arguments = (grad_out, None, query, key, value, out, lse, None)
    torch.library.opcheck(ops.flash_attention_backward.default, arguments, {"grad_dtype": torch.float32})
