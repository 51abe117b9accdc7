"""Importing this module loads the compiled library; `ops` has its ops, `calls` some of them for small calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from cuda_ext import _stamp
from cuda_ext._toolchain import NAMESPACE


def _load_installed() -> None:
    _stamp.check()
    try:
        torch.ops.load_library(_stamp.LIBRARY)
    except OSError as error:
        reason = error.__cause__ or error
        remedy = f"Rebuild it with\n  {_stamp.build_command()}"
        raise ImportError(f"cuda_ext: cannot load the compiled library: {reason}. {remedy}") from error


# `cuda_ext.dev.load` may have loaded a just-in-time build already.
if not _stamp.ops_are_defined():
    _load_installed()

ops = getattr(torch.ops, NAMESPACE)


class _NoCalls:
    """Instead of the module `_calls`, which is compiled for one version of Python."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: NotImplemented


def _find_calls() -> Any:
    try:
        return importlib.import_module("cuda_ext._calls")
    except ImportError:
        return _NoCalls()


#: The ops of small calls, faster: all arguments by position; NotImplemented means that `ops` must be called.
calls = _find_calls()
