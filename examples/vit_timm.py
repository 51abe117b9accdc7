"""Trains a vision transformer of timm to tell the direction of stripes, first as it is, then on cuda_ext.

    python examples/vit_timm.py

timm calls torch.nn.functional.scaled_dot_product_attention, which `cuda_ext.integrations.sdpa` serves; `patch` replaces
the MLPs. The images are drawn here: stripes of any width and colour in one of eight directions, in noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import timm
import torch
import torch.nn.functional as F
from common import Runs, arguments
from torch import Tensor, nn

import cuda_ext
from cuda_ext.integrations import sdpa

SIZE, CLASSES = 64, 8


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, SIZE, SIZE) of stripes, and their directions (count,), one of CLASSES."""
    axis = torch.linspace(-1, 1, SIZE)
    directions = torch.randint(CLASSES, (count,))
    angle = (torch.pi * directions / CLASSES)[:, None, None]
    distance = axis[:, None] * angle.sin() + axis * angle.cos()  # (count, SIZE, SIZE)
    stripes = (distance * (8 + 8 * torch.rand(count, 1, 1)) + 6 * torch.rand(count, 1, 1)).sin()
    colours = 0.5 + torch.rand(count, 3, 1, 1)
    return stripes.unsqueeze(1) * colours + torch.randn(count, 3, SIZE, SIZE), directions


def batches(steps: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    for _ in range(steps):
        yield draw(batch)


def main() -> Runs:
    options = arguments(__doc__, steps=60, batch=32, width=192, depth=4)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=options.width,
        depth=options.depth,
        num_heads=options.width // 64,
        num_classes=CLASSES,
    ).to(options.device)
    ours = copy.deepcopy(model)
    print(cuda_ext.patch(ours))

    runs = Runs()

    def train(title: str, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

        def step(images: Tensor, directions: Tensor) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(options.device)), directions.to(options.device))
            loss.backward()
            optimizer.step()
            return loss.item()

        runs.train(title, batches(options.steps, options.batch, options.seed), options.steps, step)

    train("timm", model)
    with sdpa.enable():
        train("cuda_ext", ours)
        images, directions = draw(256)
        with torch.no_grad():
            right = (ours.eval()(images.to(options.device)).argmax(-1).cpu() == directions).float().mean()
    runs.report(options.out / "vit_timm.png")
    print(f"accuracy on new images: {right:.0%}; attention calls: {sdpa.calls()}")
    return runs


if __name__ == "__main__":
    main()
