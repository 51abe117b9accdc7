"""Transformer layers built on the ops. Their state dicts load weights of `torch.nn`, timm and Llama-style models."""

from cuda_ext.nn.attention import RotaryEmbedding, SelfAttention
from cuda_ext.nn.cache import KeyValueCache
from cuda_ext.nn.experts import Experts, MixtureOfExperts, Router, RouterLosses
from cuda_ext.nn.joint_weights import separated
from cuda_ext.nn.linear import MLP, GatedMLP, Linear
from cuda_ext.nn.loss import LinearCrossEntropyLoss

__all__ = [
    "MLP",
    "Experts",
    "GatedMLP",
    "KeyValueCache",
    "Linear",
    "LinearCrossEntropyLoss",
    "MixtureOfExperts",
    "RotaryEmbedding",
    "Router",
    "RouterLosses",
    "SelfAttention",
    "separated",
]
