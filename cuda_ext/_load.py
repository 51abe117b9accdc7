"""Importing this module loads the compiled library; `ops` has its ops."""

from __future__ import annotations

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
