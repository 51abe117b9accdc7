"""The object BlockMask: copies, compiled code, pictures, devices and errors."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.utils import _pytree as pytree

from cuda_ext import BlockMask

FIELDS = ("kv_counts", "kv_indices", "kv_tiles", "q_counts", "q_indices", "q_tiles", "tiles", "tiles_t")


def masks_for_trips() -> tuple[BlockMask, BlockMask]:
    return BlockMask.documents([0, 100, 300], causal=True), BlockMask.blocks(torch.rand(2, 3, 3, 4) < 0.5, 64)


def same(a: BlockMask, b: BlockMask) -> bool:
    return a.seq_lengths == b.seq_lengths and all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


@pytest.mark.parametrize(
    "trip",
    [
        lambda mask: pickle.loads(pickle.dumps(mask)),
        copy.copy,
        copy.deepcopy,
        lambda mask: mask.to("cpu"),
        lambda mask: pytree.tree_unflatten(*pytree.tree_flatten(mask)),
        lambda mask: pytree.tree_map(torch.clone, {"mask": [mask]})["mask"][0],
        lambda mask: torch.compile(lambda m: pytree.tree_map(lambda t: t + 0, m), backend="eager")(mask),
    ],
    ids=["pickle", "copy", "deepcopy", "to", "pytree", "clone", "compiled"],
)
def test_a_mask_survives(trip: Callable[[BlockMask], BlockMask]) -> None:
    for mask in masks_for_trips():
        other = trip(mask)
        assert other is not mask and type(other) is BlockMask and same(other, mask)
        assert mask == mask and mask != other
        assert torch.equal(other.to_dense(), mask.to_dense())


def test_a_pytree_of_names() -> None:
    mask = BlockMask.causal(5, 9)
    leaves, spec = pytree.tree_flatten_with_path(mask)
    assert [str(path[0]) for path, _ in leaves] == [".keys_of_queries", ".queries_of_keys", ".both_tiles"]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert "other leaves" in repr(pytree.tree_map(lambda leaf: None, mask))


def test_a_compiled_function_takes_masks() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def weighted(x: Tensor, mask: BlockMask) -> Tensor:
        return x * mask.kv_counts.sum() + len(mask.seq_lengths) + mask.shape[3]

    for length in (300, 700):
        mask = BlockMask.causal(length, length)
        assert weighted(torch.ones(3), mask).tolist() == [mask.visible_blocks() + 2 + length] * 3


def test_what_a_mask_tells() -> None:
    mask = BlockMask.causal(512, 512)
    assert repr(mask) == "BlockMask(shape=(1, 1, 512, 512), 10 of 16 blocks, 4 partial, 1 tiles, device=cpu)"
    theirs = flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 512, 512, device="cpu")
    assert mask.sparsity() == theirs.sparsity() == 37.5
    assert mask.device == torch.device("cpu") and mask.visible_blocks() == 10
    with pytest.raises(AttributeError, match="expected no assignment to tiles, masks do not change"):
        mask.tiles = mask.tiles_t
    with pytest.raises(AttributeError, match="expected no deletion of tiles, masks do not change"):
        del mask.tiles


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockMask.causal(300, 300)
    mask.plot(tmp_path / "mask.svg")
    text = (tmp_path / "mask.svg").read_text()
    boxes = [line for line in text.splitlines() if " y=" in line]
    assert len(boxes) == 5  # a partial block in each row, and before it a run of full ones in two
    assert sum('fill="#f2a93b"' in box for box in boxes) == 3 and 'x="0" y="2" width="2"' in text
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"plot: expected matplotlib to be installed for mask\.png, got none"):
        mask.plot(tmp_path / "mask.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    mask.plot(tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_a_slice_of_a_flex_mask_has_no_mask_mod() -> None:
    whole = flex.create_block_mask(flex.noop_mask, 2, 1, 256, 256, device="cpu")[:1]
    assert BlockMask.from_flex(whole).to_dense().all()
    causal = flex.create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 256, 256, device="cpu")[:1]
    with pytest.raises(RuntimeError, match="mask_mod"):
        BlockMask.from_flex(causal)


# Each builder with arguments that are on a device


IDS = [0, 0, 1, 1, 0, 2] * 50
BUILDERS: dict[str, Callable[[Any], BlockMask]] = {
    "dense": lambda device: BlockMask.from_dense(torch.ones(300, 200, dtype=torch.bool, device=device).tril()),
    "causal": lambda device: BlockMask.causal(300, 513, device=device),
    "window": lambda device: BlockMask.window(300, 300, 100, None, device=device),
    "documents": lambda device: BlockMask.documents([0, 100, 300], S=310, causal=True, device=device),
    "cu_seqlens": lambda device: BlockMask.documents(torch.tensor([0, 9, 300], dtype=torch.int32, device=device)),
    "ids": lambda device: BlockMask.documents(ids=torch.tensor(IDS, device=device), window=(200, 200)),
    "sorted ids": lambda device: BlockMask.documents(ids=torch.tensor(IDS, device=device).sort().values),
    "prefix": lambda device: BlockMask.prefix_lm(torch.tensor([100, 200], device=device), 300),
    "global": lambda device: BlockMask.window_with_global(300, 20, 30, device=device),
    "prompt": lambda device: BlockMask.shared_prompt(100, [50, 150], device=device),
    "blocks": lambda device: BlockMask.blocks(torch.eye(9, dtype=torch.bool, device=device), 32),
    "ranges": lambda device: BlockMask.from_column_ranges(
        torch.arange(300, dtype=torch.int32, device=device).view(1, 1, 150, 2).flip(3), False
    ),
    "tree": lambda device: BlockMask.tree([-1, *range(149), *range(100)], 77, device=device),
    "mask_mod": lambda device: BlockMask.from_mask_mod(lambda b, h, q, k: q >= k, 2, None, 300, 300, device=device),
    "flex": lambda device: BlockMask.from_flex(
        flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device=device), device=device
    ),
    "algebra": lambda device: (
        ~BlockMask.causal(300, 300, device=device) | BlockMask.window(300, 300, 9, 9, device=device)
    ),
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_default_device_does_not_matter(builder: str) -> None:
    """A tensor that is made without a device would be on the meta device, which has no values."""
    expected = BUILDERS[builder]("cpu")
    with torch.device("meta"):
        mask = BUILDERS[builder]("cpu")
        dense = mask.to_dense()
    assert same(mask, expected) and torch.equal(dense, expected.to_dense())
    assert 0 < int(dense.sum()) < dense.numel()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("builder", BUILDERS)
def test_on_a_gpu(builder: str) -> None:
    mask = BUILDERS[builder]("cuda")
    assert {getattr(mask, name).device.type for name in FIELDS} == {"cuda"}
    assert same(mask.to("cpu"), BUILDERS[builder]("cpu")) and mask.to("cpu").device.type == "cpu"
    assert torch.equal(mask.to_dense().cpu(), BUILDERS[builder]("cpu").to_dense())


# Errors


def altered(**changes: Any) -> Callable[[], BlockMask]:
    """Makes the causal mask of 300 again, with other arguments."""

    def build() -> BlockMask:
        mask = BlockMask.causal(300, 300)
        named = {name: getattr(mask, name) for name in ("seq_lengths", *FIELDS[:7])}
        for name, change in changes.items():
            named[name] = change(named[name].clone()) if callable(change) else change
        return BlockMask(**named)

    return build


def put(place: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put(tuple(map(torch.tensor, place)), torch.tensor(value, dtype=tensor.dtype))


NO_TRANSPOSE = {"q_counts": None, "q_indices": None, "q_tiles": None}
ones = torch.ones
STRUCTURE: list[tuple[Callable[[], Any], str]] = [
    (altered(seq_lengths=(0, 300)), r"expected seq_lengths\[0\] to be an int of 1 or more, got 0"),
    (altered(kv_counts=None), "expected kv_counts to be a tensor, got None; only the lists q_ may be left out"),
    (altered(kv_tiles=[1]), r"expected kv_tiles to be a tensor, got \[1\]"),
    (altered(tiles=Tensor.long), r"expected tiles of dtype int32, got int64; convert it with \.int\(\)"),
    (altered(q_tiles=None), "expected all of q_counts, q_indices and q_tiles or none of them, got no q_tiles"),
    (altered(tiles=lambda t: t.to("meta")), "expected tiles on device cpu to match kv_counts, got meta"),
    (altered(kv_counts=lambda t: t[0]), r"expected kv_counts of shape \(B, H, 3\), got \(1, 3\)"),
    (altered(kv_counts=lambda t: t[..., :2]), r"expected kv_counts of shape \(1, 1, 3\), a row for .* got \(1, 1, 2\)"),
    (altered(kv_indices=lambda t: t[0]), r"kv_indices of shape \(1, 1, 3, W\) with W of 1 or more, got \(1, 3, 3\)"),
    (altered(kv_indices=lambda t: t[..., :0]), r"with W of 1 or more, got \(1, 1, 3, 0\)"),
    (altered(kv_tiles=lambda t: t[..., :2]), r"expected kv_tiles of shape .* to match kv_indices, got \(1, 1, 3, 2\)"),
    (altered(q_counts=lambda t: t[..., :2]), r"expected q_counts of shape \(1, 1, 3\), .* got \(1, 1, 2\)"),
    (altered(tiles=lambda t: t[..., :3]), r"expected tiles of shape \(T, 128, 4\), got \(2, 128, 3\)"),
    (altered(kv_counts=put((0, 0, 1), 4)), r"expected kv_counts in \[0, 3\], got 4; a count is at most the width"),
    (altered(kv_counts=put((0, 0, 1), -1)), r"expected kv_counts in \[0, 3\], got -1"),
    (altered(kv_indices=put((0, 0, 1, 1), 3)), r"expected kv_indices in \[0, 2\], got 3; up to the count"),
    (altered(kv_tiles=put((0, 0, 1, 1), 2)), r"expected kv_tiles in \[-1, 1\], got 2; -1 means full"),
    (altered(kv_indices=put((0, 0, 1, 1), 0)), "kv_indices without repetition, got 0 twice in row 1; list it once"),
    (
        altered(**NO_TRANSPOSE, kv_tiles=put((0, 0, 2, 2), 0)),
        "without bits past 300 queries and 300 keys, got some in the",
    ),
    (altered(q_tiles=put((0, 0, 0, 1), 0)), "expected q_counts, q_indices and q_tiles to list the same blocks"),
    (altered(q_indices=put((0, 0, 0, 1), 5)), r"expected q_indices in \[0, 2\], got 5"),
]
M = BlockMask
ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: M.from_dense(ones(3, 3)), r"from_dense: expected mask of dtype bool, got float32"),
    (lambda: M.from_dense(ones(3).bool()), r"expected mask of shape \(Sq, Sk\), .* got \(3,\)"),
    (lambda: M.from_dense([[True]]), "expected mask to be a tensor, got list"),
    (lambda: M.causal(0, 3), "BlockMask.causal: expected Sq to be an int of 1 or more, got 0"),
    (lambda: M.causal(3, 2.0), "expected Sk to be an int of 1 or more, got 2.0"),
    (
        lambda: M.window(3, 3, 1.5, 0),
        "BlockMask.window: expected left to be an int, or None or -1 for no bound, got 1.5",
    ),
    *(
        (lambda build=build, given=given: build(**dict(zip(("q_lengths", "k_lengths"), given))), message)
        for build in (functools.partial(M.window, 3, 3, 0, 0), functools.partial(M.chunks, 3, 3, 2))
        for *given, message in (
            (ones(2).int(), "expected both of q_lengths and k_lengths or none, got one; give the other"),
            (ones(2).int(), ones(2), "expected k_lengths of an integer dtype, got float32"),
            (ones(2, 1).int(), ones(2).int(), r"expected q_lengths with 1 dimensions, got shape \(2, 1\)"),
            (ones(2).int(), ones(3).int(), "q_lengths and k_lengths of as many sequences, at least one, got 2 and 3"),
            (ones(0).int(), ones(0).int(), "of as many sequences, at least one, got 0 and 0"),
            (ones(2).int(), ones(2).int().to("meta"), "q_lengths and k_lengths on one device, got cpu and meta; move"),
        )
    ),
    (lambda: M.documents(), "documents: expected one of cu_seqlens and ids, got 0; give one of them"),
    (lambda: M.documents([0, 3], ids=torch.zeros(3).int()), "expected one of cu_seqlens and ids, got 2"),
    (lambda: M.documents([1, 3]), r"cu_seqlens to begin with 0 and never to fall, got \[1, 3\]; give document ids"),
    (lambda: M.documents([0, 3, 2]), r"never to fall, got \[0, 3, 2\]"),
    (lambda: M.documents([0, 0.5]), "expected cu_seqlens of an integer dtype, got float32"),
    (lambda: M.documents(3), "expected cu_seqlens to be a tensor or a list, got 3"),
    (lambda: M.documents([0, 3], S=2), "expected S to be an int of 3 or more, got 2"),
    (lambda: M.documents([0]), "expected S to be an int of 1 or more, got 0"),
    (lambda: M.documents(ids=ones(1, 1, 3).int()), r"expected ids with 1 or 2 dimensions, got shape \(1, 1, 3\)"),
    (lambda: M.documents(ids=ones(0).int()), r"expected ids of at least one position, got shape \(0,\)"),
    (lambda: M.documents(ids=ones(3).int(), S=3), "expected S=None with ids, whose length it is, got 3"),
    (lambda: M.documents([0, 3], window=(0, "1")), r"expected window\[1\] to be an int, .* got '1'"),
    (lambda: M.prefix_lm(ones(2), 3), "expected prefix_lengths of an integer dtype, got float32"),
    (lambda: M.prefix_lm(ones(0).int(), 3), "expected prefix_lengths of at least one sequence, got none"),
    (lambda: M.window_with_global(3, -1, 0), "expected window to be an int of 0 or more, got -1"),
    (lambda: M.shared_prompt(0, [0]), r"expected answer_lengths of 0 or more, and .* got \[0\] after a prompt of 0"),
    (lambda: M.shared_prompt(5, [-1]), r"expected answer_lengths of 0 or more, and .* got \[-1\] after a prompt of 5"),
    (lambda: M.blocks(ones(2, 2).bool(), 48), "expected block_size 16, 32, 64 or 128, got 48"),
    (lambda: M.blocks(ones(2, 2).bool(), 64, 129), r"block_mask with 3 rows and 2 columns .* got \(2, 2\)"),
    (
        lambda: M.from_column_ranges(ones(1, 1, 3, 4).int(), True),
        r"\(B, Hk, Sk, 1 or 2\) for causal=True, got \(1, 1, 3, 4\)",
    ),
    (lambda: M.from_column_ranges(ones(1, 2, 3, 2).int(), False, num_heads=3), "a multiple of 2, got 3"),
    (lambda: M.tree([-1, 2]), r"expected parents in \[-1, 1\], got \[-1, 2\]; they count from the tree's first token"),
    (lambda: M.tree([-1, 2, 1]), "tree: expected parents to lead to a root, -1, got a cycle"),
    (lambda: M.tree([]), r"expected parents of at least one token, got shape \(0,\)"),
    (lambda: M.from_mask_mod(None, 1, 1, 3, 3), "expected mask_mod to be a function, got None"),
    (
        lambda: M.from_mask_mod(lambda b, h, q, k: q - k, 1, 1, 3, 3),
        "mask_mod to return a tensor of dtype bool, got int64",
    ),
    (lambda: M.from_mask_mod(lambda b, h, q, k: q >= k, 0, 1, 3, 3), "expected B to be an int of 1 or more, got 0"),
    (
        lambda: M.from_flex(M.causal(3, 3)),
        "expected block_mask to be torch.nn.attention.flex_attention.BlockMask, got B",
    ),
    (
        lambda: M.causal(3, 3) & M.causal(3, 4),
        r"__and__: expected masks of the same lengths, got \(3, 3\) and \(3, 4\)",
    ),
    (lambda: M.causal(3, 3) | M.causal(3, 3).to("meta"), "__or__: expected masks on one device, got cpu and meta"),
    (
        lambda: M.from_dense(ones(2, 3, 3).bool()) & M.from_dense(ones(3, 3, 3).bool()),
        r"expected B and H of both masks to be equal or 1, got \(2, 1\) and \(3, 1\)",
    ),
    (lambda: M.causal(3, 3).plot("a.svg", head=1), r"expected head in \[0, 0\], got 1"),
]


def check_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        call()
    assert str(error.value).startswith("cuda_ext::BlockMask") and "expected" in str(error.value)


@pytest.mark.parametrize(("call", "message"), STRUCTURE)
def test_wrong_lists_are_errors(call: Callable[[], Any], message: str) -> None:
    check_error(call, message)


@pytest.mark.parametrize(("call", "message"), ARGUMENTS)
def test_wrong_arguments_are_errors(call: Callable[[], Any], message: str) -> None:
    check_error(call, message)


def test_without_checks_wrong_lists_are_taken() -> None:
    mask = BlockMask.causal(300, 300)
    tensors = (mask.kv_counts, mask.kv_indices, mask.kv_tiles.masked_fill(mask.kv_tiles >= 0, 0))
    assert BlockMask((300, 300), *tensors, mask.tiles, check=False).partial_blocks() == 3
