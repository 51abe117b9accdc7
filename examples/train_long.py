"""Trains a small GPT on long windows of text, of which each process has a part (context parallelism).

    torchrun --standalone --nproc-per-node 4 examples/train_long.py

With N processes windows have N times --context bytes, and a process computes with --context of them. Attention sees
all: keys and values travel between processes. Then the first process trains the same model on whole windows alone,
which gives the same losses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from common import Runs, arguments, text_batches
from gpt import GPT, GPTConfig
from torch import Tensor, nn

from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.distributed.context_parallel import shard_sequence


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main() -> Runs:
    options = arguments(__doc__, steps=30, batch=2, context=256)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device)

    alone = GPT(GPTConfig()).to(device)
    model = GPT(GPTConfig(), context_group=dist.group.WORLD).to(device)
    model.load_state_dict(alone.state_dict())
    shared, trainer = Trainer(BucketedDataParallel(model)), Trainer(alone)

    def shared_step(inputs: Tensor, targets: Tensor) -> float:
        """All have as many bytes, so the mean of their means is that of the window."""
        loss = shared.step(*(shard_sequence(rows.to(device)) for rows in (inputs, targets)))
        dist.all_reduce(loss)
        return loss.item() / ranks

    def alone_step(inputs: Tensor, targets: Tensor) -> float:
        return trainer.step(inputs.to(device), targets.to(device)).item()

    runs = Runs(quiet=rank > 0)

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        return text_batches(options.steps, options.batch, options.context * ranks, options.seed)

    runs.train(f"{ranks} ranks", batches(), options.steps, shared_step)
    if rank == 0:
        trainer = Trainer(alone)
        runs.train(
            "alone", batches(), options.steps, lambda *batch: trainer.step(*(t.to(device) for t in batch)).item()
        )
        pairs = zip(*runs.losses.values())
        print(f"largest difference of losses: {max(abs(first - second) for first, second in pairs):.1e}")
        runs.report(options.out / "train_long.png")
    dist.barrier()
    dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    main()
