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
from conftest import ROOT

from cuda_ext.distributed import model_shapes
from cuda_ext.distributed.__main__ import main
from cuda_ext.distributed.cost_model import Hop, choose, fill, ring, simulate, spread, two_level
from cuda_ext.distributed.model_shapes import PRESETS, Parameter, ShapesError, Transformer

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


def test_presets_have_the_published_numbers_of_parameters() -> None:
    counts = {name: sum(p.numel for p in preset.parameters()) for name, preset in PRESETS.items()}
    assert counts == {"llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496}


# predictions


def rows(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert plan(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return report["predictions"]


def test_predictions_are_those_of_the_model(capsys: Capture) -> None:
    transformer = Transformer(layers=2, hidden=64, ffn=96, vocab=100, kv=16)
    gradients = spread([(p.name, p.numel * 4) for p in reversed(transformer.parameters())], 0.002)
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
            timeline = simulate(gradients, fill(gradients, row["bucket"]), link, 0.002)
        assert row["bucket_bytes"] == [transfer.bytes for transfer in timeline.transfers]
        assert row["exposed_seconds"] == pytest.approx(timeline.exposed)
        assert row["efficiency"] == pytest.approx(0.003 / (0.003 + timeline.exposed))


def test_dtypes_in_one_launch(capsys: Capture, tmp_path: Path) -> None:
    """What ends together is there a latency sooner, less what another bucket adds."""
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("norm 4096 float32\nweight 2048x4096 bfloat16\n")
    command = [str(shapes), "--ranks", "2", "--buckets", "auto", "--backward", "1ms", *NETWORK]
    (apart,) = rows(capsys, *command)
    (grouped,) = rows(capsys, *command, "--grouped", "1us")
    assert apart["bucket_bytes"] == grouped["bucket_bytes"] == [16 << 20, 16 << 10]
    assert (apart["launches"], grouped["launches"]) == (2, 1)
    saved = apart["exposed_seconds"] - grouped["exposed_seconds"]
    # Apart, the weight, which comes first, may leave before the norm.
    assert 0 < saved <= apart["latency_seconds"] - 1e-6 + 1e-12
    (dear,) = rows(capsys, *command, "--grouped", "1ms")
    assert dear == apart


def test_options_move_the_prediction_as_they_should(capsys: Capture) -> None:
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
    assert json.loads(capsys.readouterr().out)["backward_seconds"] == pytest.approx(4 * 8_030_261_248 * 8192 / 400e12)


def test_a_rank_alone_sends_nothing(capsys: Capture) -> None:
    row = rows(capsys, "llama-8b", *SMALL, "--ranks", "1", "--buckets", "auto", *NETWORK, *COMPUTING)[0]
    assert (row["exposed_seconds"], row["efficiency"], row["bandwidth_bytes_per_second"]) == (0, 1, None)
    plan("llama-8b", *SMALL, "--ranks", "1", *NETWORK, *COMPUTING)
    assert "nothing" in capsys.readouterr().out


def test_table(capsys: Capture) -> None:
    assert plan("llama-8b", "--ranks", "16", "4096", "--buckets", "25", "auto", *NETWORK, *COMPUTING) == 0
    first, blank, head, *body = capsys.readouterr().out.splitlines()
    assert first == "llama-8b: 8,030,261,248 parameters in 291 tensors, 15 GiB of gradients; backward takes 200 ms"
    assert blank == ""
    assert head.split() == ["ranks", "algorithm", "all-reduce", "bucket", "buckets", "last", "exposed", "efficiency"]
    assert [line.split()[0] for line in body] == ["16", "16", "4096", "4096"]
    assert all("25 MiB" in line for line in body[::2]) and all("auto" in line for line in body[1::2])
    assert len({len(line) for line in (head, *body)}) == 1


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
    monkeypatch.delitem(sys.modules, "cuda_ext.distributed.plan_plot", raising=False)
    monkeypatch.delattr("cuda_ext.distributed.plan_plot", raising=False)
    path = tmp_path / "plan.png"
    complaint = refused(capsys, "llama-8b", "--ranks", "8", *NETWORK, *COMPUTING, "--plot", str(path))
    assert complaint.startswith("--plot: expected matplotlib, got ") and complaint.endswith("; pip install matplotlib")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nope"], "nope: expected a file or a preset, llama-8b or llama-70b, got neither"),
        (["."], ".: Is a directory"),
        (["llama-8b", "--ranks", "0"], "argument --ranks: expected a whole number above 0, got '0'; --help tells more"),
        (["llama-8b", "--ranks", "60"], "two_level: expected ranks to fill nodes of 8, got 60; take 56"),
        (["llama-8b", "--bandwidth", "fast"], "argument --bandwidth: expected a number and a unit such as 400Gbit or"),
        (["llama-8b", "--latency", "5"], "argument --latency: expected a number and a unit such as 5us, got '5'"),
        (["llama-8b", "--latency", "0us"], "argument --latency: expected a number and a unit such as 5us, got '0us'"),
        (["llama-8b", "--latency", "1e999s"], "argument --latency: expected a number"),
        (["llama-8b", "--latency", "1.2.3s"], "argument --latency: expected a number"),
        (["llama-8b", "--hides", "2"], "argument --hides: expected a number from 0 to 1, got '2'"),
        (["llama-8b", "--hides", "much"], "argument --hides: expected a number from 0 to 1, got 'much'"),
        (["llama-8b", "--buckets", "x"], "argument --buckets: expected a number and a unit such as 25MiB, got 'x'"),
        (["llama-8b", "--tokens", "8"], "expected --backward, or --flops and --tokens, got both"),
        (["llama-8b", "--plot", "plan.bmp"], "--plot: expected a file name that ends in one of .png, .svg, .pdf, got"),
        (["llama-8b", "--plot", "/no/folder/plan.png"], "--plot: expected a folder that exists, got /no/folder"),
        (["shapes.txt", "--layers", "8"], "--layers: expected a preset to change, llama-8b or llama-70b, got shapes"),
    ],
)
def test_bad_arguments(capsys: Capture, arguments: list[str], complaint: str) -> None:
    # The last of equal options counts.
    assert complaint in refused(capsys, "--ranks", "8", *NETWORK, *COMPUTING, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--help"], "plan      exposed time"), (["plan", "--help"], "MODEL_SHAPES is a file of the")],
)
def test_help(capsys: Capture, arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0 and said in capsys.readouterr().out


def test_missing_arguments(capsys: Capture) -> None:
    assert "the following arguments are required: MODEL_SHAPES, --ranks" in refused(capsys)
    missing = refused(capsys, "llama-8b", "--ranks", "8", *NETWORK)
    assert missing == "expected --backward, or both --flops and --tokens, to know what transfers can hide behind"


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("400Gbit", 50e9),
        ("400 Gbit/s", 50e9),
        ("100Gbps", 12.5e9),
        ("1e3Mbit", 125e6),
        ("50GB/s", 50e9),
        ("1GiB", 2**30),
    ],
)
def test_units(capsys: Capture, text: str, bytes_per_second: float) -> None:
    arguments = ["--ranks", "1024", "--ranks-per-node", "1", "--algorithm", "tree", "--buckets", "auto"]
    row = rows(capsys, "llama-8b", *SMALL, *arguments, "--bandwidth", text, "--latency", "2µs", *COMPUTING)[0]
    assert row["bandwidth_bytes_per_second"] == pytest.approx(bytes_per_second / 2)
    assert row["latency_seconds"] == pytest.approx(20 * 2e-6)


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
