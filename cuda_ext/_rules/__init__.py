"""What PyTorch needs to know about the ops in addition to their kernels, which C++ registers: fake kernels, FLOP
formulas, vmap rules, DTensor sharding rules and kernels for jagged nested tensors. Importing this package registers all
of it.
"""

import importlib

import cuda_ext._load  # noqa: F401
from cuda_ext._rules import (  # noqa: F401
    attention_fakes,
    attention_vmap,
    bucket,
    experts,
    flops,
    fp8_fakes,
    fp8_vmap,
    gemm_fakes,
    gemm_vmap,
    kvcache_fakes,
    loss_fakes,
    loss_vmap,
)
from cuda_ext._rules.after_import import AfterImport

AfterImport("torch.distributed.tensor", lambda: importlib.import_module("cuda_ext._rules.dtensor"))
AfterImport("torch.nested._internal.ops", lambda: importlib.import_module("cuda_ext._rules.jagged"))
