"""The switch, the counter and the refusals of attn_implementation="cuda_ext"."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers_models as models
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers_models import enabled  # noqa: F401

import cuda_ext
from cuda_ext import flash_attention
from cuda_ext.integrations import transformers as integration

pytestmark = pytest.mark.usefixtures("enabled")

NAME = integration.NAME


def test_switch() -> None:
    assert NAME in AttentionInterface._global_mapping and NAME in AttentionMaskInterface._global_mapping
    with integration.enable():
        pass
    assert NAME in AttentionInterface._global_mapping  # was enabled before
    model = models.decoder("llama", NAME)
    integration.disable()
    integration.disable()
    assert NAME not in AttentionInterface._global_mapping and NAME not in AttentionMaskInterface._global_mapping
    with pytest.raises(KeyError, match=NAME):
        model(models.ids())
    with integration.enable():
        with integration.enable():
            pass
        model(models.ids())
        integration.disable()  # ends calls outside of `with`
        model(models.ids())
    assert NAME not in AttentionInterface._global_mapping


@pytest.mark.sampled
def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    program = (
        "import sys, cuda_ext; cuda_ext.integrations.transformers.calls(); assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: cuda_ext.integrations.transformers.enable()\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'transformers>=5'" in result.stdout


@pytest.mark.parametrize("keyword", ["cache", "block_indices", "indices", "sinks", "block_table"])
def test_keywords_that_change_the_result_are_refused(keyword: str) -> None:
    from cuda_ext.integrations.transformers.attention import attention_forward

    tensors = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"attn_implementation='cuda_ext', Module: {keyword}: .*choose"):
        attention_forward(torch.nn.Module(), *tensors, None, **{keyword: torch.zeros(1)})
    assert integration.calls(reset=True)["refused"] == {keyword: 1}


def test_cu_seq_lens_with_padding_is_refused() -> None:
    model = models.decoder("llama", NAME)
    cumulative = torch.tensor([0, 19, 38, 57], dtype=torch.int32)
    options = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
    with pytest.raises(ValueError, match="cu_seq_lens"):
        model(models.ids(), attention_mask=models.padding("left"), use_cache=False, **options)
    assert integration.calls(reset=True)["refused"]


def test_attention_weights_are_not_returned() -> None:
    model = models.decoder("llama", NAME)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    assert not model(models.ids(), output_attentions=True).attentions


def test_layout_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded batches go to the op as views of the model's tensors, which are (B, S, H, D) in memory."""
    from cuda_ext.integrations.transformers import attention

    seen: list[bool] = []
    original = attention.flash_attention_varlen

    def spy(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        seen.extend(t._base is not None for t in (query, key, value))
        return original(query, key, value, *rest, **options)

    monkeypatch.setattr(attention, "flash_attention_varlen", spy)
    with torch.no_grad():
        models.decoder("gpt2", NAME)(models.ids(), attention_mask=models.padding("left"), use_cache=False)
    assert seen == [True] * 6


def test_calls_count_threads_together() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from cuda_ext.integrations.counting import Calls

    calls = Calls()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: calls.served("x"), range(2000)))
    assert calls.report(reset=True) == {"served": {"x": 2000}, "refused": {}}
    assert calls.report() == {"served": {}, "refused": {}}
    assert cuda_ext.integrations.transformers.calls is integration.calls


@pytest.mark.parametrize(
    "case", ["backward", "double backward", "forward mode", "vmap", "autocast", "make_fx", "export"]
)
def test_one_call_serves_whatever_autograd_needs(case: str) -> None:
    """The op of the attention function, whose tensors have their heads first, against the public op."""
    from cuda_ext.integrations.transformers.attention import attention_forward

    torch.manual_seed(5)
    query, (key, value), weight = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 7, 8), torch.randn(2, 5, 4, 8)
    inputs = tuple(t.requires_grad_("backward" in case or case == "make_fx") for t in (query, key, value))
    options: dict[str, Any] = {"softcap": 3.0, "scaling": 0.3, "is_causal": True, "sliding_window": 3}

    def ours(*qkv: Tensor) -> Tensor:
        return attention_forward(torch.nn.Module(), *qkv, None, **options)[0]

    def public(*qkv: Tensor) -> Tensor:
        rows_first = [t.transpose(1, 2) for t in qkv]
        return flash_attention(*rows_first, softcap=3.0, scale=0.3, causal=True, window=(2, 2))

    def gradients(attend: Any, *qkv: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*qkv), qkv, weight, create_graph=case == "double backward")

    def outcome(attend: Any) -> Any:
        if case == "backward":
            return gradients(attend, *inputs)
        if case == "double backward":
            return torch.autograd.grad(sum(g.square().sum() for g in gradients(attend, *inputs)), inputs)
        if case == "forward mode":
            return torch.func.jvp(attend, inputs, tuple(t.cos() for t in inputs))
        if case == "vmap":
            return torch.vmap(attend)(*(torch.stack([t, 2 * t]) for t in inputs))
        if case == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return attend(*inputs)
        if case == "make_fx":
            graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *qkv: gradients(attend, *qkv))(*inputs)
            return graph(*(2 * t.detach() for t in inputs))  # other values: nothing became a constant
        module = torch.nn.Module()
        module.forward = lambda *qkv: attend(*qkv)
        return torch.export.export(module, inputs).run_decompositions().module()(*inputs)

    got, expected = outcome(ours), outcome(public)
    torch.testing.assert_close(got, expected)
