"""The training job: what it writes, that it goes on where it stopped, and what it says when something is wrong."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import checkpoint  # noqa: E402
import gpt  # noqa: E402
import report  # noqa: E402
import text as text_module  # noqa: E402
import train_gpt  # noqa: E402
import training  # noqa: E402

SMALL_MODEL = ("--layers", "2", "--features", "32", "--hidden-features", "48", "--context", "32")
TINY = ("--device", "cpu", *SMALL_MODEL, "--batch", "4", "--lr", "1e-2", "--sample-bytes", "30")
LAST_LINE = re.compile(r"held-out: \d+\.\d\d bits per byte")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as small as these lose time with more, above all where other processes compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short text with something to learn."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(200)))
    return path


def command(processes: int, text: Path, out: Path, *options: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    script = [str(EXAMPLES / "train_gpt.py"), *TINY, "--data", str(text), "--out", str(out)]
    return [sys.executable, *launcher, *script, *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}


def printed_by(processes: int, text: Path, out: Path, *options: str) -> str:
    """What a run prints that ends well."""
    run = command(processes, text, out, *options)
    done = subprocess.run(run, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(out: Path) -> list[str]:
    with open(out / "loss.csv", newline="") as file:
        return [row["training"] for row in csv.DictReader(file)]


LONG = ("--steps", "120", "--save-every", "20", "--eval-every", "60")


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two processes from beginning to end: its folder and what it printed."""
    out = tmp_path_factory.mktemp("finished")
    return out, printed_by(2, text, out, *LONG, "--check")


def test_two_processes_learn(finished: tuple[Path, str]) -> None:
    out, printed = finished
    assert LAST_LINE.fullmatch(printed.rstrip("\n").split("\n")[-1])
    curve = [float(loss) for loss in losses(out)]
    assert len(curve) == 120
    assert curve[0] > 7.0, "8 bits per byte is knowing nothing"
    assert sum(curve[-10:]) / 10 < 3.5
    assert float(printed.split()[-4]) < 3.5


def test_what_a_run_writes(finished: tuple[Path, str]) -> None:
    out, printed = finished
    names = {path.name for path in out.iterdir()}
    assert names == {"checkpoint-000100.pt", "checkpoint-000120.pt", "loss.csv", "loss.png", "sample.txt"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / "loss.png").stat().st_size > 10_000
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("The ")
    assert len(sample) == 34
    assert sample in printed
    with open(out / "loss.csv", newline="") as file:
        scored = {row["step"]: float(row["held_out"]) for row in csv.DictReader(file) if row["held_out"]}
    assert list(scored) == ["60", "120"]
    assert f"held-out: {scored['120']:.2f} bits" in printed


def test_check_prints_both_errors(finished: tuple[Path, str]) -> None:
    lines = [line for line in finished[1].split("\n") if line.startswith("check: ")]
    assert [line.split(" against")[0] for line in lines] == ["check: cuda_ext", "check: plain PyTorch"]
    for line in lines:
        relative = re.search(r"largest error of 21 gradients (\S+) relative, (\S+) absolute, in [a-z]\S+$", line)
        assert relative
        assert 0.0 < float(relative[1]) < 1e-4


def flip_bytes(path: Path) -> bytes:
    """Damages 64 bytes of the weights of a checkpoint, as a bad disk or memory does; returns what is in it then."""
    content = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["model"]["head.weight"]
    start = content.index(weight.numpy().tobytes())
    for offset in range(0, 64 * 16, 16):
        content[start + offset] ^= 1 << offset // 16 % 8
    path.write_bytes(content)
    return bytes(content)


@pytest.mark.sampled
def test_interrupted_run_goes_on_bit_for_bit(finished: tuple[Path, str], text: Path, tmp_path: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(2, text, tmp_path, *LONG), text=True, env=environment(), **pipes)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint-000020.pt").exists():
        assert process.poll() is None, "the run ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=120)[0]
    stopped = re.search(r"stopped after step (\d+); saved (\S+); continue with --resume", printed)
    assert stopped, printed
    assert 20 <= int(stopped[1]) < 120
    assert Path(stopped[2]) == checkpoint.checkpoints(tmp_path)[-1]
    assert process.returncode != 0

    sound, newest = checkpoint.checkpoints(tmp_path)
    flip_bytes(newest)
    resumed = printed_by(2, text, tmp_path, *LONG, "--auto-resume")
    assert f"resumed after step {int(sound.stem[11:])} from {sound}" in resumed
    assert losses(tmp_path) == losses(finished[0])
    assert resumed.split("\n")[-2] == finished[1].split("\n")[-2]


@pytest.mark.sampled
def test_without_torchrun_and_without_options(text: Path, tmp_path: Path) -> None:
    printed = printed_by(1, text, tmp_path, "--steps", "2")
    assert LAST_LINE.fullmatch(printed.rstrip("\n").split("\n")[-1])
    assert "1 process(es)" in printed


# in this process, without torchrun


def train(text: Path, out: Path, *options: str) -> int:
    return train_gpt.main([*TINY, "--data", str(text), "--out", str(out), *options])


def test_signal_in_one_process(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = ("--steps", "9", "--eval-every", "100")
    assert train(text, whole, *options) == 0
    train_step = training.Training.train_step
    handler = signal.getsignal(signal.SIGTERM)

    def step_with_signal(self: training.Training, *arguments: object) -> bool:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "train_step", step_with_signal)
        assert train(text, halves, *options) == 130
    (saved,) = checkpoint.checkpoints(halves)
    assert saved.name in ("checkpoint-000005.pt", "checkpoint-000006.pt")
    assert not (halves / "loss.png").exists()
    assert signal.getsignal(signal.SIGTERM) == handler, "the handlers of before are back"
    assert train(text, halves, *options, "--resume") == 0
    assert losses(halves) == losses(whole)
    assert len(losses(whole)) == 9


def test_a_job_that_is_started_again_goes_on(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("--steps", "9", "--save-every", "3", "--eval-every", "100")
    assert train(text, whole, *options) == 0
    train_step = training.Training.train_step

    def failing_at(step: int) -> Callable[..., bool]:
        def failing_step(self: training.Training, *arguments: object) -> bool:
            if self.step == step:
                raise RuntimeError("a peer is gone")
            return train_step(self, *arguments)

        return failing_step

    for step, saved in ((2, []), (5, [3]), (8, [3, 6])):  # the first of them before any checkpoint
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a peer is gone"):
            patch.setattr(training.Training, "train_step", failing_at(step))
            train(text, parts, *options, "--auto-resume")
        assert [int(path.stem[11:]) for path in checkpoint.checkpoints(parts)] == saved
    assert train(text, parts, *options, "--auto-resume") == 0
    assert losses(parts) == losses(whole)


def test_a_job_that_is_started_again_skips_damaged_checkpoints(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--steps", "9", "--save-every", "3", "--eval-every", "100")
    assert train(text, tmp_path, *options) == 0
    expected = losses(tmp_path)
    older, newest = checkpoint.checkpoints(tmp_path)
    damaged = flip_bytes(newest)
    capsys.readouterr()
    assert train(text, tmp_path, *options, "--auto-resume") == 0
    printed = capsys.readouterr().out
    kept = newest.with_suffix(".damaged")
    assert f"{newest} ({len(damaged)} bytes) is truncated or damaged (" in printed
    assert f"): skipped it, and kept it as {kept.name}\n" in printed
    assert f"resumed after step 6 from {older}" in printed
    assert losses(tmp_path) == expected
    assert kept.read_bytes() == damaged

    # None of them is sound: from the beginning, and all are kept.
    older.write_bytes(b"")
    newest.write_bytes(damaged[:1000])
    assert train(text, tmp_path, *options, "--auto-resume") == 0
    printed = capsys.readouterr().out
    assert printed.count("skipped it, and kept it as") == 2 and "resumed" not in printed
    assert losses(tmp_path) == expected
    assert {path.name: path.stat().st_size for path in tmp_path.glob("*.damaged*")} == {
        "checkpoint-000009.damaged": len(damaged),
        "checkpoint-000009.damaged-2": 1000,
        "checkpoint-000006.damaged": 0,
    }


def test_damage_is_noticed(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    whole = checkpoint.save(tmp_path, 1, {"step": 1, "weight": weight}).read_bytes()
    start = whole.index(weight.numpy().tobytes())
    path = tmp_path / "checkpoint-000002.pt"

    def reason(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(checkpoint.Damaged) as caught:
            checkpoint.read(path, ["step", "weight"])
        return str(caught.value)

    for bit in (0, 7):
        for byte in (start, start + 1999, start + 3999):
            content = bytearray(whole)
            content[byte] ^= 1 << bit
            assert re.fullmatch(r".*/data/\d+ does not have the checksum it was written with", reason(content))
    for content in (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        b"\0" * len(whole),
        b"a text",
        whole[:start] + whole[start + 1 :],
    ):
        assert reason(content)
    torch.save({"step": 1}, path)
    assert reason(path.read_bytes()) == "no weight in it"
    torch.save([1], path)
    assert reason(path.read_bytes()) == "no step, weight in it"
    path.unlink()
    path.mkdir()
    with pytest.raises(checkpoint.Damaged, match="Is a directory"):
        checkpoint.read(path, [])
    assert checkpoint.newest_sound(tmp_path, ["step"], print) == tmp_path / "checkpoint-000001.pt"
    assert (tmp_path / "checkpoint-000002.damaged").is_dir()


def test_resuming_a_finished_run_only_reports(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, tmp_path, "--steps", "3") == 0
    first = capsys.readouterr().out.split("\n")[-2]
    assert train(text, tmp_path, "--steps", "3", "--resume") == 0
    assert capsys.readouterr().out.split("\n")[-2] == first
    assert len(losses(tmp_path)) == 3


def test_a_new_run_sets_the_checkpoints_of_the_last_aside(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        assert train(text, tmp_path, "--steps", "2", "--save-every", "1") == 0
    assert f"moved the checkpoints of an earlier run to {tmp_path / 'earlier-2'}" in capsys.readouterr().out
    for folder in (tmp_path, tmp_path / "earlier-1", tmp_path / "earlier-2"):
        assert [path.name for path in checkpoint.checkpoints(folder)] == [
            "checkpoint-000001.pt",
            "checkpoint-000002.pt",
        ]


def test_accumulated_gradients_are_those_of_the_whole_batch(text: Path, tmp_path: Path) -> None:
    for name, accumulate in (("whole", "1"), ("parts", "4")):
        assert train(text, tmp_path / name, "--steps", "5", "--accumulate", accumulate) == 0
    whole, parts = ([float(loss) for loss in losses(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == pytest.approx(parts, rel=1e-4)


def test_bfloat16(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "bf16", "--steps", "20", "--dtype", "bfloat16", "--check") == 0
    assert train(text, tmp_path / "fp32", "--steps", "20") == 0
    low, full = ([float(loss) for loss in losses(tmp_path / name)] for name in ("bf16", "fp32"))
    assert low != full
    assert low == pytest.approx(full, rel=0.05)


def test_check_finds_a_wrong_model(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = gpt.Block.forward

    def wrong(self: gpt.Block, x: Tensor) -> Tensor:
        return forward(self, x) * (1.0001 if hasattr(self.mlp, "gate_up_proj") else 1.0)

    monkeypatch.setattr(gpt.Block, "forward", wrong)
    assert train(text, tmp_path, "--steps", "1", "--check") == 2
    assert "check: failed: expected an error of at most 3 times that of plain PyTorch" in capsys.readouterr().err
    assert not checkpoint.checkpoints(tmp_path)


# what goes wrong


def refused(capsys: pytest.CaptureFixture[str], text: Path, out: Path, *options: str) -> str:
    """The one line a refused run prints."""
    capsys.readouterr()
    assert train(text, out, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_gpt: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("train_gpt: error: ").rstrip("\n")


def test_data_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no.txt"
    assert (
        refused(capsys, missing, tmp_path)
        == f"--data: cannot read {missing} (No such file or directory): give the path of a text file"
    )
    assert refused(capsys, tmp_path, tmp_path).startswith(f"--data: cannot read {tmp_path} (Is a directory)")


@pytest.mark.sampled
def test_data_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.txt"
    for length, context, least in ((0, 32, 72), (71, 32, 72), (19, 4, 20), (8, 2, 20)):
        short.write_bytes(b"x" * length)
        expected = f"--data: expected at least {least} bytes for --context {context}, got {length}: "
        expected += "take a longer text or a shorter context"
        assert refused(capsys, short, tmp_path, "--steps", "1", "--context", str(context)) == expected
        short.write_bytes(b"x" * least)
        assert train(short, tmp_path, "--steps", "1", "--context", str(context)) == 0


def test_deleted_checkpoint(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, tmp_path, "--steps", "1") == 0
    checkpoint.checkpoints(tmp_path)[0].unlink()
    assert refused(capsys, text, tmp_path, "--steps", "1", "--resume") == (
        f"--resume: expected a checkpoint-*.pt in {tmp_path}, got none: leave --resume out to start from the beginning"
    )


@pytest.mark.parametrize("damage", ["half", "flipped", "other"])
def test_damaged_checkpoint(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    options = ("--steps", "2", "--save-every", "1")
    assert train(text, tmp_path, *options) == 0
    expected = losses(tmp_path)
    older, newest = checkpoint.checkpoints(tmp_path)
    whole = newest.read_bytes()
    if damage == "other":
        torch.save({"step": 2}, newest)
    elif damage == "flipped":
        flip_bytes(newest)
    else:
        newest.write_bytes(whole[: len(whole) // 2])
    left = newest.read_bytes()
    message = refused(capsys, text, tmp_path, *options, "--resume")
    assert message.startswith(f"--resume: {newest} ({len(left)} bytes) is truncated or damaged (")
    assert message.endswith(
        "): it was left as it is; restore it from a copy, or move it away and resume from checkpoint-000001.pt"
    )
    assert newest.read_bytes() == left
    assert older.exists()

    newest.rename(tmp_path / "moved-away")
    assert train(text, tmp_path, *options, "--resume") == 0
    assert losses(tmp_path) == expected
    assert (tmp_path / "moved-away").read_bytes() == left

    for path in checkpoint.checkpoints(tmp_path)[:-1]:
        path.unlink()
    checkpoint.checkpoints(tmp_path)[0].write_bytes(left)
    assert "move it away and start from the beginning (no older checkpoint is there)" in refused(
        capsys, text, tmp_path, *options, "--resume"
    )


def test_other_settings_than_the_checkpoint(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, tmp_path, "--steps", "1") == 0
    (path,) = checkpoint.checkpoints(tmp_path)
    assert refused(capsys, text, tmp_path, "--steps", "5", "--resume") == (
        f"--resume: --steps differs from the run in {path}: got 5, expected 1: "
        "give the options of that run, or leave --resume out"
    )
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    assert f"--data differs from the run in {path}: got another text" in refused(
        capsys, other, tmp_path, "--steps", "1", "--resume"
    )


def test_failure_to_write_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})

    def disk_full(state: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(
        report.UserError,
        match=r"cannot write .*checkpoint-000002.pt .*No space left.*older checkpoints are untouched",
    ):
        checkpoint.save(tmp_path, 2, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.pt"]
    assert checkpoint.read(checkpoint.newest(tmp_path, ["step"]), ["step"]) == {"step": 1}


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for step in (9, 10, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, {"step": step})
    (tmp_path / "checkpoint-best.pt").write_bytes(b"")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-999999.pt", "checkpoint-1000000.pt"]
    assert checkpoint.read(checkpoint.newest(tmp_path, ["step"]), ["step"]) == {"step": 1_000_000}


def test_loss_that_explodes_saves_nothing(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, text, tmp_path, "--steps", "50", "--lr", "1e30", "--save-every", "1")
    assert re.match(r"the loss became nan in step \d+: lower --lr; checkpoints before it are in ", message)
    for path in checkpoint.checkpoints(tmp_path):
        state = torch.load(path, weights_only=True)
        assert all(math.isfinite(loss) for loss in state["losses"])


def test_folder_that_cannot_be_made(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert refused(capsys, text, tmp_path / "file").startswith(
        f"--out: cannot make the folder {tmp_path / 'file'} (File exists)"
    )


def test_batch_that_does_not_divide(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        refused(capsys, text, tmp_path, "--accumulate", "3")
        == "--batch: expected a multiple of 1 processes x --accumulate 3, got 4"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine with no CUDA device")
def test_no_gpu(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, text, tmp_path, "--device", "cuda")
    assert (
        message == "--device cuda: expected a GPU for each of 1 processes, found 0: use --device cpu or fewer processes"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps: expected at least 1, got 0"),
        ("--kv-heads -1", "--kv-heads: expected at least 1, got -1"),
        ("--context 1", "--context: expected at least 2, got 1"),
        ("--eval-every 0", "--eval-every: expected at least 1, got 0"),
        ("--sample-bytes -1", "--sample-bytes of at least 0"),
        ("--features 36", "expected --features to be a multiple of 2 x --heads"),
        ("--kv-heads 3", "and --heads of --kv-heads"),
        ("--lr 0", "expected --lr and --clip above 0"),
        ("--lr nan", "expected --lr and --clip above 0"),
        ("--timeout 0", "--timeout: expected 0.001 to 1000000 s, got 0"),
        ("--timeout inf", "--timeout: expected 0.001 to 1000000 s, got inf"),
        ("--dtype float16", "invalid choice: 'float16'"),
        ("--speed 3", "unrecognized arguments: --speed 3"),
    ],
)
def test_bad_arguments(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        train_gpt.parse_arguments(options.split())
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        train_gpt.parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert "torchrun --nproc-per-node 2" in text
    assert "5 % of the steps" in text
    assert "(default: 0.1)" in text


# the pieces


def test_windows_go_through_the_text_once_an_epoch() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    windows = text_module.Windows(text, context=8, seed=3)
    inputs, targets = windows(range(2 * windows.per_epoch))
    assert inputs.shape == (2 * windows.per_epoch, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1), "targets are the bytes after the inputs"
    first, second = inputs.chunk(2)
    for epoch in (first, second):
        assert len(epoch.unique()) == epoch.numel(), "no byte twice in an epoch"
    assert windows.per_epoch >= 250 // 8 - 2
    assert not torch.equal(first, second), "another order"
    assert int(first.min()) % 8 != int(second.min()) % 8, "another phase"
    assert torch.equal(windows(range(5, 9))[0], inputs[5:9]), "a window depends on its number alone"


def test_learning_rate_rises_and_falls() -> None:
    rates = [training.learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 1.9 < max(rates) <= 2.0
    assert 0.0 < rates[-1] < 0.001
    assert training.learning_rate(0, 1, 2.0) > 0.0


class Counting(nn.Module):
    """Predicts the next byte from the current one through a fixed table, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("length", [2, 5, 8, 9, 16, 17, 61])
@pytest.mark.parametrize(("context", "batch"), [(8, 3), (7, 100)])
def test_bits_per_byte_scores_every_byte_once(length: int, context: int, batch: int) -> None:
    torch.manual_seed(length)
    model, text = Counting(), torch.randint(256, (length,), dtype=torch.uint8)
    expected = F.cross_entropy(model(text[:-1].long()), text[1:].long(), reduction="sum").double() / math.log(2)
    total = gpt.bits_per_byte(model, text, context, batch)
    assert total[1] == length - 1
    torch.testing.assert_close(total[0], expected.detach(), rtol=1e-5, atol=1e-5)
    shares = [gpt.bits_per_byte(model, text, context, batch, rank, 3) for rank in range(3)]
    torch.testing.assert_close(sum(shares), total)


def test_plain_twin_has_the_weights_under_llama_names() -> None:
    from cuda_ext.nn import separated

    config = gpt.GPTConfig(layers=1, features=32, hidden_features=16, heads=4, kv_heads=2)
    ours, plain = gpt.GPT(config), gpt.PlainGPT(config)
    plain.load_state_dict(separated(ours))
    ours.load_state_dict(plain.state_dict())
    tokens = torch.randint(256, (2, 9))
    torch.testing.assert_close(ours(tokens), plain(tokens), rtol=1e-4, atol=1e-5)


def test_samples_are_reproducible_and_longer_than_the_context() -> None:
    model = gpt.GPT(gpt.GPTConfig(layers=1, features=32, hidden_features=16, heads=2, kv_heads=1))
    sample = gpt.generate(model, b"ab", 20, 8, seed=1)
    assert sample.startswith(b"ab")
    assert len(sample) == 22
    assert sample == gpt.generate(model, b"ab", 20, 8, seed=1) != gpt.generate(model, b"ab", 20, 8, seed=2)


def test_settings_cover_every_option_that_changes_the_losses() -> None:
    known = set(vars(train_gpt.parse_arguments([])))
    elsewhere = {"data", "out", "prompt", "sample_bytes", "device", "eval_every", "save_every", "check"}
    elsewhere |= {"resume", "auto_resume", "timeout"}
    assert known == set(training.SETTINGS) | elsewhere
