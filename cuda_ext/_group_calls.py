"""The calls of an op whose ranks exchange tensors: their numbers and names, for errors, and what must be equal."""

from __future__ import annotations

import re
import weakref
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from cuda_ext._toolchain import NAMESPACE
from cuda_ext._watch import NamedCollectives

__all__ = ["GroupCall", "begin_call"]


class _Calls:
    """All calls of an op over a group. They are named for whoever waits for a dead or late rank."""

    def __init__(self, op: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.op = op
        self.count = 0
        self.agreed = set[str]()  # what ranks have compared
        self.collectives = NamedCollectives(f"{NAMESPACE}::{op}", group, device, self._status, name=op)

    def _status(self, waiting: str) -> str:
        return waiting or f"exchanges nothing; the last call of {self.op} that it has begun is call {self.count}"

    def compare(self, arguments: str) -> None:
        """Raises on every rank unless all have the same arguments in this call."""
        if arguments in self.agreed:
            return
        number = self.count

        def is_past(status: str) -> bool:  # a rank that compares, too, names the call, but waits for no exchange
            waits = re.search(r", of call (\d+)$", status)
            begun = re.search(rf"of {self.op} that it has begun is call (\d+)$", status)
            return bool((waits and int(waits[1]) >= number) or (begun and int(begun[1]) > number))

        watch = self.collectives.watch
        watch.busy(True)
        try:
            answers = watch.answers(f"call {number}", arguments, is_past)
        finally:
            watch.busy(False)
        for rank, theirs in answers.items():
            if theirs != arguments:
                got = (
                    f"{theirs} on rank {rank}" if theirs is not None else f"other arguments on rank {rank}, or no call"
                )
                raise RuntimeError(
                    f"{NAMESPACE}::{self.op}: expected the same arguments on all {watch.ranks} ranks, got {arguments} "
                    f"on rank {watch.rank} and {got}"
                )
        self.agreed.add(arguments)


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Calls]] = weakref.WeakKeyDictionary()


class GroupCall:
    """One call, forward and backward."""

    def __init__(self, calls: _Calls, group: dist.ProcessGroup) -> None:
        self.group_name = group.group_name
        self._collectives, self._of = calls.collectives, f"of call {calls.count}"

    def named(self, what: str, *, completes: bool = True) -> AbstractContextManager[None]:
        """Names the exchange of ``what`` inside; see `NamedCollectives.named`."""
        return self._collectives.named(f"the exchange of {what}, {self._of}", completes=completes)


def begin_call(op: str, group: dist.ProcessGroup, device: torch.device, *, same: str = "") -> GroupCall:
    """The next call of ``op`` over ``group``; all ranks begin theirs in the same order.

    same: the arguments that must be equal on all ranks, as a text for errors. Ranks compare each text once, through
        the store of the group.
    """
    of_group = _calls.setdefault(group, {})
    calls = of_group.get(op)
    if calls is None:
        calls = of_group[op] = _Calls(op, group, device)
        weakref.finalize(group, calls.collectives.watch.stop)
    calls.collectives.refuse_failed()
    calls.count += 1
    if same:
        calls.compare(same)
    return GroupCall(calls, group)
