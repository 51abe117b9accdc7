"""What the files of this folder share: importing it loads nothing."""

from __future__ import annotations

from cuda_ext.integrations.counting import Calls

__all__ = ["NAME", "counter"]

NAME = "cuda_ext"
counter = Calls()
