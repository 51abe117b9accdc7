"""The collectives that the host has queued on a GPU and that the GPU has not completed."""

from __future__ import annotations

import threading
from collections import deque

import torch

from cuda_ext.distributed.clock import is_captured, is_reached

MOST = 64  # collectives that are remembered before it is asked which are complete


class Queued:
    """Names of collectives in the order of a stream, each with an event behind it. Empty on a CPU, where hosts wait.

    Over NCCL a rank that waits for another one waits on its GPU: the host runs ahead, and cannot tell from its own
    calls which collective does not end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._entries: deque[tuple[str, torch.cuda.Event]] = deque()

    def add(self, what: str) -> None:
        """``what`` ends before anything that is queued in the current stream from now on.

        What is captured runs later, and has no name then.
        """
        if self._device.type != "cuda" or is_captured(self._device):
            return
        if len(self._entries) >= MOST:
            self.oldest()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._entries.append((what, event))

    def oldest(self) -> str:
        """The first collective that is not complete, or an empty string. In any thread, even during a capture."""
        with self._lock:
            while self._entries:
                what, event = self._entries[0]
                if not self._is_complete(event):
                    return what
                self._entries.popleft()
        return ""

    def _is_complete(self, event: torch.cuda.Event) -> bool:
        try:
            return is_reached(event, self._device)
        except RuntimeError:  # an error of an earlier launch, which the next call of the host raises
            return False
