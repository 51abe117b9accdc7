"""A small GPT writes text, byte by byte, with its keys and values in a paged cache.

    python examples/write_gpt.py                  # what `make generate` runs

It takes the newest checkpoint of `make demo` (--run), or trains the same model for a minute if there is none. Then it
continues prompts of different lengths as one batch, greedily and sampled, and compares the speed with the same model
without a cache, and with plain PyTorch: scaled_dot_product_attention over a static cache. Greedy, all write the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import Damaged, checkpoints, read
from common import Runs, arguments, print_table, text_batches
from gpt import GPT, GPTConfig, PlainAttention, PlainGPT
from rich.progress import track
from torch import Tensor

from cuda_ext.nn import KeyValueCache, separated

PROMPTS = (b"The value of the expression ", b"If the class defines method ", b"A list is ", b"Note that ")
STATE = ("settings", "model")

# Maps bytes (B, S) that follow those of earlier calls to logits (B, S, 256).
Step = Callable[[Tensor], Tensor]


def load(run: Path, steps: int, seed: int, out: Path, device: str) -> tuple[GPT, GPTConfig]:
    """The model of the newest checkpoint in `run`, or one that is trained now."""
    for path in reversed(checkpoints(run)):
        try:
            state = read(path, STATE)
        except Damaged:
            continue
        config = GPTConfig(**{name: state["settings"][name] for name in GPTConfig.__dataclass_fields__})
        model = GPT(config).to(device)
        model.load_state_dict(state["model"])
        print(f"the model of {path}")
        return model, config
    config = GPTConfig()
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        return loss.item()

    print(f"no checkpoint in {run}: training for {steps} steps; `make demo` trains longer")
    runs = Runs()
    runs.train("cuda_ext", text_batches(steps, 4, 256, seed), steps, step)
    runs.report(out / "write_gpt.png")
    return model, config


class StaticAttention(PlainAttention):
    """PlainAttention with a cache (B, Hk, capacity, D) in plain PyTorch."""

    def start(self, batch: int, capacity: int, lengths: Tensor) -> None:
        kv_heads = self.k_proj.out_features // self.head_dim
        self.keys, self.values = lengths.new_zeros(2, batch, kv_heads, capacity, self.head_dim, dtype=torch.float32)
        self.lengths = lengths

    def rotate_at(self, x: Tensor, positions: Tensor) -> Tensor:  # x (B, H, S, D), positions (B, S)
        exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / -self.head_dim
        angles = (positions.unsqueeze(-1) * 10000.0**exponents).unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = self.lengths.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)  # (B, S)
        rows = at[:, None, :, None].expand(-1, k.shape[1], -1, self.head_dim)
        self.keys.scatter_(2, rows, self.rotate_at(k, at))
        self.values.scatter_(2, rows, v)
        mask = torch.arange(self.keys.shape[2], device=x.device) <= at.unsqueeze(-1)  # (B, S, capacity)
        out = F.scaled_dot_product_attention(
            self.rotate_at(q, at), self.keys, self.values, mask.unsqueeze(1), enable_gqa=True
        )
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return out if residual is None else residual + out


@torch.inference_mode()
def write(step: Step, advance: Callable[[Tensor], None], prompts: list[bytes], length: int, pick: object) -> Tensor:
    """`length` bytes after each prompt, (B, length). pick(logits) chooses the next bytes, (B,) from (B, 256)."""
    assert callable(pick)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts):
        row[: len(prompt)] = torch.tensor(list(prompt))
    logits = step(padded)[torch.arange(len(prompts)), lengths - 1]
    advance(lengths)
    written = []
    for _ in range(length):
        written.append(pick(logits))
        logits = step(written[-1].unsqueeze(1))[:, -1]
        advance(torch.ones_like(lengths))
    return torch.stack(written, dim=1)


def with_cache(model: GPT, config: GPTConfig, prompts: list[bytes], length: int, pick: object, device: str) -> Tensor:
    longest = [len(prompt) + length + 1 for prompt in prompts]
    head_dim = config.features // config.heads
    cache = KeyValueCache(config.layers, longest, config.kv_heads, head_dim, device=device, dtype=torch.float32)
    return write(
        lambda tokens: model(tokens.to(device), cache=cache).cpu(),
        lambda counts: cache.advance(counts.to(device, torch.int32)),
        *(prompts, length, pick),
    )


def without_cache(model: GPT, _: GPTConfig, prompts: list[bytes], length: int, pick: object, device: str) -> Tensor:
    texts = torch.zeros(len(prompts), max(map(len, prompts)) + length + 1, dtype=torch.int64, device=device)
    ends = torch.zeros(len(prompts), dtype=torch.int64)
    rows = torch.arange(len(prompts))

    def step(tokens: Tensor) -> Tensor:
        columns = torch.arange(tokens.shape[1])
        at = ends.unsqueeze(1) + columns
        texts[rows.unsqueeze(1), at] = tokens.to(device)
        logits = model(texts[:, : int(ends.max()) + tokens.shape[1]])
        return logits.cpu()[rows.unsqueeze(1), at]

    return write(step, ends.add_, prompts, length, pick)


def in_plain_pytorch(
    model: GPT, config: GPTConfig, prompts: list[bytes], length: int, pick: object, device: str
) -> Tensor:
    plain = PlainGPT(config).to(device)
    plain.load_state_dict(separated(model))
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    for block in plain.blocks:
        block.attention.__class__ = StaticAttention
        block.attention.start(len(prompts), max(map(len, prompts)) + length + 1, lengths)
    return write(
        lambda tokens: plain(tokens.to(device)).cpu(), lambda n: lengths.add_(n.to(device)), prompts, length, pick
    )


WAYS = {"cuda_ext, paged cache": with_cache, "PyTorch, static cache": in_plain_pytorch, "no cache": without_cache}


def main() -> dict[str, Tensor]:
    options = arguments(__doc__, run="runs/gpt", steps=150, tokens=512, temperature=0.7)
    model, config = load(Path(options.run), options.steps, options.seed, options.out, options.device)
    model.eval()
    prompts = list(PROMPTS)

    def greedy(logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def sampled(logits: Tensor) -> Tensor:
        return torch.multinomial(torch.softmax(logits / options.temperature, -1), 1).squeeze(1)

    written, rows = {}, []
    for name, way in track(WAYS.items(), "   writing"):
        way(model, config, prompts, 4, greedy, options.device)
        begin = time.perf_counter()
        written[name] = way(model, config, prompts, options.tokens, greedy, options.device)
        seconds = time.perf_counter() - begin
        same = "yes" if torch.equal(written[name], written["cuda_ext, paged cache"]) else "no"
        rows.append(
            (name, f"{len(prompts) * options.tokens / seconds:.0f}", f"{1e3 * seconds / options.tokens:.2f}", same)
        )
    print_table(("", "tokens/s", "ms per step", "same text"), rows)
    for title, pick in (("greedy", greedy), ("sampled", sampled)):
        torch.manual_seed(options.seed)
        text = with_cache(model, config, prompts, min(options.tokens, 160), pick, options.device)
        for prompt, row in zip(prompts, text.tolist()):
            print(f"{title}: {prompt.decode()!r} -> {bytes(row).decode(errors='replace')!r}")
    return written


if __name__ == "__main__":
    main()
