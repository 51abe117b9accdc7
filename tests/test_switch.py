"""cuda_ext._switch: who keeps something active, and until when."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cuda_ext._switch import Switch


class Recorded:
    """A switch whose activation can be made to fail."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = False
        self.switch = Switch(self._activate, self._deactivate)

    def _activate(self, name: str = "") -> str:
        if self.fails:
            raise ValueError(name)
        self.calls.append(name)
        return f"before {name}"

    def _deactivate(self, state: str) -> None:
        self.calls.append(state)


def test_calls_and_blocks() -> None:
    it = Recorded()
    it.switch.turn_off()
    assert it.calls == []
    it.switch.turn_on(name="a")
    it.switch.turn_on(name="b")
    assert it.switch.is_active and it.switch.state == "before a"
    with it.switch.turn_on(name="c"):
        it.switch.turn_off()
        assert it.switch.is_active
    assert it.calls == ["a", "before a"] and not it.switch.is_active
    with it.switch.turn_on(), it.switch.turn_on() as inner:
        inner.remove()
        assert it.switch.is_active
    it.switch.turn_on().remove()
    assert it.calls[2:] == ["", "before "] * 2


def test_a_call_before_a_block_outlives_it() -> None:
    it = Recorded()
    it.switch.turn_on(name="a")
    with it.switch.turn_on():
        pass
    assert it.switch.is_active
    it.switch.turn_off()
    assert it.calls == ["a", "before a"]


def test_a_block_that_begins_after_turn_off_has_its_settings() -> None:
    it = Recorded()
    enabled = it.switch.turn_on(name="a")
    enabled.remove()
    for _ in range(2):
        with enabled:
            assert it.switch.is_active
        assert not it.switch.is_active
    assert it.calls == ["a", "before a"] * 3


def test_a_failure_to_activate_leaves_nothing() -> None:
    it = Recorded()
    it.fails = True
    with pytest.raises(ValueError, match="a"):
        it.switch.turn_on(name="a")
    assert not it.switch.is_active
    it.fails = False
    with it.switch.turn_on(name="b"):
        pass
    assert it.calls == ["b", "before b"] and not it.switch.is_active


def test_threads() -> None:
    it = Recorded()
    inside = threading.Barrier(4)

    def use() -> None:
        for _ in range(50):
            with it.switch.turn_on(name="a"):
                assert it.switch.is_active
        with it.switch.turn_on(name="a"):
            inside.wait()
            assert it.switch.is_active

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not inside.broken and not it.switch.is_active
    assert it.calls == ["a", "before a"] * (len(it.calls) // 2)
