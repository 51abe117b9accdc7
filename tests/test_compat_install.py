"""`cuda_ext.compat.install`: what libraries find when they look for flash-attn, and that nothing of it remains."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import cuda_ext
from cuda_ext import compat


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    assert importlib.util.find_spec("flash_attn") is None, "these tests need a machine without flash-attn"
    modules = {name for name in sys.modules if name.startswith("flash_attn")}
    yield
    compat.uninstall()
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == compat.install.__module__]
    assert {name for name in sys.modules if name.startswith("flash_attn")} == modules
    assert importlib.util.find_spec("flash_attn") is importlib.util.find_spec("flash_attn_interface") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    assert "flash_attn" not in importlib.metadata.packages_distributions()


def test_imports() -> None:
    with compat.install():
        import flash_attn  # type: ignore[import-not-found]
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # type: ignore[import-not-found]
        from flash_attn.flash_attn_interface import flash_attn_varlen_func  # type: ignore[import-not-found]

        assert flash_attn.flash_attn_func is compat.flash_attn.flash_attn_func
        assert flash_attn.flash_attn_interface.flash_attn_func is compat.flash_attn.flash_attn_func
        assert flash_attn_varlen_func is compat.flash_attn.flash_attn_varlen_func
        assert (pad_input, unpad_input) == (compat.flash_attn.bert_padding.pad_input, unpad_input)
        assert index_first_axis is compat.flash_attn.bert_padding.index_first_axis
        assert set(compat.flash_attn.__all__) - {"bert_padding", "layers"} <= set(dir(flash_attn))
        assert "cuda_ext" in (flash_attn.__doc__ or "")
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward

        with pytest.raises(NotImplementedError, match="_wrapped_flash_attn_forward is not there; use flash_attn_func"):
            _wrapped_flash_attn_forward(torch.ones(1))
        assert flash_attn.flash_attn_with_kvcache is compat.flash_attn.flash_attn_with_kvcache
        from flash_attn.layers.rotary import apply_rotary_emb  # type: ignore[import-not-found]

        assert apply_rotary_emb is compat.flash_attn.layers.rotary.apply_rotary_emb
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
            importlib.import_module("flash_attn.ops")
        with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
            importlib.import_module("flash_attn_interface")


def test_metadata() -> None:
    with compat.install():
        spec = importlib.util.find_spec("flash_attn")
        assert spec is not None and spec.name == "flash_attn"
        import flash_attn

        for name in ("flash-attn", "flash_attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        distribution = importlib.metadata.distribution("flash-attn")
        assert distribution.metadata["Name"] == "flash-attn" and not distribution.files
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert "torch" in importlib.metadata.packages_distributions()  # others are found as before
        names = [each.metadata["Name"] for each in importlib.metadata.distributions(name="torch")]
        assert names == ["torch"]


def test_flash_attention_3() -> None:
    with compat.install(flash_attn_3=True):
        import flash_attn_interface  # type: ignore[import-not-found]

        assert flash_attn_interface.flash_attn_func is compat.flash_attn_interface.flash_attn_func
        assert importlib.import_module("flash_attn_3.flash_attn_interface").flash_attn_func
        assert importlib.metadata.version("flash_attn_3") == "3.0.0"
        assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash_attn_3"]
        with pytest.raises(RuntimeError, match=r"expected flash_attn_3=True, .* got False; call .*uninstall first"):
            compat.install()


def test_a_second_call_changes_nothing() -> None:
    compat.install()
    path = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == path
    with compat.install(), compat.install():
        compat.uninstall()
        assert sys.meta_path == path
    assert importlib.util.find_spec("flash_attn") is None
    compat.uninstall()
    compat.install().remove()


def test_the_real_package_is_not_replaced_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("from flash_attn import part\n__version__ = '2.5.0'\n")
    (tmp_path / "flash_attn" / "part.py").write_text("")
    information = tmp_path / "flash_attn-2.5.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.5.0\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        real = importlib.import_module("flash_attn")
        with pytest.raises(RuntimeError, match=r"expected that flash_attn cannot be imported, .* pass force=True"):
            compat.install()
        assert importlib.import_module("flash_attn") is real
        with compat.install(force=True):
            assert importlib.import_module("flash_attn").flash_attn_func is compat.flash_attn.flash_attn_func
            assert importlib.metadata.version("flash_attn") == "2.8.3"
            assert "flash_attn.part" not in sys.modules
        assert importlib.import_module("flash_attn") is real and "flash_attn.part" in sys.modules
        assert importlib.metadata.version("flash_attn") == "2.5.0"
        for name in ("flash_attn", "flash_attn.part"):
            del sys.modules[name]
    importlib.invalidate_caches()


# Libraries


@pytest.mark.sampled
def test_what_transformers_asks() -> None:
    from transformers.utils import import_utils

    checks: list[Callable[[], bool]] = [
        import_utils.is_flash_attn_2_available,
        lambda: import_utils.is_flash_attn_greater_or_equal("2.6.3"),
    ]
    # The mocked answer is that there is a CUDA device; everything else is transformers' own code.
    with mock.patch.object(import_utils, "is_torch_cuda_available", lambda: True):
        assert [check() for check in checks] == [False, False]  # answers that transformers keeps
        with compat.install():
            assert [check() for check in checks] == [True, True]
            assert not import_utils.is_flash_attn_greater_or_equal("2.9")
            assert not import_utils.is_flash_attn_3_available()
        assert [check() for check in checks] == [False, False]
        with compat.install(flash_attn_3=True):
            assert import_utils.is_flash_attn_3_available()
        assert not import_utils.is_flash_attn_3_available()
    with compat.install():
        assert not import_utils.is_flash_attn_2_available()  # no device
    import_utils.is_flash_attn_2_available.cache_clear()


@pytest.mark.sampled
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_of_transformers(version: int) -> None:
    """A padded Llama with attn_implementation="flash_attention_2" against "eager", outputs and gradients.

    Mocked is only the check for a CUDA device; on CPU tensors our functions take the same path."""
    from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils
    from transformers.utils import import_utils

    matrix = {
        key: {**row, "supported_devices": ((lambda: True, "cuda"),)}
        for key, row in modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()
    }
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, dtype=torch.bfloat16, **sizes)
    ids, mask = torch.randint(64, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[0, 5:] = mask[2, 8:] = 0
    with (
        mock.patch.object(import_utils, "is_torch_cuda_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),
        mock.patch.dict(modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX, matrix),
        compat.install(flash_attn_3=version == 3),
    ):
        name = f"flash_attention_{version}"
        model = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).double()
        eager = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").double()
        eager.load_state_dict(model.state_dict())
        ran = mock.Mock(wraps=cuda_ext.flash_attention_varlen)
        with mock.patch("cuda_ext.compat._flash_attn_call.flash_attention_varlen", ran):
            actual = model(ids, attention_mask=mask).logits
        assert ran.call_count == 2
        expected = eager(ids, attention_mask=mask).logits
        seen = mask.bool()
        # The eager path computes softmax in float32, even in float64.
        torch.testing.assert_close(actual[seen], expected[seen], rtol=1e-6, atol=1e-6)
        gradient = torch.randn_like(actual) * mask[..., None]
        actual.backward(gradient)
        expected.backward(gradient)
        for (name, one), other in zip(model.named_parameters(), eager.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)
        tokens = model.generate(ids[1:2], max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert torch.equal(tokens, eager.generate(ids[1:2], max_new_tokens=3, do_sample=False, eos_token_id=None))
    import_utils.is_flash_attn_2_available.cache_clear()
    import_utils.is_flash_attn_3_available.cache_clear()


def test_without_a_device_transformers_says_so() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with compat.install():
        config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
        with pytest.raises(ImportError, match="is not available on CPU"):
            LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")


DIFFUSERS = """
import cuda_ext.compat, torch
cuda_ext.compat.install(flash_attn_3=True)
from diffusers.models import attention_dispatch as dispatch
assert dispatch._CAN_USE_FLASH_ATTN and dispatch._CAN_USE_FLASH_ATTN_3
q, k, v = (torch.randn(2, 9, 4, 16, dtype=torch.bfloat16) for _ in range(3))
expected = dispatch.dispatch_attention_fn(q, k, v, is_causal=True, backend="native")
out = dispatch.dispatch_attention_fn(q, k, v, is_causal=True, backend="flash")  # diffusers runs "_flash_3" on CUDA only
assert (out - expected).abs().max() < 0.04
lengths = dispatch.dispatch_attention_fn(q, k, v, backend="flash_varlen")
assert (lengths - dispatch.dispatch_attention_fn(q, k, v, backend="native")).abs().max() < 0.04
print("served")
"""


def test_diffusers(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """In its own process, because diffusers looks for flash-attn while it is imported."""
    result = run_python("-c", DIFFUSERS)
    assert result.returncode == 0 and "served" in result.stdout, result.stdout


def test_diffusers_imported_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", mock.Mock())
    with pytest.warns(UserWarning, match="diffusers looks for flash-attn while it is imported"):
        compat.install()
