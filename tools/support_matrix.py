"""Writes docs/support.md: which op works with which dtype and option, on the CPU and in the CUDA kernels.

    python tools/support_matrix.py            # prints the page; --write writes it

Every cell is an answer of the code: the op runs on small inputs, on the CPU and under the emulator, and its result and
gradients must match the reference in float64. A cell is empty if the op refuses the input with one of the two errors
that mean "not supported", RuntimeError and NotImplementedError, whose text names the op. Anything else ends the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cuda_ext
from cuda_ext import BlockMask, testing

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
YES, NO = "✓", ""
# The largest error of plain PyTorch may be small by luck; products of float32 in three tf32 have up to 2^-21 of a term.
OF_FEW_ELEMENTS: dict[str, Any] = {"factor": 8.0, "gradient_factor": 8.0}

PRODUCTS = ("gemm", "linear", "gated_linear", "mlp", "gated_mlp", "grouped_mm", "mixture_of_experts")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICES: dict[str, Callable[[], AbstractContextManager[Any]]] = {"CPU": nullcontext, "CUDA": testing.emulated}

HEAD = """# Supported dtypes, options and transforms

Written by `tools/support_matrix.py`, which runs every combination: ✓ means that the result and the gradients match the
reference; an empty cell means that the op refuses the input with an error that names it.

"CUDA" stands for the kernels on `mma.sync`, here run by the [emulator](emulator.md). Those on `wgmma`, which an H100 or
H200 runs instead, take the same options.
"""
DTYPES_TEXT = """
## Dtypes

All ops have forward and backward in these dtypes. Sums are formed in float32, for float64 in float64.

Where CUDA has no kernel, ops are composed of PyTorch's, correct and slower: all ops in float64; attention with head
dims above 256, and its backward in float32 above 128. Memory still grows with Sq + Sk. Two things raise on CUDA only:
`flash_attention_with_kvcache` that appends to a cache of float64, and, while a graph is captured,
`flash_attention_varlen` and `flash_attention_with_kvcache` that are composed, because the host then reads lengths.
`tests/test_everywhere.py` compares both devices, op by op.
"""
OPTIONS_TEXT = """
## Options of attention

Forward and backward, float32 on the CPU and float16 in the CUDA kernels. "Packed" is `flash_attention_varlen`.
"""
TRANSFORMS_TEXT = """
## Transforms

Derivatives other than the first one by `backward` are composed of several ops, and slower.
"""


GPUS = {
    "sm_75": "T4, RTX 20",
    "sm_80": "A100, A30",
    "sm_86": "RTX 30, A10, A40",
    "sm_87": "Jetson Orin",
    "sm_89": "RTX 40, L4, L40",
    "sm_90a": "H100, H200, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_120": "RTX 50, RTX PRO 6000",
    "sm_121": "DGX Spark",
}
GPUS_TEXT = """
## GPUs

The instructions that multiply matrices on each architecture, as emulated. "float32": in float32 arithmetic without
tensor cores, several times slower than float16. "as bfloat16": `scaled_mm` is composed of products in bfloat16; sm_100
and sm_103 convert FP8 inside the kernel, at best as fast as one of float16. On sm_75 backward of head dims above 192,
or 128 of the value, is composed of other ops, with memory proportional to the product of the lengths. Of these GPUs, an
H100 has run the kernels. `python -m cuda_ext.info` says how fast the others should be; `sm_100` has faster
instructions, which are not used.
"""


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return (0.5 * torch.randn(shape)).to(dtype).requires_grad_(grad)


class Case:
    """One call: the op, its reference, its tensors and its options."""

    def __init__(self, op: Callable[..., Any], reference: Callable[..., Any], **arguments: Any) -> None:
        self.op, self.reference = op, reference
        self.tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.options = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}

    def works(self, device: str) -> bool:
        """Whether the op takes these arguments. AssertionError if it does and its result is wrong."""
        extra = {}
        try:
            with DEVICES[device]():
                if self.options.get("dropout_p"):
                    state = torch.get_rng_state()
                    drawn = torch.ops.cuda_ext.flash_attention_forward(**self.tensors, **self.options)[2]
                    torch.set_rng_state(state)
                    extra = dict(zip(("seed", "offset"), drawn.tolist()))
                # Not a test of accuracy: a gradient of a few numbers may be exact by chance in plain PyTorch.
                testing.assert_op_matches_reference(
                    self.op, self.reference, self.tensors, self.options, reference_options=extra, **OF_FEW_ELEMENTS
                )
        except (RuntimeError, NotImplementedError) as error:
            if self.op.__name__ not in str(error):
                raise
            return False
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            return False
        return True


def product(name: str, dtype: torch.dtype) -> Case:
    make = partial(randn, dtype=dtype)
    op, reference = getattr(cuda_ext, name), getattr(testing, f"reference_{name}")
    if name == "gemm":
        return Case(op, reference, a=make(24, 16), b=make(16, 32), bias=make(32), activation="gelu")
    x = make(24, 16)
    if name == "grouped_mm":
        offs = torch.tensor([5, 5, 20], dtype=torch.int32)
        return Case(op, reference, mat_a=x, mat_b=make(3, 16, 32), bias=make(3, 32), offs=offs)
    if name == "mixture_of_experts":
        ids, weights = torch.randint(0, 3, (24, 2)), make(24, 2)
        return Case(op, reference, input=x, expert_ids=ids, expert_weights=weights, w_up=make(3, 64, 16),
                    w_down=make(3, 16, 32), b_up=make(3, 64), b_down=make(3, 16))  # fmt: skip
    if name == "linear":
        return Case(op, reference, input=x, weight=make(32, 16), bias=make(32), activation="gelu")
    if name == "gated_linear":
        return Case(op, reference, input=x, weight=make(64, 16))
    return Case(op, reference, input=x, weight1=make(64 if name == "gated_mlp" else 32, 16), weight2=make(16, 32))


def loss(dtype: torch.dtype) -> Case:
    make = partial(randn, dtype=dtype)
    op, reference = cuda_ext.linear_cross_entropy, testing.reference_linear_cross_entropy
    target = torch.randint(0, 40, (24,))
    tensors = {"input": make(24, 16), "linear_weight": make(40, 16), "linear_bias": make(40), "target": target}
    return Case(op, reference, **tensors, softcap=5.0, z_loss=0.1)


def attention(dtype: torch.dtype, packed: bool, heads: int = 4, dim: int = 32, **options: Any) -> Case:
    """Two sequences, of 24 and 16 queries if packed; `options` override the tensors by name."""
    make = partial(randn, dtype=dtype)
    if not packed:
        tensors = {"query": make(2, 24, heads, dim), "key": make(2, 24, heads, dim), "value": make(2, 24, heads, dim)}
        return Case(cuda_ext.flash_attention, testing.reference_attention, **tensors | options)
    lengths = torch.tensor([0, 24, 40], dtype=torch.int32)
    tensors = {"query": make(40, heads, dim), "key": make(40, heads, dim), "value": make(40, heads, dim)}
    tensors |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    return Case(cuda_ext.flash_attention_varlen, testing.reference_attention_varlen, **tensors | options)


def bucket(dtype: torch.dtype) -> Callable[[str], bool]:
    def works(device: str) -> bool:
        tensors = [torch.randint(-8, 8, (n,)).to(dtype) for n in (5, 33)]
        flat, back = torch.full((128,), float("nan"), dtype=dtype), [torch.empty_like(t) for t in tensors]
        try:
            with DEVICES[device]():
                cuda_ext.bucket.pack(tensors, flat, [0, 64], scale=0.5)
                cuda_ext.bucket.unpack(flat, back, [0, 64], scale=2.0)
        except (RuntimeError, NotImplementedError) as error:
            if "bucket_pack" not in str(error):
                raise
            return False
        assert torch.equal(flat[:5], tensors[0] / 2) and torch.equal(flat[64:97], tensors[1] / 2)
        assert all(torch.equal(a, b) for a, b in zip(tensors, back))
        return True

    return works


def attention_options(dtype: torch.dtype, packed: bool) -> dict[str, dict[str, Any]]:
    """Rows of the table: the arguments that each option stands for. None: the function has no such argument."""
    make = partial(randn, dtype=dtype)
    rows = 40 if packed else (2, 24)
    shape = (rows,) if isinstance(rows, int) else rows
    keys = {"key": make(*shape, 2, 32), "value": make(*shape, 2, 32)}
    return {
        "`causal`": {"causal": True},
        "`window`": {"window": (7, 3)},
        "`softcap`": {"softcap": 5.0},
        "`alibi_slopes`": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        "`sinks`, with gradient": {"sinks": make(4)},
        "`attn_bias`, with gradient": {"attn_bias": make(1, 4, 24, 24)},
        "`relative_bias`, with gradient": {"relative_bias": make(4, 9)},
        "`block_mask`": {"block_mask": BlockMask.causal(24, 24)},
        "`attn_mask`": {"attn_mask": torch.rand(2, 1, 24, 24) < 0.8},
        "`dropout_p`": {"dropout_p": 0.25},
        "`return_lse`, with gradient": {"return_lse": True},
        "`deterministic`": {"deterministic": True},
        "fewer key heads (GQA, MQA)": keys,
        "Dv ≠ D": {"value": make(*shape, 4, 64)},
        "D = 8": {name: make(*shape, 4, 8) for name in ("query", "key", "value")},
        "D = 256": {name: make(*shape, 4, 256) for name in ("query", "key", "value")},
        "D = 20": {name: make(*shape, 4, 20) for name in ("query", "key", "value")},
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] + [":-:"] * (len(head) - 1), *rows]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def table_of_dtypes() -> str:
    ops: dict[str, Callable[[torch.dtype], Callable[[str], bool]]] = {
        name: lambda dtype, name=name: product(name, dtype).works  # type: ignore[misc]
        for name in PRODUCTS
    }
    ops["linear_cross_entropy"] = lambda dtype: loss(dtype).works
    ops["flash_attention"] = lambda dtype: attention(dtype, packed=False).works
    ops["flash_attention_varlen"] = lambda dtype: attention(dtype, packed=True).works
    ops["bucket.pack, unpack"] = bucket

    def cell(make: Callable[[torch.dtype], Callable[[str], bool]], dtype: torch.dtype) -> str:
        return ", ".join(device for device in DEVICES if make(dtype)(device))

    rows = [[f"`{name}`", *(cell(make, dtype) for dtype in DTYPES)] for name, make in ops.items()]
    return table(["op", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)], rows)


def table_of_options() -> str:
    dtype_of = {"CPU": torch.float32, "CUDA": torch.float16}
    columns = [(device, packed) for packed in (False, True) for device in DEVICES]

    def cell(name: str, device: str, packed: bool) -> str:
        options = attention_options(dtype_of[device], packed)[name]
        return YES if attention(dtype_of[device], packed, **options).works(device) else NO

    rows = [
        [name, *(cell(name, device, packed) for device, packed in columns)]
        for name in attention_options(torch.float32, False)
    ]
    return table(["option", *(f"{device}{', packed' if packed else ''}" for device, packed in columns)], rows)


def transforms(case: Case) -> dict[str, Callable[[], object]]:
    """What each column does, on float64; it raises if the transform is not supported, or wrong."""
    names = [name for name, tensor in case.tensors.items() if tensor.requires_grad]
    leaves = [case.tensors[name] for name in names]
    others = {name: tensor for name, tensor in case.tensors.items() if not tensor.requires_grad}

    def function(*values: Tensor) -> Any:
        return case.op(**dict(zip(names, values)), **others, **case.options)

    def vmap() -> None:
        mapped = torch.func.vmap(function)(*(torch.stack([leaf, 2 * leaf]) for leaf in leaves))
        torch.testing.assert_close(mapped[1], function(*(2 * leaf for leaf in leaves)))

    def compiled() -> None:
        torch._dynamo.reset()
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
        torch.testing.assert_close(result, function(*leaves))

    check = partial(torch.autograd.gradcheck, function, leaves, fast_mode=True)
    return {
        "`backward`": check,
        "second derivative": lambda: torch.autograd.gradgradcheck(function, leaves, fast_mode=True),
        "forward mode": lambda: check(check_forward_ad=True, check_backward_ad=False),
        "`torch.func.vmap`": vmap,
        "`torch.compile`, full graph": compiled,
    }


def table_of_transforms() -> str:
    cases = {f"`{name}`": product(name, torch.float64) for name in PRODUCTS}
    cases["`linear_cross_entropy`"] = loss(torch.float64)
    cases["`flash_attention`"] = attention(torch.float64, packed=False, heads=2, dim=8)
    cases["`flash_attention_varlen`"] = attention(torch.float64, packed=True, heads=2, dim=8)

    def cell(name: str, act: Callable[[], object]) -> str:
        try:
            act()
        except (RuntimeError, NotImplementedError) as error:
            if name.strip("`") not in str(error):
                raise
            return NO
        return YES

    columns = list(transforms(next(iter(cases.values()))))
    rows = [[name, *(cell(name, act) for act in transforms(case).values())] for name, case in cases.items()]
    return table(["op", *columns], rows)


def instruction(arch: str, case: Case) -> str:
    """What multiplies matrices; AssertionError if the result is wrong."""
    with testing.emulated(arch) as emulation:
        testing.assert_op_matches_reference(case.op, case.reference, case.tensors, case.options, **OF_FEW_ELEMENTS)
    counters = emulation.counters
    return "`wgmma`" if counters["wgmma"] else "`mma.sync`" if counters["mma"] else "float32"


def instruction_of_fp8(arch: str) -> str:
    """That of `scaled_mm`; AssertionError if the result is wrong."""
    a, b = (torch.randint(-8, 9, size).to(torch.float8_e4m3fn) for size in ((24, 16), (16, 32)))
    one = torch.ones(1)
    with testing.emulated(arch):
        out = cuda_ext.scaled_mm(a, b, one, "TensorWise", one, "TensorWise", output_dtype=torch.float32)
        kernel = cuda_ext.gemm_plan(a, b).kernel
    assert out.equal(a.float() @ b.float())
    return {"sm_90": "`wgmma`", "sm_89": "`mma.sync`", "composed": "as bfloat16"}[kernel]


def table_of_gpus() -> str:
    def row(arch: str, devices: str) -> list[str]:
        products = [instruction(arch, product("linear", dtype)) for dtype in DTYPES[:3]]
        products.append(instruction_of_fp8(arch))
        return [f"`{arch}`", devices, *products, *(instruction(arch, attention(dtype, False)) for dtype in DTYPES[1:3])]

    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES[:3]]
    head = [*(f"product, {name}" for name in (*names, "FP8")), *(f"attention, {name}" for name in names[1:])]
    return table(["architecture", "devices", *head], [row(*each) for each in GPUS.items()])


def page() -> str:
    torch.manual_seed(0)
    parts = [HEAD, DTYPES_TEXT, table_of_dtypes(), OPTIONS_TEXT, table_of_options(), TRANSFORMS_TEXT]
    return "".join([*parts, table_of_transforms(), GPUS_TEXT, table_of_gpus()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates docs/support.md by running the ops.")
    parser.add_argument("--write", action="store_true", help="write docs/support.md instead of printing it")
    text = page() if parser.parse_args().write else None
    if text is None:
        sys.stdout.write(page())
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
