"""Runs on each host under torchrun: the demo, which logs its steps and errors to a file for `four_hosts.py train`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent)]

import train_gpt  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from training import Training  # noqa: E402


def note(event: str, **values: Any) -> None:
    """Appends a line to the file of events in one write, so that lines of several processes do not mix."""
    place = {"host": int(os.environ["HOST_NUMBER"]), "pid": os.getpid()}
    with open(os.environ["HOST_EVENTS"], "ab", buffering=0) as file:
        file.write(json.dumps({"time": time.time(), "event": event, **place, **values}).encode() + b"\n")


class NotedTraining(Training):
    def run(self) -> bool:
        note("ready", step=self.step, rank=self.rank)
        finished = super().run()
        note("trained", digest=self.digest())
        return finished

    def train_step(self, *arguments: Any) -> bool:
        stopped = super().train_step(*arguments)
        note("step", step=self.step, loss=self.losses[-1].hex())
        return stopped

    def digest(self) -> str:
        """A digest of all bits of the parameters and the optimiser's state."""
        digest = hashlib.sha256()
        for leaf in tree_leaves([self.gpt.state_dict(), self.optimizer.state_dict()]):
            digest.update(leaf.contiguous().numpy().data if isinstance(leaf, Tensor) else repr(leaf).encode())
        return digest.hexdigest()


if __name__ == "__main__":
    note("start")
    try:
        code = train_gpt.main(sys.argv[1:], NotedTraining)
    except Exception as error:
        note("error", text=f"{type(error).__name__}: {error}")
        raise
    sys.exit(code)
