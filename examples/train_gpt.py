"""Trains a byte-level GPT on text with the ops of cuda_ext, on one or several processes.

    python examples/train_gpt.py                                  # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py             # two: what `make demo` runs

Without --data it reads the language reference that ships with Python (pydoc_data.topics, about 465 kB). The last tenth
of the text is held out: it is never trained on, and scored at the end. A run writes its results to --out: checkpoints,
loss.csv, loss.png and sample.txt. Ctrl-C saves a checkpoint before the run stops; --resume continues from the newest
one, with the losses of an uninterrupted run. For torchrun --max-restarts, --auto-resume does this automatically.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint import set_aside
from gpt import check_one_step
from report import UserError
from rich.console import Console
from training import MODEL, Training


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(group: argparse._ArgumentGroup, name: str, default: float, help: str) -> None:
        group.add_argument(name, type=type(default), default=default, metavar="N", help=f"{help} (default: {default})")

    text = parser.add_argument_group("text and output")
    text.add_argument("--data", type=Path, metavar="FILE", help="text to learn instead of the language reference")
    text.add_argument(
        "--out", type=Path, default=Path("runs/gpt"), metavar="DIR", help="folder for the results (default: runs/gpt)"
    )
    text.add_argument("--prompt", default="The ", metavar="TEXT", help="start of the sample (default: 'The ')")
    number(text, "--sample-bytes", 400, "length of the sample")

    model = parser.add_argument_group("model")
    number(model, "--layers", 4, "transformer blocks")
    number(model, "--features", 256, "width of the residual stream")
    number(model, "--hidden-features", 768, "width of the gated hidden layer")
    number(model, "--heads", 4, "query heads")
    number(model, "--kv-heads", 2, "key/value heads, a divisor of --heads")

    training = parser.add_argument_group("training")
    number(training, "--steps", 1600, "optimiser steps of the whole run")
    number(training, "--batch", 2, "windows of text per step, over all processes")
    number(training, "--context", 256, "bytes per window")
    number(training, "--accumulate", 1, "backward passes per step; gradients are sent in the last one only")
    number(training, "--lr", 1.5e-3, "peak learning rate: 5 %% of the steps up to it, then a cosine down to 0")
    number(training, "--weight-decay", 0.1, "of the matrices")
    number(training, "--clip", 1.0, "largest norm of the gradient")
    number(training, "--seed", 0, "of the initial weights, the order of the text and the sample")

    running = parser.add_argument_group("running")
    running.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto (the default) uses a GPU if possible"
    )
    running.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of matrix products (default: bfloat16 on cuda; float32 on cpu, where few have bfloat16 units)",
    )
    running.add_argument(
        "--eval-every",
        type=int,
        metavar="N",
        help="steps between scorings of the held-out text (default: 6 times a run)",
    )
    number(running, "--save-every", 200, "steps between checkpoints")
    running.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out, with the same settings"
    )
    running.add_argument(
        "--auto-resume",
        action="store_true",
        help="like --resume if there is an intact checkpoint, else start: for jobs that are restarted automatically",
    )
    number(running, "--timeout", 120.0, "seconds that a process waits for another before it gives up with an error")
    running.add_argument(
        "--check", action="store_true", help="first compare one step with the same model in plain PyTorch"
    )
    arguments = parser.parse_args(argv)

    if arguments.eval_every is None:
        arguments.eval_every = max(-(-arguments.steps // 6), 1)
    for name in (*MODEL, "steps", "batch", "accumulate", "eval_every", "save_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(arguments, name)}")
    if arguments.context < 2:
        parser.error(f"--context: expected at least 2, got {arguments.context}")
    if arguments.sample_bytes < 0 or not arguments.prompt:
        parser.error("expected --sample-bytes of at least 0 and a --prompt of at least 1 byte")
    if arguments.features % (2 * arguments.heads) or arguments.heads % arguments.kv_heads:
        parser.error("expected --features to be a multiple of 2 x --heads, and --heads of --kv-heads")
    if not (arguments.lr > 0 and arguments.clip > 0 and arguments.weight_decay >= 0):
        parser.error("expected --lr and --clip above 0 and --weight-decay of at least 0")
    if not 0.001 <= arguments.timeout <= 1e6:
        parser.error(f"--timeout: expected 0.001 to 1000000 s, got {arguments.timeout:g}")
    return arguments


def start_process_group(choice: str, timeout: float, console: Console) -> torch.device:
    """Joins the processes that torchrun started, or forms a group of one. Returns the device of this process."""
    local_rank, local_processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    console.quiet = int(os.environ.get("RANK", 0)) > 0
    gpus = torch.cuda.device_count()
    if choice == "cuda" and gpus < local_processes:
        raise UserError(
            f"--device cuda: expected a GPU for each of {local_processes} processes, found {gpus}: "
            "use --device cpu or fewer processes"
        )
    if choice == "auto":
        choice = "cuda" if gpus >= local_processes else "cpu"
        if choice == "cuda" and not has_cuda_kernels():
            console.print("this build of cuda_ext has no CUDA kernels: training on the CPU")
            choice = "cpu"
    device = torch.device("cuda", local_rank) if choice == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
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


def run(arguments: argparse.Namespace, console: Console, kind: type[Training]) -> int:
    device = start_process_group(arguments.device, arguments.timeout, console)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training = kind(arguments, device, console)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {arguments.out} ({error.strerror}): choose another") from error
    resumed = (arguments.resume or arguments.auto_resume) and training.resume()
    if not resumed and rank == 0 and (earlier := set_aside(arguments.out)):
        console.print(f"moved the checkpoints of an earlier run to {earlier}")

    parameters = sum(p.numel() for p in training.gpt.parameters())
    console.print(
        f"{parameters / 1e6:.2f} M parameters, {arguments.data or 'the Python language reference'}: "
        f"{len(training.windows.text):,} bytes to learn, {len(training.held_out_text):,} held out"
    )
    console.print(f"{device.type}, {training.dtype}, {world_size} process(es) x {torch.get_num_threads()} thread(s)")
    if arguments.check:
        share = arguments.batch // world_size
        inputs, targets = (t.to(device) for t in training.windows(range(rank * share, (rank + 1) * share)))
        for line in check_one_step(training.gpt, training.config, inputs, targets, training.autocast()):
            console.print(line)
    if not training.run():
        return 128 + signal.SIGINT
    training.finish()
    return 0


def main(argv: list[str] | None = None, kind: type[Training] = Training) -> int:
    arguments = parse_arguments(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        return run(arguments, console, kind)
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"train_gpt: error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
