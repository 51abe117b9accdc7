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

MOST_COMPARED = 256  # arguments that are remembered


class _Calls:
    """All calls of an op over a group. They are named for whoever waits for a dead or late rank."""

    def __init__(self, op: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.op = op
        self.count = 0
        self.told = dict[str, list[str]]()  # by what ranks have compared; the oldest first, on all ranks alike
        self.questions = list[str]()  # whose answers are in the store
        self.collectives = NamedCollectives(f"{NAMESPACE}::{op}", group, device, self._status, name=op)

    def _status(self, waiting: str) -> str:
        return waiting or f"exchanges nothing; the last call of {self.op} that it has begun is call {self.count}"

    def compare(self, arguments: str, own: str) -> list[str]:
        """What each rank tells of its `own`. Raises on every rank unless all have the same arguments in this call."""
        if arguments in self.told:
            return self.told[arguments]
        number = self.count

        def is_past(status: str) -> bool:  # a rank that compares, too, names the call, but waits for no exchange
            waits = re.search(r", of call (\d+)$", status)
            begun = re.search(rf"of {self.op} that it has begun is call (\d+)$", status)
            return bool((waits and int(waits[1]) >= number) or (begun and int(begun[1]) > number))

        watch = self.collectives.watch
        self.questions.append(f"call {number}")
        watch.busy(True)
        try:
            answers = watch.answers(self.questions[-1], f"{arguments}\n{own}", is_past)
        finally:
            watch.busy(False)
        if len(self.questions) > 2:  # all ranks have read the one before the last, or would not have asked the last
            watch.forget_answer(self.questions.pop(0))
        told = {}
        for rank, answer in answers.items():
            theirs, _, told[rank] = (answer or "").partition("\n")
            if theirs != arguments:
                got = f"{theirs or 'other arguments'} on rank {rank}{'' if theirs else ', or no call'}"
                raise RuntimeError(
                    f"{NAMESPACE}::{self.op}: expected the same arguments on all {watch.ranks} ranks, got {arguments} "
                    f"on rank {watch.rank} and {got}"
                )
        if len(self.told) == MOST_COMPARED:
            del self.told[next(iter(self.told))]
        return self.told.setdefault(arguments, [told[rank] for rank in range(watch.ranks)])


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Calls]] = weakref.WeakKeyDictionary()


class GroupCall:
    """One call, forward and backward."""

    def __init__(self, calls: _Calls, group: dist.ProcessGroup, told: list[str]) -> None:
        self.group_name = group.group_name
        self.told = told
        self._collectives, self._of = calls.collectives, f"of call {calls.count}"

    def named(self, what: str, *, completes: bool = True) -> AbstractContextManager[None]:
        """Names the exchange of ``what`` inside; see `NamedCollectives.named`."""
        return self._collectives.named(f"the exchange of {what}, {self._of}", completes=completes)


def begin_call(op: str, group: dist.ProcessGroup, device: torch.device, *, same: str = "", own: str = "") -> GroupCall:
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
    return GroupCall(calls, group, calls.compare(same, own) if same else [own] * group.size())
