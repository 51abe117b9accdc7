"""Loads the compiled library when imported, and holds its ops: `from cuda_ext._load import ops; ops.gemm(...)`."""

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


# They are where `cuda_ext.dev.load` has built them in this process.
if not _stamp.ops_are_defined():
    _load_installed()

ops = getattr(torch.ops, NAMESPACE)
