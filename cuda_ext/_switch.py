"""A reference-counted process-wide switch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Generic, TypeVar, cast

__all__ = ["Enabled", "Switch"]


State = TypeVar("State")


class Switch(Generic[State]):
    """Calls ``activate`` when the first user comes, and ``deactivate`` with the result, which is ``state`` in between,
    when the last user leaves.

    A user is a call of `turn_on`, until the next `turn_off`; or, if its result is used in a `with` statement, the
    block, to its end. Blocks may be nested, and overlap in several threads.
    """

    def __init__(self, activate: Callable[..., State], deactivate: Callable[[State], None]) -> None:
        self.lock = threading.RLock()
        self.is_active, self.state = False, cast("State", None)
        self._activate, self._deactivate = activate, deactivate
        self._calls, self._blocks = 0, 0

    def turn_on(self, **settings: Any) -> Enabled:
        """``settings`` are arguments for ``activate``, and count only if this activates."""
        with self.lock:
            self._update(self._calls + 1, self._blocks, settings)
        return Enabled(self, settings)

    def turn_off(self) -> None:
        with self.lock:
            self._update(0, self._blocks)

    def _update(self, calls: int, blocks: int, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        wanted = calls + blocks > 0
        if wanted and not self.is_active:
            self.state = self._activate(**settings)
        elif self.is_active and not wanted:
            self._deactivate(self.state)
        self._calls, self._blocks, self.is_active = calls, blocks, wanted


class Enabled:
    """Active until it is turned off; as a `with` statement, until the end of the block."""

    def __init__(self, switch: Switch[Any], settings: Mapping[str, Any]) -> None:
        self._switch, self._settings = switch, settings
        self._counts_as_call = True

    def __enter__(self) -> Enabled:
        switch = self._switch
        with switch.lock:  # the block takes the place of the call
            switch._update(max(0, switch._calls - self._counts_as_call), switch._blocks + 1, self._settings)
            self._counts_as_call = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        switch = self._switch
        with switch.lock:
            switch._update(switch._calls, switch._blocks - 1)

    def remove(self) -> None:
        """Turns it off. Blocks that are running stay active to their end."""
        self._switch.turn_off()
