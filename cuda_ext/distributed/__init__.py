"""Data parallel training over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

from cuda_ext.distributed.collectives import AllreduceState, CoalescedWork, all_reduce_coalesced, allreduce_hook
from cuda_ext.distributed.float32_sums import (
    ErrorFeedback,
    Float32ReduceScatter,
    float32_all_reduce,
    float32_reduce_scatter,
)
from cuda_ext.distributed.grad_scaler import GradScaler
from cuda_ext.distributed.prediction.layers import SequenceParallelPlan, plan_sequence_parallel
from cuda_ext.distributed.sequence_parallel import all_gather_linear, linear_reduce_scatter
from cuda_ext.distributed.symmetric import SymmetricArena, probe_shared_memory
from cuda_ext.distributed.tensor_parallel import all_reduce, all_reduce_gradient
from cuda_ext.distributed.wrapper import BucketedDataParallel

__all__ = [
    "AllreduceState",
    "BucketedDataParallel",
    "CoalescedWork",
    "ErrorFeedback",
    "Float32ReduceScatter",
    "GradScaler",
    "SequenceParallelPlan",
    "SymmetricArena",
    "all_gather_linear",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_gradient",
    "allreduce_hook",
    "float32_all_reduce",
    "float32_reduce_scatter",
    "linear_reduce_scatter",
    "plan_sequence_parallel",
    "probe_shared_memory",
]
