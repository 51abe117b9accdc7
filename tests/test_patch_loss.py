"""Losses of patched models of transformers: without logits, and the same as those of the models as they were."""

from __future__ import annotations

import copy
import inspect
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers_models import SEQ2SEQ, SIZES, decoder, ids

import cuda_ext
from cuda_ext.integrations import transformers as integration
from cuda_ext.integrations.patching.logits import StandIn
from cuda_ext.integrations.patching.verification import ROUNDINGS

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "gpt2"]
VOCABULARY = SIZES["vocab_size"]


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    integration.calls(reset=True)
    yield


def patched(model: nn.Module, **options: Any) -> Any:
    """A copy."""
    model = copy.deepcopy(model)
    report = cuda_ext.patch(model, attention=False, mlp=False, **options)
    assert list(report.swapped) == ["loss"] and not report.left
    return model


def batch() -> dict[str, Tensor]:
    tokens = ids()
    labels = tokens.clone()
    labels[0, :5] = labels[1, -3:] = -100
    return {"input_ids": tokens, "labels": labels}


class Formed(TorchDispatchMode):
    """Notices tensors with as many elements as logits, or as the same without a row of each sequence."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.fewest, self.found = (rows - 3) * VOCABULARY, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            sizes = [t.shape for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.found |= any(s.numel() >= self.fewest and VOCABULARY in s[-1:] for s in sizes)
        return out


def assert_same(model: Any, reference: Any, inputs: dict[str, Any], *, formed: bool = False) -> None:
    """Loss and all gradients, and whether logits were formed."""
    losses, gradients = [], []
    for each in (model, reference):
        with Formed(inputs["input_ids"].numel()) as mode:
            out = each(**inputs)
            each.zero_grad()
            out.loss.backward()
        assert mode.found == (formed or each is reference)
        losses.append(out.loss.detach())
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    # Losses of transformers are float32 in all models: float64 is no more exact.
    dtype = reference.dtype if reference.dtype != torch.float64 else torch.float32
    assert losses[0].dtype == losses[1].dtype
    tolerance = ROUNDINGS[dtype] * torch.finfo(dtype).eps
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)
    assert list(gradients[0]) == list(gradients[1])
    norms = {name: float(expected.double().norm()) for name, expected in gradients[1].items()}
    rounding = torch.finfo(reference.dtype).eps * max(norms.values())  # the bias of keys has no other gradient
    for name, expected in gradients[1].items():
        assert float((gradients[0][name] - expected).double().norm()) <= tolerance * norms[name] + rounding, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(name: str, dtype: torch.dtype) -> None:
    reference = decoder(name, "eager", dtype)
    model = patched(reference)
    for training in (False, True):
        assert_same(model.train(training), reference.train(training), batch())
    assert model(**batch()).logits is None
    assert integration.calls() == {"served": {"linear_cross_entropy": 3}, "refused": {}}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(cases=3)
def test_twenty_steps(name: str, dtype: torch.dtype, optimizer: Any) -> None:
    """As far from float64 as the model as it was."""
    start = decoder(name, "eager", dtype).train()
    exact = decoder(name, "eager", torch.float64).train()
    exact.load_state_dict(start.state_dict())
    batches = [batch() for _ in range(4)]

    def losses(model: Any) -> Tensor:
        steps = optimizer(model.parameters(), lr=1e-3 if optimizer is torch.optim.AdamW else 0.1)
        found = []
        for step in range(20):
            loss = model(**batches[step % 4]).loss
            loss.backward()
            steps.step()
            steps.zero_grad()
            found.append(loss.detach().double())
        return torch.stack(found)

    ours = losses(patched(start))
    expected = losses(exact)
    theirs = losses(start)
    assert expected[-4:].mean() < expected[:4].mean() - 0.01  # it learns
    # Twice: of 20 differences between two trajectories that are rounded independently.
    rounding = torch.finfo(torch.float32).eps * float(expected.max())
    assert (ours - expected).norm() <= 2 * (theirs - expected).norm() + 20 * rounding


# What the loss depends on


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(11)},
        {"ignore_index": 5},
        {"shift_labels": torch.randint(3, 99, (3, 19))},
        {"logits_to_keep": torch.arange(3, 19), "shift_labels": torch.randint(3, 99, (3, 16))},
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_arguments_of_the_loss(name: str, arguments: dict[str, Any]) -> None:
    reference = decoder(name, "eager")
    inputs = batch() | arguments
    if "ignore_index" in arguments:
        inputs["labels"][inputs["labels"] < 0] = 5
    if "logits_to_keep" in arguments:
        losses = [each(**inputs).loss for each in (patched(reference), reference)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # a loss is float32 also in models of float64
    else:
        assert_same(patched(reference), reference, inputs)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_and_bias(tied: bool) -> None:
    reference = decoder("llama", "eager", tie_word_embeddings=tied)
    reference.lm_head.bias = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == tied
    assert_same(patched(reference), reference, batch())


def other(name: str, config: str, **changed: Any) -> Any:
    import transformers as hf

    settings = getattr(hf, config)(**{**SIZES, **changed})
    settings._attn_implementation = "eager"
    return getattr(hf, name)(settings).double().eval()


@pytest.mark.parametrize(
    ("name", "config", "changed"),
    [
        ("GraniteForCausalLM", "GraniteConfig", {"logits_scaling": 3.0}),
        ("CohereForCausalLM", "CohereConfig", {"logit_scale": 0.3}),
        ("Gemma2ForCausalLM", "Gemma2Config", {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
        ("BertForMaskedLM", "BertConfig", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    ],
)
def test_what_models_do_to_logits(name: str, config: str, changed: dict[str, Any]) -> None:
    reference = other(name, config, **changed)
    model = patched(reference)
    assert_same(model, reference, batch())
    assert integration.calls() == {"served": {"linear_cross_entropy": 1}, "refused": {}}


def test_the_loss_of_a_router_is_added() -> None:
    reference = decoder("gpt_oss", "eager", output_router_logits=True, router_aux_loss_coef=0.5)
    model = patched(reference)
    assert_same(model, reference, batch())
    inputs = batch()
    assert model(**inputs).aux_loss == reference(**inputs).aux_loss > 0.1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_and_decoder(name: str) -> None:
    """BART adds a bias to its logits."""
    import transformers as hf

    reference: Any
    if name == "bart":
        reference = hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ | {"vocab_size": VOCABULARY})).double()
        reference.final_logits_bias.normal_()
        assert_same(patched(reference), reference, batch())
        return
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
    reference = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0))
    assert_same(patched(reference.double()), reference, batch())


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast(name: str) -> None:
    reference = decoder(name, "eager", torch.float32)
    model, inputs = patched(reference), batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [each(**inputs).loss for each in (model, reference)]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    torch.testing.assert_close(*losses, rtol=2.0**-8, atol=0)  # the reference rounds logits to bfloat16
    assert integration.calls()["served"] == {"linear_cross_entropy": 1}


def test_on_the_meta_device() -> None:
    model = patched(decoder("llama", "eager")).to("meta")
    out = model(**{name: value.to("meta") for name, value in batch().items()})
    assert out.loss.shape == () and out.logits is None


# What the model returns


def test_logits_are_returned_when_asked_for() -> None:
    reference = decoder("gemma2", "eager")
    inputs = batch()
    expected = reference(**inputs)
    without, with_logits = patched(reference), patched(reference, return_logits=True)
    assert without(**inputs).logits is None and "logits" not in without(**inputs)
    assert torch.equal(with_logits(**inputs).logits, expected.logits)
    assert torch.equal(without(inputs["input_ids"]).logits, expected.logits)  # without labels
    assert without(input_ids=inputs["input_ids"], labels=None).loss is None
    assert len(without(**inputs, return_dict=False)) == len(reference(**inputs, return_dict=False)) - 1
    assert torch.equal(with_logits(**inputs, return_dict=False)[1], expected.logits)
    gradients = [
        torch.autograd.grad(each(**inputs).logits.sum(), each.lm_head.weight)[0] for each in (with_logits, reference)
    ]
    assert torch.equal(*gradients)
    # Patching again changes it.
    assert "loss" in cuda_ext.patch(without, attention=False, mlp=False, return_logits=True).swapped
    assert torch.equal(without(**inputs).logits, expected.logits)
    assert not cuda_ext.patch(without, attention=False, mlp=False, return_logits=True).swapped


def test_labels_by_position() -> None:
    reference, inputs = decoder("llama", "eager"), batch()
    arguments = (inputs["input_ids"], None, None, None, None, inputs["labels"])
    out = patched(reference)(*arguments)
    assert out.logits is None
    torch.testing.assert_close(out.loss, reference(*arguments).loss, rtol=1e-6, atol=0)


def test_unpatched_and_copied() -> None:
    reference = decoder("llama", "eager")
    model, inputs = patched(reference), batch()
    assert list(model.state_dict()) == list(reference.state_dict())
    assert type(model).__name__ == model._get_name() == type(reference).__name__  # as Trainer wants it
    assert copy.deepcopy(model)(**inputs).logits is None
    cuda_ext.unpatch(model)
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    assert [set(vars(m)) for m in model.modules()] == [set(vars(m)) for m in reference.modules()]
    assert torch.equal(model(**inputs).logits, reference(**inputs).logits)


def test_generation() -> None:
    reference = decoder("llama", "eager")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    model, tokens = patched(reference), ids()
    model(**batch())
    assert torch.equal(model.generate(tokens, **options), reference.generate(tokens, **options))


# What it relies on, and what happens where that does not hold


def forms_logits(change: Callable[[Any], object]) -> None:
    reference = decoder("llama", "eager")
    model = patched(reference)
    for each in (model, reference):
        change(each)
    assert_same(model, reference, batch(), formed=True)


def test_another_loss_gets_logits() -> None:
    def loss_function(logits: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        kept = logits[:, :-1].float() - 1.0
        return -(kept.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))).mean()

    def change(model: Any) -> None:
        model.loss_function = loss_function

    forms_logits(change)
    assert integration.calls() == {"served": {}, "refused": {"loss: __sub__ of logits": 1}}


def test_hooks_of_the_output_layer_see_logits() -> None:
    seen = []
    forms_logits(lambda model: model.lm_head.register_forward_hook(lambda m, i, out: seen.append(out.shape)))
    assert seen == [(3, 19, VOCABULARY)] * 2


def test_a_replaced_or_reparametrized_output_layer() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    forms_logits(lambda model: nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Doubled()))
    layer = nn.Linear(64, VOCABULARY).double()
    forms_logits(lambda model: setattr(model, "lm_head", copy.deepcopy(layer)))


@pytest.mark.parametrize("patch_first", [True, False])
def test_lora(patch_first: bool) -> None:
    """On the output layer, which is then left alone, or elsewhere."""
    from peft import LoraConfig, get_peft_model

    start = decoder("llama", "eager")
    for targets in (["lm_head", "q_proj"], ["q_proj"]):
        models = []
        for patch in (True, False):
            model = copy.deepcopy(start)
            if patch and patch_first:
                cuda_ext.patch(model, attention=False, mlp=False)
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))
            if patch and not patch_first:
                report = cuda_ext.patch(model, attention=False, mlp=False)
                left = report.left.get("base_model.model.lm_head", "")
                assert ("output layer is a" in left) == ("lm_head" in targets) == ("loss" not in report.swapped)
            models.append(model.train())
        assert_same(*models, batch(), formed="lm_head" in targets)


def test_a_forward_of_its_own_is_left() -> None:
    model = decoder("llama", "eager")
    model.forward = model.forward
    report = cuda_ext.patch(model, attention=False, mlp=False)
    assert not report.swapped and "a forward of its own" in report.left["lm_head"]


class Small(nn.Module):
    """A model that is itself an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation, self.lm_head = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.activation(self.linear(x)))
        return logits if labels is None else F.cross_entropy(logits, labels)


def test_a_model_that_is_swapped_as_a_block_keeps_its_loss() -> None:
    model, x, labels = Small(), torch.randn(3, 4), torch.tensor([0, 4, 2])
    expected = model(x), model(x, labels)
    report = cuda_ext.patch(model)
    assert list(report.swapped) == ["MLP"] and "is swapped for its linear layers" in report.left["lm_head"]
    torch.testing.assert_close((model(x), model(x, labels)), expected)
    cuda_ext.unpatch(model)
    assert type(model) is Small and type(model.lm_head) is nn.Linear
    assert list(cuda_ext.patch(model, mlp=False).swapped) == ["loss"]
    torch.testing.assert_close((model(x), model(x, labels)), expected)


def test_stand_ins_behave_as_logits() -> None:
    input, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    expected = F.linear(input, weight, bias)
    stand_in: Any = StandIn(input, weight, bias, input.dtype)
    assert (stand_in.shape, stand_in.size(-1), stand_in.dim(), stand_in.device) == ((2, 3, 5), 5, 3, input.device)
    same: list[Callable[[Any], Any]] = [
        lambda z: z / 2 * 3,
        lambda z: 2 * (z / 5).tanh().tanh(),
        lambda z: torch.tanh(z * 0.5).to(torch.float64),
        lambda z: z[..., 1:, :].contiguous().view(-1, 5),
        lambda z: z[:, :2].reshape((4, 5)).float(),
        lambda z: z[:, :, :2],
        lambda z: z[:, 1:, :2, ...],
        lambda z: z[:, 1:, :, ...],
        lambda z: z[1:, ..., :2],
        lambda z: z[..., :2, :],
        lambda z: z[1:, ...],
        lambda z: z[()],
        lambda z: z[:1],
        lambda z: z[0, 1],
        lambda z: z.view(-1, 10) + 1,
        lambda z: z.reshape(-1),
        lambda z: z * torch.ones(5) - bias / z,
        lambda z: (z + bias + bias[None]) * 0.5,
        lambda z: z * 2 + bias,
        lambda z: z + 1 + expected[0, 0, 0],
        lambda z: z + bias.double(),
        lambda z: bias + z,
        lambda z: -z,
        lambda z: z.argmax(-1),
        lambda z: torch.cat([z, expected], 1),
        lambda z: F.cross_entropy(z.transpose(1, 2), torch.ones(2, 3, dtype=torch.int64)),
        lambda z: F.cross_entropy(z.flatten(0, 1), expected.flatten(0, 1).softmax(-1)),
        lambda z: F.cross_entropy(z.view(-1, 5) / -2, torch.arange(6) % 5, label_smoothing=0.1, reduction="none"),
        lambda z: F.cross_entropy((z.view(-1, 5) * -0.5).tanh() * 2, torch.arange(6) % 5, weight=bias.abs()),
        lambda z: F.cross_entropy((z.view(-1, 5)).tanh() * -2, torch.arange(6) % 5),
    ]
    for function in same:
        actual = function(stand_in)
        actual = actual.formed() if isinstance(actual, StandIn) else actual
        torch.testing.assert_close(actual, function(expected))


@pytest.mark.sampled(full=True)
def test_every_model_that_transformers_can_make_small() -> None:
    """Their losses and gradients, whether logits are formed or not."""
    from transformers.models.auto import modeling_auto as auto

    kinds = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
    served, formed = set(), set()
    for config, model in [pair for kind in kinds for pair in getattr(auto, f"MODEL_FOR_{kind}_MAPPING").items()]:
        model = model if isinstance(model, type) else model[0]
        reference = smallest(config, model)
        inputs = {"input_ids": ids(2, 9), "labels": ids(2, 9)}
        try:
            assert reference is not None and reference(**inputs).loss is not None
        except Exception:
            continue  # it needs other sizes, or other inputs
        integration.calls(reset=True)
        losses = [each(**inputs).loss for each in (patched(reference), reference)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=0, msg=model.__name__)
        (served if integration.calls()["served"] else formed).add(model.__name__)
    assert len(served) > 140 and len(formed) < 10, (served, formed)


def smallest(config: Any, kind: Any) -> Any:
    known = set().union(*(vars(each).get("__annotations__", {}) for each in config.__mro__))
    known |= set(inspect.signature(config.__init__).parameters)
    changes = {**SIZES, **SEQ2SEQ, "eos_token_id": 2, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    changes |= {"n_embd": 64, "n_layer": 1, "n_head": 4, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    changes |= {"ffn_dim": 96, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    try:
        settings = config(**{name: value for name, value in changes.items() if name in known})
        with torch.device("meta"):
            parameters = sum(each.numel() for each in kind(settings).parameters())
        return kind(settings).float().eval() if parameters < 3e6 else None
    except Exception:
        return None


# Compilers and memory


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiles_without_graph_breaks(name: str) -> None:
    reference = decoder(name, "eager", torch.float32)
    model, inputs = patched(reference), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, expected = compiled(**inputs), reference(**inputs)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected.loss)
    out.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, reference.lm_head.weight.grad)
    torch.testing.assert_close(compiled(inputs["input_ids"]).logits, expected.logits)


@pytest.mark.sampled
def test_peak_memory_of_a_step(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
import sys, torch, cuda_ext
from transformers import LlamaConfig, LlamaForCausalLM
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def step(length):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    tokens = torch.randint(65536, (1, length))
    model(input_ids=tokens, labels=tokens).loss.backward()
    return peak() - before
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=65536, **sizes))
for is_patched in (False, True):
    if is_patched:
        cuda_ext.patch(model)
    step(2)
    print("peak", step(1024))
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stdout
    plain, ours = (int(each.split()[0]) for each in done.stdout.split("peak ")[1:])
    print(f"a step of 1,024 tokens, 65,536 classes: {plain / 1e6:.0f} MB, without logits {ours / 1e6:.0f} MB")
    logits = 1024 * 65536 * 4
    assert plain > 2 * logits and ours < 0.5 * logits


@pytest.mark.sampled
def test_trainer(tmp_path: Any) -> None:
    """Which passes num_items_in_batch, and reads the signature of forward."""
    import transformers as hf

    rows = [{name: value[0] for name, value in batch().items()} for _ in range(8)]
    found = []
    for is_patched in (False, True):
        model = decoder("llama", "eager", torch.float32)
        model = patched(model) if is_patched else model
        options: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        options |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "seed": 3}
        trainer = hf.Trainer(model, hf.TrainingArguments(str(tmp_path), **options), train_dataset=rows)
        trainer.train()
        found.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        found[-1].append(trainer.evaluate(rows)["eval_loss"])
    assert len(found[0]) == 4
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-5, atol=0)


@pytest.mark.sampled
@on_ranks(2)
def test_wrapped_for_several_ranks() -> None:
    """The output layer belongs to the model's own unit of FSDP2, or is one with hooks."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def sharded(model: Any, *parts: str) -> nn.Module:
        for part in parts:
            fully_shard(model.get_submodule(part))
        return fully_shard(model, reshard_after_forward=True)

    def sharded_head(model: Any) -> nn.Module:
        return sharded(model, "lm_head")

    torch.manual_seed(5)
    start, inputs = decoder("llama", "eager"), batch()
    expected = start(**inputs)
    expected.loss.backward()
    for wrap, served in ((DistributedDataParallel, True), (sharded, True), (sharded_head, False)):
        model = patched(start)
        model.zero_grad()
        wrapped = wrap(model)
        integration.calls(reset=True)
        loss = wrapped(**inputs).loss
        assert bool(integration.calls()["served"]) == served
        torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
        loss.backward()
        gradient = model.lm_head.weight.grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(full, start.lm_head.weight.grad, rtol=1e-5, atol=1e-9)
