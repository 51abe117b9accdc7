"""The Python interface of the flash-attn package, version 2, on top of `cuda_ext.flash_attention`.

Put `cuda_ext.compat.` before `flash_attn` in imports; the rest of a program stays the same::

    from cuda_ext.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from cuda_ext.compat.flash_attn.bert_padding import pad_input, unpad_input

Names, order and defaults of the arguments are those of flash-attn 2.8; `flash_attn_interface` lists the differences.
For its Hopper package, FlashAttention-3, see `cuda_ext.compat.flash_attn_interface`.

Of the package's modules and layers, `bert_padding` and `layers.rotary` are included.
"""

from cuda_ext.compat.flash_attn import bert_padding, layers
from cuda_ext.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "layers",
]
