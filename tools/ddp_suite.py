"""Runs PyTorch's tests of DistributedDataParallel on BucketedDataParallel, over gloo, without a GPU.

    python tools/ddp_suite.py                      # all, in a few minutes
    python tools/ddp_suite.py -k uneven -k no_sync --algorithm float32
    python tools/ddp_suite.py --control            # the same tests on torch's own wrapper

The tests are those of torch/testing/_internal/distributed/distributed_test.py, which is installed with torch, that
construct a DistributedDataParallel. Each runs on new ranks, forked from this process. An adapter replaces torch's
class: it is BucketedDataParallel, with the options of this script, for modules that a test wraps several times and GPUs
that are the CPU.

Most of the tests require one GPU per rank, though few depend on it. This script replaces their GPUs by the CPU;
--control shows which of them then fail even with torch's own wrapper: they are skipped as needing a GPU.

On stdout there is one line per test and a summary. "by design" is a failure for the reason in BY_DESIGN; such a test
has FAILED if it passes, since the table is then wrong. The exit status is 1 if a test has FAILED, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import inspect
import logging
import os
import re
import sys
import tempfile
import unittest
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from suites import GPUsAreTheCPU, by_name, is_chosen, judge, on_cpu, report, run_test

from cuda_ext.distributed import BucketedDataParallel

try:
    import torch.testing._internal.common_distributed as common
except ModuleNotFoundError as error:  # torch's tests need more packages than torch
    sys.exit(f"ddp_suite.py: expected {error.name}, which torch's tests import; pip install {error.name}")

RANKS = 2
SECONDS = 60  # limit of a test, unless torch sets a longer one
TESTS = "torch.testing._internal.distributed.distributed_test"
TORCH_WRAPPER = nn.parallel.DistributedDataParallel


BY_DESIGN = by_name(
    {
        "registers a communication hook that does more than choose a dtype: refused": """
        accumulate_gradients_no_sync_allreduce_hook accumulate_gradients_no_sync_allreduce_with_then_hook
        ddp_broadcast_buffer_via_hook ddp_buffer_hook_allreduce ddp_buffer_hook_allreduce_return_future
        ddp_hook_parity_post_localSGD ddp_hook_parity_powerSGD ddp_python_error_logged
    """,
        "reads the reducer, the logger or other internals of torch's wrapper": """
        compute_bucket_assignment_by_size_sparse_error_with_logger ddp_build_debug_param_to_name_mapping
        ddp_build_debug_param_to_name_mapping_requires_grad ddp_comm_hook_logging
        ddp_control_flow_different_across_ranks ddp_control_flow_same_across_ranks ddp_logging_data_cpu
        ddp_uneven_inputs detect_ddp_is_actually_static different_graph_across_ranks get_data_parallel_params
        skip_all_reduce_unused_parameters
    """,
        "sets mixed_precision, which is torch.autocast's task": """
        ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none ddp_native_mixed_precision_ignored_params
        ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
    """,
        "expects an error for unused parameters, which need no flag": """
        ddp_multiple_nested_unused_params_err_ignore_params ddp_multiple_nested_unused_params_error
        ddp_unused_params_rebuild_buckets_exception
    """,
        "expects an error from static_graph, but graphs may change": "invalid_static_graph static_graph_api_cpu",
        "runs optimizers of torch.distributed.optim inside backward, before a bucket is averaged: refused": """
        ddp_apply_optim_in_backward ddp_apply_optim_in_backward_grad_as_bucket_view_false
        ddp_apply_optim_in_backward_ignored_params
    """,
        "expects an error for a mesh of two dimensions, which is for two levels of network": """
        ddp_device_mesh_initialization
    """,
        "sets a size for each bucket": "ddp_bucket_cap_mb_list",
        "calls backward with create_graph=True, but averages are not part of the graph: refused": "ddp_create_graph",
        "divides by the number of ranks that still have inputs: refused": "ddp_grad_div_uneven_inputs",
        "expects search_unused_parameters in the profile, but no search is needed": "ddp_profiling_torch_profiler",
        "expects a RuntimeError for a module without trainable parameters; ours raises ValueError": """
        DistributedDataParallel_requires_grad
    """,
        "assigns a module to the wrapper, which would neither average nor save it: refused": "ddp_sync_module_states",
        "replaces parameters by functional_call, whose gradients are not averaged: refused": "stateless_api_with_ddp",
    }
)
NEEDS_GPU = by_name(
    {
        "has a SyncBatchNorm, which torch's wrapper supports on GPUs only": """
        DistributedDataParallel_SyncBatchNorm DistributedDataParallel_SyncBatchNorm_2D_Input
        DistributedDataParallel_SyncBatchNorm_Channels_Last
        DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient DistributedDataParallel_SyncBatchNorm_No_Affine
        DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process DistributedDataParallel_SyncBatchNorm_half
        ddp_inference ddp_uneven_inputs_stop_iteration_sync_bn sync_bn_logged
    """,
        "works on streams of a GPU": """
        DistributedDataParallel_non_default_stream ddp_apply_optim_in_backward
        ddp_apply_optim_in_backward_grad_as_bucket_view_false ddp_apply_optim_in_backward_ignored_params
        ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none ddp_native_mixed_precision_ignored_params
        ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
    """,
        "expects tensors or logs to name a GPU": "ddp_device ddp_logging_data_gpu",
    }
)


class Adapter(BucketedDataParallel):
    """BucketedDataParallel for modules that may be wrapped already, on GPUs that are the CPU."""

    options: ClassVar[dict[str, Any]] = {}  # arguments of all BucketedDataParallels
    wrapped: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    def __init__(self, module: nn.Module, device_ids: object = None, output_device: object = None, **rest: Any) -> None:
        module = module.module if isinstance(module, Adapter) else module
        module = copy.deepcopy(module) if module in self.wrapped else module  # a module may be wrapped only once
        self.wrapped.add(module)
        super().__init__(module, **rest, **self.options)

    def _set_ddp_sink_clone(self, value: bool) -> None:
        """Does nothing: outputs are never cloned."""


class TorchOnCPU(TORCH_WRAPPER):
    """torch's wrapper without device ids, which it refuses on a CPU."""

    def __init__(self, module: nn.Module, device_ids: object = None, output_device: object = None, **rest: Any) -> None:
        super().__init__(module, **rest)


def lend_cpu_as_gpus() -> None:
    """Pretends that there is a GPU per rank; must be called before the tests are imported."""
    module_to, skip_if_fewer = nn.Module.to, common.skip_if_lt_x_gpu

    @functools.wraps(module_to)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return module_to(module, *map(on_cpu, args[:1]), *args[1:], **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda count, **kwargs: (
        (lambda test: test) if count <= RANKS else skip_if_fewer(count, **kwargs)
    )
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.current_device = lambda: 0
    for name in ("set_device", "manual_seed", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)


def import_tests() -> ModuleType:
    """Sets the environment variables that torch's test module reads."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        return importlib.import_module(TESTS)


def substitute(module: ModuleType, wrapper: type) -> None:
    for place in (nn.parallel, nn.parallel.distributed, module):
        place.DistributedDataParallel = wrapper  # type: ignore[attr-defined]


def names_of_tests(module: ModuleType) -> list[str]:
    """Tests that construct a DistributedDataParallel, directly or in a method that they call."""
    methods = inspect.getmembers(module.DistributedTest._DistTestBase, inspect.isfunction)
    sources = {name: inspect.getsource(inspect.unwrap(method)) for name, method in methods}
    makes_one = {name for name, source in sources.items() if re.search(r"\b(DistributedDataParallel|DDP)\(", source)}
    while True:
        helpers = [name for name in makes_one if not name.startswith("test_")]
        calls = re.compile(rf"self\.({'|'.join(helpers)})\(")
        callers = {name for name, source in sources.items() if calls.search(source)}
        if callers <= makes_one:
            return sorted(name for name in makes_one if name.startswith("test_"))
        makes_one |= callers


def make_case(module: ModuleType, log: int) -> type[unittest.TestCase]:
    """Runs each test on forked ranks, whose output goes to `log`."""

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            os.dup2(log, 1)
            os.dup2(log, 2)
            with GPUsAreTheCPU():
                super()._run(rank, test_name, file_name, pipe, **kwargs)

    return Case


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="parts", action="append", metavar="PART", help="only tests with PART in the name")
    parser.add_argument("--control", action="store_true", help="run torch's own wrapper instead of ours")
    parser.add_argument("--algorithm", default="auto", help="algorithm of BucketedDataParallel; default: %(default)s")
    parser.add_argument("--log", type=Path, help="file for the output of the ranks; default: a temporary file")
    return parser.parse_args()


def verdict_of(case: type[unittest.TestCase], name: str, options: argparse.Namespace) -> tuple[str, str]:
    """Compares the outcome with the tables."""
    if name in NEEDS_GPU and name not in BY_DESIGN and not options.control:
        return "skipped", f"needs a GPU: {NEEDS_GPU[name]}"
    with contextlib.redirect_stdout(sys.stderr if options.log else open(os.devnull, "w")):
        outcome, why = run_test(case(name))
    if options.control:
        return judge(outcome, why, NEEDS_GPU.get(name, ""), "needs GPU")
    return judge(outcome, why, BY_DESIGN.get(name, ""))


def main() -> int:
    options = parse()
    Adapter.options = {"algorithm": options.algorithm}
    lend_cpu_as_gpus()
    module = import_tests()
    substitute(module, TorchOnCPU if options.control else Adapter)
    common.get_timeout = lambda test_id: max(SECONDS, common.TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], 0))
    logging.getLogger(common.__name__).disabled = True
    names = [name for name in names_of_tests(module) if is_chosen(name, options.parts)]
    with open(options.log, "wb") if options.log else tempfile.TemporaryFile() as log:
        case = make_case(module, log.fileno())
        return report([(name, functools.partial(verdict_of, case, name, options)) for name in names], f"{RANKS} ranks")


if __name__ == "__main__":
    sys.exit(main())
