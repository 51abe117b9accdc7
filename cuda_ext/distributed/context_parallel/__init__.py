"""Context parallelism: attention over sequences whose rows the ranks of a group share."""

from cuda_ext.distributed.context_parallel.attention import (
    ring_attention,
    ring_attention_varlen,
    ulysses_attention,
    ulysses_attention_varlen,
)
from cuda_ext.distributed.context_parallel.dtensor import attention_of_dtensors  # noqa: F401 serves flash_attention
from cuda_ext.distributed.context_parallel.layout import Layout
from cuda_ext.distributed.context_parallel.plan import ContextPlan, MethodPlan, plan_context
from cuda_ext.distributed.context_parallel.sequence import positions, shard_sequence, unshard_sequence
from cuda_ext.distributed.context_parallel.sharding import context_parallel

__all__ = [
    "ContextPlan",
    "Layout",
    "MethodPlan",
    "context_parallel",
    "plan_context",
    "positions",
    "ring_attention",
    "ring_attention_varlen",
    "shard_sequence",
    "ulysses_attention",
    "ulysses_attention_varlen",
    "unshard_sequence",
]
