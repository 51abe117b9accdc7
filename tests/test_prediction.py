"""`python -m cuda_ext.distributed plan`: what it reads, prints, draws and refuses."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import nn

from cuda_ext.distributed.bucketing.assignment import fill, fixed_capacity
from cuda_ext.distributed.bucketing.choice import choose
from cuda_ext.distributed.bucketing.links import Hop, ring, two_level
from cuda_ext.distributed.bucketing.simulation import Gradient, simulate
from cuda_ext.distributed.prediction import model_shapes, quantities
from cuda_ext.distributed.prediction.command import EPILOG, main
from cuda_ext.distributed.prediction.model_shapes import Parameter, ShapesError
from cuda_ext.distributed.prediction.presets import PRESETS, Transformer

Capture = pytest.CaptureFixture[str]
NETWORK = ["--bandwidth", "100Gbit", "--latency", "10us"]
COMPUTING = ["--backward", "200ms"]
SMALL = ["--layers", "2", "--hidden", "64", "--ffn", "96", "--vocab", "100", "--kv", "16"]


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line that says why."""
    try:
        status: Any = plan(*arguments)
    except SystemExit as stop:
        status = stop.code
    written = capsys.readouterr()
    assert status == 2 and written.out == ""
    line, end = written.err.split("\n")
    assert end == "" and line.startswith("python -m cuda_ext.distributed plan: ")
    return line.removeprefix("python -m cuda_ext.distributed plan: ")


# shapes


def safetensors_header(parameters: dict[str, Any]) -> bytes:
    text = json.dumps(parameters).encode()
    return struct.pack("<Q", len(text)) + text


def test_every_kind_of_file_tells_the_same(tmp_path: Path) -> None:
    expected = [Parameter("layers.2.weight", (3, 5), "bfloat16"), Parameter("layers.10.bias", (7,), "float32")]
    text = tmp_path / "shapes.txt"
    text.write_text("# a model\n\nlayers.2.weight 3x5 bfloat16  # first\nlayers.10.bias 7\n")
    assert model_shapes.read(text) == expected
    described = {
        "layers.10.bias": {"shape": [7], "dtype": "F32", "data_offsets": [30, 58]},
        "layers.2.weight": {"shape": [3, 5], "dtype": "BF16", "data_offsets": [0, 30]},
    }
    tensors = tmp_path / "model.safetensors"
    tensors.write_bytes(safetensors_header({"__metadata__": {"format": "pt"}, **described}) + bytes(58))
    assert model_shapes.read(tensors) == expected
    for name, value in described.items():
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors_header({name: value}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in described}}))
    assert model_shapes.read(index) == expected
    plain = tmp_path / "shapes.json"
    plain.write_text(
        json.dumps({"layers.2.weight": {"shape": [3, 5], "dtype": "torch.bfloat16"}, "layers.10.bias": [7]})
    )
    assert model_shapes.read(plain) == expected
    assert [p.bytes() for p in expected] == [30, 28] and [p.bytes("float64") for p in expected] == [120, 56]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", "weight 3x5 bfloat16\nbias seven", 'a.txt, line 2: expected "name 4096x4096" and perhaps a dtype'),
        (
            "a.txt",
            "weight 3x5 int8",
            "a.txt, line 1: expected a dtype of float64, float32, bfloat16, float16, got",
        ),
        ("a.txt", "weight 3x5 float32 uses=-1", "a.txt, line 1: expected uses of 0 or more, got -1"),
        ("a.json", '{"weight": {"shape": [3], "uses": "x"}}', "a.json, weight: expected uses of 0 or more, got x"),
        ("a.txt", "# nothing\n", "a.txt: expected parameters, got none with an element"),
        ("a.txt", b"\xff\xfe\x00\x80", "a.txt: expected text, JSON or a name that ends in .safetensors, got other"),
        ("a.json", "[1, 2]", "a.json: expected a JSON object of names, got list"),
        ("a.json", '{"weight": ', "a.json: expected JSON: Expecting value"),
        ("a.json", '{"weight": "3x5"}', 'a.json, weight: expected a shape such as [4096, 4096], got "3x5"'),
        ("a.json", '{"weight": {"shape": [3, -5]}}', "a.json, weight: expected a shape"),
        ("a.json", '{"weight": {"shape": [3], "dtype": "I8"}}', "a.json, weight: expected a dtype of"),
        ("a.json", '{"weight_map": {"weight": "b.safetensors"}}', "b.safetensors: No such file or directory"),
        ("a.safetensors", b"PK\x03\x04 is of a zip", "a.safetensors: expected a safetensors file, got one without"),
        ("a.safetensors", b"\x05", "a.safetensors: expected a safetensors file, got one without its header"),
        ("a.safetensors", safetensors_header({})[:-1] + b"!", "a.safetensors: expected a safetensors file"),
    ],
)
def test_bad_files(tmp_path: Path, capsys: Capture, name: str, content: str | bytes, complaint: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ShapesError, match=re.escape(complaint)):
        model_shapes.read(path)
    assert complaint in refused(capsys, str(path), "--ranks", "8", *NETWORK, *COMPUTING)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False, dtype=torch.bfloat16)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.words.weight


def test_a_users_own_model(tmp_path: Path) -> None:
    """`save` marks embeddings, by the types of modules."""
    path = tmp_path / "shapes.json"
    model_shapes.save(Tied(), path)
    assert model_shapes.read(path) == [
        Parameter("scale", ()),
        Parameter("words.weight", (7, 4), uses=1.0, looked_up=True),
        Parameter("places.weight", (5, 4), uses=0.0, looked_up=True),
        Parameter("head.weight", (7, 4), "bfloat16"),
        Parameter("output.bias", (7,)),
    ]


def test_the_example_of_the_help_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    code, end, _ = EPILOG.partition("<<'EOF'\n")[2].partition("\nEOF\n")
    assert end
    exec(code, {})
    assert plan("shapes.json", "--ranks", "8", *NETWORK, *COMPUTING) == 0
    count = sum(parameter.numel() for parameter in nn.Transformer().parameters())
    assert capsys.readouterr().out.startswith(f"shapes.json: {count:,} parameters in ")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("model.embed_tokens.weight 9x4\nh.0.up 4x4\nlm_head.weight 9x4", [(0, True), (1, False), (1, False)]),
        ("wte.weight 9x4\nwpe.weight 5x4\nh.0.up 4x4", [(1, True), (0, True), (1, False)]),
        ("patch_embedding.weight 4x3x2x2\nembed_out.weight 9x4", [(1, False), (1, False)]),
        ("words 9x4 bfloat16 lookup\nembed.weight 8x4\nexperts.0 4x4 uses=.25", [(0, True), (1, False), (0.25, False)]),
        ("words 9x4 lookup uses=1\nembed.weight 8x4", [(1, True), (1, False)]),
    ],
)
def test_what_is_looked_up(tmp_path: Path, lines: str, expected: list[tuple[float, bool]]) -> None:
    """By marks in the file, or by names."""
    path = tmp_path / "shapes.txt"
    path.write_text(lines)
    assert [(p.uses, p.looked_up) for p in model_shapes.read(path)] == expected


def test_gradients_come_after_their_products() -> None:
    looked_up = Parameter("words", (10, 4), uses=0.0, looked_up=True)
    found = model_shapes.arrivals([looked_up, Parameter("a", (4, 4)), Parameter("b", (8, 4), "bfloat16", uses=0.5)])
    assert [(p.name, part) for p, part in found] == [("b", 0.5), ("a", 1.0), ("words", 1.0)]
    # With a tied weight, the work of the output comes first, and that of the lookup last.
    tied = model_shapes.arrivals(
        [Parameter("words", (8, 4), looked_up=True), Parameter("a", (4, 4)), Parameter("b", (4, 4))]
    )
    assert [(p.name, part) for p, part in tied] == [("b", 0.75), ("a", 1.0), ("words", 1.0)]
    assert model_shapes.arrivals([looked_up]) == [(looked_up, 1.0)]


# From the papers, the model cards and the published weights.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-9b": 9_241_705_984,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "vit-h-14": 632_045_800,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
}
MILLIONS = {"gpt3-6.7b": 6_660, "gpt3-175b": 174_600}  # from the paper's table, in units of 10 million


def test_presets_have_the_published_numbers_of_parameters() -> None:
    counts = {name: sum(p.numel for p in preset.parameters()) for name, preset in PRESETS.items()}
    rounded = {name: round(counts.pop(name), -7) // 10**6 for name in MILLIONS}
    assert counts == COUNTS and rounded == MILLIONS


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("llama-8b", 8_030_261_248 - 128256 * 4096),
        ("gpt2", 124_439_808 - 1024 * 768),
        # Two experts of eight: the paper has 12.9 billion active parameters, embedding included.
        ("mixtral-8x7b", 12_879_925_248 - 32000 * 4096),
    ],
)
def test_lookups_multiply_nothing(name: str, work: int) -> None:
    assert model_shapes.work_per_token(PRESETS[name].parameters()) == work


def test_convolutions_are_used_at_every_place() -> None:
    weights = [p for p in PRESETS["resnet-50"].parameters() if len(p.shape) > 1]
    assert model_shapes.work_per_token(weights) == 4_089_184_256  # per image, as published


# predictions


def rows(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert plan(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return report["predictions"]


def test_predictions_are_those_of_the_model(capsys: Capture) -> None:
    transformer = Transformer(layers=2, hidden=64, ffn=96, vocab=100, kv=16)
    gradients = [
        Gradient(p.name, p.numel * 4, 0.002 * part) for p, part in model_shapes.arrivals(transformer.parameters())
    ]
    network = ["--ranks-per-node", "4", "--node-bandwidth", "80GB/s", "--node-latency", "500ns", *NETWORK]
    found = rows(
        capsys, "llama-8b", *SMALL, "--wire", "float32", "--ranks", "2", "64", "--buckets", "auto", "20KiB",
        "--backward", "2ms", "--algorithm", "ring", *network,
    )  # fmt: skip
    inside = Hop(500e-9, 80e9)
    links = {2: ring(2, inside), 64: two_level(64, 4, inside, Hop(10e-6, 12.5e9))}
    assert [(row["ranks"], row["bucket"]) for row in found] == [(n, b) for n in (2, 64) for b in ("auto", 20 << 10)]
    for row in found:
        link = links[row["ranks"]]
        assert row["latency_seconds"] == pytest.approx(link.latency)
        assert row["bandwidth_bytes_per_second"] == pytest.approx(link.bandwidth)
        if row["bucket"] == "auto":
            timeline = choose(gradients, link, 0.002).timeline
        else:
            timeline = simulate(gradients, fill(gradients, fixed_capacity(row["bucket"])), link, 0.002)
        assert row["bucket_bytes"] == [transfer.bytes for transfer in timeline.transfers]
        assert row["exposed_seconds"] == pytest.approx(timeline.exposed)
        assert row["efficiency"] == pytest.approx(0.003 / (0.003 + timeline.exposed))


def test_dtypes_in_one_transfer(capsys: Capture, tmp_path: Path) -> None:
    """A common transfer saves a latency, and costs what another bucket adds."""
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("norm 4096 float32\nweight 2048x4096 bfloat16\n")
    command = [str(shapes), "--ranks", "2", "--buckets", "auto", "--backward", "1ms", *NETWORK]
    (apart,) = rows(capsys, *command)
    (grouped,) = rows(capsys, *command, "--grouped", "1us")
    assert apart["bucket_bytes"] == grouped["bucket_bytes"] == [16 << 20, 16 << 10]
    assert (apart["transfers"], grouped["transfers"]) == (2, 1)
    saved = apart["exposed_seconds"] - grouped["exposed_seconds"]
    # In separate transfers the weight, which is ready first, may be sent before the norm.
    assert 0 < saved <= apart["latency_seconds"] - 1e-6 + 1e-12
    (dear,) = rows(capsys, *command, "--grouped", "1ms")
    assert dear == apart


def test_effects_of_options_on_the_prediction(capsys: Capture) -> None:
    base = ["llama-8b", "--layers", "4", "--ranks", "256", "--buckets", "25MiB", *COMPUTING]

    def exposed(*arguments: str) -> float:
        return rows(capsys, *base, *arguments)[0]["exposed_seconds"]

    assert exposed("--bandwidth", "200Gbit", "--latency", "10us") < exposed(*NETWORK)
    assert exposed(*NETWORK, "--hides", "0.5") > exposed(*NETWORK)
    assert exposed(*NETWORK, "--jitter", "2%") > exposed(*NETWORK) + 0.2 * 0.02
    assert exposed(*NETWORK, "--jitter", "2%", "--seed", "1") != exposed(*NETWORK, "--jitter", "2%")
    assert exposed(*NETWORK, "--wire", "float32") > 1.5 * exposed(*NETWORK)
    best = exposed(*NETWORK)
    assert best == min(exposed(*NETWORK, "--algorithm", name) for name in ("ring", "tree"))


def test_backward_time_from_tokens(capsys: Capture) -> None:
    plan("llama-8b", "--ranks", "8", *NETWORK, "--flops", "400TFLOP/s", "--tokens", "8192", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["looked_up"] == 128256 * 4096
    work = report["parameters"] - report["looked_up"]
    assert report["backward_seconds"] == pytest.approx(4 * work * 8192 / 400e12)
    capsys.readouterr()


def test_a_lookup_alone_takes_no_flops(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text("words 100x10 lookup\n")
    command = [str(path), "--ranks", "8", *NETWORK]
    assert rows(capsys, *command, *COMPUTING)
    complaint = refused(capsys, *command, "--flops", "1T", "--tokens", "8")
    assert complaint == "expected --backward, as no parameter multiplies anything, got --flops and --tokens"


def test_ranks_that_do_not_fill_their_nodes(capsys: Capture) -> None:
    """The last node has fewer links, and all wait for it; another link helps."""
    ranks = [str(n) for n in (57, 60, 63, 64)]
    found = rows(
        capsys, "llama-8b", "--ranks", *ranks, "--buckets", "25MiB", "--algorithm", "ring", *NETWORK, *COMPUTING
    )
    far = ring(8, Hop(10e-6, 12.5e9))
    near = ring(8, Hop(3.4e-6, 370e9))
    for row, networks in zip(found, (1, 4, 7, 8), strict=True):
        seconds = 1 / near.bandwidth + 1 / (networks * far.bandwidth)
        assert row["bandwidth_bytes_per_second"] == pytest.approx(1 / seconds)
        assert row["latency_seconds"] == pytest.approx(near.latency + far.latency)
    exposed = [row["exposed_seconds"] for row in found]
    assert exposed == sorted(exposed, reverse=True) and exposed[0] > exposed[-1]


def test_a_rank_alone_sends_nothing(capsys: Capture) -> None:
    row = rows(capsys, "llama-8b", *SMALL, "--ranks", "1", "--buckets", "auto", *NETWORK, *COMPUTING)[0]
    assert (row["exposed_seconds"], row["efficiency"], row["bandwidth_bytes_per_second"]) == (0, 1, None)
    plan("llama-8b", *SMALL, "--ranks", "1", *NETWORK, *COMPUTING)
    assert "nothing" in capsys.readouterr().out


def test_table(capsys: Capture) -> None:
    assert plan("llama-8b", "--ranks", "16", "4096", "--buckets", "25", "auto", *NETWORK, *COMPUTING) == 0
    first, blank, head, *body = capsys.readouterr().out.splitlines()
    assert first == (
        "llama-8b: 8,030,261,248 parameters in 291 tensors (525,336,576 only looked up), 15 GiB of gradients; "
        "backward takes 200 ms"
    )
    assert blank == ""
    assert head.split() == ["ranks", "algorithm", "all-reduce", "bucket", "buckets", "last", "exposed", "efficiency"]
    assert [line.split()[0] for line in body] == ["16", "16", "4096", "4096"]
    assert all("25 MiB" in line for line in body[::2]) and all("auto" in line for line in body[1::2])
    assert len({len(line) for line in (head, *body)}) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot(tmp_path: Path, capsys: Capture, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    arguments = ["llama-8b", *SMALL, "--ranks", "8", "64", *NETWORK, *COMPUTING, "--plot", str(path)]
    assert plan(*arguments) == 0
    assert capsys.readouterr().err == f"\n{path} written\n"
    content = path.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    if suffix == "svg":
        text = content.decode()
        for said in ("llama-8b on 64 ranks", "auto", "25 MiB", "4096", "exposed time"):
            assert said in text
        plan(*arguments)
        assert path.read_bytes() == content


def test_plot_without_matplotlib(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "cuda_ext.distributed.prediction.plot", raising=False)
    monkeypatch.delattr("cuda_ext.distributed.prediction.plot", raising=False)
    path = tmp_path / "plan.png"
    complaint = refused(capsys, "llama-8b", "--ranks", "8", *NETWORK, *COMPUTING, "--plot", str(path))
    assert complaint.startswith("--plot: expected matplotlib, got ") and complaint.endswith("; pip install matplotlib")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nope"], "nope: expected a file or a preset, such as gpt2, gpt2-medium, "),
        (["lama-8b"], "lama-8b: expected a file or a preset, such as llama-8b, "),
        (["."], ".: Is a directory"),
        (["llama-8b", "--ranks", "0"], "argument --ranks: expected a whole number above 0, got '0'; see --help"),
        (["llama-8b", "--bandwidth", "fast"], "argument --bandwidth: expected a number and a unit such as 400Gbit or"),
        (["llama-8b", "--latency", "5"], "argument --latency: expected a number and a unit such as 5us, got '5'"),
        (["llama-8b", "--latency", "0foo"], "argument --latency: expected a number and a unit such as 5us, got '0foo'"),
        (["llama-8b", "--latency", "1e999s"], "argument --latency: expected a finite value, 0 or more, such as"),
        (["llama-8b", "--bandwidth", "0Gbit"], "argument --bandwidth: expected a finite value, above 0, such as"),
        (["llama-8b", "--bandwidth", "100G"], "argument --bandwidth: expected a number and a unit such as 400Gbit or"),
        (["llama-8b", "--backward", "0ms"], "argument --backward: expected a finite value, above 0, such as 200ms"),
        (["llama-8b", "--latency", "1.2.3s"], "argument --latency: expected a number"),
        (["llama-8b", "--hides", "2"], "argument --hides: expected a number from 0 to 1, got '2'"),
        (["llama-8b", "--hides", "much"], "argument --hides: expected a number from 0 to 1, got 'much'"),
        (["llama-8b", "--buckets", "x"], "argument --buckets: expected a number and a unit such as 25MiB, got 'x'"),
        (["llama-8b", "--tokens", "8"], "expected --backward, or --flops and --tokens, got both"),
        (["llama-8b", "--plot", "plan.bmp"], "--plot: expected a file name that ends in one of .png, .svg, .pdf, got"),
        (["llama-8b", "--plot", "/no/folder/plan.png"], "--plot: expected a folder that exists, got /no/folder"),
        (["shapes.txt", "--layers", "8"], "--layers: expected a preset to change, such as llama-8b, got shapes.txt"),
        (["vit-b-16", "--kv", "8"], "--kv: expected a preset that has it, got vit-b-16; leave it out"),
    ],
)
def test_bad_arguments(capsys: Capture, arguments: list[str], complaint: str) -> None:
    # If an option is repeated, the last one counts.
    assert complaint in refused(capsys, "--ranks", "8", *NETWORK, *COMPUTING, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--help"], "plan      exposed time"), (["plan", "--help"], "MODEL_SHAPES is a file that lists")],
)
def test_help(capsys: Capture, arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0 and said in capsys.readouterr().out


def test_missing_arguments(capsys: Capture) -> None:
    assert "the following arguments are required: MODEL_SHAPES, --ranks" in refused(capsys)
    missing = refused(capsys, "llama-8b", "--ranks", "8", *NETWORK)
    assert missing == "expected --backward, or both --flops and --tokens, to know what transfers can hide behind"


def test_units_in_any_case() -> None:
    rates = {
        50e9: ("400Gbit", "400 Gbit/s", "400gbit", "400GBIT/S", "400Gb/s", "400Gbps", "400gbps", "50GB/s", "50 GBps"),
        12.5e9: ("100Gb/s", "12.5GB/s", "12.5Gbytes/sec", "1e2gb"),
        125e6: ("1e3Mbit", ".125GB", "125e6B"),
        2.0**30: ("1GiB", "1gibyte/s", "8Gib", "8Gibit/s"),
    }
    for rate, texts in rates.items():
        assert {quantities.bandwidth(text) for text in texts} == {rate}
    times = {0.0: ("0us", "0", "0.0 S"), 5e-6: ("5us", "5US", "5 µs", "5 μs", "5usec"), 7e-3: ("7ms", "7MS")}
    for expected, texts in times.items():
        assert [quantities.latency(text) for text in texts] == pytest.approx([expected] * len(texts))
    assert {quantities.some_bytes(text) for text in ("25", "25MiB", "25mib", "25 MIB", "25600kib")} == {25.0 * 2**20}
    assert {quantities.flop_rate(text) for text in ("400T", "400tflops", "0.4 PFLOP/s", "4e14")} == {400e12}
    assert quantities.percent("2%") == 0.02 and quantities.percent("0%") == 0.0


def test_zero_latency(capsys: Capture) -> None:
    command = ["LLAMA-8b", *SMALL, "--ranks", "64", "--bandwidth", "100gbit", "--latency", "0us", "--node-latency", "0"]
    for row in rows(capsys, *command, *COMPUTING):
        assert row["latency_seconds"] == 0


@pytest.mark.sampled
def test_as_a_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cuda_ext.distributed", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    shapes = tmp_path / "shapes.txt"
    shapes.write_text("".join(f"layer.{n} {random.randint(1, 999)}x1000\n" for n in range(50)))
    done = run("plan", str(shapes), "--ranks", "1024", "4096", *NETWORK, *COMPUTING)
    assert done.returncode == 0 and done.stdout.startswith(f"{shapes}: ") and not done.stderr
    wrong = run("plan", str(tmp_path / "absent"), "--ranks", "8", *NETWORK, *COMPUTING)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "Traceback" not in wrong.stderr
