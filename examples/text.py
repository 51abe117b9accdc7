"""The text a model learns from: where it comes from, and in which order it is read."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from report import UserError
from torch import Tensor


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of the language reference that every Python carries, as uint8 (length,)."""
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
    """What is learnt, and the last tenth, which is held out; UserError if that is too little for ``context``."""
    least = max(20 * context // 9 + 1, 20)  # two windows and a byte to learn, two bytes held out
    if len(text) < least:
        raise UserError(
            f"--data: expected at least {least} bytes for --context {context}, got {len(text)}: "
            "take a longer text or a shorter context"
        )
    split = len(text) - len(text) // 10
    return text[:split], text[split:]


class Windows:
    """Training windows in an order that the seed alone decides, so that a resumed run needs no state of it.

    Every epoch cuts the text into windows from a random phase on and goes through them in a random order.
    """

    def __init__(self, text: Tensor, context: int, seed: int) -> None:
        self.text, self.context, self.seed = text, context, seed
        self.per_epoch = (len(text) - 1) // context - 1  # the random phase takes up to one window
        self.starts = functools.lru_cache(maxsize=2)(self._starts)

    def _starts(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        phase = torch.randint(self.context, (1,), generator=generator)
        return phase + self.context * torch.randperm(self.per_epoch, generator=generator)

    def __call__(self, numbers: range) -> tuple[Tensor, Tensor]:
        """The windows of these numbers, and the same one byte further on, each int64 (len(numbers), context)."""
        starts = torch.stack([self.starts(n // self.per_epoch)[n % self.per_epoch] for n in numbers])
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
