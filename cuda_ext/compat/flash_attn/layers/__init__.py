"""The layers of flash-attn that other libraries import."""

from cuda_ext.compat.flash_attn.layers import rotary

__all__ = ["rotary"]
