"""The training text: its source, and the order in which it is read."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from report import UserError
from torch import Tensor


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of the language reference that ships with Python, as uint8 (length,)."""
    if path is None:
        from pydoc_data.topics import topics

        data = "".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"--data: cannot read {path} ({error.strerror}): give the path of a text file") from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def split_text(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The training text, and the last tenth, which is held out. Raises UserError if it is too short for ``context``."""
    least = max(20 * context // 9 + 1, 20)  # two windows and a byte for training, two bytes held out
    if len(text) < least:
        raise UserError(
            f"--data: expected at least {least} bytes for --context {context}, got {len(text)}: "
            "take a longer text or a shorter context"
        )
    split = len(text) - len(text) // 10
    return text[:split], text[split:]


class Windows:
    """Training windows in an order that depends only on the seed, so that a resumed run needs no saved state for it.

    Every epoch cuts the text into windows, starting at a random offset, and visits them in random order.
    """

    def __init__(self, text: Tensor, context: int, seed: int) -> None:
        self.text, self.context, self.seed = text, context, seed
        self.per_epoch = (len(text) - 1) // context - 1  # the random offset uses up to one window
        self.starts = functools.lru_cache(maxsize=2)(self._starts)

    def _starts(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        phase = torch.randint(self.context, (1,), generator=generator)
        return phase + self.context * torch.randperm(self.per_epoch, generator=generator)

    def __call__(self, numbers: range) -> tuple[Tensor, Tensor]:
        """The windows with these numbers and their targets, one byte later; each int64 (len(numbers), context)."""
        starts = torch.stack([self.starts(n // self.per_epoch)[n % self.per_epoch] for n in numbers])
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
