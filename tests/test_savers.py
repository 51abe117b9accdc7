"""Savers write, and their loaders read, the same names and values whatever this package has done to a model.

A new saver is one more function with `saves_a_state` or `saves_a_model`.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import multiprocessing
import re
import sys
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
from cuda_ext.nn import GatedMLP, SelfAttention, separated

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
    "ZeRO-1": lambda model: BucketedDataParallel(model, bucket_cap_mb=0.01, shard_optimizer=True),
    "patched, then ZeRO-1": lambda model: BucketedDataParallel(patched(model), shard_optimizer=True),
}
WRAPPED = {"wrapped", "ZeRO-1", "patched, then ZeRO-1"}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention(16, 4, num_kv_heads=2, bias=True)
        self.mlp = self.again = GatedMLP(16, 24, bias=True)


def make_state(kind: str) -> State:
    if kind == "separated":
        return separated(Packed())
    if kind == "separated with gradients":
        module = Packed()
        return separated(module, dict(module.named_parameters()))
    state: State = KINDS[kind](llama()).state_dict()
    return state


def assert_equal(actual: Any, expected: Any) -> None:
    assert sorted(actual) == sorted(expected)
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


@pytest.mark.parametrize("kind", [*KINDS, "separated", "separated with gradients"])
@pytest.mark.parametrize("saver", STATE_SAVERS)
def test_savers_of_states(group: None, tmp_path: Path, saver: str, kind: str) -> None:
    state = make_state(kind)
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    read = STATE_SAVERS[saver](state, tmp_path)
    assert_equal(read, expected)
    if "separated" in kind:
        packed = Packed()
        packed.load_state_dict(read, strict=kind == "separated")
        assert_equal({name: separated(packed)[name] for name in expected}, expected)


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


@pytest.mark.sampled(cases="every value")
@pytest.mark.parametrize("saver, kind, other_kind", list(cells()))
def test_savers_of_models(
    group: None, without_accelerators: None, tmp_path: Path, saver: str, kind: str, other_kind: str
) -> None:
    expected = llama().state_dict()
    model, other = KINDS[kind](llama()), KINDS[other_kind](llama(2))
    read = MODEL_SAVERS[saver].call(model, tmp_path, other)
    read = other if read is None else read
    assert_equal(read if isinstance(read, dict) else read.state_dict(), expected)


class Gated(nn.Module):
    def __init__(self, features: int = 8, hidden: int = 12, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, hidden, bias), nn.Linear(features, hidden, bias)
        self.down = nn.Linear(hidden, features, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def is_packed(block: Any) -> bool:
    """Whether gate and up are read without a copy."""
    with torch.profiler.profile() as profile:
        block(torch.ones(1, block.gate.in_features, dtype=block.gate.weight.dtype))
    return any("gated_mlp" in event.name for event in profile.events())


def assert_same_block(actual: nn.Module, expected: nn.Module) -> None:
    x = torch.randn(3, 8)
    # Sums of 20 float32 products in another order differ by 20 * 2^-24 of the terms, some of which cancel.
    wanted = expected(x)
    torch.testing.assert_close(actual(x), wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(wanted.abs().max())))


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, feed_forward_proj="gated-silu"))


def swiglu() -> Any:
    return pytest.importorskip("timm.layers").SwiGLU(16, 24)


@pytest.mark.parametrize("make", [t5, swiglu, functools.partial(Gated, bias=True)], ids=["t5", "swiglu", "biases"])
@pytest.mark.parametrize("change", [patched, unpatched])
def test_other_gated_models(
    without_accelerators: None, tmp_path: Path, make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make()
    expected = copy.deepcopy(model)
    accelerate.Accelerator(cpu=True).save_model(change(model), tmp_path)
    other = make()
    accelerate.load_checkpoint_in_model(other, tmp_path, strict=False)  # tied embeddings have one name
    assert_equal(other.state_dict(), expected.state_dict())


# Memory


def anonymous_memory() -> int:
    """Resident bytes that no file backs, without what malloc keeps of memory that is free."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s*(\d+) kB", status)[1])  # type: ignore[index]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, calls glibc")
def test_no_memory_twice(group: None) -> None:
    cuda_ext.patch(Gated(8, 8))  # imports what it needs
    model = Gated(2048, 8192)
    weight = model.up.weight.nbytes  # 64 MiB, one of three
    before = anonymous_memory()
    for change in (cuda_ext.patch, cuda_ext.unpatch, cuda_ext.patch):
        change(model)
        assert abs(anonymous_memory() - before) < weight / 2
    packed = GatedMLP(2048, 8192)
    before = anonymous_memory()
    parts = separated(packed)
    assert parts["up_proj.weight"].data_ptr() == packed.gate_up_proj.weight[8192:].data_ptr()
    assert abs(anonymous_memory() - before) < weight / 2
    before = anonymous_memory()
    wrapper = BucketedDataParallel(model, shard_optimizer=True)
    assert anonymous_memory() - before < 3.5 * weight  # the gradients
    assert cuda_ext.patch(model).swapped == {}  # leaves the parameters in their buckets
    assert anonymous_memory() - before < 3.5 * weight
    del wrapper


def test_files_have_the_size_of_a_plain_model_s() -> None:
    def size(of: Any) -> int:
        file = io.BytesIO()
        torch.save(of, file)
        return file.getbuffer().nbytes

    plain = llama()
    model = patched(llama())
    assert size(model.state_dict()) == size(plain.state_dict())
    assert size(model.model.layers[0].mlp.up_proj.weight) == size(plain.model.layers[0].mlp.up_proj.weight)
    module = Packed()
    parts = separated(module)
    assert parts["mlp.up_proj.weight"] is parts["again.up_proj.weight"]
    assert size(parts) < 1.2 * size(module.state_dict())
    assert size(parts["mlp.up_proj.weight"]) < 0.7 * size(module.mlp.gate_up_proj.weight)


def test_memory_is_freed_with_the_last_part() -> None:
    model = patched(Gated())
    up = torch.from_dlpack(torch.utils.dlpack.to_dlpack(model.up.weight.detach()))
    expected = up.clone()
    with torch.no_grad():
        model.up.weight.mul_(2)
    del model
    assert torch.equal(up, 2 * expected)
    block = patched(Gated())
    holders = torch.ops.cuda_ext._memory_holders
    assert holders(block.gate.weight) == holders(block.up.weight) == 2
    block.up.weight.data = block.up.weight.data.clone()
    assert holders(block.gate.weight) == holders(block.up.weight) == 1
    assert not is_packed(block)
    patched_again = cuda_ext.patch(block)
    assert patched_again.swapped == {} and is_packed(block)


# What moves or changes parameters


def test_updates_in_place() -> None:
    model, reference = patched(Gated(bias=True)), Gated(bias=True)
    model.load_state_dict(reference.state_dict())
    assert_same_block(model, reference)
    for block in (model, reference):
        with torch.no_grad():
            block.gate.weight.mul_(2)
            block.up.weight.data.add_(1)
            block.up.bias.numpy()[:3] = 5
        storage = block.gate.weight.untyped_storage()
        storage.resize_(storage.nbytes() + 64)
        storage.resize_(storage.nbytes() - 64)
    assert_same_block(model, reference)
    for block in (model, reference):
        block.up.weight.data = torch.ones(12, 8)
    assert_same_block(model, reference)
    cuda_ext.patch(model)
    for block in (model, reference):
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        block(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    assert is_packed(model)
    assert_same_block(model, reference)


def test_a_gate_of_two_blocks_stays_with_one() -> None:
    model = nn.ModuleList([Gated(), Gated()])
    model[1].gate.weight = model[0].gate.weight
    expected = copy.deepcopy(model)
    for _ in range(2):
        cuda_ext.patch(model)
        assert [is_packed(block) for block in model] == [True, False]
    for block, plain in zip(model, expected, strict=True):
        assert_same_block(block, plain)


def test_copies_have_storages_of_their_own() -> None:
    model = patched(Gated())
    for other in (copy.deepcopy(model), model.to(torch.float64), model.float()):
        one, two = other.gate.weight, other.up.weight
        assert one.untyped_storage().nbytes() == one.nbytes and two.untyped_storage().nbytes() == two.nbytes
        assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()
        assert is_packed(other)
    tensor = copy.deepcopy(separated(GatedMLP(8, 12))["up_proj.weight"])
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_packed_weight_that_changes_before_backward_is_an_error() -> None:
    module = GatedMLP(8, 12)
    loss = sum(part.square().sum() for part in separated(module, dict(module.named_parameters())).values())
    with torch.no_grad():
        module.gate_up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[union-attr]


def test_gradients_through_parts() -> None:
    module = GatedMLP(8, 12, bias=True)
    parameters = dict(module.named_parameters())

    def loss(parameters: State) -> Tensor:
        return torch.stack([part.pow(3).sum() for part in separated(module, parameters).values()]).sum()

    loss(parameters).backward()
    expected = {name: 3 * parameter.square() for name, parameter in parameters.items()}
    assert_equal({name: parameter.grad for name, parameter in parameters.items()}, expected)
    assert_equal(torch.func.grad(loss)(parameters), expected)
    batch = {name: torch.stack([parameter.detach()] * 2) for name, parameter in parameters.items()}
    torch.testing.assert_close(torch.func.vmap(loss)(batch), loss(parameters).expand(2))
    tangents = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    plain = {name: parameter.detach() for name, parameter in parameters.items()}
    _, tangent = torch.func.jvp(loss, (plain,), (tangents,))
    torch.testing.assert_close(tangent, torch.stack([each.sum() for each in expected.values()]).sum())


def _train(block: Any, results: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        block.gate.weight.fill_(0.5)
        block.up.weight.fill_(0.25)
    results.put(block(torch.ones(2, 8)).tolist())


@pytest.mark.parametrize("method", ["spawn", "fork", "share_memory, then fork"])
def test_shared_with_other_processes(method: str) -> None:
    block = patched(Gated())
    reference = Gated()
    reference.load_state_dict(block.state_dict())
    if "share_memory" in method:
        block.share_memory()
        assert_same_block(block, reference)
        assert block.gate.weight.is_shared() and block.up.weight.is_shared()
    context: Any = multiprocessing.get_context(method.split()[-1])
    results = context.Queue()
    process = context.Process(target=_train, args=(block, results))
    process.start()
    result = torch.tensor(results.get(timeout=60))
    process.join()
    if method != "fork":
        torch.testing.assert_close(block(torch.ones(2, 8)), result)
    assert bool((block.up.weight == 0.25).all()) == (method != "fork")
    if method == "fork":
        assert_same_block(block, reference)
        assert is_packed(block)


def test_parts_of_what_moves() -> None:
    module = Packed()
    expected = {name: tensor.clone() for name, tensor in separated(module).items()}
    parts = separated(module)
    module.share_memory()  # frees the memory that the parameters had
    others = [torch.full_like(tensor, 7) for tensor in parts.values()]
    assert_equal(parts, expected)
    assert all(parameter.is_shared() for parameter in module.parameters())
    of_shared = separated(module)
    assert all(parameter.is_shared() for parameter in module.parameters())
    of_shared["mlp.up_proj.weight"].zero_()
    assert not module.mlp.gate_up_proj.weight[24:].any()
    del module, others
    assert not of_shared["mlp.up_proj.weight"].any()
    module = Packed()
    parts = separated(module)
    expected = {name: tensor.clone() for name, tensor in parts.items()}
    for parameter in module.parameters():
        parameter.data.untyped_storage().resize_(0)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parts.items() if "gate" in name or "up" in name)


# Compilers think that tensors of different storages do not share memory


def test_compiled_training() -> None:
    model, reference = patched(Gated()), Gated()
    reference.load_state_dict(model.state_dict())
    for block, compiled in ((model, True), (reference, False)):
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)

        def step(block: Any = block, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = block(torch.ones(2, 8)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after: Tensor = block(torch.ones(2, 8))  # of the weights after the step
            return after.detach()

        step = torch.compile(step, backend="aot_eager") if compiled else step
        for _ in range(3):
            after = step()
        torch.testing.assert_close(after, block(torch.ones(2, 8)))
    assert_same_block(model, reference)


def test_compiled_backward_with_steps_of_an_optimizer_inside() -> None:
    model, reference = patched(Gated()), Gated()
    reference.load_state_dict(model.state_dict())

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    inputs = []
    for block in (model, reference):
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        inputs.append(torch.ones(2, 8, requires_grad=True))
        for _ in range(2):
            loss = block(inputs[-1]).square().sum()
            if block is model:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend="inductor")):
                    loss.backward()
            else:
                loss.backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert_same_block(model, reference)


def test_compiled_writes_to_parts() -> None:
    module = GatedMLP(8, 12)

    @torch.compile(fullgraph=True, backend="inductor")
    def double() -> Tensor:
        with torch.no_grad():
            separated(module, dict(module.named_parameters()))["up_proj.weight"].mul_(2)
            return module.gate_up_proj.weight.sum()

    expected = module.gate_up_proj.weight.detach().clone()
    expected[12:] *= 2
    torch.testing.assert_close(double(), expected.sum())
    assert torch.equal(module.gate_up_proj.weight, expected)


# ZeRO-1 trains as one process, whatever memory its parameters are given


def give_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = 1.5 * parameter.data


def share(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.share_memory_()


def nothing(model: nn.Module) -> None:
    pass


@on_ranks(2)
@pytest.mark.parametrize("change", [nothing, give_other_memory, share])
@pytest.mark.parametrize("compiled", [False, True])
def test_sharded_training(change: Callable[[nn.Module], None], compiled: bool) -> None:
    tolerance: Any = {"rtol": 1e-6, "atol": 1e-6} if compiled else {"rtol": 1e-12, "atol": 1e-12}  # AdamW's scalars
    plain = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 5)).double()
    module = copy.deepcopy(plain)
    model = BucketedDataParallel(module, shard_optimizer=True)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    optimizers = torch.optim.AdamW(plain.parameters()), model.sharded_optimizer(torch.optim.AdamW)
    step = torch.compile(optimizers[1].step, backend="aot_eager") if compiled else optimizers[1].step
    for number in range(4):
        if number == 2:
            change(module)
            if change is give_other_memory:
                change(plain)
        batch = torch.randn(2, 3, 8).double()
        plain(batch).square().mean().backward()
        forward(batch[dist.get_rank()]).square().mean().backward()
        optimizers[0].step()
        step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for actual, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, **tolerance)
        assert module[0].weight.is_shared() == (change is share and number >= 2)
    whole, state = get_state_dict(plain, optimizers[0])[1], model.optimizer_state_dict(optimizers[1])
    for name, entries in whole["state"].items():
        torch.testing.assert_close(state["state"][name]["exp_avg"], entries["exp_avg"], **tolerance)
