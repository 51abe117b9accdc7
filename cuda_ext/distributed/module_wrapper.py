"""A module with the attributes, names and checkpoints of the module it wraps, and no members of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from cuda_ext.distributed.reporting import NAME


class ModuleWrapper(nn.Module):
    """Forwards attributes, state dicts and named parameters and buffers to ``module``, which a subclass assigns.

    Names do not have the prefix ``module.``, so a checkpoint of either fits the other.
    """

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            f"{NAME}: cannot be copied, as its buckets belong to a process group; copy model.module instead"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{NAME}: cannot be pickled, as its buckets belong to a process group; save model.state_dict(), "
            "whose names are the module's, or model.module"
        )
