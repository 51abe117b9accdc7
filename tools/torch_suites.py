"""Runs PyTorch's own tests of FlexAttention, varlen_attn, grouped_mm and scaled_mm on this package, on the CPU.

    python tools/torch_suites.py flex PYTORCH                  # PYTORCH: a checkout of PyTorch's source
    python tools/torch_suites.py decoding PYTORCH -k mask -k gqa
    python tools/torch_suites.py varlen PYTORCH --log varlen.log
    python tools/torch_suites.py grouped PYTORCH               # or scaled

    git clone --depth 1 --branch v2.12.1 https://github.com/pytorch/pytorch PYTORCH

The tests are not installed with PyTorch. Those of v2.12.1 fit PyTorch 2.11, and the tables below fit them:

    flex      test/inductor/test_flex_attention.py
    decoding  test/inductor/test_flex_decoding.py
    varlen    test/test_varlen_attention.py
    grouped   test/test_matmul_cuda.py, only test_grouped_gemm_*
    scaled    test/test_scaled_matmul_cuda.py, without groups and formats of two levels of scales

In flex and decoding, this package serves what a test compiles: `cuda_ext.integrations.flex` is enabled while a compiled
function runs. What the test compares it with is PyTorch's, in the same process. `torch.compile` is called without
fullgraph=True, with which the door is closed, and with the backend aot_eager in place of inductor, which has no
backward on CPUs. On two cores each of these two takes about 25 minutes. In varlen all calls are served, and in grouped
and scaled `torch.nn.functional.grouped_mm` and `scaled_mm` are this package's. Tests that are for GPUs run on the CPU,
also those that PyTorch skips there.

On stdout there is one line per test and a summary, with these verdicts:

    passed     and this package served at least one of its calls
    refused    it passed, but PyTorch ran all calls, for the reason that `flex.calls()` gives
    no call    it passed without a call that this package could serve
    skipped    by PyTorch, or for the reason in TOO_SLOW
    by design  a failure for the reason in BY_DESIGN; such a test has FAILED if it passes, since the table is then wrong
    FAILED     any other failure, with the numbers of calls that were served and refused

The exit status is 1 if a test has FAILED, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import signal
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from suites import GPUsAreTheCPU, by_name, is_chosen, judge, reason_of, report, run_test

import cuda_ext
from cuda_ext.integrations import flex

try:
    import torch.testing._internal.common_cuda as common_cuda
    import torch.testing._internal.common_device_type as device_types
    import torch.testing._internal.inductor_utils as inductor_utils
except ModuleNotFoundError as error:  # torch's tests need more packages than torch
    sys.exit(f"torch_suites.py: expected {error.name}, which torch's tests import; pip install {error.name}")

SECONDS = 120  # limit of a test
TORCH_COMPILE = torch.compile
SKIP_IF = unittest.skipIf
TORCH_INSTANTIATE = device_types.instantiate_device_type_tests

BY_DESIGN = by_name(
    {
        "counts Dynamo's graphs, whose number follows from the breaks": """
        builtin_score_mods_automatic_dynamic_* builtin_score_mods_dynamic_* dynamic_shapes_bug_dynamic_batch
        do_not_trigger_dynamic_shapes_on_empty_block_mask free_symbol_dynamic
    """,
        "compares Dynamo's graph, which is of the door": "fw_bw_graph_correctness symbol_closure_in_score_mod",
        "reads code or the log of inductor, which compiles nothing here": """
        backend_auto_matches_triton_large backend_triton_decode_matches_auto dynamic_divisibility_guards epilogue_fused
        flex_attention_always_freezes_layout flex_attention_logging kernel_options_argument_is_respected
        logsumexp_only_return strided_backwards
    """,
        "expects inductor to refuse what is served here, or what PyTorch runs without inductor": """
        backend_rejects_legacy_force_use_flag backend_triton_decode_errors_when_not_supported
        backend_triton_decode_errors_with_non_power_of_two_gqa cant_lower_error_message
        captured_wrong_device_error_message cpu_error_message_return_lse invalid_block_size mixed_dtypes_compiled
        symmetric_bias_* validate_small_embedding_size_error_message zero_length_sequence_error
    """,
        "expects an error without lists of query blocks, which are not read": "backward_error_with_none_q_indices",
        "asks for max_scores, which flash attention does not keep, and PyTorch has on GPUs only": """
        return_aux__* return_max__*
    """,
        "calls PyTorch's operator, whose backward the CPU does not have": """
        direct_backward_preserves_explicit_buffers direct_backward_supports_symint_score_mod_buffers
    """,
        "expects an error or a warning of PyTorch's own in an eager call": """
        mixed_device_error_message mixed_dtype_backwards mixed_dtype_backwards_compiled return_aux_deprecation_warnings
        float8_error_messages
    """,
        "reads an element outside of a captured tensor, at a hidden position: PyTorch fails, too": "load_rel_bias",
        "runs forward again in backward, when this tool has disabled the door": """
        selective_ac_with_max_autotune_short_query
    """,
        "compares a gradient that is 0 with sums of rounding errors": """
        distinct_biases_*256*float16 distinct_biases_*277*float16
    """,
        "compares strides of a dim of one element, which nothing reads": """
        flex_attention_stride_ordering_mode_inductor_permute_order2_shape0
        flex_attention_stride_ordering_mode_inductor_permute_order3_shape0
    """,
        "needs a GPU": "create_is_cuda_graphable",
        "expects an error without enable_gqa, which is not needed for groups of heads": "enable_gqa_*",
        "expects PyTorch's operators to be called": "custom_op_compliance_* custom_op_registration_*",
        "looks for kernels of AMD's libraries": "grouped_gemm_rocm_ck_flag",
    }
)
TOO_SLOW = by_name({"takes two minutes for PyTorch's own products of float16": "varlen_vs_sdpa_*_float16_*"})


class Suite(NamedTuple):
    file: str
    served: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # in which a test runs
    prefix: str | tuple[str, ...] = "test_"  # of its tests


SUITES = {
    "flex": Suite("inductor/test_flex_attention.py"),
    "decoding": Suite("inductor/test_flex_decoding.py"),
    "varlen": Suite("test_varlen_attention.py", flex.enable),
    "grouped": Suite("test_matmul_cuda.py", GPUsAreTheCPU, "test_grouped_gemm_"),
    "scaled": Suite(
        "test_scaled_matmul_cuda.py",
        GPUsAreTheCPU,
        ("test_float8_", "test_float32_", "test_scaled_mm_", "test_non_divisible_", "test_zero_dim_"),
    ),
}


# What serves


def compile_served(function: Any = None, /, **options: Any) -> Any:
    """`torch.compile` of a function in which this package serves attention."""
    if function is None:
        return functools.partial(compile_served, **options)
    backend = options.get("backend", "inductor")
    backend = "aot_eager" if backend == "inductor" else backend
    compiled: Any = TORCH_COMPILE(function, backend=backend, dynamic=options.get("dynamic"))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with flex.enable():
            return compiled(*args, **kwargs)

    return run


product_calls: list[None] = []


def grouped_mm(*args: Any, **kwargs: Any) -> Any:
    product_calls.append(None)
    return cuda_ext.grouped_mm(*args, **kwargs)


def scaled_mm(*args: Any, **kwargs: Any) -> Any:
    product_calls.append(None)
    return cuda_ext.scaled_mm(*args, **kwargs)


def calls() -> tuple[int, dict[str, int]]:
    """How many were served, and how many refused, and why, since the last call of this function."""
    found, products = flex.calls(reset=True), len(product_calls)
    product_calls.clear()
    return sum(found["served"].values()) + products, found["refused"]


# PyTorch's files


def put(place: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(place, name, value)


def lend_cpu() -> None:
    """Changes PyTorch so that its tests run on the CPU; must be called before they are imported."""

    def instantiate(case: type, scope: dict[str, Any], **_: object) -> None:
        TORCH_INSTANTIATE(case, scope, only_for="cpu")

    def run_always(*_: object) -> Callable[[Any], Any]:
        return lambda test: test

    def skip_if(condition: object, reason: str) -> Callable[[Any], Any]:
        return SKIP_IF(condition and "on CPU" not in reason, reason)

    put(unittest, skipUnless=run_always, skipIf=skip_if)
    put(device_types, instantiate_device_type_tests=instantiate, onlyCUDA=lambda test: test, skipCPUIf=run_always)
    put(common_cuda, PLATFORM_SUPPORTS_FLASH_ATTENTION=True, PLATFORM_SUPPORTS_FP8=True, IS_SM90=True)
    put(common_cuda, SM80OrLater=True, SM89OrLater=True, SM90OrLater=True)
    put(inductor_utils, IS_BIG_GPU=True)
    put(torch_flex, _validate_device=lambda *_: None)  # it refuses gradients on a CPU
    put(torch, compile=compile_served)


def import_file(path: Path) -> ModuleType:
    """Names that a newer file imports from PyTorch's test modules, and that this PyTorch lacks, are None."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    is_new = not hasattr(torch_varlen, "varlen_attn_out")
    if is_new:
        put(torch_varlen, varlen_attn_out=flex.varlen_attn_out)
    while True:
        try:
            spec.loader.exec_module(module)
            break
        except ImportError as error:
            missing = re.match(r"cannot import name '(\w+)' from '(torch\.testing\.[\w.]+)'", str(error))
            if missing is None:
                raise
            setattr(sys.modules[missing[2]], missing[1], None)
    if is_new:
        del vars(torch_varlen)["varlen_attn_out"]  # `flex.enable()` would route it to itself
    if hasattr(module, "DEVICE_SUPPORTS_BACKWARDS"):
        module.DEVICE_SUPPORTS_BACKWARDS.items.add("cpu")
    for place in (torch.nn.functional, module):  # a module may have imported the functions
        put(place, grouped_mm=grouped_mm, scaled_mm=scaled_mm)
    return module


def tests_of(module: ModuleType, suite: Suite) -> list[unittest.TestCase]:
    """Those whose names begin with the prefix."""
    cases = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, unittest.TestCase)]
    loader: Any = unittest.TestLoader()
    loader.testMethodPrefix = suite.prefix  # of which startswith takes several
    found = [loader.loadTestsFromTestCase(case) for case in cases if case.__module__ == module.__name__]
    return [test for group in found for test in group if isinstance(test, unittest.TestCase)]


# A run


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def short_name(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def method_of(name: str) -> str:
    """The name of a test without its class, device and dtype."""
    return re.sub(r"_cpu(_(?:float|bfloat)\d+)?$", "", name.rpartition(".")[2])


def verdict_of(test: unittest.TestCase, suite: Suite) -> tuple[str, str]:
    method = method_of(short_name(test))
    if slow := reason_of(method, TOO_SLOW):
        return "skipped", slow
    torch._dynamo.reset()
    calls()
    with suite.served(), limited(SECONDS):
        outcome, why = run_test(test)
    served, refused = calls()
    listed = reason_of(method, BY_DESIGN)
    if outcome == "passed" and not served:
        return judge(*(("refused", next(iter(refused))) if refused else ("no call", "")), listed)
    if outcome == "failed":
        why = f"{why} ({served} served{''.join(f', {count} refused: {each}' for each, count in refused.items())})"
    return judge(outcome, why, listed)


@contextlib.contextmanager
def output_in(log: Path | None) -> Iterator[TextIO]:
    """What this process prints inside goes to a file; yields what stdout is outside."""
    saved = os.dup(1), os.dup(2)
    with open(log, "wb") if log else tempfile.TemporaryFile() as file, os.fdopen(saved[0], "w") as output:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield output
        finally:
            for stream in (1, 2):
                os.dup2(saved[stream - 1], stream)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("pytorch", type=Path, metavar="PYTORCH", help="a checkout of PyTorch's source")
    parser.add_argument("-k", dest="parts", action="append", metavar="PART", help="only tests with PART in the name")
    parser.add_argument("--log", type=Path, help="file for what the tests print; default: a temporary file")
    return parser.parse_args()


def main() -> int:
    options = parse()
    suite = SUITES[options.suite]
    path = options.pytorch / "test" / suite.file
    if not path.is_file():
        sys.exit(f"torch_suites.py: expected a checkout of PyTorch's source, got {options.pytorch}, without {path}")
    lend_cpu()
    with output_in(options.log) as output:
        tests = tests_of(import_file(path), suite)
        named = [(short_name(test), functools.partial(verdict_of, test, suite)) for test in tests]
        return report([each for each in named if is_chosen(each[0], options.parts)], path.name, output)


if __name__ == "__main__":
    sys.exit(main())
