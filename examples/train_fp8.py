"""Trains a byte-level GPT in bfloat16 and, by three recipes, in FP8, and compares the losses.

    python examples/train_fp8.py

All runs begin with the same weights and read the same text. Every linear layer but the last multiplies in FP8, forward
and backward; attention, norms, the loss and the optimizer stay as they are. The last table compares the mean losses of
the last 50 steps. On a CPU FP8 is no faster: this shows what it costs in quality.
"""

from __future__ import annotations

import copy
from statistics import mean

from common import Runs, arguments, print_table, text_batches
from gpt import GPT, GPTConfig
from training import autocast_step

from cuda_ext import fp8

RECIPES = ("tensorwise", "rowwise", "blockwise")


def main() -> tuple[Runs, dict[str, float]]:
    options = arguments(__doc__, steps=300, batch=4, context=256, features=256, layers=2)
    initial = GPT(GPTConfig(options.layers, options.features, 3 * options.features))
    runs = Runs()
    for recipe in ("bfloat16", *RECIPES):
        model = copy.deepcopy(initial).to(options.device)
        if recipe in RECIPES:
            report = fp8.convert(model, recipe, lambda name, layer: name == "head", least_features=1)
            print(f"{recipe}: {report}")
        batches = text_batches(options.steps, options.batch, options.context, options.seed)
        runs.train(recipe, batches, options.steps, autocast_step(model, options.device, options.steps))
    runs.report(options.out / "train_fp8.png")

    last = {recipe: mean(losses[-50:]) for recipe, losses in runs.losses.items()}
    print_table(
        ("", "mean of the last losses", "beside bfloat16"),
        [(name, f"{loss:.4f}", f"{loss / last['bfloat16'] - 1:+.2%}") for name, loss in last.items()],
    )
    return runs, last


if __name__ == "__main__":
    main()
