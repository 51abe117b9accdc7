"""DistributedDataParallel's arguments and members, for programs in which only the name of the wrapper changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from cuda_ext.distributed.checks import NAME
from cuda_ext.distributed.collectives import AllreduceState, allreduce_hook

Device = int | str | torch.device

# Where `ignore` leaves the names; torch's wrapper and Lightning read them there, too.
IGNORED = "_ddp_params_and_buffers_to_ignore"

_REFUSED = {
    "mixed_precision": "parameters keep their dtype. Call the model inside torch.autocast(device_type, "
    "torch.bfloat16); for 16-bit transfers pass wire_dtype=torch.bfloat16",
    "bucket_cap_mb_list": 'all buckets have one capacity. Pass it as bucket_cap_mb, or "auto", the default, for '
    "buckets of different sizes that suit the network",
}

_DESCRIBED = "print(model.describe()) shows the buckets, model.trace() when they are sent"
_INSTEAD = {
    "_register_builtin_comm_hook": "pass wire_dtype=torch.float16 when wrapping, for FP16_COMPRESS",
    "_register_buffer_comm_hook": "pass broadcast_buffers=False and reduce the buffers yourself before forward",
    "_register_fused_optim": "call optimizer.step() after backward",
    "reducer": _DESCRIBED,
    "logger": _DESCRIBED,
    "_get_ddp_logging_data": _DESCRIBED,
    "_set_ddp_runtime_logging_sample_rate": _DESCRIBED,
    "_update_process_group": "call model.close(), then BucketedDataParallel(model.module, process_group=group)",
}


def check_ddp_arguments(given: Mapping[str, Any], device: torch.device) -> None:
    """ValueError for an argument that cannot be honoured; ``device``: that of the trained parameters."""
    for name, why in _REFUSED.items():
        if given[name]:
            raise ValueError(f"{NAME}: expected {name}=None, got {given[name]!r}, but {why}")
    pair = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
    if (given[pair[0]] is None) != (given[pair[1]] is None):
        raise ValueError(f"{NAME}: expected {' and '.join(pair)} together, got only one; neither is needed")
    device_ids, output_device = given["device_ids"] or [], given["output_device"]
    if len(device_ids) > 1:
        raise ValueError(
            f"{NAME}: expected device_ids to be None or the device of the module, got {device_ids}; start one process "
            "per device, as with torchrun --nproc-per-node"
        )
    for name, place in (*(("device_ids", each) for each in device_ids), ("output_device", output_device)):
        if place is not None and not _is_same(place, device):
            raise ValueError(
                f"{NAME}: expected {name} to be None or the device of the module, {device}, got {place!r}; move the "
                "module there before it is wrapped"
            )


def _is_same(place: Device, device: torch.device) -> bool:
    """Whether ``place`` means ``device``: a number is that of a GPU, and a name without one the current GPU."""
    if isinstance(place, int):
        return device.type != "cpu" and place == device.index
    named = torch.device(place)
    if named.index is None and named.type == device.type != "cpu":
        return device.index == torch.accelerator.current_device_index()
    return named == device


def move_inputs(inputs: Any, device: torch.device) -> Any:
    """``inputs`` with every tensor in their tuples, lists and dicts on ``device``."""

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) or is_packed(leaf) else leaf

    def is_packed(node: Any) -> bool:  # a tuple whose ``batch_sizes`` stay on the CPU
        return isinstance(node, PackedSequence)

    return tree_map(move, inputs, is_leaf=is_packed)


def wire_dtype_of_hook(hook: Callable[..., Any], state: object, group: dist.ProcessGroup) -> torch.dtype | None:
    """The ``wire_dtype`` that stands for a communication hook of torch's wrapper; ValueError if there is none."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # needs NumPy

    dtypes = {
        default_hooks.allreduce_hook: None,
        default_hooks.fp16_compress_hook: torch.float16,
        default_hooks.bf16_compress_hook: torch.bfloat16,
        allreduce_hook: state.wire_dtype if isinstance(state, AllreduceState) else None,
    }
    if not callable(hook) or hook not in dtypes:
        raise ValueError(
            f"{NAME}.register_comm_hook: expected allreduce_hook, fp16_compress_hook or bf16_compress_hook, got "
            f"{hook}, but algorithm= sums gradients, not a hook; wrap with wire_dtype=, algorithm= and error_feedback= "
            "instead, or keep torch.nn.parallel.DistributedDataParallel for this hook"
        )
    of = state.process_group if isinstance(state, AllreduceState) else state
    if of is not None and dist.get_process_group_ranks(of) != dist.get_process_group_ranks(group):  # type: ignore[arg-type]
        raise ValueError(f"{NAME}.register_comm_hook: expected the ranks of the wrapper in state, got {of}")
    return dtypes[hook]


def missing_member(name: str) -> AttributeError | None:
    """The error for a member of torch's wrapper without a counterpart; None for other names."""
    instead = _INSTEAD.get(name)
    return None if instead is None else AttributeError(f"{NAME} has no {name}: {instead}", name=name)


def ignore(module: nn.Module, names: Sequence[str]) -> None:
    """See `BucketedDataParallel._set_params_and_buffers_to_ignore_for_model`."""
    setattr(module, IGNORED, names)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in names:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]  # for torch's wrapper
