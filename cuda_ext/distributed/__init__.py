"""Data parallel training over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

import warnings
from typing import Any

from cuda_ext.distributed.collectives import AllreduceState, CoalescedWork, all_reduce_coalesced, allreduce_hook
from cuda_ext.distributed.data_parallel import BucketedDataParallel
from cuda_ext.distributed.fsdp import Float32ReduceScatter
from cuda_ext.distributed.grad_scaler import GradScaler
from cuda_ext.distributed.symmetric import SymmetricArena, probe_shared_memory
from cuda_ext.distributed.tensor_parallel import all_reduce, all_reduce_gradient
from cuda_ext.distributed.wire import ErrorFeedback, float32_all_reduce, float32_reduce_scatter

__all__ = [
    "AllreduceState",
    "BucketedDataParallel",
    "CoalescedWork",
    "ErrorFeedback",
    "Float32ReduceScatter",
    "GradScaler",
    "SymmetricArena",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_gradient",
    "allreduce_hook",
    "float32_all_reduce",
    "float32_reduce_scatter",
    "probe_shared_memory",
]

_FORMER_NAMES = {
    "fp32_all_reduce": float32_all_reduce,
    "fp32_reduce_scatter": float32_reduce_scatter,
    "probe": probe_shared_memory,
}


def __getattr__(name: str) -> Any:
    renamed = _FORMER_NAMES.get(name)
    if renamed is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {__name__}.{renamed.__name__}", FutureWarning, stacklevel=2)
    return renamed
