"""Savers write, and their loaders read, the same names and values whatever this package has done to a model.

A new saver is one more function with `saves_a_state` or `saves_a_model`.
"""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ranks import on_ranks
from test_doors import forget_accelerators
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import cuda_ext
from cuda_ext.distributed import BucketedDataParallel
from cuda_ext.nn import GatedMLP, SelfAttention, unpacked

State = dict[str, Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


# What is saved


def llama(seed: int = 1) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def patched(model: Any) -> Any:
    assert cuda_ext.patch(model, attention=False).swapped
    return model


def unpatched(model: Any) -> Any:
    cuda_ext.unpatch(patched(model))
    return model


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "patched": patched,
    "unpatched": unpatched,
    "wrapped": lambda model: BucketedDataParallel(patched(model)),
    "ZeRO-1": lambda model: BucketedDataParallel(model, bucket_mb=0.01, shard_optimizer=True),
    "patched, then ZeRO-1": lambda model: BucketedDataParallel(patched(model), shard_optimizer=True),
}
WRAPPED = {"wrapped", "ZeRO-1", "patched, then ZeRO-1"}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(16, 4, num_kv_heads=2, bias=True)
        self.mlp = self.again = GatedMLP(16, 24, bias=True)


def make_state(kind: str) -> State:
    if kind == "unpacked":
        return unpacked(Packed())
    if kind == "unpacked with gradients":
        module = Packed()
        return unpacked(module, dict(module.named_parameters()))
    state: State = KINDS[kind](llama()).state_dict()
    return state


def assert_equal(actual: Any, expected: Any) -> None:
    assert list(sorted(actual)) == list(sorted(expected))
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# Savers of state dicts: what is read back

STATE_SAVERS: dict[str, Callable[[State, Path], Any]] = {}


def saves_a_state(function: Callable[[State, Path], Any]) -> Callable[[State, Path], Any]:
    STATE_SAVERS[function.__name__] = function
    return function


@saves_a_state
def torch_save(state: State, folder: Path) -> Any:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt")


@saves_a_state
def torch_load_mmap(state: State, folder: Path) -> Any:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", mmap=True)


@saves_a_state
def dcp_save(state: State, folder: Path) -> Any:
    dcp.save(dict(state), checkpoint_id=folder)
    read = {name: torch.full_like(tensor, torch.nan, requires_grad=False) for name, tensor in state.items()}
    dcp.load(read, checkpoint_id=folder)
    return read


@saves_a_state
def safetensors_save_file(state: State, folder: Path) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(without_aliases(state), folder / "state.safetensors")
    return with_aliases(safetensors.load_file(folder / "state.safetensors"), state)


@saves_a_state
def safetensors_save(state: State, folder: Path) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    return with_aliases(safetensors.load(safetensors.save(without_aliases(state))), state)


@saves_a_state
def hub_save_torch_state_dict(state: State, folder: Path, shard: str = "1GB") -> Any:
    hub = pytest.importorskip("huggingface_hub")
    hub.save_torch_state_dict(without_aliases(state), folder, max_shard_size=shard)
    read: State = {}
    for file in folder.glob("*.safetensors"):
        read |= hub.load_state_dict_from_file(file)
    return with_aliases(read, state)


@saves_a_state
def hub_save_torch_state_dict_in_shards(state: State, folder: Path) -> Any:
    return hub_save_torch_state_dict(state, folder, "4KB")


@saves_a_state
def accelerate_save(state: State, folder: Path) -> Any:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    accelerate.utils.save(OrderedDict(without_aliases(state)), folder / "state", safe_serialization=True)
    return with_aliases(load_file(folder / "state"), state)


@saves_a_state
def accelerate_save_with_pickle(state: State, folder: Path) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.utils.save(OrderedDict(state), folder / "state")
    return torch.load(folder / "state")


# Formats without aliases expect one name for a layer that has two.


def without_aliases(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith("again.")}


def with_aliases(read: State, state: State) -> State:
    aliases = {name: read[name.replace("again.", "mlp.")] for name in state if name.startswith("again.")}
    return {**read, **aliases}


@pytest.mark.parametrize("kind", [*KINDS, "unpacked", "unpacked with gradients"])
@pytest.mark.parametrize("saver", STATE_SAVERS)
def test_savers_of_states(group: None, tmp_path: Path, saver: str, kind: str) -> None:
    state = make_state(kind)
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    read = STATE_SAVERS[saver](state, tmp_path)
    assert_equal(read, expected)
    if "unpacked" in kind:
        packed = Packed()
        packed.load_state_dict(read, strict=kind == "unpacked")
        assert_equal({name: unpacked(packed)[name] for name in expected}, expected)


# Savers of models: each writes ``model``, and reads into ``other``, or returns another model



class ModelSaver(NamedTuple):
    call: Callable[[Any, Path, Any], Any]
    writes: set[str]  # kinds
    reads: set[str]


MODEL_SAVERS: dict[str, ModelSaver] = {}


def saves_a_model(*, wrapped: bool = True, reads_wrapped: bool = True) -> Any:
    """``wrapped``: whether it writes wrapped models. ``reads_wrapped``: whether it reads into them, too."""

    def decorate(function: Callable[[Any, Path, Any], Any]) -> Any:
        writes = set(KINDS) if wrapped else KINDS.keys() - WRAPPED
        MODEL_SAVERS[function.__name__] = ModelSaver(function, writes, writes if reads_wrapped else writes - WRAPPED)
        return function

    return decorate


@saves_a_model(wrapped=False)
def torch_save_of_the_model(model: Any, folder: Path, other: Any) -> Any:
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


@saves_a_model()
def load_state_dict(model: Any, folder: Path, other: Any) -> Any:
    torch.save(model.state_dict(), folder / "state.pt")
    other.load_state_dict(torch.load(folder / "state.pt"))


@saves_a_model(reads_wrapped=False)
def load_state_dict_assign(model: Any, folder: Path, other: Any) -> Any:
    other.load_state_dict(model.state_dict(), assign=True)
    return safetensors_save_model(other, folder, llama(3))


@saves_a_model()
def dcp_get_model_state_dict(model: Any, folder: Path, other: Any) -> Any:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    read = get_model_state_dict(other)
    dcp.load(read, checkpoint_id=folder)
    set_model_state_dict(other, read)


@saves_a_model()
def safetensors_save_model(model: Any, folder: Path, other: Any) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, str(folder / "model.safetensors"))
    assert safetensors.load_model(other, str(folder / "model.safetensors")) == (set(), [])
    return other


@saves_a_model()
def hub_save_torch_model(model: Any, folder: Path, other: Any, shard: str = "1GB") -> None:
    hub = pytest.importorskip("huggingface_hub")
    hub.save_torch_model(model, folder, max_shard_size=shard)
    hub.load_torch_model(other, folder, strict=True)


@saves_a_model()
def hub_save_torch_model_in_shards(model: Any, folder: Path, other: Any) -> None:
    hub_save_torch_model(model, folder, other, "20KB")


@saves_a_model(reads_wrapped=False)
def hub_mixin(model: Any, folder: Path, other: Any) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Holder(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

    Holder(model).save_pretrained(folder)
    Holder.from_pretrained(folder, strict=True, inner=other)


@saves_a_model(reads_wrapped=False)
def transformers_save_pretrained(model: Any, folder: Path, other: Any, shard: str = "1GB") -> Any:
    model.save_pretrained(folder, max_shard_size=shard)
    read, report = type(llama()).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return read


@saves_a_model(reads_wrapped=False)
def transformers_save_pretrained_in_shards(model: Any, folder: Path, other: Any) -> Any:
    return transformers_save_pretrained(model, folder, other, "20KB")


@saves_a_model(wrapped=False)
def transformers_trainer(model: Any, folder: Path, other: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    options = {"learning_rate": 0.0, "save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}

    def trainer(of: Any, steps: int) -> Any:
        arguments = transformers.TrainingArguments(folder, max_steps=steps, **options)
        return transformers.Trainer(of, arguments, train_dataset=data)

    trainer(model, 1).train()
    trainer(other, 2).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return type(llama()).from_pretrained(folder / "checkpoint-2")


@saves_a_model(reads_wrapped=False)
def accelerate_save_model(model: Any, folder: Path, other: Any, shard: str = "1GB") -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True).save_model(model, folder, max_shard_size=shard)
    accelerate.load_checkpoint_in_model(other, folder, strict=True)


@saves_a_model(reads_wrapped=False)
def accelerate_save_model_in_shards(model: Any, folder: Path, other: Any) -> None:
    accelerate_save_model(model, folder, other, "20KB")


@saves_a_model()
def accelerate_save_state(model: Any, folder: Path, other: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    for each, act in ((model, "save_state"), (other, "load_state")):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator._models.append(each)  # `prepare` would wrap it in DDP, because there is a process group
        getattr(accelerator, act)(folder)


@saves_a_model(wrapped=False)
def lightning_trainer(model: Any, folder: Path, other: Any) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def training_step(self, ids: Tensor, _: int) -> Tensor:
            loss: Tensor = self.inner(input_ids=ids, labels=ids).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(**options, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Module(model), torch.arange(16).view(2, 1, 8))
    trainer.save_checkpoint(folder / "model.ckpt")
    Module.load_from_checkpoint(folder / "model.ckpt", inner=other)


@saves_a_model()
def lightning_fabric(model: Any, folder: Path, other: Any) -> None:
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    fabric.save(folder / "model.ckpt", {"model": model})
    fabric.load(folder / "model.ckpt", {"model": other})


@saves_a_model(wrapped=False)
def fsdp2(model: Any, folder: Path, other: Any) -> Any:
    whole = StateDictOptions(full_state_dict=True)
    torch.save(get_model_state_dict(fully_shard(model), options=whole), folder / "state.pt")
    fully_shard(other)
    set_model_state_dict(other, torch.load(folder / "state.pt"), options=whole)
    return get_model_state_dict(other, options=whole)


@saves_a_model(wrapped=False)
def fsdp2_with_dcp(model: Any, folder: Path, other: Any) -> Any:
    dcp.save(get_model_state_dict(fully_shard(model)), checkpoint_id=folder)
    read = get_model_state_dict(fully_shard(other))
    dcp.load(read, checkpoint_id=folder)
    set_model_state_dict(other, read)
    return get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))


@saves_a_model(wrapped=False)
def fsdp1(model: Any, folder: Path, other: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.save(FSDP(model, use_orig_params=True, device_id=torch.device("cpu")).state_dict(), folder / "state.pt")
    read = FSDP(other, use_orig_params=True, device_id=torch.device("cpu"))
    read.load_state_dict(torch.load(folder / "state.pt"))
    return read.state_dict()


@pytest.fixture
def without_accelerators() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        forget_accelerators()


def cells() -> Iterator[Any]:
    for saver, (_, writes, reads) in MODEL_SAVERS.items():
        for kind in KINDS:
            if kind in writes:
                yield pytest.param(saver, kind, "plain", id=f"{saver}-of {kind}")
            if kind in reads and kind != "plain":
                yield pytest.param(saver, "plain", kind, id=f"{saver}-into {kind}")


@pytest.mark.parametrize("saver, kind, other_kind", list(cells()))
def test_savers_of_models(
    group: None, without_accelerators: None, tmp_path: Path, saver: str, kind: str, other_kind: str
) -> None:
    expected = llama().state_dict()
    model, other = KINDS[kind](llama()), KINDS[other_kind](llama(2))
    read = MODEL_SAVERS[saver].call(model, tmp_path, other)
    read = other if read is None else read
    assert_equal(read if isinstance(read, dict) else read.state_dict(), expected)
