"""Trains a small GPT with Lightning.

    python examples/lightning_training.py

A model of cuda_ext layers is a torch.nn.Module like any other: Lightning's Trainer brings precision, checkpoints,
gradient clipping and the progress bar.
"""

from __future__ import annotations

import logging
import time
import warnings

import lightning
import torch
from common import arguments, plot, text_batches
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class LitGPT(lightning.LightningModule):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.gpt(*batch)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> list[float]:
    options = arguments(__doc__, steps=40, batch=8, context=256)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    batches = list(text_batches(options.steps, options.batch, options.context, options.seed))
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches))
    model = LitGPT(GPTConfig())
    trainer = lightning.Trainer(
        accelerator=options.device,
        devices=1,
        precision="bf16-mixed",
        max_epochs=1,
        gradient_clip_val=1.0,
        default_root_dir=options.out,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    begin = time.perf_counter()
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=options.batch))
    seconds = (time.perf_counter() - begin) / options.steps
    print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, {1e3 * seconds:.0f} ms per step")
    plot(options.out / "lightning_training.png", {"loss": model.losses})
    return model.losses


if __name__ == "__main__":
    main()
