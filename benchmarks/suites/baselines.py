"""Other implementations. Each function turns the inputs of a case into a call. It raises ImportError if the package is
not installed and Failure if it does not support the inputs; its row then says so.

Packages other than PyTorch are used if they are installed, through their public interface.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.suites.measure import NOT_INSTALLED, Call, Failure

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for fixed shapes and a full graph; compiles at the first call."""
    return torch.compile(function, fullgraph=True, dynamic=False)


# GEMM: inputs are a (M, K) and b (K, N), each contiguous in one of its dims.


def deep_gemm(a: Tensor, b: Tensor) -> Call:
    module = importlib.import_module("deep_gemm")
    if a.dtype != torch.bfloat16:
        raise Failure("bfloat16 only")
    variant = f"bf16_gemm_{_layout(a)}{_layout(b)}"  # nt: b is (N, K) in memory
    product = getattr(module, variant)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    x, y = (t if t.is_contiguous() else t.t() for t in (a, b))  # row-major views

    def call() -> Tensor:
        product(x, y, out)
        return out

    return call


def _layout(matrix: Tensor) -> str:
    return "n" if matrix.is_contiguous() else "t"


def quack(a: Tensor, b: Tensor) -> Call:
    gemm = importlib.import_module("quack.gemm_interface").gemm
    return lambda: gemm(a, b)


# The loss of a vocabulary: functions of input (M, K), weight (V, K) and target (M,).


def torch_linear_cross_entropy(rows: int | None = None) -> Callable[..., Tensor]:
    """In chunks of so many rows; None: as many as PyTorch chooses, which are M K / V."""
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Failure(f"{NOT_INSTALLED}: PyTorch 2.13")
    return functools.partial(function, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows))  # type: ignore[attr-defined]


def liger_linear_cross_entropy() -> Callable[..., Tensor]:
    function: Callable[..., Tensor]
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return function


def cut_cross_entropy() -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return function


# Mixtures of experts: weights are (experts, 2 F, K) and (experts, K, F).


def transformers_experts(implementation: str, w_up: Tensor, w_down: Tensor) -> Callable[..., Tensor]:
    """The experts of Mixtral: a function of input (tokens, K), ids and weights (tokens, k)."""
    config = importlib.import_module("transformers").MixtralConfig(
        hidden_size=w_down.shape[1], intermediate_size=w_down.shape[2], num_local_experts=len(w_up)
    )
    modeling = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    with torch.device("meta"):
        experts = modeling.MixtralExperts(config)
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj, experts.down_proj = w_up, w_down
    config._experts_implementation = implementation
    function: Callable[..., Tensor] = experts.forward
    return function


# Attention: inputs are q (B, Sq, H, D), k and v (B, Sk, Hk, D).


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """Pinned to a backend such as "FLASH_ATTENTION", or "" for PyTorch's choice; in its own layout, (B, H, S, D)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if causal and q.shape[1] != k.shape[1]:
        raise Failure("aligns a causal mask top-left")
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (_own(t.transpose(1, 2)) for t in (q, k, v))

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def pinned() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return call()

    return with_leaves(pinned if backend else call, (q, k, v), lambda t: t.transpose(1, 2))


def _own(tensor: Tensor) -> Tensor:
    """A contiguous leaf with the same values."""
    return tensor.detach().contiguous().clone().requires_grad_(tensor.requires_grad)


def with_leaves(call: Call, leaves: tuple[Tensor, ...], to_ours: Callable[[Tensor], Tensor]) -> Call:
    """A call with its inputs (`leaves`) and the conversion to our layout, for backward() below."""
    call.leaves, call.to_ours = leaves, to_ours  # type: ignore[attr-defined]
    return call


def flex_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> Call:
    from torch.nn.attention.flex_attention import flex_attention as flex

    masked = causal or window is not None
    mask = _block_mask(causal, window, q.shape[1], k.shape[1], q.device) if masked else None
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (_own(t.transpose(1, 2)) for t in (q, k, v))
    call = functools.partial(compiled(flex), q, k, v, block_mask=mask, enable_gqa=grouped)
    return with_leaves(call, (q, k, v), lambda t: t.transpose(1, 2))


def flex_attention_of(q: Tensor, k: Tensor, v: Tensor, mask_mod: Callable[..., Tensor]) -> Call:
    """With a mask of equal lengths."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    mask = create_block_mask(mask_mod, None, None, q.shape[1], k.shape[1], device=q.device.type)
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (_own(t.transpose(1, 2)) for t in (q, k, v))
    call = functools.partial(compiled(flex), q, k, v, block_mask=mask, enable_gqa=grouped)
    return with_leaves(call, (q, k, v), lambda t: t.transpose(1, 2))


def flex_attention_with(q: Tensor, k: Tensor, v: Tensor, table: Tensor, score_mod: Callable[..., Tensor]) -> Call:
    """Without a mask; score_mod reads `table`, which gets a gradient."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    q, k, v = (_own(t.transpose(1, 2)) for t in (q, k, v))
    call = functools.partial(compiled(flex), q, k, v, score_mod=score_mod)
    return with_leaves(call, (q, k, v, table), lambda t: t.transpose(1, 2) if t.dim() == 4 else t)


@functools.lru_cache(maxsize=1)
def _block_mask(causal: bool, window: int | None, queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    shift = keys - queries

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i + shift if causal else j >= 0
        return seen & (i + shift - j <= window) if window is not None else seen

    # Uncompiled, create_block_mask materializes the whole mask first.
    large = queries * keys > 1 << 28
    return create_block_mask(visible, None, None, queries, keys, device=device.type, _compile=large)


def flash_attn(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, deterministic: bool = False
) -> Call:
    """FlashAttention-2."""
    function = importlib.import_module("flash_attn").flash_attn_func
    _require_16_bit(q)
    options = {"causal": causal, "window_size": _window(window), "deterministic": deterministic}
    return with_leaves(lambda: function(q, k, v, **options), (q, k, v), lambda t: t)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Call:
    """FlashAttention-2's, over a contiguous cache: its pages are multiples of 256."""
    function = importlib.import_module("flash_attn").flash_attn_with_kvcache
    _require_16_bit(q)
    return lambda: function(q, k_cache, v_cache, cache_seqlens=lengths)


def flash_attn_3(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None, deterministic: bool = False
) -> Call:
    """FlashAttention-3; depending on its version it also returns the LSE."""
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    _require_16_bit(q)
    options = {"causal": causal, "window_size": _window(window), "deterministic": deterministic}
    return with_leaves(lambda: _first(function(q, k, v, **options)), (q, k, v), lambda t: t)


def flashinfer(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None) -> Call:
    module = importlib.import_module("flashinfer")
    _require_16_bit(q)
    if q.shape[0] != 1:
        raise Failure("one sequence a call")
    left = -1 if window is None else window
    single = module.single_prefill_with_kv_cache
    return lambda: single(q[0], k[0], v[0], causal=causal, window_left=left)[None]


def xformers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    ops = importlib.import_module("xformers.ops")
    bias = ops.LowerTriangularMask() if causal else None
    if q.shape[2] != k.shape[2]:
        # (B, S, groups, heads of a group, D), keys and values expanded without a copy
        groups = k.shape[2]
        each = q.shape[2] // groups
        query = q.detach().unflatten(2, (groups, each)).requires_grad_(q.requires_grad)
        key, value = (t.detach()[:, :, :, None].expand(-1, -1, -1, each, -1) for t in (k, v))
        if q.requires_grad:
            raise Failure("no gradient for grouped heads")
        return lambda: ops.memory_efficient_attention(query, key, value, attn_bias=bias).flatten(2, 3)
    return with_leaves(lambda: ops.memory_efficient_attention(q, k, v, attn_bias=bias), (q, k, v), lambda t: t)


def flash_attn_varlen(
    module: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool
) -> Call:
    """FlashAttention-2 ("flash_attn") or -3 ("flash_attn_interface"); q, k, v are packed, (total, H, D)."""
    function = importlib.import_module(module).flash_attn_varlen_func
    _require_16_bit(q)
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    return with_leaves(lambda: _first(function(q, k, v, *lengths, causal=causal)), (q, k, v), lambda t: t)


def _window(window: int | None) -> tuple[int, int]:
    return (-1, -1) if window is None else (window, 0)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _require_16_bit(tensor: Tensor) -> None:
    if tensor.dtype not in SIXTEEN_BIT:
        raise Failure("float16 and bfloat16 only")


def backward(forward: Call, grad_out: Tensor) -> Call:
    """Backward of a call made by with_leaves; grad_out and the gradients are in our layout."""
    leaves, to_ours = getattr(forward, "leaves", None), getattr(forward, "to_ours", None)
    if leaves is None or to_ours is None:
        raise Failure("no backward")
    out = forward()
    if not out.requires_grad:
        raise Failure("no backward")
    own = to_ours(grad_out).contiguous()  # the layouts differ by a transposition, which is its own inverse
    return with_leaves(lambda: torch.autograd.grad(out, leaves, own, retain_graph=True), leaves, to_ours)
