"""Data parallel training over `torch.distributed`: gloo on CPUs, NCCL on GPUs."""

from cuda_ext.distributed.collectives import AllreduceState, CoalescedWork, all_reduce_coalesced, allreduce_hook
from cuda_ext.distributed.data_parallel import BucketedDataParallel

__all__ = ["AllreduceState", "BucketedDataParallel", "CoalescedWork", "all_reduce_coalesced", "allreduce_hook"]
