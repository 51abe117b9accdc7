"""Trains a byte-level GPT on text, on one or several processes, with the ops of cuda_ext underneath.

    python examples/train_gpt.py                                  # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py             # two: what `make demo` runs

Without --data it reads the Python language reference that every Python carries (pydoc_data.topics, about 465 kB). The
last tenth of the text is
held out: never trained on, and scored at the end. Everything a run makes goes to --out: checkpoints, loss.csv,
    loss.png and sample.txt. Ctrl-C saves a checkpoint first; --resume goes on from the newest one and gives the
    losses of a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import math
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from checkpoint import UserError, load, save, set_aside
from gpt import GPT, GPTConfig, PlainGPT, bits_per_byte, generate
from report import Progress, write_losses, write_plot
from rich.console import Console
from torch import Tensor

from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.nn import unpacked

# what decides the losses of a run, and so has to stay when it is resumed
MODEL = ("layers", "features", "hidden_features", "heads", "kv_heads")
SETTINGS = (*MODEL, "context", "batch", "accumulate", "steps", "lr", "weight_decay", "clip", "seed", "dtype")
STATE = ("settings", "step", "model", "optimizer", "rng", "losses", "held_out")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(group: argparse._ArgumentGroup, name: str, default: object, help: str, **options: object) -> None:
        shown = "" if default is None or default is False else f" (default: {default})"
        group.add_argument(name, default=default, help=help + shown, **options)  # type: ignore[arg-type]

    text = parser.add_argument_group("text and output")
    add(text, "--data", None, "text file to learn instead of the Python language reference", type=Path, metavar="FILE")
    add(text, "--out", Path("runs/gpt"), "folder for everything the run writes", type=Path, metavar="DIR")
    add(text, "--prompt", "The ", "start of the sample")
    add(text, "--sample-bytes", 400, "length of the sample", type=int, metavar="N")

    model = parser.add_argument_group("model")
    add(model, "--layers", 4, "transformer blocks", type=int, metavar="N")
    add(model, "--features", 256, "width of the residual stream", type=int, metavar="N")
    add(model, "--hidden-features", 768, "width of the gated hidden layer", type=int, metavar="N")
    add(model, "--heads", 4, "query heads", type=int, metavar="N")
    add(model, "--kv-heads", 2, "key/value heads, a divisor of --heads", type=int, metavar="N")

    training = parser.add_argument_group("training")
    add(training, "--steps", 1200, "optimiser steps of the whole run", type=int, metavar="N")
    add(training, "--batch", 8, "windows of text per step, over all processes", type=int, metavar="N")
    add(training, "--context", 256, "bytes per window", type=int, metavar="N")
    add(
        training,
        "--accumulate",
        1,
        "backward passes per step; gradients are sent in the last one only",
        type=int,
        metavar="N",
    )
    add(
        training,
        "--lr",
        2e-3,
        "peak learning rate: 5 %% of the steps up to it, then a cosine down to 0",
        type=float,
        metavar="X",
    )
    add(training, "--weight-decay", 0.1, "of the matrices", type=float, metavar="X")
    add(training, "--clip", 1.0, "largest norm of the gradient", type=float, metavar="X")
    add(training, "--seed", 0, "of the initial weights, the order of the text and the sample", type=int, metavar="N")

    running = parser.add_argument_group("running")
    add(running, "--device", "auto", "auto takes a GPU when there is one", choices=["auto", "cpu", "cuda"])
    add(
        running,
        "--dtype",
        None,
        "of the matrix products (default: bfloat16 on cuda, float32 on cpu)",
        choices=["float32", "bfloat16"],
    )
    add(
        running,
        "--eval-every",
        None,
        "steps between scorings of the held-out text (default: steps / 6)",
        type=int,
        metavar="N",
    )
    add(running, "--save-every", 200, "steps between checkpoints", type=int, metavar="N")
    add(
        running,
        "--resume",
        False,
        "go on from the newest checkpoint in --out, with the same settings",
        action="store_true",
    )
    add(running, "--check", False, "first compare one step with the same model in plain PyTorch", action="store_true")
    arguments = parser.parse_args(argv)

    for name in (*MODEL, "steps", "batch", "accumulate", "save_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(arguments, name)}")
    if arguments.context < 2:
        parser.error(f"--context: expected at least 2, got {arguments.context}")
    if arguments.eval_every is None:
        arguments.eval_every = max(arguments.steps // 6, 1)
    if arguments.eval_every < 1 or arguments.sample_bytes < 0 or not arguments.prompt:
        parser.error(
            "expected --eval-every of at least 1, --sample-bytes of at least 0 and a --prompt of at least 1 byte"
        )
    if arguments.features % (2 * arguments.heads) or arguments.heads % arguments.kv_heads:
        parser.error("expected --features to be a multiple of 2 x --heads, and --heads of --kv-heads")
    if not (arguments.lr > 0 and arguments.clip > 0 and arguments.weight_decay >= 0):
        parser.error("expected --lr and --clip above 0 and --weight-decay of at least 0")
    return arguments


def start_process_group(choice: str) -> torch.device:
    """Joins the processes that torchrun started, or forms a group of one, and says on which device this one
    computes."""
    local_rank, local_processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    if choice == "cuda" and gpus < local_processes:
        raise UserError(
            f"--device cuda: expected a GPU for each of {local_processes} processes, found {gpus}: use --device cpu or fewer processes"
        )
    cuda = choice == "cuda" or (choice == "auto" and gpus >= local_processes and has_cuda_kernels())
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def has_cuda_kernels() -> bool:
    from cuda_ext import linear

    try:
        linear(torch.zeros(1, 1, device="cuda"), torch.zeros(1, 1, device="cuda"))
    except NotImplementedError:
        return False
    return True


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = max(steps // 20, 1)
    return peak * min((step + 1) / warmup, 1.0) * 0.5 * (1.0 + math.cos(math.pi * (step + 0.5) / steps))


def check_one_step(
    model: GPT, config: GPTConfig, inputs: Tensor, targets: Tensor, autocast: torch.autocast
) -> list[str]:
    """Compares the loss and every gradient of one step with the same model in plain PyTorch, both against plain
    PyTorch in float64.

    Returns what it found, a line each. Raises UserError if the largest error of a gradient, relative to the largest
    element of that gradient, is more than 3 times that of plain PyTorch in the same dtype: both round alike, but not
    in the same places.
    """
    plain = PlainGPT(config).to(inputs.device)
    plain.load_state_dict(unpacked(model))
    exact = copy.deepcopy(plain).double()

    def step(net: GPT, context: contextlib.AbstractContextManager) -> tuple[float, dict[str, Tensor]]:
        parameters = dict(net.named_parameters())
        with context:
            loss = net(inputs, targets)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return loss.item(), unpacked(net, dict(zip(parameters, gradients)))

    exact_loss, exact_gradients = step(exact, contextlib.nullcontext())
    lines, largest = [], {}
    for title, net in (("cuda_ext", model), ("plain PyTorch", plain)):
        loss, gradients = step(net, autocast)
        absolute = {name: float((gradients[name] - expected).abs().max()) for name, expected in exact_gradients.items()}
        relative = {name: error / float(exact_gradients[name].abs().max()) for name, error in absolute.items()}
        worst = max(relative, key=lambda name: relative[name] if math.isfinite(relative[name]) else math.inf)
        largest[title] = relative[worst]
        lines.append(
            f"check: {title} against float64: loss off by {abs(loss - exact_loss):.1e} of {exact_loss:.4f}; largest error of "
            f"{len(relative)} gradients {relative[worst]:.1e} relative, {absolute[worst]:.1e} absolute, in {worst}"
        )
    if not largest["cuda_ext"] <= 3.0 * largest["plain PyTorch"]:
        raise UserError(
            "\n".join([*lines, "check: failed: expected an error of at most 3 times that of plain PyTorch"])
        )
    return lines


class StopRequest:
    """Notes SIGINT and SIGTERM, which would otherwise end the process in the middle of a step, while it is entered."""

    def __init__(self) -> None:
        self.seen = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True

    def __enter__(self) -> StopRequest:
        self.previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


class Training:
    """The state of a run: the model, its optimiser, and what happened so far."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, console: Console) -> None:
        self.arguments, self.device, self.console = arguments, device, console
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        text = read_text(arguments.data)
        split = len(text) - len(text) // 10
        self.held_out_text = text[split:]
        self.windows = Windows(text[:split], arguments.context, arguments.seed)
        if self.windows.per_epoch < 1 or len(self.held_out_text) < 2:
            least = max(20 * arguments.context // 9 + 1, 20)  # two windows and a byte to learn, two bytes held out
            raise UserError(
                f"--data: expected at least {least} bytes for --context {arguments.context}, got {len(text)}: take a longer text or a shorter context"
            )
        if arguments.batch % (self.world_size * arguments.accumulate):
            raise UserError(
                f"--batch: expected a multiple of {self.world_size} processes x --accumulate {arguments.accumulate}, got {arguments.batch}"
            )
        self.dtype = arguments.dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        self.settings = {name: getattr(arguments, name) for name in SETTINGS} | {
            "text": hashlib.sha256(bytes(text.tolist())).hexdigest()
        }

        torch.manual_seed(arguments.seed)
        self.config = GPTConfig(
            arguments.layers, arguments.features, arguments.hidden_features, arguments.heads, arguments.kv_heads
        )
        self.gpt = GPT(self.config).to(device)
        matrices = [p for p in self.gpt.parameters() if p.dim() > 1]
        others = [p for p in self.gpt.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=arguments.lr,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.losses: list[float] = []  # bits per byte of every step
        self.held_out: list[tuple[int, float]] = []  # after how many steps, bits per byte

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def resume(self) -> None:
        path, state = load(self.arguments.out, STATE)
        for name, expected in state["settings"].items():
            if self.settings.get(name) != expected:
                option = "--data" if name == "text" else f"--{name.replace('_', '-')}"
                came = "another text" if name == "text" else f"{self.settings.get(name)}, expected {expected}"
                raise UserError(
                    f"--resume: {option} differs from the run in {path}: got {came}: give the options of that run, or leave --resume out"
                )
        self.gpt.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]
        self.held_out = [(step, bits) for step, bits in state["held_out"]]
        if len(state["rng"]) == self.world_size:
            cpu, cuda = state["rng"][self.rank]
            torch.set_rng_state(cpu)
            if cuda is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(cuda)
        self.console.print(f"resumed after step {self.step} from {path}")

    def save(self) -> Path | None:
        """Every process takes part; the first one writes and gets the path."""
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        rng = [None] * self.world_size
        dist.all_gather_object(rng, (torch.get_rng_state(), cuda))
        path = None
        if self.rank == 0:
            model, optimizer = self.gpt.state_dict(), self.optimizer.state_dict()
            values = (self.settings, self.step, model, optimizer, rng, self.losses, self.held_out)
            path = save(self.arguments.out, self.step, dict(zip(STATE, values, strict=True)))
            write_losses(self.arguments.out / "loss.csv", self.losses, self.held_out)
        dist.barrier()
        return path

    def score_held_out(self) -> float:
        """Bits per byte of the whole held-out text, every process scoring its share."""
        with self.autocast():
            share = bits_per_byte(
                self.gpt, self.held_out_text, self.arguments.context, 16, self.rank, self.world_size
            ).to(self.device)
        dist.all_reduce(share)
        return float(share[0] / share[1])

    def train_step(self, model: BucketedDataParallel, stop: bool) -> bool:
        """One step of the optimiser; whether any process was asked to stop."""
        a = self.arguments
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, a.steps, a.lr)
        share = a.batch // (self.world_size * a.accumulate)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro in range(a.accumulate):
            start = self.step * a.batch + (micro * self.world_size + self.rank) * share
            inputs, targets = (t.to(self.device) for t in self.windows(range(start, start + share)))
            last = micro == a.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with self.autocast():
                    loss = model(inputs, targets) / a.accumulate
                loss.backward()
            total[0] += loss.detach()
        model.clip_grad_norm_(a.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total[1] = float(stop)
        dist.all_reduce(total)  # the stop travels with the loss, so that all processes stop after the same step
        self.losses.append(float(total[0]) / self.world_size / math.log(2))
        self.step += 1
        return bool(total[1] > 0)

    def run(self) -> bool:
        """Trains to the last step; False if it was stopped before."""
        a = self.arguments
        model = BucketedDataParallel(self.gpt)
        saved = self.step
        with StopRequest() as stop, Progress(self.console, self.step, a.steps, a.batch * a.context) as progress:
            while self.step < a.steps:
                stopped = self.train_step(model, stop.seen)
                progress.update(self.losses[-1])
                if not math.isfinite(self.losses[-1]):
                    raise UserError(
                        f"the loss became {self.losses[-1]} in step {self.step}: lower --lr; checkpoints before it are in {a.out}"
                    )
                if self.step % a.eval_every == 0 or self.step == a.steps:
                    with progress.paused():
                        self.held_out.append((self.step, self.score_held_out()))
                        progress.note(f"step {self.step}: held-out {self.held_out[-1][1]:.3f} bits per byte")
                if stopped or self.step % a.save_every == 0 or self.step == a.steps:
                    with progress.paused():
                        path, saved = self.save(), self.step
                if stopped and self.step < a.steps:
                    self.console.print(f"stopped after step {saved}; saved {path}; go on with --resume")
                    return False
        return True

    def finish(self) -> None:
        """The plot, the sample, and the last line."""
        a = self.arguments
        with self.autocast():
            sample = generate(self.gpt, a.prompt.encode(), a.sample_bytes, a.context, seed=a.seed)
        if self.rank:
            return
        write_losses(a.out / "loss.csv", self.losses, self.held_out)
        write_plot(a.out / "loss.png", self.losses, self.held_out)
        text = sample.decode(errors="replace")
        (a.out / "sample.txt").write_text(text, encoding="utf-8")
        self.console.rule("sample")
        self.console.print(text, markup=False, highlight=False)
        self.console.rule()
        self.console.print(f"wrote checkpoints, loss.csv, loss.png and sample.txt to {a.out}")
        print(f"held-out: {self.held_out[-1][1]:.2f} bits per byte", flush=True)


def run(arguments: argparse.Namespace, console: Console) -> int:
    device = start_process_group(arguments.device)
    console.quiet = dist.get_rank() > 0
    training = Training(arguments, device, console)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {arguments.out} ({error.strerror}): choose another") from error
    if arguments.resume:
        training.resume()
    elif dist.get_rank() == 0 and (earlier := set_aside(arguments.out)):
        console.print(f"moved the checkpoints of an earlier run to {earlier}")

    parameters = sum(p.numel() for p in training.gpt.parameters())
    source = arguments.data or "the Python language reference"
    console.print(
        f"{parameters / 1e6:.2f} M parameters on {source}: {len(training.windows.text):,} bytes to learn, {len(training.held_out_text):,} held out\n"
        f"{device.type}, {training.dtype}, {dist.get_world_size()} process(es) x {torch.get_num_threads()} thread(s)"
    )
    if arguments.check:
        share = arguments.batch // dist.get_world_size()
        inputs, targets = training.windows(range(dist.get_rank() * share, (dist.get_rank() + 1) * share))
        for line in check_one_step(
            training.gpt, training.config, inputs.to(device), targets.to(device), training.autocast()
        ):
            console.print(line)
    if not training.run():
        return 128 + signal.SIGINT
    training.finish()
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        return run(arguments, console)
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"train_gpt: error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
