"""A training run: state, optimiser step, stopping, resuming and results."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from checkpoint import Damaged, newest, newest_sound, read, save
from gpt import GPT, GPTConfig, bits_per_byte, generate
from report import Progress, UserError, write_losses, write_plot
from rich.console import Console
from text import Windows, read_text, split_text
from torch import Tensor

from cuda_ext.distributed import BucketedDataParallel

# settings that determine the losses of a run, and so must not change when it is resumed
MODEL = ("layers", "features", "hidden_features", "heads", "kv_heads")
SETTINGS = (*MODEL, "context", "batch", "accumulate", "steps", "lr", "weight_decay", "clip", "seed", "dtype")
STATE = ("settings", "step", "model", "optimizer", "rng", "losses", "held_out")


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = max(steps // 20, 1)
    return peak * min((step + 1) / warmup, 1.0) * 0.5 * (1.0 + math.cos(math.pi * (step + 0.5) / steps))


def autocast_step(
    model: GPT, device: str, steps: int, beside: Callable[[GPT], Tensor] | None = None
) -> Callable[[Tensor, Tensor], float]:
    """A step of AdamW in bfloat16 with a cosine schedule, which returns the loss. `beside`: what else is minimised."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    numbers = count()

    def step(inputs: Tensor, targets: Tensor) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(next(numbers), steps, 1.5e-3)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(inputs.to(device), targets.to(device))
        (loss if beside is None else loss + beside(model)).backward()
        optimizer.step()
        return loss.item()

    return step


class StopRequest:
    """Records SIGINT and SIGTERM inside a with block; otherwise they would end the process in the middle of a step."""

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
    """The state of a run: the model, its optimiser and the losses so far."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, console: Console) -> None:
        self.arguments, self.device, self.console = arguments, device, console
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        text = read_text(arguments.data)
        learnt, self.held_out_text = split_text(text, arguments.context)
        self.windows = Windows(learnt, arguments.context, arguments.seed)
        if arguments.batch % (self.world_size * arguments.accumulate):
            raise UserError(
                f"--batch: expected a multiple of {self.world_size} processes x --accumulate {arguments.accumulate}, "
                f"got {arguments.batch}"
            )
        self.dtype = arguments.dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        self.settings = {name: getattr(arguments, name) for name in SETTINGS}
        self.settings["text"] = hashlib.sha256(text.numpy().data).hexdigest()

        torch.manual_seed(arguments.seed)
        self.config = GPTConfig(**{name: getattr(arguments, name) for name in MODEL})
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
        self.held_out: list[tuple[int, float]] = []  # (steps done, bits per byte)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def resume(self) -> bool:
        """Resumes from the newest checkpoint, or with --auto-resume the newest intact one; False if there is none.

        The first process chooses the file for all, because files may be renamed meanwhile.
        """
        a = self.arguments
        choice: list[Path | str | None] = [None]
        if self.rank == 0:
            try:
                choice = [newest_sound(a.out, STATE, self.console.print) if a.auto_resume else newest(a.out, STATE)]
            except UserError as error:
                choice = [str(error)]
        dist.broadcast_object_list(choice)
        (path,) = choice
        if isinstance(path, str):
            raise UserError(path)
        if path is None:
            return False
        try:
            state = read(path, STATE)
        except Damaged as error:
            raise UserError(f"--resume: rank {self.rank} reads {path} as truncated or damaged ({error})") from error
        for name, expected in state["settings"].items():
            if self.settings.get(name) != expected:
                option = "--data" if name == "text" else f"--{name.replace('_', '-')}"
                came = "another text" if name == "text" else f"{self.settings.get(name)}, expected {expected}"
                raise UserError(
                    f"--resume: {option} differs from the run in {path}: got {came}: "
                    "give the options of that run, or leave --resume out"
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
        return True

    def save(self) -> Path | None:
        """Collective: all processes take part; the first one writes the file and returns its path."""
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        rng = [None] * self.world_size
        with self.model.collective(f"the checkpoint after step {self.step}"):
            dist.all_gather_object(rng, (torch.get_rng_state(), cuda))
        path = None
        if self.rank == 0:
            model, optimizer = self.gpt.state_dict(), self.optimizer.state_dict()
            values = (self.settings, self.step, model, optimizer, rng, self.losses, self.held_out)
            path = save(self.arguments.out, self.step, dict(zip(STATE, values, strict=True)))
            write_losses(self.arguments.out / "loss.csv", self.losses, self.held_out)
        with self.model.collective(f"the end of the checkpoint after step {self.step}"):
            dist.barrier()
        return path

    def score_held_out(self) -> float:
        """Bits per byte of the whole held-out text; each process scores its share."""
        with self.autocast():
            share = bits_per_byte(
                self.gpt, self.held_out_text, self.arguments.context, 16, self.rank, self.world_size
            ).to(self.device)
        with self.model.collective(f"the score of the held-out text after step {self.step}"):
            dist.all_reduce(share)
        return float(share[0] / share[1])

    def train_step(self, stop: bool) -> bool:
        """Runs one optimiser step. Returns whether any process was asked to stop."""
        a = self.arguments
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, a.steps, a.lr)
        share = a.batch // (self.world_size * a.accumulate)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for micro in range(a.accumulate):
            start = self.step * a.batch + (micro * self.world_size + self.rank) * share
            inputs, targets = (t.to(self.device) for t in self.windows(range(start, start + share)))
            last = micro == a.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with self.autocast():
                    loss = self.model(inputs, targets) / a.accumulate
                loss.backward()
            total[0] += loss.detach()
        self.model.clip_grad_norm_(a.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total[1] = float(stop)
        with self.model.collective(f"the mean of the losses of step {self.step + 1}"):
            dist.all_reduce(total)  # summed with the loss, so that all processes stop after the same step
        self.losses.append(float(total[0]) / self.world_size / math.log(2))
        self.step += 1
        return bool(total[1] > 0)

    def run(self) -> bool:
        """Trains to the last step. Returns False if it was stopped earlier."""
        a = self.arguments
        self.model = BucketedDataParallel(self.gpt)
        with StopRequest() as stop, Progress(self.console, self.step, a.steps, a.batch * a.context) as progress:
            while self.step < a.steps:
                stopped = self.train_step(stop.seen)
                progress.update(self.losses[-1])
                if not math.isfinite(self.losses[-1]):
                    raise UserError(
                        f"the loss became {self.losses[-1]} in step {self.step}: lower --lr; "
                        f"checkpoints before it are in {a.out}"
                    )
                if self.step % a.eval_every == 0 or self.step == a.steps:
                    with progress.paused():
                        self.held_out.append((self.step, self.score_held_out()))
                        progress.note(f"step {self.step}: held-out {self.held_out[-1][1]:.3f} bits per byte")
                if stopped or self.step % a.save_every == 0 or self.step == a.steps:
                    with progress.paused():
                        path = self.save()
                if stopped and self.step < a.steps:
                    self.console.print(f"stopped after step {self.step}; saved {path}; continue with --resume")
                    return False
        return True

    def finish(self) -> None:
        """Writes the losses, the plot and the sample, and prints the final score."""
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
