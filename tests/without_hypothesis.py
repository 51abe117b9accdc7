"""A replacement of hypothesis where it is not installed: its tests are reported as skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest


class settings:
    register_profile = load_profile = staticmethod(lambda *_, **__: None)

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        return test


def given(*_: object, **__: object) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    def decorate(test: Callable[..., Any]) -> Callable[[], None]:
        @pytest.mark.skip(reason="hypothesis is not installed")
        def skipped() -> None: ...

        # Without the test's arguments, which pytest would look up as fixtures.
        skipped.__name__, skipped.__doc__ = test.__name__, test.__doc__
        return skipped

    return decorate


HealthCheck = assume = strategies = MagicMock()
sys.modules["hypothesis"] = sys.modules[__name__]
sys.modules["hypothesis.strategies"] = strategies
