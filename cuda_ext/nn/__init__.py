"""Modules around the ops: the layers of a Llama-style transformer, whose state dicts load the weights that people
already have."""

from cuda_ext.nn.attention import RotaryEmbedding, SelfAttention
from cuda_ext.nn.linear import GatedMLP, Linear
from cuda_ext.nn.packing import unpacked

__all__ = ["GatedMLP", "Linear", "RotaryEmbedding", "SelfAttention", "unpacked"]
