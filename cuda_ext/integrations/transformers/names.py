"""What the files of this folder share: importing it loads nothing."""

from __future__ import annotations

from typing import NoReturn

from cuda_ext.integrations.counting import Calls

__all__ = ["NAME", "counter", "refuse"]

NAME = "cuda_ext"
counter = Calls()


def refuse(what: str, error: type[Exception], advice: str, module: object = None) -> NoReturn:
    """Raises for something that attention does not do; `module`: the layer, if it is known."""
    counter.refused(what)
    layer = "" if module is None else f", {type(module).__name__}"
    raise error(f"attn_implementation={NAME!r}{layer}: {what}: {advice}")
