"""Data parallel training over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

from cuda_ext.distributed.collectives import AllreduceState, CoalescedWork, all_reduce_coalesced, allreduce_hook
from cuda_ext.distributed.data_parallel import BucketedDataParallel
from cuda_ext.distributed.fsdp import Float32ReduceScatter
from cuda_ext.distributed.grad_scaler import GradScaler
from cuda_ext.distributed.symmetric import SymmetricArena, probe
from cuda_ext.distributed.tensor_parallel import all_reduce, all_reduce_gradient
from cuda_ext.distributed.wire import ErrorFeedback, fp32_all_reduce, fp32_reduce_scatter

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
    "fp32_all_reduce",
    "fp32_reduce_scatter",
    "probe",
]
