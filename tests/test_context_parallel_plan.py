"""Plans of context parallelism, against what calls send and what others have measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_common import Bytes
from ranks import on_ranks

from cuda_ext import BlockMask
from cuda_ext.distributed import context_parallel as cp
from cuda_ext.distributed.bucketing.links import Hop
from cuda_ext.distributed.context_parallel import Layout, plan_context
from cuda_ext.distributed.context_parallel.command import add
from cuda_ext.distributed.context_parallel.costs import Cluster, visible_pairs
from cuda_ext.distributed.context_parallel.parts import Band
from cuda_ext.distributed.prediction.command import main

Capture = pytest.CaptureFixture[str]

H100 = {"rate": 680e12, "bandwidth": 50e9}
LLAMA: Any = {"heads": 64, "key_heads": 8, **H100}


ENDS = [0, 500, 640, 1000, 1536]
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": (200, None)},
    "documents": {"cu_seqlens": ENDS},
    "mask": {"block_mask": True},
    "mask in float64": {"block_mask": True, "dtype": torch.float64},
    "uneven": {"layout": Layout(1536, (((0, 128),), ((128, 640), (768, 1024)), ((640, 768),), ((1024, 1536),)))},
}


@on_ranks(4)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("method", ["all_gather", "p2p", "ulysses", "2-D"])
def test_bytes_are_those_that_calls_send(case: str, method: str) -> None:
    options = {"dtype": torch.float32, **CASES[case]}
    if options.get("block_mask"):
        options["block_mask"] = BlockMask.documents(ENDS, causal=True)
    if method == "2-D":
        options.pop("layout", None)
    rank, length, heads, key_heads, batch = dist.get_rank(), 1536, 6, 3, 1 if "cu_seqlens" in options else 2
    sizes: Any = {"heads": heads, "key_heads": key_heads, "head_dim": 8, "value_dim": 12, "batch": batch}
    plan = plan_context(length, 4, ranks_per_node=2, **H100, **sizes, **options)
    predicted = plan.method(method)
    assert not predicted.refused
    layout, function, where = plan.layout, cp.ring_attention, {}
    if method == "ulysses":
        layout, function = Layout.contiguous(length, 4), cp.ulysses_attention
    elif method == "2-D":
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
        where = {"group": groups[rank % 2], "ulysses_group": groups[2 + rank // 2]}
        layout = plan_context(length, 2, **H100, **sizes, **options).layout.divided(2)
    else:
        where = {"method": method}
    shapes = [(batch, layout.rows(rank), *dims) for dims in ((heads, 8), (key_heads, 8), (key_heads, 12))]
    tensors = [torch.randn(shape, dtype=options["dtype"], requires_grad=True) for shape in shapes]
    names = ("block_mask", "window")
    given: Any = {**where, "layout": layout, **{name: options[name] for name in names if name in options}}
    given["causal"] = options.get("causal", "block_mask" not in options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Bytes(monkeypatch)
        if "cu_seqlens" in options:
            ends = torch.tensor(ENDS, dtype=torch.int32)
            varlen = cp.ulysses_attention_varlen if method == "ulysses" else cp.ring_attention_varlen
            out = varlen(*(tensor[0] for tensor in tensors), ends, ends, **given)
        else:
            out = function(*tensors, **given)
        forward = counted.sent
        out.sum().backward()
    assert (predicted.forward_bytes[rank], predicted.backward_bytes[rank]) == (forward, counted.sent - forward)


# TFLOP/s of each H100, forward and backward, for 8, 16, 32 and 64 of them with 8 Ki tokens each: causal, bfloat16, 64
# query and 8 key heads of 128, by TransformerEngine and DeepSpeed; read from the chart in MagiAttention's repository.
PUBLISHED = {
    "ulysses": ((602, 557, 582, 584), (583, 560, 573, 586)),
    "p2p": ((421, 455, 451, 446), (433, 475, 469, 457)),
    "all_gather": ((601, 592, 592, 580), (516, 525, 523, 523)),
}


@pytest.mark.parametrize("number", range(4))
def test_predictions_are_within_a_fifth_of_published_figures(number: int) -> None:
    ranks = 8 << number
    length = 8192 * ranks
    plan = plan_context(length, ranks, **LLAMA)
    flops = 4 * 128 * 64 * length * length / 2 / ranks
    for name, (forward, backward) in PUBLISHED.items():
        found = plan.method(name)
        assert flops / found.forward / 1e12 == pytest.approx(forward[number], rel=0.2)
        assert 2.5 * flops / found.backward / 1e12 == pytest.approx(backward[number], rel=0.2)


def test_visible_pairs_are_those_of_the_dense_mask() -> None:
    bounds = [None, 0, 1, 3, 8, 30, -2, -7]
    for rows, keys in ((1, 1), (7, 7), (5, 12), (12, 5)):
        distance = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
        for left in bounds:
            for right in bounds:
                visible = torch.ones_like(distance, dtype=torch.bool)
                visible &= True if left is None else distance >= -left
                visible &= True if right is None else distance <= right
                assert visible_pairs(rows, keys, Band(left, right)) == int(visible.sum()), (rows, keys, left, right)


def test_work_of_masks_and_documents_agrees() -> None:
    """One rank's time by a mask is that of the same documents, whose ends are whole blocks."""
    ends = [0, 1024, 1152, 8192]
    sizes: Any = {"heads": 8, **H100, "causal": False}
    by_mask = plan_context(8192, 4, block_mask=BlockMask.documents(ends), **sizes)
    by_ends = plan_context(8192, 4, cu_seqlens=ends, **sizes)
    assert by_mask.alone.forward == pytest.approx(by_ends.alone.forward, rel=1e-6)
    windowed = plan_context(8192, 4, block_mask=BlockMask.documents(ends), window=(256, 0), **sizes)
    assert windowed.alone.forward < by_mask.alone.forward


def test_balance() -> None:
    causal = {name: plan_context(65536, 8, layout=name, **LLAMA) for name in ("zigzag", "contiguous")}
    assert causal["zigzag"].method("all_gather").balance == pytest.approx(1.0, abs=1e-3)
    assert causal["contiguous"].method("all_gather").balance == pytest.approx(15 / 8, abs=1e-2)
    assert causal["contiguous"].method("p2p").forward > 1.5 * causal["zigzag"].method("p2p").forward
    uneven_heads = plan_context(65536, 6, **LLAMA).method("ulysses")
    assert uneven_heads.balance > 1.4  # some ranks have two groups of 8 query heads, some one


def test_what_cannot_be_has_a_reason() -> None:
    plan = plan_context(1 << 20, 128, **LLAMA)
    assert plan.method("ulysses").refused == "64 query heads are fewer than the 128 ranks"
    assert plan.method("p2p").refused == "predicted for up to 64 ranks"
    assert plan.best in ("all_gather", "2-D")
    assert "not ulysses: 64 query heads are fewer than the 128 ranks" in str(plan)
    within_a_host = plan_context(65536, 8, **LLAMA)
    assert within_a_host.method("2-D").refused == "8 ranks are no hosts of 8"
    short = plan_context(1000, 8, **LLAMA)
    assert short.best is None
    assert short.method("all_gather").refused == "125 rows a rank are fewer than the 128 of a tile"
    assert short.reasons[0].startswith("do not divide it, too short: one rank takes ")
    slow = plan_context(4096, 8, **{**LLAMA, "bandwidth": 1e8}, ranks_per_node=1)
    assert slow.best is None
    assert "too short" in slow.reasons[0]
    plan = plan_context(1 << 17, 16, **LLAMA)
    small = plan_context(1 << 17, 16, memory=plan.method("2-D").memory - 1, **LLAMA)
    assert small.method("2-D").refused.startswith("a rank needs ")
    assert plan.best == "2-D"
    assert small.best == "all_gather"
    many = plan_context(8192 * 8, 8, cu_seqlens=[0, *range(1000, 65536, 1000), 65536], **LLAMA)
    assert "ranges" in many.method("p2p").refused
    assert plan_context(8192, 1, **LLAMA).reasons == ("one rank: nothing to divide",)


def test_best_is_the_fastest() -> None:
    for ranks in (8, 16, 64):
        plan = plan_context(8192 * ranks, ranks, **LLAMA)
        possible = [method for method in plan.methods if not method.refused]
        assert plan.best == min(possible, key=lambda method: method.seconds).method
        assert plan.reasons[0].startswith(f"{plan.best}: ")


def test_times_of_exchanges() -> None:
    cluster = Cluster(1.0, 1.0, 1.0, Hop(0.0, 100.0), Hop(0.0, 10.0), 2)
    assert cluster.gather(2, 50.0) == 0.5
    assert cluster.gather(4, 50.0) == pytest.approx(2 * 50 / (2 * 10))  # two networks of a host share two ranks' bytes
    sent = torch.tensor([[7, 100, 0, 0], [0, 0, 0, 30], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert cluster.all_to_all(sent) == pytest.approx(3.0)
    assert cluster.all_to_all(sent.t()) == pytest.approx(3.0)
    assert cluster.all_to_all(sent[:2, :2]) == pytest.approx(1.0)
    assert cluster.all_to_all(torch.zeros(4, 4)) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "plan_context: expected length above 0, got 0"),
        ({"key_heads": 3}, "expected key_heads that divide the 8 heads, got 3"),
        ({"cu_seqlens": [0, 100]}, r"expected cu_seqlens from 0 to the length 4096, rising, got \[0, 100\] ... 100"),
        ({"block_mask": BlockMask.causal(128, 128)}, "expected block_mask of 4096 rows and keys"),
        ({"layout": Layout.zigzag(4096, 8)}, "expected a layout for the 4 ranks of group, got one for 8"),
        ({"layout": "stripe"}, "expected layout 'zigzag' or 'contiguous', or a Layout, got 'stripe'"),
        (
            {"block_mask": BlockMask.causal(4096, 4096), "layout": Layout(4096, (((0, 64),), ((64, 4096),), (), ()))},
            "multiples of 128",
        ),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_context(**{"length": 4096, "ranks": 4, "heads": 8, **H100, **options})


def context(*arguments: str) -> int:
    network = ["--bandwidth", "400Gbit", "--latency", "5us", "--rate", "680T"]
    try:
        return main(["context", *arguments, *network], [add])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_command_prints_the_plan(capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "who.svg"
    assert context("llama-70b", "--length", "131072", "--ranks", "8", "16", "--map", "--plot", str(picture)) == 0
    printed = capsys.readouterr().out
    plans = [plan_context(131072, ranks, latency=5e-6, **LLAMA) for ranks in (8, 16)]
    assert printed == "\n\n".join(f"{plan.ranks} ranks\n{plan}\n\n{plan.map()}" for plan in plans) + "\n"
    assert picture.read_text().count("<rect") > 64
    assert len(set(re.findall(r"hsl\(\d+", picture.read_text()))) == 16


def test_command_in_json(capsys: Capture) -> None:
    documents = ["--documents", "5000", "60000", "536", "--heads", "8", "--head-dim", "64"]
    assert context(*documents, "--ranks", "4", "--json", "--window", "4096") == 0
    (report,) = json.loads(capsys.readouterr().out)
    plan = plan_context(
        65536, 4, heads=8, head_dim=64, cu_seqlens=[0, 5000, 65000, 65536], window=(4096, None), latency=5e-6, **H100
    )
    assert report["best"] == plan.best
    assert report["methods"][1]["forward"] == plan.methods[0].forward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "4096"], "expected a preset or --heads, got neither"),
        (["resnet-50", "--length", "4096"], "expected a preset that has heads, see context --help, got resnet-50"),
        (["llama-8b"], "expected one of --length and --documents, got both or neither"),
        (["llama-8b", "--length", "4096", "--heads", "8"], "--heads: expected no preset, got llama-8b"),
        (["llama-8b", "--length", "4096", "--head-dim", "3000"], "--head-dim: expected that of llama-8b, got 3000"),
        (["llama-8b", "--length", "4096", "--plot", "a.png"], "--plot: expected a file name that ends in .svg"),
        (["llama-8b", "--length", "x"], "argument --length: expected a whole number above 0, got 'x'"),
    ],
)
def test_command_refuses(capsys: Capture, arguments: list[str], message: str) -> None:
    assert context(*arguments, "--ranks", "4") == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"python -m cuda_ext.distributed context: {message}")


def test_map_is_of_who_computes_what() -> None:
    plan = plan_context(1024, 4, heads=4, layout="zigzag", **H100)
    assert plan.map().splitlines() == [
        "0.......", "11......", "222.....", "3333....", "33333...", "222222..", "1111111.", "00000000",
    ]  # fmt: skip
    documents = plan_context(1024, 2, heads=4, cu_seqlens=[0, 256, 1024], causal=False, layout="contiguous", **H100)
    assert documents.map().splitlines() == ["00......"] * 2 + ["..000000"] * 2 + ["..111111"] * 4
    windowed = plan_context(1024, 2, heads=4, window=(128, None), layout="contiguous", **H100)
    assert windowed.map().splitlines()[3] == "..00...."
    mask = BlockMask.from_dense(torch.rand(1, 1, 1024, 1024) < 1e-5)
    masked = plan_context(1024, 2, heads=4, block_mask=mask, layout=Layout.contiguous(1024, 2), **H100)
    listed = mask.to_dense()[0, 0].view(8, 128, 8, 128).any(3).any(1)
    assert masked.map().splitlines() == [
        "".join(str(row // 4) if seen else "." for seen in line) for row, line in enumerate(listed)
    ]


def gradients(model: str, *arguments: str) -> int:
    network = ["--bandwidth", "400Gbit", "--latency", "5us", "--flops", "400T", "--tokens", "8192", "--buckets", "auto"]
    try:
        return main(["plan", model, *network, *arguments], [add])
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("ranks", [1, 16])
def test_attention_is_part_of_the_backward_that_gradients_hide_behind(capsys: Capture, ranks: int) -> None:
    assert gradients("llama-8b", "--layers", "5", "--ranks", "64", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["attention"] is None
    of_group = ["--layers", "5", "--ranks", "64", "--context-ranks", str(ranks), "--attention-flops", "680T"]
    assert gradients("llama-8b", *of_group, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    options = {**LLAMA, "heads": 32, "rate": 680e12, "latency": 5e-6}
    plan = plan_context(8192 * ranks, ranks, **options)
    attention = 5 * (plan.alone if ranks == 1 else plan.method(plan.best or "")).backward
    assert report["backward_seconds"] == pytest.approx(alone["backward_seconds"] + attention)
    assert report["attention"]["best"] == plan.best and report["attention"]["length"] == 8192 * ranks
    assert gradients("llama-8b", *of_group) == 0
    printed = capsys.readouterr().out
    assert f"{plan}\n\nranks  algorithm" in printed
    assert ("one rank has 8,192 rows: one rank\n" if ranks == 1 else "16 ranks share 131,072 rows: ") in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-8b", "--ranks", "24", "64"], r"--ranks: expected multiples of --context-ranks 16, got [24, 64]"),
        (["llama-8b", "--ranks", "64", "--tokens", "9"], "--context-ranks: do not divide it, too short"),
        (["resnet-50", "--ranks", "64"], "expected a preset that has heads, see context --help, got resnet-50"),
        (["llama-8b", "--ranks", "64", "--head-dim", "96"], "--head-dim: expected that of llama-8b, got 96"),
    ],
)
def test_plan_refuses_what_ranks_cannot_share(capsys: Capture, arguments: list[str], message: str) -> None:
    assert gradients(*arguments, "--context-ranks", "16") == 2
    written = capsys.readouterr()
    assert written.out == "" and message in written.err


def test_shared_attention_needs_the_rows_of_a_rank(capsys: Capture) -> None:
    network = ["--bandwidth", "400Gbit", "--latency", "5us", "--ranks", "64", "--backward", "1s"]
    assert main(["plan", "llama-8b", *network, "--context-ranks", "4"], [add]) == 2
    assert "--context-ranks: expected --flops and --tokens" in capsys.readouterr().err
