"""Trains a tiny GPT on short documents with a block mask, so that none of them sees another.

    python examples/train_packed.py                      # many documents in one row of tokens
    python examples/train_packed.py --mask prefix-lm     # a batch of prompts, read in both directions, with answers

A document is a prompt, "please count by 3 from b :", and its answer, "b e h k n q t w z c f ...". At the end the logits
of documents among others are compared with those of each document alone. With the block mask they are equal, but for
rounding; with a causal mask they are not.
"""

from __future__ import annotations

from itertools import count, pairwise
from typing import NamedTuple

import torch
from common import Runs, arguments, print_table
from torch import Tensor, nn

from cuda_ext import BlockMask, flash_attention, linear_cross_entropy
from cuda_ext.nn import GatedMLP, Linear

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
STEPS = tuple(str(step) for step in range(1, 10))
WORDS = (*LETTERS, *STEPS, "please", "count", "by", "from", ":")
IGNORED = -100


class Rows(NamedTuple):
    """tokens, positions and targets are int64 (B, S); targets are IGNORED in prompts. alone: of each document the row,
    where it is in the row, and the mask that it has alone."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    mask: BlockMask
    alone: list[tuple[int, slice, BlockMask]]


class Block(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(features), nn.RMSNorm(features)
        self.qkv, self.out = Linear(features, 3 * features), Linear(features, features)
        self.mlp = GatedMLP(features, 2 * features)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=2)
        x = self.out(flash_attention(q, k, v, block_mask=mask).flatten(2), residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class GPT(nn.Module):
    """Maps rows to logits of the next word (B, S, words), or with targets to their mean loss."""

    def __init__(self, longest: int, features: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(len(WORDS), features), nn.Embedding(longest, features)
        self.blocks = nn.ModuleList(Block(features, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(features), nn.Linear(features, len(WORDS), bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, mask: BlockMask, targets: Tensor | None = None) -> Tensor:
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return self.head(x) if targets is None else linear_cross_entropy(x, self.head.weight, targets)


def document(length: int) -> tuple[Tensor, Tensor, int]:
    """Words (length,), their targets, and the length of the prompt."""
    begin, step, polite = (int(torch.randint(count, ())) for count in (len(LETTERS), len(STEPS), 8))
    prompt = [*["please"] * polite, "count", "by", STEPS[step], "from", LETTERS[begin], ":"]
    answer = (begin + (step + 1) * torch.arange(length - len(prompt) + 1)) % len(LETTERS)
    words = torch.cat([torch.tensor([WORDS.index(word) for word in prompt]), answer])
    targets = words[1:].clone()
    targets[: len(prompt) - 1] = IGNORED
    return words[:-1], targets, len(prompt)


def packed(documents: int, longest: int, device: str) -> Rows:
    """One row with all documents; positions begin anew in each."""
    lengths = torch.randint(longest // 4, longest + 1, (documents,))
    tokens, targets, _ = zip(*(document(length) for length in lengths.tolist()))
    positions = [torch.arange(length) for length in lengths.tolist()]
    row = (torch.cat(each).unsqueeze(0).to(device) for each in (tokens, positions, targets))
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0))
    alone = [
        (0, slice(begin, end), BlockMask.causal(end - begin, end - begin, device=device))
        for begin, end in pairwise(cu_seqlens.tolist())
    ]
    return Rows(*row, BlockMask.documents(cu_seqlens, causal=True, device=device), alone)


def prefix_lm(documents: int, longest: int, device: str) -> Rows:
    """A row for each document; its prompt is the prefix. Alone, an answer ends sooner: what follows must not count."""
    tokens, targets, prompts = zip(*(document(longest) for _ in range(documents)))
    positions = [torch.arange(longest)] * documents
    rows = (torch.stack(each).to(device) for each in (tokens, positions, targets))
    end = longest - longest // 4
    alone = [(row, slice(end), BlockMask.prefix_lm(prompt, end, device=device)) for row, prompt in enumerate(prompts)]
    return Rows(*rows, BlockMask.prefix_lm(torch.tensor(prompts), longest, device=device), alone)


@torch.no_grad()
def difference_from_alone(model: GPT, rows: Rows, mask: BlockMask) -> float:
    """The largest, of the logits of all documents."""
    together = model(rows.tokens, rows.positions, mask)
    return max(
        float(
            (together[row, place] - model(rows.tokens[row, None, place], rows.positions[row, None, place], own))
            .abs()
            .max()
        )
        for row, place, own in rows.alone
    )


def main() -> tuple[Runs, dict[str, float]]:
    options = arguments(
        __doc__, mask=("documents", "prefix-lm"), steps=250, documents=16, longest=200, features=128, layers=2
    )
    draw = {"documents": packed, "prefix-lm": prefix_lm}[options.mask]
    model = GPT(options.longest, options.features, options.layers).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers = count(1)

    def step(rows: Rows) -> float:
        optimizer.zero_grad()
        loss = model(rows.tokens, rows.positions, rows.mask, rows.targets)
        loss.backward()
        optimizer.step()
        if (number := next(numbers)) % max(1, options.steps // 10) == 0:
            print(f"step {number}: loss {loss.item():.3f}")
        return loss.item()

    def batch() -> Rows:
        return draw(options.documents, options.longest, options.device)

    runs = Runs()
    runs.train("cuda_ext", ((batch(),) for _ in range(options.steps)), options.steps, step)
    runs.report(options.out / "train_packed.png")

    rows = batch()
    print(rows.mask)
    length = rows.tokens.shape[1]
    masks = {options.mask: rows.mask, "causal": BlockMask.causal(length, length, device=options.device)}
    differences = {name: difference_from_alone(model, rows, mask) for name, mask in masks.items()}
    print_table(
        ("mask", "largest difference of logits from the document alone"),
        [(name, f"{difference:.1e}") for name, difference in differences.items()],
    )
    return runs, differences


if __name__ == "__main__":
    main()
