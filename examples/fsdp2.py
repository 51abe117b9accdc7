"""Trains a small GPT with FSDP2: sharded parameters, bfloat16 compute, gradients summed in float32.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

`Float32ReduceScatter` sends 16-bit gradients and adds them in float32: FSDP2 itself sends and adds in one dtype.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import Runs, arguments, text_batches
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cuda_ext.distributed import Float32ReduceScatter


def main() -> Runs:
    options = arguments(__doc__, steps=30, batch=8, context=256)
    backend = "nccl" if options.device == "cuda" else "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(options.device)

    model = GPT(GPTConfig()).to(device)  # the same seed on every rank
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
        module.set_custom_reduce_scatter(Float32ReduceScatter())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(inputs[rank::ranks].to(device), targets[rank::ranks].to(device))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / ranks

    runs = Runs(quiet=rank > 0)
    batches = text_batches(options.steps, options.batch, options.context, options.seed)
    runs.train("FSDP2", batches, options.steps, step)
    if rank == 0:
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"{ranks} ranks; parameters on rank 0: {local:,} of {sum(p.numel() for p in model.parameters()):,}")
        runs.report(options.out / "fsdp2.png")
    dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    main()
