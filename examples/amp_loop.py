"""A plain training loop with everything in it: autocast, GradScaler, accumulation and activation checkpointing.

    python examples/amp_loop.py                       # bfloat16 on a CPU, float16 on a GPU

Selective checkpointing keeps the results of the products and of attention, and recomputes only what is cheap. The loss
is that of the same model in plain PyTorch.
"""

from __future__ import annotations

from functools import partial

import torch
from common import Runs, arguments, text_batches
from gpt import GPT, GPTConfig, PlainGPT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cuda_ext.ops
from cuda_ext.nn import separated


class Checkpointed(nn.Module):
    """Calls a block under selective activation checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, cuda_ext.ops.compute_intensive_ops())
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)


def main() -> Runs:
    options = arguments(__doc__, steps=30, batch=8, accumulate=2, context=256)
    device = torch.device(options.device)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    config = GPTConfig()
    model, plain = GPT(config).to(device), PlainGPT(config).to(device)
    plain.load_state_dict(separated(model))
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)

    runs = Runs()

    def train(title: str, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

        def step(inputs: Tensor, targets: Tensor) -> float:
            total = 0.0
            for part in range(options.accumulate):
                own = slice(part, None, options.accumulate)
                with torch.autocast(device.type, dtype):
                    loss = model(inputs[own].to(device), targets[own].to(device)) / options.accumulate
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return total

        runs.train(
            title, text_batches(options.steps, options.batch, options.context, options.seed), options.steps, step
        )

    train("PyTorch", plain)
    train("cuda_ext", model)
    runs.report(options.out / "amp_loop.png")
    return runs


if __name__ == "__main__":
    main()
