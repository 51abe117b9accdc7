"""A byte-level, Llama-style GPT: the model, the same model in plain PyTorch, scoring and sampling.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward layer, RMSNorm, no biases
(Touvron et al., arXiv 2302.13971). Tokens are bytes, so there is no tokenizer, and any file can be the text.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import UserError
from torch import Tensor, nn

from cuda_ext import linear_cross_entropy
from cuda_ext.nn import GatedMLP, SelfAttention, separated

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    features: int = 256
    hidden_features: int = 768
    heads: int = 4
    kv_heads: int = 2


class Block(nn.Module):
    def __init__(self, config: GPTConfig, context_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.features, eps=1e-6)
        self.attention = SelfAttention(
            config.features, config.heads, num_kv_heads=config.kv_heads, context_group=context_group
        )
        self.mlp_norm = nn.RMSNorm(config.features, eps=1e-6)
        self.mlp = GatedMLP(config.features, config.hidden_features)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        options = {} if cache is None else {"cache": cache}
        x = add(x, self.attention, self.attention_norm(x), **options)
        return add(x, self.mlp, self.mlp_norm(x))


def add(residual: Tensor, layer: nn.Module, input: Tensor, **options: Any) -> Tensor:
    """``residual + layer(input)``; as one op, except under autocast, which would round the residual to bfloat16."""
    if torch.is_autocast_enabled(input.device.type):
        return residual + layer(input, **options)
    return layer(input, residual=residual, **options)


class GPT(nn.Module):
    """Maps bytes (B, S) int64 to logits of the next byte (B, S, 256) float32, or with ``targets`` (B, S) to the mean
    loss in nats, a scalar. With ``cache``, which has one for each layer, the bytes follow those that it has. With
    ``context_group``, each rank of it has a part of the bytes."""

    def __init__(self, config: GPTConfig, context_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.features)
        self.blocks = nn.ModuleList(Block(config, context_group) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.features, eps=1e-6)
        self.head = nn.Linear(config.features, VOCABULARY, bias=False)
        self.reset_parameters(config.layers)

    def reset_parameters(self, layers: int) -> None:
        """Normal with standard deviation 1 / sqrt(fan in), which preserves the scale of activations, except that

        - projections into the residual stream are smaller by sqrt(2 x layers), which preserves the scale of the stream;
        - embeddings have standard deviation 0.5, with which this model learns faster than with 1 / 16.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deviation = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    deviation /= math.sqrt(2 * layers)
                nn.init.normal_(parameter, std=0.5 if name == "embedding.weight" else deviation)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Any = None) -> Tensor:
        x = self.embedding(tokens)
        for n, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache[n])
        x = self.norm(x)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def logits(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """That of the logits, which are never in memory."""
        return linear_cross_entropy(x, self.head.weight, targets)


class PlainAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.features // config.heads
        self.q_proj = nn.Linear(config.features, config.features, bias=False)
        self.k_proj = nn.Linear(config.features, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.features, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.features, config.features, bias=False)

    def rotate(self, x: Tensor) -> Tensor:  # (B, H, S, D)
        frequencies = 10000.0 ** (
            torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / -self.head_dim
        )
        angles = torch.outer(torch.arange(x.shape[2], device=x.device, dtype=torch.float32), frequencies)
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return out if residual is None else residual + out


class PlainMLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.features, config.hidden_features, bias=False)
        self.up_proj = nn.Linear(config.features, config.hidden_features, bias=False)
        self.down_proj = nn.Linear(config.hidden_features, config.features, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out if residual is None else residual + out


class PlainGPT(GPT):
    """The same model in plain PyTorch. Its state dict is ``cuda_ext.nn.separated`` of that of `GPT`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.attention, block.mlp = PlainAttention(config), PlainMLP(config)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1), targets.flatten())


def check_one_step(
    model: GPT, config: GPTConfig, inputs: Tensor, targets: Tensor, autocast: torch.autocast
) -> list[str]:
    """Compares one step, its loss and every gradient, with the same model in plain PyTorch.

    The reference for both is plain PyTorch in float64. Returns the findings, one line each. Raises UserError if the
    largest gradient error, relative to the largest element of that gradient, is more than 3 times that of plain PyTorch
    in the same dtype: both round equally often, but not in the same places.
    """
    plain = PlainGPT(config).to(inputs.device)
    plain.load_state_dict(separated(model))
    exact = copy.deepcopy(plain).double()

    def step(net: GPT, context: contextlib.AbstractContextManager[object]) -> tuple[float, dict[str, Tensor]]:
        parameters = dict(net.named_parameters())
        with context:
            loss = net(inputs, targets)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return loss.item(), separated(net, dict(zip(parameters, gradients, strict=True)))

    exact_loss, exact_gradients = step(exact, contextlib.nullcontext())
    lines, largest = [], {}
    for title, net in (("cuda_ext", model), ("plain PyTorch", plain)):
        loss, gradients = step(net, autocast)
        absolute = {name: float((gradients[name] - expected).abs().max()) for name, expected in exact_gradients.items()}
        relative = {name: error / (float(exact_gradients[name].abs().max()) or 1.0) for name, error in absolute.items()}
        worst = max(relative, key=lambda name: relative[name] if math.isfinite(relative[name]) else math.inf)
        largest[title] = relative[worst]
        lines.append(
            f"check: {title} against float64: loss off by {abs(loss - exact_loss):.1e} of {exact_loss:.4f}; "
            f"largest error of {len(relative)} gradients {relative[worst]:.1e} relative, "
            f"{absolute[worst]:.1e} absolute, in {worst}"
        )
    if not largest["cuda_ext"] <= 3.0 * largest["plain PyTorch"]:
        raise UserError(
            "\n".join([*lines, "check: failed: expected an error of at most 3 times that of plain PyTorch"])
        )
    return lines


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, text: Tensor, context: int, batch: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """The cost of ``text`` (length,) uint8 under the model: float64 (2,) = [bits, bytes] of this rank's share.

    Windows of ``context`` bytes start every context/2 bytes. Each window after the first scores only the bytes that the
    previous one did not, so every byte except the first is predicted exactly once, from at least context/2 preceding
    bytes if the text has them.
    """
    stride = context // 2
    starts = list(range(0, max(len(text) - 1 - (context - stride), 1), stride))[rank::world_size]
    total = torch.zeros(2, dtype=torch.float64)
    offsets = torch.arange(context + 1)
    for first in range(0, len(starts), batch):
        start = torch.tensor(starts[first : first + batch])[:, None]
        position = start + offsets
        window = text[position.clamp(max=len(text) - 1)].to(next(model.parameters()).device, torch.int64)
        scored = (position[:, 1:] < len(text)) & ((offsets[1:] > context - stride) | (start == 0))
        nats = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten(), reduction="none").cpu()
        total += torch.stack([nats.double()[scored.flatten()].sum() / math.log(2), scored.sum()])
    return total


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, context: int, *, temperature: float = 0.7, seed: int = 0
) -> bytes:
    """``prompt`` followed by ``length`` sampled bytes, each conditioned on at most ``context`` previous bytes."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt), device=device)
    for _ in range(length):
        logits = model(text[None, -context:])[0, -1]
        choice = torch.multinomial(torch.softmax(logits / temperature, dim=-1).cpu(), 1, generator=generator)
        text = torch.cat([text, choice.to(device)])
    return bytes(text.tolist())
