"""Trains a byte-level GPT whose feed-forward layers are mixtures of experts, in bfloat16 and in FP8.

    python examples/train_moe.py

Each token goes to 2 of 8 experts; the router's loss keeps them in use. Both runs begin with the same weights and read
the same text. In FP8 all layers but the router and the last one multiply by the recipe "rowwise_with_gw_hp"; the last
table compares the mean losses of the last 50 steps, and tells how evenly the experts are used. On a CPU FP8 is no
faster: this shows what it costs in quality.
"""

from __future__ import annotations

import copy
from statistics import mean

import torch
from common import Runs, arguments, print_table, text_batches
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from training import autocast_step

from cuda_ext import fp8
from cuda_ext.nn import MixtureOfExperts

RECIPE = "rowwise_with_gw_hp"


class Experts(nn.Module):
    """In place of the feed-forward layer of a block. Keeps the router's losses of the last call."""

    def __init__(self, features: int, hidden_features: int, experts: int) -> None:
        super().__init__()
        self.layer = MixtureOfExperts(features, hidden_features, experts, top_k=2)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        out, self.losses = self.layer(input, residual, return_losses=True)
        return out


def mixture_gpt(config: GPTConfig, experts: int) -> GPT:
    """A GPT with as many multiplications for a token as without experts: two of them with half of the features."""
    model = GPT(config)
    for block in model.blocks:
        block.mlp = Experts(config.features, config.hidden_features // 2, experts)
    return model


def balance(model: GPT) -> Tensor:
    """What keeps the experts in use, beside the loss."""
    return 0.01 * sum(block.mlp.losses.balance + 0.1 * block.mlp.losses.z for block in model.blocks)


def evenness(model: GPT) -> str:
    """The tokens of the most and least used experts of the last step, of all layers, relative to the mean."""
    shares = torch.stack([block.mlp.losses.load / block.mlp.losses.load.float().mean() for block in model.blocks])
    return f"{shares.min():.2f} to {shares.max():.2f}"


def main() -> tuple[Runs, dict[str, float]]:
    options = arguments(__doc__, steps=300, batch=4, context=256, features=256, layers=2, experts=8)
    initial = mixture_gpt(GPTConfig(options.layers, options.features, 3 * options.features), options.experts)
    runs, used = Runs(), {}
    for precision in ("bfloat16", "FP8"):
        model = copy.deepcopy(initial).to(options.device)
        if precision == "FP8":
            print(fp8.convert(model, RECIPE, lambda name, layer: name == "head", least_features=1))
        batches = text_batches(options.steps, options.batch, options.context, options.seed)
        runs.train(precision, batches, options.steps, autocast_step(model, options.device, options.steps, balance))
        used[precision] = evenness(model)
    runs.report(options.out / "train_moe.png")

    last = {precision: mean(losses[-50:]) for precision, losses in runs.losses.items()}
    print_table(
        ("", "mean of the last losses", "beside bfloat16", "tokens of an expert, of the mean"),
        [(name, f"{loss:.4f}", f"{loss / last['bfloat16'] - 1:+.2%}", used[name]) for name, loss in last.items()],
    )
    return runs, last


if __name__ == "__main__":
    main()
