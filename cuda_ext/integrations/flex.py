"""PyTorch's `flex_attention` and `varlen_attn` on this package's flash attention, in the whole process.

    from cuda_ext.integrations import flex

    flex.enable()          # until flex.disable()
    with flex.enable():    # or for a block
        out = flex_attention(query, key, value, score_mod, block_mask)
    flex.calls()           # {'served': {'flex_attention': 1}, 'refused': {}}

Both work on the CPU with gradients, where PyTorch has none for `flex_attention`, and no `varlen_attn`. What cannot be
served runs in PyTorch.

`flex_attention` (`torch.nn.attention.flex_attention`) is served with

- any BlockMask, which is converted once, and again if its lists or tensors that its mask_mod captures are changed in
  place. Its lists count, as in PyTorch's compiled kernels, not only its mask_mod;
- heads in groups, a batch of 1 for keys, values of another head dim;
- a score_mod that is ``softcap(factor * score) + bias``: the identity, ``score * 2``, ``cap * tanh(score / cap)``,
  ALiBi, masks by -inf, and any function of (b, h, q_idx, kv_idx) that is added, with the gradient of tensors it
  captures. A bias that depends on the distance of query and key alone has one element for each distance; ALiBi is
  passed as slopes if it is symmetric, or if the mask is causal. Any other is a table of the dimensions that it depends
  on, of at most `MAX_BIAS` elements;
- a score_mod that is ``factor(b, h, q) * score + bias``, such as a gate of each head, with the gradient of the factor:
  it multiplies the rows of query;
- `return_lse`, and `return_aux` without max_scores. `kernel_options`, which choose PyTorch's kernels, are not read.

A score_mod is recognised by evaluating it at all positions (`flex_score_mods`), at each call if it captures tensors,
which takes about 50 ns an element of the bias on a CPU. If distances alone count, all positions are evaluated once, and
then each distance, with some rows and columns (`flex_distances`); if there are more than `MAX_BIAS`, these from the
start. One that differs only at scores that are not tried gives wrong results. Only -inf in its bias hides keys; NaN or
+inf there are refused, also where the mask hides them.

Under `torch.compile` a call with neither score_mod nor block_mask stays in the graph. Others break it, because values
decide, and run between the parts: so does `torch.compile(flex_attention)`, even if it was compiled before `enable()`.
With ``fullgraph=True`` and in `torch.export` they run in PyTorch. In a CUDA graph, masks and functions must be known
from an earlier call.

`varlen_attn` (`torch.nn.attention.varlen`) is served with all arguments of PyTorch 2.11. Those of newer versions are
taken too: `enable_gqa`; `num_splits`; `seqused_k`, with gradients; and `block_table`, with `seqused_k`, for inference
with equal numbers of queries. So is their `varlen_attn_out`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from cuda_ext._checks import autocasts
from cuda_ext._switch import Enabled, Switch
from cuda_ext.attention import flash_attention, flash_attention_varlen
from cuda_ext.integrations.counting import Calls
from cuda_ext.integrations.flex_block_masks import Converted, convert
from cuda_ext.integrations.flex_score_mods import MAX_BIAS, Modification, NotServed, Positions, recognise
from cuda_ext.integrations.rerouting import Rerouted
from cuda_ext.kvcache import flash_attention_with_kvcache

__all__ = ["MAX_BIAS", "calls", "disable", "enable", "flex_attention", "is_enabled", "varlen_attn", "varlen_attn_out"]

_KINDS = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NO_MASK_SIZE = torch_flex._create_empty_block_mask(*torch.empty(2, 1, 1, 1, 1)).BLOCK_SIZE
_counter = Calls()


def enable() -> Enabled:
    """Routes `flex_attention` and `varlen_attn` of `torch.nn.attention` to `cuda_ext.flash_attention`, in all threads.

    The functions are changed in place, so that names that were imported before, and `torch.compile(flex_attention)`,
    are served too. Calling it again changes nothing. Functions that `torch.compile` has compiled are traced again.

    Returns:
        An object for `with`: at the end of the block the functions are what they were before. Blocks may be nested, and
        overlap in several threads.

    Raises:
        RuntimeError: something else has replaced the functions by others.
    """
    return _switch.turn_on()


def disable() -> None:
    """Takes back `enable()`. A `with` block that is running stays active to its end. Without an earlier `enable()` it
    does nothing."""
    _switch.turn_off()


def is_enabled() -> bool:
    """Whether the functions are routed to this package now, by `enable()` or by a `with` block in any thread."""
    return _switch.is_active


def calls(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """The number of calls since the start of the process, or since the last reset, while this was enabled.

    Args:
        reset: start at 0 again.

    Returns:
        `served`, under the name of the function, and `refused`, by reasons: calls that ran in PyTorch. A call that
        stays in a compiled graph counts when it is traced.
    """
    return _counter.report(reset=reset)


def _activate() -> dict[str, Rerouted]:
    """By the names of the functions. PyTorch 2.11 has no `varlen_attn_out`."""
    functions = {
        "flex_attention": (torch_flex.flex_attention, "_routed_flex"),
        "varlen_attn": (torch_varlen.varlen_attn, "_routed_varlen"),
        "varlen_attn_out": (getattr(torch_varlen, "varlen_attn_out", None), "_routed_varlen_out"),
    }
    rerouted: dict[str, Rerouted] = {}
    try:
        for name, (function, target) in functions.items():
            if function is not None:
                rerouted[name] = Rerouted(function, __name__, target)
    except RuntimeError:
        _deactivate(rerouted)
        raise
    return rerouted


def _deactivate(rerouted: dict[str, Rerouted]) -> None:
    for each in rerouted.values():
        each.restore()


_switch = Switch(_activate, _deactivate)


# flex_attention


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on this package's attention, without `enable()`.

    Raises:
        RuntimeError: what it cannot serve, with the reason.
    """
    arguments = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa}
    try:
        return _serve_flex(query, key, value, return_lse=return_lse, return_aux=return_aux, **arguments)
    except NotServed as reason:
        raise RuntimeError(_refusal("flex_attention", reason, "flex_attention.flex_attention")) from reason


def _refusal(name: str, reason: NotServed, instead: str) -> str:
    wanted = "expected a call that cuda_ext.flash_attention can serve, got"
    return f"cuda_ext.integrations.flex.{name}: {wanted}: {reason}; call torch.nn.attention.{instead}"


def _routed_flex(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    original = _switch.state["flex_attention"].original
    if not torch.compiler.is_dynamo_compiling():
        found = _try_flex(query, key, value, arguments)
    elif arguments["score_mod"] is None and arguments["block_mask"] is None:
        reason = _reason(query, key, value, **arguments)
        if reason:
            _counter.refused(reason)
            return original(query, key, value, **arguments)
        return _attention(query, key, value, Modification(), None, **arguments)
    elif _must_not_break():
        return original(query, key, value, **arguments)
    else:
        found = _try_flex(query, key, value, arguments)
    # What is refused is compiled by PyTorch after the break.
    return original(query, key, value, **arguments) if found is NotImplemented else found


@torch.compiler.assume_constant_result
def _must_not_break() -> bool:
    """Whether a break of the graph that is traced now would be an error."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx()
    if not (tracer.one_graph or tracer.error_on_graph_break):
        return False
    _counter.refused("score_mod or block_mask in torch.compile with fullgraph=True")
    return True


@torch.compiler.disable
def _try_flex(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Any:
    """NotImplemented if PyTorch has to compute it."""
    try:
        return _serve_flex(query, key, value, **arguments)
    except NotServed as reason:
        _counter.refused(str(reason))
        return NotImplemented


def _serve_flex(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    if reason := _reason(query, key, value, **arguments):
        raise NotServed(reason)
    score_mod, block_mask = arguments["score_mod"], arguments["block_mask"]
    may_wait = not (query.is_cuda and torch.cuda.is_current_stream_capturing())
    mask: Converted | None = None
    if block_mask is not None and tuple(block_mask.BLOCK_SIZE) != tuple(_NO_MASK_SIZE):
        mask = convert(block_mask, may_wait=may_wait)
    modification = Modification()
    if score_mod is not None and score_mod is not torch_flex._identity:
        (batch, heads, queries, _), keys = query.shape, key.shape[2]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        positions = Positions(batch, heads, queries, keys, query.device, dtype)
        hides_future = mask.hides_future if mask is not None and may_wait else _never
        modification = recognise(score_mod, positions, hides_future, may_wait=may_wait)
    return _attention(query, key, value, modification, mask, **arguments)


def _never() -> bool:
    return False


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modification: Modification,
    mask: Converted | None,
    *,
    scale: float | None,
    return_lse: bool,
    return_aux: AuxRequest | None,
    **unused: Any,
) -> Any:
    _counter.served("flex_attention")
    if query.shape[0] != key.shape[0]:
        key, value = (each.expand(query.shape[0], -1, -1, -1) for each in (key, value))
    if modification.factor != 1.0:
        scale = modification.factor * (1.0 / math.sqrt(query.shape[3]) if scale is None else scale)
    rows = query
    if modification.row_factor is not None:
        rows = (query * modification.row_factor).to(query.dtype)
    out, lse = flash_attention(
        rows.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        scale=scale,
        softcap=modification.softcap,
        alibi_slopes=modification.alibi_slopes,
        attn_bias=modification.attn_bias,
        relative_bias=modification.relative_bias,
        block_mask=None if mask is None else mask.mask,
        return_lse=True,
    )
    out = _laid_out_as(query, out.transpose(1, 2))
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _laid_out_as(query: Tensor, out: Tensor) -> Tensor:
    """With the dims in the order of those of `query`, and the last one innermost, as in PyTorch."""
    if query.is_contiguous():
        return out.contiguous()
    order = [0, 1, 2]  # from the largest stride to the smallest
    for first, second in ((0, 1), (1, 2), (0, 1)):
        if query.stride(order[first]) < query.stride(order[second]):
            order[first], order[second] = order[second], order[first]
    return out.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)


def _reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    return_lse: bool,
    return_aux: AuxRequest | None,
    **unused: Any,
) -> str:
    """Why PyTorch has to compute attention, or to raise its error; empty if it need not."""
    if reason := _tensor_reason(query, key, value):
        return reason
    if any(each.dim() != 4 for each in (query, key, value)):
        return "shapes"
    batch, heads = query.shape[:2]
    fits = query.shape[3] == key.shape[3] and key.shape[:3] == value.shape[:3] and min(query.shape) > 0
    groups = heads == key.shape[1] or (enable_gqa and heads % max(key.shape[1], 1) == 0)
    if not fits or not groups or key.shape[2] == 0 or value.shape[3] == 0:
        return "shapes"
    if key.shape[0] != batch and (key.shape[0] != 1 or block_mask is None or len(block_mask.kv_num_blocks) != batch):
        return "shapes"
    if scale is not None and not isinstance(scale, (int, float)):
        return "scale is no number"
    if return_aux is not None and (return_lse or getattr(return_aux, "max_scores", False)):
        return "return_lse together with return_aux" if return_lse else "max_scores: flash attention does not keep them"
    if score_mod is None and block_mask is None:
        return ""
    if any(isinstance(each, (FakeTensor, FunctionalTensor)) for each in (query, key, value)) or query.is_meta:
        return "score_mod or block_mask of tensors without values"
    return "" if block_mask is None else _mask_reason(block_mask, query, key)


def _tensor_reason(*tensors: Tensor) -> str:
    if not all(type(each) in _KINDS for each in tensors):
        return "tensor subclass"
    if not all(each.is_cpu or each.is_cuda or each.is_meta for each in tensors):
        return "device"
    if any(each.device != tensors[0].device for each in tensors):
        return "several devices"
    if any(each.dtype not in _DTYPES for each in tensors):
        return "dtype"
    if any(each.dtype != tensors[0].dtype for each in tensors) and not autocasts(tensors[0].device):
        return "several dtypes"
    return ""


def _mask_reason(block_mask: Any, query: Tensor, key: Tensor) -> str:
    if not isinstance(block_mask, torch_flex.BlockMask):
        return "block_mask is no BlockMask"
    if block_mask.mask_mod is torch_flex._sliced_mask_mod_error:
        return "slice of a block_mask"
    if block_mask.kv_num_blocks.device != query.device:
        return "several devices"
    if tuple(block_mask.BLOCK_SIZE) == tuple(_NO_MASK_SIZE):
        return ""
    if tuple(block_mask.seq_lengths) != (query.shape[2], key.shape[2]):
        return "block_mask of other lengths"
    sizes = (1, 1, *block_mask.kv_num_blocks.shape[:-1])[-2:]
    fits = sizes[0] in (1, query.shape[0]) and sizes[1] in (1, query.shape[1])
    return "" if fits else "block_mask of another batch or other heads"


# varlen_attn


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **arguments: Any,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` on this package's attention, without `enable()`.

    Args:
        arguments: those of PyTorch: `return_aux`, `scale`, `window_size`, `enable_gqa`, `seqused_k`, `block_table` and
            `num_splits`. Without `enable_gqa`, groups of heads are allowed.

    Raises:
        RuntimeError: what it cannot serve, with the reason.
    """
    try:
        return _serve_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments)
    except NotServed as reason:
        raise RuntimeError(_refusal("varlen_attn", reason, "varlen.varlen_attn")) from reason


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **arguments: Any,
) -> Any:
    """`varlen_attn_out` of `torch.nn.attention.varlen`, which PyTorch 2.11 does not have: `varlen_attn`, whose output
    is copied to `out`, `(total_q, heads, dim_v)` of the dtype of `query`, any strides, and returned. No gradients.

    Raises:
        RuntimeError: what it cannot serve, with the reason.
    """
    try:
        return _serve_varlen_out(out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **arguments)
    except NotServed as reason:
        raise RuntimeError(_refusal("varlen_attn_out", reason, "varlen.varlen_attn_out")) from reason


def _routed_varlen(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    return _served_or_original("varlen_attn", _varlen_reason, _serve_varlen, query, key, value, **arguments)


def _routed_varlen_out(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Any:
    tensors = (out, query, key, value)
    return _served_or_original("varlen_attn_out", _varlen_out_reason, _serve_varlen_out, *tensors, **arguments)


def _served_or_original(
    name: str, reason_of: Callable[..., str], serve: Callable[..., Any], *tensors: Tensor, **arguments: Any
) -> Any:
    original = _switch.state[name].original
    if reason := reason_of(*tensors, **arguments):
        _counter.refused(reason)
        return original(*tensors, **arguments)
    return serve(*tensors, **arguments)


def _varlen_out_reason(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, **options: Any) -> str:
    if reason := _varlen_reason(query, key, value, *more, **options):
        return reason
    if torch.is_grad_enabled() and any(each.requires_grad for each in (out, query, key, value)):
        return "varlen_attn_out with gradients"
    if out.shape != (*query.shape[:-1], value.shape[-1]):
        return "shapes"
    return _tensor_reason(query, out)


def _serve_varlen_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any, return_aux: Any = None, **options: Any
) -> Any:
    if reason := _varlen_out_reason(out, query, key, value, *more, **options):
        raise NotServed(reason)
    result, lse = _attend_varlen(query, key, value, *more, **options)
    _counter.served("varlen_attn_out")
    out.copy_(result)
    return (out, lse) if return_aux is not None and return_aux.lse else out


_VARLEN = ("is_causal", "return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits")


def _varlen_reason(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, **options: Any
) -> str:
    if unknown := [name for name in options if name not in _VARLEN]:
        return f"argument {unknown[0]}"
    if reason := _tensor_reason(query, key, value):
        return reason
    is_paged = options.get("block_table") is not None
    rank = 4 if is_paged else 3
    heads = key.shape[-2] if key.dim() == rank else 0
    if query.dim() != 3 or heads == 0 or key.shape[:-1] != value.shape[:-1] or query.shape[-1] != key.shape[-1]:
        return "shapes"
    if query.shape[1] % heads or (options.get("enable_gqa") is False and query.shape[1] != heads):
        return "shapes"
    if len(options.get("window_size") or (-1, -1)) != 2:
        return "window_size"
    if not is_paged:
        captures = query.is_cuda and torch.cuda.is_current_stream_capturing()
        if options.get("seqused_k") is not None and (captures or torch.compiler.is_compiling()):
            return "seqused_k without block_table, under torch.compile or in a CUDA graph"
        return "" if isinstance(cu_seq_k, Tensor) else "cu_seq_k"
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return "block_table with gradients"
    if query.shape[0] != options["block_table"].shape[0] * max_q:
        return "block_table with different numbers of queries"
    no_lengths = options.get("seqused_k") is None and cu_seq_k is None
    return "block_table without seqused_k and cu_seq_k" if no_lengths else ""


def _serve_varlen(query: Tensor, key: Tensor, value: Tensor, *more: Any, return_aux: Any = None, **options: Any) -> Any:
    if reason := _varlen_reason(query, key, value, *more, **options):
        raise NotServed(reason)
    _counter.served("varlen_attn")
    out, lse = _attend_varlen(query, key, value, *more, **options)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    left, right = (None if side < 0 else side for side in options.get("window_size") or (-1, -1))
    shared: dict[str, Any] = {"scale": options.get("scale"), "causal": options.get("is_causal") or False}
    shared |= {"window": None if left is right is None else (left, right), "return_lse": True}
    table = options.get("block_table")
    if table is None:
        if options.get("seqused_k") is not None:
            cu_seq_k, key, value = _of_first_keys(options["seqused_k"], cu_seq_k, key, value)
        shared |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
        out, lse = flash_attention_varlen(query, key, value, cu_seq_q.int(), cu_seq_k.int(), **shared)
    else:
        used = options.get("seqused_k")
        used = cu_seq_k.diff() if used is None else used
        where = {"cache_seqlens": used.int(), "block_table": table.int(), "num_splits": options.get("num_splits") or 0}
        in_rows = query.unflatten(0, (table.shape[0], max_q))
        out, lse = flash_attention_with_kvcache(in_rows, key, value, **where, **shared)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return out, lse


def _of_first_keys(used: Tensor, starts: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """New starts and tensors of only the first `used` keys of each sequence: what is in the rest, which may be NaN, is
    not read."""
    used = torch.minimum(used, starts.diff())
    rows = torch.arange(tensors[0].shape[0], device=starts.device)
    sequence = (torch.searchsorted(starts, rows, right=True) - 1).clamp(max=max(len(used) - 1, 0))
    is_used = rows - starts[sequence] < F.pad(used, (0, 1))[sequence]
    return F.pad(used.cumsum(0), (1, 0)), *(each[is_used] for each in tensors)
