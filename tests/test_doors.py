"""`cuda_ext.distributed` inside other people's trainers, and the programs of its pages of documentation."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cuda_ext.distributed import AllreduceState, BucketedDataParallel, allreduce_hook

STEPS, BATCH = 4, 6  # of all ranks together
# Options of Lightning's trainers here.
QUIET = {"accelerator": "cpu", "devices": 2, "logger": False}
QUIET |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 3))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def loader_and_batches() -> tuple[DataLoader[tuple[Tensor, ...]], list[Tensor]]:
    """Of 24 inputs, and the batches that all ranks see together where rank r is dealt every second one from r on."""
    ranks = dist.get_world_size()
    inputs = torch.randn(STEPS * BATCH, 7)
    return DataLoader(TensorDataset(inputs), batch_size=BATCH // ranks), list(inputs.split(BATCH))


def assert_trained(
    actual: nn.Module, start: nn.Module, batches: list[Tensor], wire_dtype: torch.dtype | None = None
) -> None:
    """Trains ``start`` on the whole batches, and compares."""
    optimizer = make_optimizer(start)
    largest = 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss_of(start(batch)).backward()
        largest = max(largest, *(float(parameter.grad.abs().max()) for parameter in start.parameters()))
        optimizer.step()
    tolerance = 1e-6  # float32 against float32: sums in another order
    if wire_dtype == torch.bfloat16:
        # Gradients are rounded three times, to 2**-8; by momentum 0.9 at most 4 + 3 + 2 + 1 of them add up in 4 steps.
        tolerance = 3 * 2**-8 * largest * 10 * 0.1
    for a, b in zip(actual.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@contextmanager
def as_torchrun_starts_it() -> Iterator[None]:
    """The environment in which a trainer finds its rank; the process group is there already, and is left alone."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, {**variables, **address, "ACCELERATE_USE_CPU": "true"}):
        yield


@needs("lightning")
@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_lightning_ddp_strategy(wire_dtype: torch.dtype | None) -> None:
    import lightning
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    buckets = []

    def hook(state, bucket):  # bare: DistributedDataParallel compares annotations, and here they are text
        buckets.append(bucket.index())
        return allreduce_hook(state, bucket)

    class Strategy(DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            """As in Lightning, which takes the hook only where there is a GPU."""
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            assert isinstance(self.trainer.strategy.model, DistributedDataParallel)
            return loss_of(self.model(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

    module = Module()
    start = copy.deepcopy(module.model)
    loader, batches = loader_and_batches()
    # Lightning's own sampler shuffles.
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = DataLoader(TensorDataset(loader.dataset.tensors[0][rank::ranks]), batch_size=BATCH // ranks)
    with as_torchrun_starts_it():
        strategy = Strategy(ddp_comm_hook=hook, ddp_comm_state=AllreduceState(wire_dtype=wire_dtype))
        lightning.Trainer(strategy=strategy, max_epochs=1, use_distributed_sampler=False, **QUIET).fit(module, own)
    assert len(buckets) >= STEPS
    assert_trained(module.model, start, batches, wire_dtype)


@needs("lightning")
@on_ranks(2)
def test_lightning_ignores_the_hook_on_a_cpu() -> None:
    """If this fails, Lightning has changed: then docs/distributed.md and the test above can be simpler."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return loss_of(self.layer(batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self)

    def hook(state, bucket):
        raise AssertionError("called")

    module = Module()
    module.layer = nn.Linear(7, 3)
    with as_torchrun_starts_it():
        strategy = DDPStrategy(ddp_comm_hook=hook, ddp_comm_state=None)
        lightning.Trainer(strategy=strategy, max_steps=1, **QUIET).fit(module, loader_and_batches()[0])


@needs("lightning")
@on_ranks(2)
def test_lightning_fabric_with_the_wrapper() -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    class BucketedStrategy(DDPStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return BucketedDataParallel(module)

    module = make_model()
    start = copy.deepcopy(module)
    loader, batches = loader_and_batches()
    with as_torchrun_starts_it():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=BucketedStrategy())
        fabric.launch()
        model, optimizer = fabric.setup(module, make_optimizer(module))
        for (batch,) in fabric.setup_dataloaders(loader):
            optimizer.zero_grad()
            fabric.backward(loss_of(model(batch)))
            optimizer.step()
    assert isinstance(model._forward_module, BucketedDataParallel)
    assert_trained(module, start, batches)


@contextmanager
def accelerator() -> Iterator[object]:
    from accelerate import Accelerator

    with as_torchrun_starts_it():
        yield Accelerator(cpu=True)
    forget_accelerators()


def forget_accelerators() -> None:
    """What accelerate keeps for the life of a process; the next test has another process group."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@needs("accelerate")
@on_ranks(2)
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_accelerate_with_the_hook(wire_dtype: torch.dtype | None) -> None:
    with accelerator() as trainer:
        module = make_model()
        start = copy.deepcopy(module)
        loader, batches = loader_and_batches()
        model, optimizer, loader = trainer.prepare(module, make_optimizer(module), loader)
        assert isinstance(model, DistributedDataParallel)
        model.register_comm_hook(AllreduceState(wire_dtype=wire_dtype), allreduce_hook)
        for (batch,) in loader:
            optimizer.zero_grad()
            trainer.backward(loss_of(model(batch)))
            optimizer.step()
        assert_trained(module, start, batches, wire_dtype)


@needs("accelerate")
@on_ranks(2)
def test_accelerate_with_the_wrapper() -> None:
    """Two batches for each step, accumulated by `no_sync` of the wrapper."""
    with accelerator() as trainer:
        trainer.gradient_accumulation_steps = 2
        model = BucketedDataParallel(make_model())
        start = copy.deepcopy(model.module)
        loader, batches = loader_and_batches()
        optimizer, loader = trainer.prepare(make_optimizer(model), loader)
        for (batch,) in loader:
            with trainer.accumulate(model):
                trainer.backward(loss_of(model(batch)))
                optimizer.step()
                optimizer.zero_grad()
        pairs = [torch.cat(batches[n : n + 2]) for n in range(0, STEPS, 2)]
        assert_trained(model.module, start, pairs)


DOCUMENTS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {"distributed": 19, "context_parallel": 6}  # programs of each
PROGRAMS = {
    f"{section.partition(chr(10))[0]} {number}": program
    for page in PAGES
    for section in (DOCUMENTS / f"{page}.md").read_text().split("\n## ")
    for number, program in enumerate(re.findall("```python\n(.*?)```", section, re.DOTALL))
}


@on_ranks(2)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[needs(package) for package in ("lightning", "accelerate") if package in text])
        for name, text in PROGRAMS.items()
    ],
)
def test_programs_of_the_documentation(program: str) -> None:
    with (
        as_torchrun_starts_it(),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(PROGRAMS[program], program, "exec"), {"__name__": "__main__"})
    if "accelerate" in PROGRAMS[program]:
        forget_accelerators()


def test_the_documentation_has_programs() -> None:
    assert len(PROGRAMS) == sum(PAGES.values())
