"""A module around another one, with that one's attributes, parameters and state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from cuda_ext.distributed.checks import NAME

PREFIX = "module."


class ModuleWrapper(nn.Module):
    """Forwards attributes, state dicts and named parameters and buffers to ``module``, which a subclass assigns.

    Names do not have the prefix ``module.``, so a checkpoint of either fits the other.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Also loads a state dict of DistributedDataParallel, whose names begin with ``module.``."""
        if self._has_prefix(state_dict, ""):
            state_dict = copy.copy(state_dict)
            if hasattr(state_dict, "_metadata"):
                state_dict._metadata = copy.copy(state_dict._metadata)
            consume_prefix_in_state_dict_if_present(state_dict, PREFIX)  # type: ignore[arg-type]
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Part of the load_state_dict of a module that contains the wrapper, such as an AveragedModel: torch looks for
        names with ``module.`` next."""
        if not self._has_prefix(state_dict, prefix):
            for name in [name for name in state_dict if name.startswith(prefix)]:
                state_dict[prefix + PREFIX + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _has_prefix(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        """Whether names have another ``module.`` than the wrapped module's own."""
        names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
        return all(name.startswith(PREFIX) for name in names) and "module" not in self.module._modules

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # A parameter, buffer or submodule of the wrapper itself would be neither averaged nor saved.

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)) and "module" in self._modules:
            self._refuse_member(name)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._refuse_member(name)

    register_module = add_module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._refuse_member(name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._refuse_member(name)

    def _refuse_member(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{NAME}: expected parameters, buffers and submodules to be given to the module before it is wrapped, got "
            f"{name} for the wrapper, which would neither average nor save it; assign it to model.module and wrap again"
        )
