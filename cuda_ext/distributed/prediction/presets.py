"""The parameters of well-known models, from the sizes in their papers and configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cuda_ext.distributed.prediction.model_shapes import Parameter

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer for text.

    kv, queries: width of the keys and of the queries of a token, all heads; default ``hidden``.
    experts: number of feed-forward layers, of which each token uses ``active``.
    positions: of a learnt position embedding. tied: whether the output shares the embedding's weight.
    biases: of "all" layers or only of "qkv".
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    kv: int | None = None
    _: dataclasses.KW_ONLY
    queries: int | None = None
    gated: bool = True
    experts: int = 0
    active: int = 2
    positions: int = 0
    segments: int = 0  # of BERT's segment embedding
    tied: bool = False
    pooler: bool = False
    biases: str = ""
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")  # of each layer
    norm_bias: bool = False
    head_norm: int = 0  # elements of the norms of queries and of keys
    norm_of: str = "norm"  # the norm outside the layers: "norm" after them, "embedding_norm" before
    dtype: str = "bfloat16"

    def parameters(self) -> list[Parameter]:
        """In order of registration."""
        embedding = (self.vocab, self.hidden)
        found = [Parameter("embedding", embedding, self.dtype, uses=float(self.tied), looked_up=True)]
        for name, count in (("position_embedding", self.positions), ("segment_embedding", self.segments)):
            if count:
                found.append(Parameter(name, (count, self.hidden), self.dtype, uses=0.0, looked_up=True))
        before, after = [list(self._norm(n)) if n == self.norm_of else [] for n in ("embedding_norm", "norm")]
        found += self._multiplied(before)
        for layer in range(self.layers):
            found += self._multiplied((f"layers.{layer}.{name}", shape) for name, shape in self._layer())
            found += self._experts(layer)
        found += self._multiplied(after)
        if self.pooler:  # uses one token of a sequence
            pooler = self._product("pooler", self.hidden, self.hidden, self.biases == "all")
            found += [dataclasses.replace(p, uses=1 / self.positions) for p in self._multiplied(pooler)]
        elif not self.tied:
            found += self._multiplied([("output", embedding)])
        return found

    def _multiplied(self, shapes: Shapes | list[tuple[str, tuple[int, ...]]]) -> list[Parameter]:
        return [Parameter(name, shape, self.dtype) for name, shape in shapes]

    def _layer(self) -> Shapes:
        queries = self.hidden if self.queries is None else self.queries
        kv = self.hidden if self.kv is None else self.kv
        every = self.biases == "all"
        of_qkv = every or self.biases == "qkv"
        first, *others = self.norms
        yield from self._norm(first)
        yield from self._product("query", queries, self.hidden, of_qkv)
        yield from self._product("key", kv, self.hidden, of_qkv)
        yield from self._product("value", kv, self.hidden, of_qkv)
        if self.head_norm:
            yield from [("query_norm", (self.head_norm,)), ("key_norm", (self.head_norm,))]
        yield from self._product("out", self.hidden, queries, every)
        for name in others:
            yield from self._norm(name)
        if self.experts:
            yield "router", (self.experts, self.hidden)
            return
        yield from self._feed_forward(every)

    def _feed_forward(self, bias: bool) -> Shapes:
        if self.gated:
            yield from self._product("gate", self.ffn, self.hidden, bias)
        yield from self._product("up", self.ffn, self.hidden, bias)
        yield from self._product("down", self.hidden, self.ffn, bias)

    def _experts(self, layer: int) -> Iterator[Parameter]:
        for expert in range(self.experts):
            for name, shape in self._feed_forward(bias=False):
                uses = self.active / self.experts
                yield Parameter(f"layers.{layer}.experts.{expert}.{name}", shape, self.dtype, uses=uses)

    def _norm(self, name: str) -> Shapes:
        yield name, (self.hidden,)
        if self.norm_bias:
            yield f"{name}.bias", (self.hidden,)

    @staticmethod
    def _product(name: str, rows: int, columns: int, bias: bool) -> Shapes:
        yield name, (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)


@dataclass(frozen=True)
class VisionTransformer:
    """For images of 224 x 224 and 1000 classes (Dosovitskiy et al., arXiv 2010.11929). An image counts as a token."""

    layers: int
    hidden: int
    ffn: int
    _: dataclasses.KW_ONLY
    patch: int

    def parameters(self) -> list[Parameter]:
        patches = (224 // self.patch) ** 2
        hidden = self.hidden
        blocks = Transformer(
            self.layers, hidden, self.ffn, vocab=1, gated=False, biases="all", norm_bias=True, dtype="float32"
        ).parameters()
        head = [("head", (1000, hidden)), ("head.bias", (1000,))]
        return [
            Parameter("class_token", (hidden,), uses=1.0),
            Parameter("patches", (hidden, 3, self.patch, self.patch), uses=patches),
            Parameter("patches.bias", (hidden,), uses=patches),
            Parameter("position_embedding", (patches + 1, hidden), uses=0.0, looked_up=True),
            *(dataclasses.replace(p, uses=patches + 1.0) for p in blocks if p.name not in ("embedding", "output")),
            *(Parameter(name, shape) for name, shape in head),
        ]


@dataclass(frozen=True)
class ResNet:
    """With bottleneck blocks, for images of 224 x 224 and 1000 classes, like torchvision's (He et al., arXiv
    1512.03385, with the stride in the 3 x 3 convolution). An image counts as a token.

    blocks: of each of the four stages.
    """

    blocks: tuple[int, int, int, int]

    def parameters(self) -> list[Parameter]:
        found = [*_convolution("conv1", 64, 3, 7, 112)]
        channels = 64
        for stage, count in enumerate(self.blocks):
            width, pixels = 64 << stage, 56 >> stage
            for block in range(count):
                name = f"layer{stage + 1}.{block}"
                pixels_in = pixels << (stage > 0 and block == 0)
                found += _convolution(f"{name}.conv1", width, channels, 1, pixels_in)
                found += _convolution(f"{name}.conv2", width, width, 3, pixels)
                found += _convolution(f"{name}.conv3", 4 * width, width, 1, pixels)
                if block == 0:
                    found += _convolution(f"{name}.downsample", 4 * width, channels, 1, pixels)
                channels = 4 * width
        return [*found, Parameter("fc", (1000, channels)), Parameter("fc.bias", (1000,))]


def _convolution(name: str, channels: int, channels_in: int, size: int, pixels: int) -> Iterator[Parameter]:
    """A convolution and its batch norm; ``pixels``: width of the output."""
    yield Parameter(name, (channels, channels_in, size, size), uses=float(pixels * pixels))
    for part in ("weight", "bias"):
        yield Parameter(f"{name}.norm.{part}", (channels,), uses=float(pixels * pixels))


Preset = Transformer | VisionTransformer | ResNet


def _gpt(layers: int, hidden: int, positions: int, dtype: str) -> Transformer:
    return Transformer(
        layers, hidden, 4 * hidden, 50257, gated=False, positions=positions, tied=True, biases="all", norm_bias=True,
        dtype=dtype,
    )  # fmt: skip


def _bert(layers: int, hidden: int) -> Transformer:
    return Transformer(
        layers, hidden, 4 * hidden, 30522, gated=False, positions=512, segments=2, tied=True, pooler=True, biases="all",
        norm_bias=True, norm_of="embedding_norm", dtype="float32",
    )  # fmt: skip


_GEMMA_2_NORMS = ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm")

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt(12, 768, 1024, "float32"),
    "gpt2-medium": _gpt(24, 1024, 1024, "float32"),
    "gpt2-large": _gpt(36, 1280, 1024, "float32"),
    "gpt2-xl": _gpt(48, 1600, 1024, "float32"),
    "gpt3-6.7b": _gpt(32, 4096, 2048, "bfloat16"),
    "gpt3-175b": _gpt(96, 12288, 2048, "bfloat16"),
    "llama2-7b": Transformer(32, 4096, 11008, 32000),
    "llama2-13b": Transformer(40, 5120, 13824, 32000),
    "llama2-70b": Transformer(80, 8192, 28672, 32000, 1024),
    "llama-1b": Transformer(16, 2048, 8192, 128256, 512, tied=True),  # 3.2
    "llama-3b": Transformer(28, 3072, 8192, 128256, 1024, tied=True),
    "llama-8b": Transformer(32, 4096, 14336, 128256, 1024),  # 3 and 3.1
    "llama-70b": Transformer(80, 8192, 28672, 128256, 1024),
    "llama-405b": Transformer(126, 16384, 53248, 128256, 1024),
    "mistral-7b": Transformer(32, 4096, 14336, 32000, 1024),
    "mixtral-8x7b": Transformer(32, 4096, 14336, 32000, 1024, experts=8),
    "mixtral-8x22b": Transformer(56, 6144, 16384, 32000, 1024, experts=8),
    "qwen2.5-0.5b": Transformer(24, 896, 4864, 151936, 128, tied=True, biases="qkv"),
    "qwen2.5-7b": Transformer(28, 3584, 18944, 152064, 512, biases="qkv"),
    "qwen2.5-72b": Transformer(80, 8192, 29568, 152064, 1024, biases="qkv"),
    "qwen3-8b": Transformer(36, 4096, 12288, 151936, 1024, head_norm=128),
    "gemma-2b": Transformer(18, 2048, 16384, 256000, 256, tied=True),
    "gemma-7b": Transformer(28, 3072, 24576, 256000, 4096, queries=4096, tied=True),
    "gemma2-9b": Transformer(42, 3584, 14336, 256000, 2048, queries=4096, tied=True, norms=_GEMMA_2_NORMS),
    "bert-base": _bert(12, 768),
    "bert-large": _bert(24, 1024),
    "vit-b-16": VisionTransformer(12, 768, 3072, patch=16),
    "vit-l-16": VisionTransformer(24, 1024, 4096, patch=16),
    "vit-h-14": VisionTransformer(32, 1280, 5120, patch=14),
    "resnet-50": ResNet((3, 4, 6, 3)),
    "resnet-101": ResNet((3, 4, 23, 3)),
    "resnet-152": ResNet((3, 8, 36, 3)),
}
SIZES = ("layers", "hidden", "ffn", "vocab", "kv")  # options that change a preset
