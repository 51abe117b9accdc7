"""The interfaces of other packages on top of this package's ops: a program changes only its import lines.

from cuda_ext.compat.flash_attn import flash_attn_func               # flash-attn 2
from cuda_ext.compat.flash_attn_interface import flash_attn_func     # its Hopper package, FlashAttention-3

Or not even these: after `cuda_ext.compat.install()`, `import flash_attn` gives the first.
"""

from cuda_ext.compat import flash_attn, flash_attn_interface
from cuda_ext.compat.installing import install, uninstall

__all__ = ["flash_attn", "flash_attn_interface", "install", "uninstall"]
