"""The interfaces of packages that people come from, on top of this package's ops: only the import line changes.

from cuda_ext.compat.flash_attn import flash_attn_func               # flash-attn 2
from cuda_ext.compat.flash_attn_interface import flash_attn_func     # its Hopper package, FlashAttention-3
"""

from cuda_ext.compat import flash_attn, flash_attn_interface

__all__ = ["flash_attn", "flash_attn_interface"]
