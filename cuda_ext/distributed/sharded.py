"""Optimizers with a part of their state on each rank: ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cuda_ext import bucket as bucket_ops
from cuda_ext._load import ops
from cuda_ext._timing import profiler_range
from cuda_ext.distributed.algorithms import Algorithm
from cuda_ext.distributed.checks import NAME
from cuda_ext.distributed.gradient_bucket import GradientBucket, Outcome
from cuda_ext.distributed.memory import Layout


def asked_for_optimizers() -> bool:
    """Whether `torch.distributed.checkpoint.state_dict`, which calls this, was given an optimizer."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_verify_options":
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("optims"))


def make_optimizer(
    optimizer: type[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, nn.Parameter],
    params: Iterable[Any] | None,
    defaults: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """``optimizer(params, **defaults)`` with this rank's shards instead of the parameters; None: of all parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    chosen = list(names if params is None else params)
    groups = chosen if chosen and isinstance(chosen[0], dict) else [{"params": chosen}]

    def shard_of(parameter: Any) -> nn.Parameter | None:
        if not isinstance(parameter, Tensor) or parameter not in names:
            what = f"one of shape {tuple(parameter.shape)}" if isinstance(parameter, Tensor) else repr(parameter)
            raise ValueError(
                f"{NAME}.sharded_optimizer: expected parameters of the wrapped module, got {what} that is not one; "
                "give it to an optimizer of its own"
            )
        return shards.get(names[parameter])

    def shards_of(chosen: Any) -> list[nn.Parameter]:
        several = [chosen] if isinstance(chosen, Tensor) else chosen
        return [shard for shard in map(shard_of, several) if shard is not None]

    return optimizer([{**group, "params": shards_of(group["params"])} for group in groups], **defaults)


def gather_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The state of the optimizers of all ranks, by name, as an unsharded optimizer has it. A collective."""
    here = {
        name: {key: value.dtype if _is_piece(key, value, shard) else value for key, value in state.items()}
        for name, shard in shards.items()
        if (state := optimizer.state.get(shard))
    }
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (_group_names(optimizer, shards), here), group=group)
    whole: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        entries = {key: value for _, theirs in ranks for key, value in theirs.get(name, {}).items()}
        for key, value in entries.items():
            if isinstance(value, torch.dtype):
                value = torch.zeros_like(parameter, dtype=value, requires_grad=False)
                elements = _elements(value)
                if key in here.get(name, {}):
                    elements[_place(shards[name])] = optimizer.state[shards[name]][key]
                # Each element is non-zero on one rank only; a sum of bytes keeps all of its bits.
                dist.all_reduce(elements.view(torch.uint8), group=group)
            whole.setdefault(name, {})[key] = value
    groups = [
        {**options, "params": [name for name in parameters if any(name in names[number] for names, _ in ranks)]}
        for number, options in enumerate(optimizer.param_groups)
    ]
    return {"state": whole, "param_groups": groups}


def load_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, nn.Parameter],
) -> None:
    """Loads this rank's pieces of a state from `gather_state` into the optimizer."""
    op, groups = f"{NAME}.load_optimizer_state_dict", state_dict.get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{op}: expected state_dict to have {len(optimizer.param_groups)} param_groups, like the optimizer, got "
            f"{len(groups)}; make both with the same groups"
        )
    own: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for group, names in zip(groups, _group_names(optimizer, shards)):
        indices = range(first, first + len(names))
        first = indices.stop
        own["param_groups"].append({**group, "params": list(indices)})
        for index, name in zip(indices, names):
            if name not in group["params"]:
                raise ValueError(
                    f"{op}: expected param_groups with the same parameters as the optimizer, got none or another "
                    f"group for {name}; use a state_dict from model.optimizer_state_dict or get_optimizer_state_dict"
                )
            entries, place = state_dict["state"].get(name, {}), _place(shards[name])
            own["state"][index] = {}
            for key, value in entries.items():
                if _is_piece(key, value, parameters[name]):
                    value = torch.empty_like(parameters[name], dtype=value.dtype, requires_grad=False).copy_(value)
                    value = _elements(value)[place]
                own["state"][index][key] = value.clone() if isinstance(value, Tensor) else value
    optimizer.load_state_dict(own)


def _group_names(optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]) -> list[list[str]]:
    names = {shard: name for name, shard in shards.items()}
    try:
        return [[names[shard] for shard in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise ValueError(
            f"{NAME}: expected an optimizer from sharded_optimizer of this model, got {type(optimizer).__name__} with "
            "other parameters"
        ) from None


def _is_piece(key: str, value: object, of: Tensor) -> bool:
    """Whether a value of an optimizer's state is elementwise, like moments, or belongs to the whole parameter."""
    return isinstance(value, Tensor) and value.shape == of.shape and key != "step"


def _elements(tensor: Tensor) -> Tensor:
    """The elements in memory order, in which parameters are divided into shards."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _place(shard: nn.Parameter) -> slice:
    """Which elements of its parameter a shard has: the storage is that of the parameter."""
    return slice(shard.storage_offset(), shard.storage_offset() + shard.numel())


def refuse_other_optimizers(named: Mapping[str, nn.Parameter]) -> RemovableHandle:
    """Makes the step of any optimizer with one of these parameters raise, as only their shards have gradients."""
    names = {id(parameter): name for name, parameter in named.items()}

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    raise RuntimeError(
                        f"{NAME}: expected an optimizer from model.sharded_optimizer, as with shard_optimizer=True "
                        f"only a rank's pieces of parameters get gradients, got {type(optimizer).__name__} with "
                        f"parameter {names[id(parameter)]}, which it would not update"
                    )

    return register_optimizer_step_pre_hook(refuse)


class ShardedBucket(GradientBucket):
    """A bucket of which each rank only gets its part of the sum, and whose parameters have the layout of gradients.

    The rank's optimizer updates ``shards``: flat pieces of the parameters, where they overlap the rank's part; their
    gradients are views of that part. `gather` then distributes the updated parts to all ranks, in place.

    Each parameter has a storage of its own, by which savers tell parameters apart, over its place in ``values``.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        layout: Layout,
        wire: Tensor,
        gradients: Tensor | None,  # (layout.size,); only this rank's part is used
        algorithm: Algorithm,
        error_feedback: bool,
        values: Tensor,  # (layout.size,), in the parameters' dtype: their new memory
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(named, layout, wire, gradients, algorithm, error_feedback)
        self._group = group
        self._values = values
        size = layout.size // algorithm.ranks
        part = slice(algorithm.rank * size, (algorithm.rank + 1) * size)
        self._wire_part, self._values_part = wire[part], values[part]
        self._gradients_part = self._wire_part if gradients is None else gradients[part]
        self.shards: dict[str, nn.Parameter] = {}
        self._homes: list[Tensor] = []  # the memory that each parameter was given
        self._addresses: list[int] = []  # of the parameters' places in ``values``
        self._away: list[int] = []  # positions of homes that are no longer there, as after ``share_memory_()``
        # For each shard: the position of its parameter, the shard, and its gradient.
        self._places: list[tuple[int, nn.Parameter, Tensor]] = []
        for position, (name, parameter) in enumerate(named.items()):
            begin = layout.offsets[position]
            place = self._view(values, position)
            home: Tensor = ops._own_storage(place)
            home.copy_(parameter.detach())
            parameter.data = home
            self._homes.append(home)
            self._addresses.append(place.data_ptr())
            first, last = max(begin, part.start), min(begin + parameter.numel(), part.stop)
            if first < last:
                shard = nn.Parameter(_elements(home)[first - begin : last - begin])
                self.shards[name] = shard
                (gradient,) = ops._not_views([self._gradients_part[first - part.start : last - part.start]])
                self._places.append((position, shard, gradient))

    def finish(self) -> Outcome:
        outcome = super().finish()
        self.drop_gradients()
        unused, unsettled = set(self._unused), set(self._unsettled)
        self._unsettled.clear()
        for position, shard, gradient in self._places:
            if position not in unused:
                if position in unsettled and shard.grad is None:
                    self._unsettled[position] = shard, gradient
                shard.grad = gradient
            elif shard.grad is not None:  # the user zeroes gradients in place, and expects zeros
                shard.grad.zero_()
        return outcome

    def _receive(self, stats: Tensor | None) -> None:
        if self.unpacks:
            with profiler_range("unpack_bucket"):
                bucket_ops.unpack(self._wire_part, [self._gradients_part], [0])

    @torch.no_grad()
    def take_back(self) -> None:
        """Moves parameters that were given other memory, as by ``parameter.data = x``, back to where the shards are."""
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            if parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter.detach())
                parameter.data = home

    def gather(self) -> dist.Work | None:
        """Starts the all-gather of the parameters."""
        self._away = [n for n, home in enumerate(self._homes) if home.data_ptr() != self._addresses[n]]
        for position in self._away:
            self._view(self._values, position).copy_(self._homes[position])
        return self._group._allgather_base(self._values, self._values_part)

    def gathered(self) -> None:
        """After the all-gather."""
        for position in self._away:
            self._homes[position].copy_(self._view(self._values, position))

    def reduced(self) -> list[Tensor]:
        return [shard.grad for shard in self.shards.values() if shard.grad is not None]

    def stats(self, whole: bool = False) -> tuple[Tensor, bool]:
        tensors = self.reduced()
        if not tensors:
            return torch.zeros(2, device=self.wire.device), True
        return bucket_ops.stats(tensors), True

    def remember(self, stats: Tensor) -> None:
        """Nothing: from its own part a rank cannot tell whether the parts of the others have changed."""
