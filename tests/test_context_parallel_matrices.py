"""The test matrices of other libraries of context parallelism: their heads, masks, documents and groups.

Every case is compared with one rank: in float64 out, lse and all gradients to 1e-12, relative to the largest element.
Where a matrix has 16-bit dtypes, a case also runs in one of them, drawn: its errors against float64 are at most 1.5
times those of one rank (more for tensors of a few elements), and within the tolerances of TransformerEngine. Sequences
are shorter, and some are odd: what depends on the tiles of kernels is tested on one rank.

| matrix | here |
|---|---|
| TransformerEngine, test_attention_with_cp.py: `test_cp_with_flash_attention` | `test_te`, all models x methods |
| the same: `test_cp_with_fused_attention`, bias, sinks, MLA, max logits | the same, models from ``"bias"`` on |
| the same: `test_cp_with_fused_attention_d256` | the same, models ``"D 256"`` |
| the same: bshd, thd, thd with padding between sequences | forms ``"batch"``, ``"packed"``, ``"padded"`` |
| ring-flash-attn, test_zigzag_ring_flash_attn_varlen_func.py, test_ring_..., test_llama3_... | `test_ring_varlen` |
| the same, test_zigzag_ring_flash_attn_func.py, test_ring_flash_attn_func.py | `test_ring_batch` |
| the same, test_stripe_flash_attn_func.py | `test_ring_stripes` |
| PyTorch, test/distributed/tensor/test_attention.py: `test_ring_attention_sdpa` | `test_torch_sdpa`, all cells |
| the same: native and custom Transformer | `test_module` |
| the same: flex document masks, head-tail balance for each document | `test_torch_documents` |
| MagiAttention, test_dist_attn.py: heads, head dims, sinks, flat and hierarchical | `test_magi`, all cells |
| MagiAttention: slices that are full, causal, inverse causal, both; uneven shards | `test_magi_slices` |
| DeepSpeed, test_ulysses.py: all-to-all, also of odd numbers of heads | `test_deepspeed_heads`, all cells |
| the same: a loss on ranks of two groups | `test_deepspeed_two_groups` |
| DeepSpeed, test_ulysses_sp_hf.py: a model with and without it | `test_module` |

Nobody tests, but here are: checkpoints of both kinds around the call (`test_module`), ranks without rows
(`test_empty_shards`), 500 tiny documents, one document over all ranks, key heads that are fewer than the ranks.

What does not apply:

- TransformerEngine's sbhd is a view of bshd. Its fp8 attention does not exist here. Its refusals do not exist here
  either, so those cells run: windows and sinks only with some methods, bias only with p2p and not in thd, MLA not by
  all-to-all, padding not in two dimensions. Its models of 128 heads have 16 here. Maximal logits are not returned.
- ring-flash-attn's sequences are multiples of twice the ranks; here one of the two sets is odd. Its ranks are 8, here 2
  to 4. It prints differences, without a bound. QKV packed in one tensor are views.
- PyTorch's counts of collectives: test_context_parallel_calls.py counts bytes. Its cell of load balance without a
  causal mask, which it leaves out, runs. Its choice of a balance by the work of blocks is a layout, here a random one.
- MagiAttention's slices that overlap, or have the queries of several slices, are no documents: they need a block mask,
  which ring attention does not take. A window is one for all documents, so inverse causal slices of one case are all as
  much longer in keys. Native or NCCL collectives, one or several stages: there is one of each.
- DeepSpeed's FPDT, which keeps chunks on the host, and its engine. Three heads on four ranks is an error
  (test_context_parallel_calls.py), so as there, odd numbers of heads are divided by two, and also by three.
- Ranks that die during a call: test_distributed_faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from context_common import Case, Check, groups_of_two, layouts_of
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cuda_ext import flash_attention
from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.context_parallel import Layout

CAUSAL: Mapping[str, Any] = MappingProxyType({"causal": True})
METHODS = ("all_gather", "p2p", "ulysses", "two_dimensions")
all_methods = pytest.mark.parametrize("method", METHODS)
sampled = pytest.mark.sampled(cases=5)


def function_of(method: str, packed: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The call, and the arguments that name the method."""
    if method == "ulysses":
        return (cp.ulysses_attention_varlen if packed else cp.ulysses_attention), {}
    function = cp.ring_attention_varlen if packed else cp.ring_attention
    if method != "two_dimensions":
        return function, {"method": method}
    ring, heads = groups_of_two()
    return function, {"group": ring, "ulysses_group": heads}


def zigzag_of_documents(case: Case, ranks: int) -> list[Layout]:
    """Of queries and keys: of each document, chunks r and ``2 * ranks - 1 - r``; of rows after the last one, too."""
    layouts = []
    for lengths, total in zip(zip(*case.lengths), case.rows):
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        begin = 0
        for length in (*lengths, total - sum(lengths)):
            for of_rank, chunks in zip(ranges, Layout.zigzag(length, ranks).ranges):
                of_rank += [(begin + first, begin + end) for first, end in chunks]
            begin += length
        layouts.append(Layout(total, tuple(map(tuple, ranges))))
    return layouts


def layouts_for(kind: str, case: Case, method: str) -> list[Layout]:
    if kind == "documents":
        return zigzag_of_documents(case, dist.get_world_size())
    if kind == "zigzag" and method == "two_dimensions":
        return [Layout.zigzag(length, 2).divided(2) for length in case.rows]
    return layouts_of(kind, case, dist.get_world_size())


def check_exact(case: Case, kind: str, method: str, bound: float = 1e-12) -> None:
    function, arguments = function_of(method, case.packed)
    Check(case, kind, layouts=layouts_for(kind, case, method)).run(function, bound, **arguments)


def check_rounded(check: Check, method: str) -> None:
    """In a 16-bit dtype, by the rule of this file. The errors are those of all ranks together."""
    function, arguments = function_of(method, check.case.packed)
    weights = check.weights()
    actual = check.found(check.call(function, **arguments), weights)
    on_one = check.expected(check.whole, weights)
    for name, exact in check.expected(check.whole.in_float64(), weights).items():
        finite = exact.isfinite()
        assert torch.equal(actual[name].isfinite(), finite), name
        wanted = exact.where(finite, 0.0)
        found, one = (each[name].double().where(finite, 0.0) for each in (actual, on_one))
        sums = torch.stack([(found - wanted).square().sum(), (one - wanted).square().sum(), wanted.square().sum()])
        count = torch.tensor([float(wanted.numel())], dtype=torch.float64)
        sums = torch.cat([sums, count])
        largest = wanted.abs().max() if wanted.numel() else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        error, of_one, size = sums[:3].sqrt().tolist()
        rounding = 2.0**-21 * size  # of float32 sums in another order
        factor = 1.5 * math.exp(3 / max(1, wanted.numel()) ** 0.5)  # roots of n random squares vary by n ** -0.5
        assert error <= factor * of_one + rounding, f"{name}: error {error:.3g} of {size:.3g}, of one rank {of_one:.3g}"
        # Those of TransformerEngine: elements, and the root of the mean square, beside the range of elements.
        torch.testing.assert_close(found, wanted, atol=2.5e-2 * max(1.0, float(largest)), rtol=2.5e-2, msg=name)
        assert math.sqrt(float(sums[0] / sums[3].clamp(min=1.0))) <= 0.01 * 2 * float(largest) + 1e-9, name


def drawn(values: Sequence[Any]) -> Any:
    """One of them, the same on all ranks."""
    return values[int(torch.randint(len(values), ()))]


class Model(NamedTuple):
    """options: of so many rows; a bias without a size is of (batch, heads), which are 1 or all."""

    heads: int
    key_heads: int
    dims: tuple[int, int]
    causal: bool = False
    window: tuple[int, int] | None = None  # of 4096 rows
    bias: str = ""  # which of batch and heads it has, such as "1h"; "keys": (keys,)
    sinks: bool = False


TE = {
    "MHA, causal": Model(12, 12, (128, 128), True),
    "MHA": Model(12, 12, (128, 128)),
    "MHA, causal window": Model(12, 12, (128, 128), True, (512, 0)),
    "MHA, window": Model(12, 12, (128, 128), False, (512, 512)),
    "GQA 8, causal": Model(32, 4, (128, 128), True),
    "GQA 6": Model(12, 2, (128, 128)),
    "32 heads, short window": Model(32, 32, (128, 128), True, (128, 0)),
    "GQA 6, window": Model(12, 2, (128, 128), False, (512, 512)),
    "MLA, causal": Model(16, 16, (192, 128), True),
    "MLA": Model(12, 12, (192, 128)),
    "MLA, causal window": Model(12, 12, (192, 128), True, (512, 0)),
    "MLA, window": Model(12, 12, (192, 128), False, (512, 512)),
    "bias, causal": Model(12, 12, (128, 128), True, bias="1h"),
    "bias": Model(12, 12, (128, 128), bias="1h"),
    "bias of batches": Model(12, 12, (128, 128), bias="bh"),
    "causal, window with both sides": Model(12, 12, (128, 128), True, (512, 512)),
    "GQA, bias, causal": Model(12, 2, (128, 128), True, bias="1h"),
    "GQA, bias of all heads, causal": Model(12, 2, (128, 128), True, bias="11"),
    "GQA, bias of keys, causal": Model(12, 2, (128, 128), True, bias="keys"),
    "GQA, bias": Model(12, 2, (128, 128), bias="1h"),
    "GQA, causal, window with both sides": Model(12, 2, (128, 128), True, (512, 512)),
    "narrow values, causal": Model(12, 12, (128, 64), True),
    "narrow values, bias, causal": Model(12, 12, (128, 64), True, bias="1h"),
    "narrow values, bias": Model(12, 12, (128, 64), bias="1h"),
    "narrow values, bias of batches": Model(12, 12, (128, 64), bias="b1"),
    "64 heads": Model(64, 8, (64, 64), True),
    "64 heads, sinks": Model(64, 8, (64, 64), True, sinks=True),
    "64 heads, sinks, short window": Model(64, 64, (64, 64), True, (128, 0), sinks=True),
    "D 256": Model(16, 16, (256, 256), True),
    "D 256, window": Model(16, 16, (256, 256), True, (512, 0)),
}
TE_ROWS = (64, 48, 61, 45)  # of 4096


def te_case(model: Model, form: str) -> Case:
    """padded: between sequences are rows without keys, and keys without rows."""
    rows = drawn(TE_ROWS)
    options: dict[str, Any] = {"causal": model.causal}
    if model.window is not None:
        options["window"] = tuple(reach * rows // 4096 for reach in model.window)
    if model.sinks:
        options["sinks"] = (model.heads,)
    lengths: Any = (rows, rows)
    sequences, longest = 2, rows
    if form != "batch":
        used = [(rows - 9, rows - 9), (rows // 3, rows // 3)]
        pads = [drawn((0, 1, 3)), drawn((3, 8))]
        lengths = tuple(used)
        if form == "padded":
            lengths = tuple(part for same, pad in zip(used, pads) for part in (same, (pad, 0), (0, pad)))
        sequences, longest = len(lengths), max(map(max, lengths))
    if model.bias == "keys":
        options["attn_bias"] = (longest,)
    elif model.bias:
        sizes = {"1": 1, "b": sequences, "h": model.heads}
        options["attn_bias"] = (*(sizes[each] for each in model.bias), longest, longest)
    return Case(model.heads, model.key_heads, lengths, options, rest=3 * (form == "padded"), dims=model.dims)


def with_nans_in_padding(check: Check) -> Check:
    """Padding of packed rows, and of keys, is not a number: nothing may read it."""
    begins = [0, 0]
    for number, lengths in enumerate((*check.case.lengths, (check.case.rest, check.case.rest))):
        for side, (begin, length) in enumerate(zip(list(begins), lengths)):
            if number % 3 or number == len(check.case.lengths):
                rows = slice(begin, begin + length)
                for tensor in check.whole.tensors[1:] if side else check.whole.tensors[:1]:
                    tensor.data[rows] = torch.nan
            begins[side] += length
    return Check(check.case, "", layouts=check.layouts, whole=check.whole)


@pytest.mark.sampled(cases=12)
@on_ranks("ranks")
@pytest.mark.parametrize("form", ["batch", "packed", "padded"])
@pytest.mark.parametrize(("method", "ranks"), [("all_gather", 2), ("p2p", 2), ("ulysses", 2), ("two_dimensions", 4)])
@pytest.mark.parametrize("model", TE)
def test_te(model: str, method: str, ranks: int, form: str) -> None:
    assert dist.get_world_size() == ranks
    case = te_case(TE[model], form)
    layouts = layouts_for("zigzag" if form == "batch" else "documents", case, method)
    for dtype in (torch.float64, drawn((torch.bfloat16, torch.float16))):
        check = Check(case, "", dtype, layouts)
        if form == "padded":
            check = with_nans_in_padding(check)
        if dtype == torch.float64:
            function, arguments = function_of(method, case.packed)
            check.run(function, **arguments)
        else:
            check_rounded(check, method)


RING_ENDS = {"even": (0, 8, 78, 265), "odd": (0, 7, 80, 251), "llama3": (0, 15, 156, 529)}


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("kind", ["documents", "zigzag", "contiguous"])
@pytest.mark.parametrize("ends", RING_ENDS)
def test_ring_varlen(ends: str, kind: str, method: str, ranks: int) -> None:
    """Five heads, of which three ranks have other numbers; only llama3 has short head dims there."""
    cuts = RING_ENDS[ends]
    lengths = tuple((end - first,) * 2 for first, end in zip(cuts, cuts[1:]))
    dim = 8 if ends == "llama3" else 128 // ranks
    options = {"causal": True, "deterministic": drawn((False, True))}
    check_exact(Case(5, 5, lengths, options, dims=(dim, dim)), kind, method)


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("rows", [239, 240])
def test_ring_batch(rows: int, kind: str, method: str, ranks: int) -> None:
    """3824 rows there, a sixteenth of which is odd; one sequence."""
    case = Case(5, 5, (rows, rows), CAUSAL, dims=(64, 64), batch=1)
    check_exact(case, kind, method)
    check_rounded(Check(case, "", torch.bfloat16, layouts_for(kind, case, method)), method)


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("lengths", [((29, 29),), ((2, 2), (17, 17), (11, 11))])
def test_ring_stripes(lengths: Any, method: str, ranks: int) -> None:
    """Row i on rank i mod P."""
    case = Case(5, 5, lengths, CAUSAL)
    (rows, _) = case.rows
    layout = Layout(rows, tuple(tuple((i, i + 1) for i in range(rank, rows, ranks)) for rank in range(ranks)))
    function, arguments = function_of(method, packed=True)
    Check(case, "", layouts=[layout, layout]).run(function, **arguments)


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", METHODS[:2])
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_sdpa(causal: bool, kind: str, method: str, compiled: bool, ranks: int) -> None:
    """Both rotations, with and without balance; what is computed without gradients has the same bits."""
    case = Case(8, 8, (12 * ranks, 12 * ranks), {"causal": causal}, dims=(32, 32), batch=8)
    check = Check(case, kind)

    def attend(*tensors: Tensor, **options: Any) -> Any:
        return cp.ring_attention(*tensors, method=method, **options)

    function = torch.compile(attend, backend="aot_eager") if compiled else attend
    check.run(function)
    with torch.no_grad():
        forward_only = check.call(function)
    for actual, expected in zip(forward_only, check.call(function)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Not p2p with documents: it plans each pair of ranges of rows and keys for each document, which takes minutes.
MANY_DOCUMENTS = [
    *((kind, method) for kind in ("zigzag", "contiguous", "uneven") for method in METHODS[:3]),
    *(("documents", method) for method in ("all_gather", "ulysses")),
]


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kind", "method"), MANY_DOCUMENTS)
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_torch_documents(batch: int, kind: str, method: str, ranks: int) -> None:
    """28 documents of random lengths in each row of the batch, all packed as one."""
    lengths = []
    for _ in range(batch):
        cuts = (torch.randperm(63)[:27] + 1).sort().values.tolist()
        lengths += [end - first for first, end in zip([0, *cuts], [*cuts, 64])]
    check_exact(Case(4, 4, tuple((n, n) for n in lengths), CAUSAL, dims=(16, 16)), kind, method)


@sampled
@on_ranks(4)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("key_heads", [8, 4])
def test_magi(key_heads: int, dim: int, hierarchical: bool, sinks: bool) -> None:
    """All queries see all keys, of 32 rows a rank."""
    method = "two_dimensions" if hierarchical else drawn(METHODS[:2])
    case = Case(8, key_heads, ((128, 128),), {"sinks": (8,)} if sinks else {}, dims=(dim, dim))
    check_exact(case, "contiguous", method)
    dtype = drawn((torch.float16, torch.bfloat16))
    check_rounded(Check(case, "", dtype, layouts_for("contiguous", case, method)), method)


SLICES = ((20, 25), (1, 6), (33, 38), (0, 5), (9, 14))  # all with five more keys than queries
MAGI = {
    "full": (((20, 9), (3, 40), (31, 31), (7, 0), (0, 4)), {}),
    "causal": (((20, 9), (3, 40), (31, 31), (7, 0), (0, 4)), CAUSAL),
    "inverse causal": (SLICES, {"window": (5, None)}),
    "both causal": (SLICES, {"window": (5, 0)}),
    "window": (((64, 64),), {"window": (10, 6)}),
    "window of documents": (((40, 40), (5, 5), (37, 37)), {"window": (10, 0)}),
}


@sampled
@on_ranks(4)
@all_methods
@pytest.mark.parametrize("kind", ["contiguous", "uneven"])
@pytest.mark.parametrize("mask", MAGI)
def test_magi_slices(mask: str, kind: str, method: str) -> None:
    lengths, options = MAGI[mask]
    check_exact(Case(8, 4, lengths, options, rest=2), kind, method)


HEADS = [*((4, heads) for heads in (4, 8, 7)), *((2, heads) for heads in (3, 7)), *((3, heads) for heads in (3, 7, 8))]


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize(("ranks", "heads"), HEADS)
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("batch", [2, 4])
def test_deepspeed_heads(batch: int, rows: int, ranks: int, heads: int, dim: int) -> None:
    """So many rows on each rank; bit-equal to one rank if each has the same number of heads, and not one, of which the
    CPU kernels add up the products of short sequences in another order."""
    case = Case(heads, heads, (rows * ranks, rows * ranks), CAUSAL, dims=(dim, dim), batch=batch)
    check_exact(case, "contiguous", "ulysses", 0.0 if heads % ranks == 0 and heads > ranks else 1e-12)


class Attention(nn.Module):
    """A layer with rotary positions and a residual: (B, rows, width) -> the same."""

    def __init__(self, heads: int, key_heads: int, dim: int = 8) -> None:
        super().__init__()
        self.sizes, self.dim = [heads, key_heads, key_heads], dim
        self.inputs = nn.Linear(heads * dim, sum(self.sizes) * dim, dtype=torch.float64)
        self.outputs = nn.Linear(heads * dim, heads * dim, dtype=torch.float64)

    def forward(self, rows: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        query, key, value = self.inputs(rows).unflatten(-1, (-1, self.dim)).split(self.sizes, -2)
        out = attend(*(self.rotated(tensor, positions) for tensor in (query, key)), value, causal=True)
        return rows + self.outputs(out.flatten(-2))

    def rotated(self, tensor: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double().view(-1, 1, 1) / 10.0 ** torch.arange(self.dim // 2)
        first, second = tensor.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.cat(turned, -1)


def loss_and_gradients(
    layers: nn.ModuleList,
    rows: Tensor,
    positions: Tensor,
    attend: Callable[..., Tensor],
    labels: Tensor,
    reentrant: bool | None = None,
) -> list[Tensor]:
    """The loss, and the gradients of the weights and of the rows. reentrant: the kind of checkpoint around a layer."""
    rows = rows.detach().requires_grad_()
    hidden = rows
    for layer in layers:
        if reentrant is None:
            hidden = layer(hidden, positions, attend)
        else:
            hidden = checkpoint(layer, hidden, positions, attend, use_reentrant=reentrant)
    loss = (hidden - labels).square().sum()
    layers.zero_grad()
    loss.backward()
    assert rows.grad is not None
    return [loss.detach(), *(weight.grad for weight in layers.parameters() if weight.grad is not None), rows.grad]


def check_module(
    heads: int, key_heads: int, layout: Layout, attend: Callable[..., Tensor], reentrant: bool | None, group: Any = None
) -> None:
    """Losses and gradients of weights are summed over the ranks of the group."""
    layers = nn.ModuleList([Attention(heads, key_heads) for _ in range(2)])
    rows, labels = torch.randn(2, 2, layout.length, heads * 8, dtype=torch.float64)
    expected = loss_and_gradients(layers, rows, torch.arange(layout.length), flash_attention, labels)
    positions = cp.positions(layout.length, layout=layout, group=group)
    own, own_labels = (cp.shard_sequence(tensor, layout=layout, group=group) for tensor in (rows, labels))
    *sums, of_rows = loss_and_gradients(layers, own, positions, attend, own_labels, reentrant)
    for actual, wanted in zip(sums, expected[:-1], strict=True):
        total = actual.clone()
        dist.all_reduce(total, group=group)
        Check.compare("loss or gradient of a weight", total, wanted, 1e-11)
    Check.compare("gradient of rows", of_rows, expected[-1][:, positions], 1e-11)


MODULES = [
    *((method, ranks) for method in METHODS[:3] for ranks in (2, 3, 4)),
    *(("two_dimensions", 4),),
]


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (5, 5), (6, 2)])
@pytest.mark.parametrize(("method", "ranks"), MODULES)
def test_module(method: str, ranks: int, heads: int, key_heads: int, reentrant: bool | None) -> None:
    """Two layers, with and without checkpoints, of rows that the ranks do not divide."""
    function, arguments = function_of(method, packed=False)
    layout = layouts_for("zigzag", Case(1, 1, (8 * ranks + 3,) * 2), method)[0]

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        result: Tensor = function(*tensors, layout=layout, **arguments, **options)
        return result

    check_module(heads, key_heads, layout, attend, reentrant)


@on_ranks(4)
def test_deepspeed_two_groups() -> None:
    """Two groups of two ranks, which have other numbers of rows."""
    _, group = groups_of_two()
    layout = Layout.contiguous(11 + 6 * (dist.get_rank() // 2), 2)
    torch.manual_seed(dist.get_rank() // 2)

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        result: Tensor = cp.ulysses_attention(*tensors, group=group, layout=layout, **options)
        return result

    check_module(3, 3, layout, attend, None, group)


@sampled
@on_ranks(4)
@all_methods
@pytest.mark.parametrize("empty", [(0,), (1,), (3,), (0, 1), (1, 2, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_empty_shards(packed: bool, empty: tuple[int, ...], method: str) -> None:
    """Ranks without rows, and one document over all others."""
    lengths: Any = ((37, 37),) if packed else (37, 37)
    owners = [rank for rank in range(4) if rank not in empty]
    parts = dict(zip(owners, Layout.zigzag(37, len(owners)).ranges))
    layout = Layout(37, tuple(parts.get(rank, ()) for rank in range(4)))
    function, arguments = function_of(method, packed)
    case = Case(4, 2, lengths, {"causal": True, "window": (19, None), "sinks": (4,)})
    Check(case, "", layouts=[layout, layout]).run(function, **arguments)


@sampled
@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("kind", "method"), MANY_DOCUMENTS)
def test_500_documents(kind: str, method: str, ranks: int) -> None:
    lengths = tuple((int(n), int(n)) for n in torch.randint(4, (500,)))
    check_exact(Case(4, 2, lengths, CAUSAL, rest=5), kind, method)


@sampled
@on_ranks(4)
@all_methods
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 1), (6, 2), (6, 3), (9, 3), (5, 1), (14, 2)])
@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": True}, {"window": (6, 3), "attn_bias": True}])
def test_few_key_heads(options: dict[str, Any], heads: int, key_heads: int, method: str) -> None:
    """Fewer than ranks, and divided by these or not."""
    shapes = {"sinks": (heads,), "attn_bias": (2, heads, 27, 27)}
    given = {name: shapes[name] if value is True and name in shapes else value for name, value in options.items()}
    check_exact(Case(heads, key_heads, (27, 27), given), "zigzag", method)
