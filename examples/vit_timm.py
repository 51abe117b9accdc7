"""Trains a vision transformer of timm to tell shapes apart, first as it is, then on cuda_ext.

    python examples/vit_timm.py

timm calls torch.nn.functional.scaled_dot_product_attention, which `cuda_ext.integrations.sdpa` serves; `patch` replaces
the MLPs. The images are drawn here: a disc, a square, a triangle or a cross, of any size, place and colour, in noise.
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

SIZE, CLASSES = 64, 4


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, SIZE, SIZE) and their classes (count,)."""
    axis = torch.linspace(-1, 1, SIZE)
    y, x = axis[:, None], axis[None, :]
    kinds = torch.randint(CLASSES, (count,))
    images = 0.3 * torch.randn(count, 3, SIZE, SIZE)
    for image, kind in zip(images, kinds.tolist()):
        place, radius = torch.rand(2) - 0.5, 0.2 + 0.3 * torch.rand(())
        u, v = (x - place[0]) / radius, (y - place[1]) / radius
        inside = (
            u.square() + v.square() < 1,
            (u.abs() < 0.85) & (v.abs() < 0.85),
            (v < 0.8) & (v > 2 * u.abs() - 1),
            ((u.abs() < 0.25) | (v.abs() < 0.25)) & (u.abs() < 1) & (v.abs() < 1),
        )[kind]
        image[:, inside] += torch.randn(3, 1)
    return images, kinds


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

        def step(images: Tensor, kinds: Tensor) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(options.device)), kinds.to(options.device))
            loss.backward()
            optimizer.step()
            return loss.item()

        runs.train(title, batches(options.steps, options.batch, options.seed), options.steps, step)

    train("timm", model)
    with sdpa.enable():
        train("cuda_ext", ours)
        images, kinds = draw(256)
        with torch.no_grad():
            right = (ours.eval()(images.to(options.device)).argmax(-1).cpu() == kinds).float().mean()
    runs.report(options.out / "vit_timm.png")
    print(f"accuracy on new images: {right:.0%}; attention calls: {sdpa.calls()}")
    return runs


if __name__ == "__main__":
    main()
