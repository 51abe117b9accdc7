"""The Python interface of the flash-attn package, version 2, on `cuda_ext.flash_attention`.

Put `cuda_ext.compat.` before `flash_attn` in an import, and the rest of a program stays::

    from cuda_ext.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from cuda_ext.compat.flash_attn.bert_padding import pad_input, unpad_input

Names, order and defaults of the arguments are flash-attn 2.8's; `flash_attn_interface` tells where the two differ. For
its Hopper package, FlashAttention-3, see `cuda_ext.compat.flash_attn_interface`.

What is for inference only (`flash_attn_with_kvcache`) and the package's modules and layers are not here.
"""

from cuda_ext.compat.flash_attn import bert_padding
from cuda_ext.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
