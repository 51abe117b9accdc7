"""Tables that are kept between calls: made in any mode, by any thread, they serve every later call."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from cuda_ext._tables import KeptTables, Tables
from cuda_ext.compat.flash_attn.layers import rotary as flash_attn
from cuda_ext.nn import RotaryEmbedding, SelfAttention


class FlashAttnRotary(nn.Module):
    """flash-attn's module, on a copy, and with the shapes of ours."""

    def __init__(self, scale_base: float | None = None) -> None:
        super().__init__()
        self.inner = flash_attn.RotaryEmbedding(8, scale_base=scale_base)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 1, num_heads_q=2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: RotaryEmbedding(8),
    "flash-attn's": FlashAttnRotary,
    "flash-attn's with XPos": lambda: FlashAttnRotary(64.0),
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "fake mode": FakeTensorMode,
    "a mode that counts": lambda: FlopCounterMode(display=False),
    "a default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture(params=MODULES)
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return MODULES[request.param]


def check_trains(module: nn.Module, make: Callable[[], nn.Module], length: int = 50) -> None:
    x = torch.randn(1, length, 4, 8, requires_grad=True)
    out, expected = module(x), make()(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [50, 20], ids=["as long", "shorter"])
def test_a_first_call_in_any_mode(make: Callable[[], nn.Module], mode: str, length: int) -> None:
    module = make()
    with MODES[mode]():
        module(torch.randn(1, length, 4, 8, device="cpu"))
    check_trains(module, make)


@pytest.mark.parametrize("mode", MODES)
def test_a_longer_call_in_any_mode(make: Callable[[], nn.Module], mode: str) -> None:
    module = make()
    module(torch.randn(1, 3, 4, 8))
    with MODES[mode]():
        module(torch.randn(1, 60, 4, 8, device="cpu"))
    check_trains(module, make, 60)


@pytest.mark.parametrize("cast", [torch.float64, torch.bfloat16, torch.float32])
def test_casts_and_moves_in_inference_mode(make: Callable[[], nn.Module], cast: torch.dtype) -> None:
    module = make()
    module(torch.randn(1, 3, 4, 8))
    with torch.inference_mode():
        module.to(cast).to("meta").to_empty(device="cpu")
    check_trains(module, make)


def test_fake_inputs_without_the_mode() -> None:
    module = RotaryEmbedding(8)
    module(torch.randn(1, 3, 4, 8))
    with FakeTensorMode():
        x = torch.empty(1, 70, 4, 8)
    assert module(x).shape == x.shape
    check_trains(module, MODULES["ours"])


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "functionalize": lambda module, x: torch.func.functionalize(module)(x),
    "vmap": lambda module, x: torch.vmap(module)(x.expand(2, *x.shape)),
    "grad": lambda module, x: torch.func.grad(lambda x: module(x).sum())(x),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (x,)),
    "make_fx": lambda module, x: make_fx(module)(x),
    "make_fx on fake tensors": lambda module, x: make_fx(module, tracing_mode="fake")(x),
    "jit.trace": lambda module, x: torch.jit.trace(module, x, check_trace=False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_first_call_in_a_transform(name: str) -> None:
    module = RotaryEmbedding(8)
    TRANSFORMS[name](module, torch.randn(1, 50, 4, 8))
    check_trains(module, MODULES["ours"])


def test_a_graph_traced_with_tables_has_its_own() -> None:
    module, x = RotaryEmbedding(8), torch.randn(1, 9, 2, 8)
    module(torch.randn(1, 3, 2, 8))
    graph = make_fx(module)(x)
    module(torch.randn(1, 100, 2, 8))
    torch.testing.assert_close(graph(x), module(x))


def test_copies_and_pickles_have_no_tables(make: Callable[[], nn.Module]) -> None:
    module = make()
    module(torch.randn(1, 4000, 4, 8))
    assert len(pickle.dumps(module)) < 10_000
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        check_trains(other, make)


def test_threads_of_different_lengths_and_dtypes() -> None:
    module, wrong = RotaryEmbedding(8), []
    x = torch.randn(1, 300, 2, 8)
    expected = RotaryEmbedding(8)(x)

    def run(first: int) -> None:
        for length in range(first, 300, 7):
            if not torch.equal(module(x[:, :length]), expected[:, :length]):
                wrong.append(length)

    threads = [threading.Thread(target=run, args=(n + 1,)) for n in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_made_on_meta_needs_no_tables() -> None:
    model = SelfAttention(16, 2)
    with torch.device("meta"):
        other = SelfAttention(16, 2)
    other.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(1, 9, 16)
    torch.testing.assert_close(other(x), model(x))
    assert not list(other.buffers())


class OnGPU:
    device = torch.device("cuda", 0)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def set_capture(captures: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)

    set_capture(False)
    return set_capture


def count(length: int, device: torch.device) -> Tables:
    return (torch.arange(length),)


def test_what_a_graph_computes_at_its_replay_is_not_kept(capture: Callable[[bool], None]) -> None:
    tables = KeptTables()
    capture(True)
    first = tables.get(count, 5, OnGPU(), torch.int64)  # type: ignore[arg-type]
    capture(False)
    assert tables.get(count, 5, OnGPU(), torch.int64)[0] is not first[0]  # type: ignore[arg-type]


def test_what_a_graph_reads_lives_as_long_as_the_module(capture: Callable[[bool], None]) -> None:
    tables = KeptTables()
    for captures in (False, True):
        before = weakref.ref(tables.get(count, 5, OnGPU(), torch.int64)[0])  # type: ignore[arg-type]
        capture(captures)
        tables.get(count, 5, OnGPU(), torch.int64)  # type: ignore[arg-type]
        capture(False)
        tables.get(count, 500 << captures, OnGPU(), torch.int64)  # type: ignore[arg-type]
        assert (before() is None) == (not captures)
        tables = KeptTables() if not captures else tables


def test_tables_grow_by_doubling() -> None:
    tables, lengths = KeptTables(), []
    for length in (3, 4, 5, 7, 20, 6):
        lengths.append(len(tables.get(count, length, torch.empty(0), torch.int64)[0]))
    assert lengths == [3, 6, 6, 12, 24, 24]
