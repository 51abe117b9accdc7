"""A reference in plain PyTorch for each public op."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext._activations import ACTIVATIONS
from cuda_ext.testing.philox import dropout_mask, philox_uint32

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cuda_ext._attention_options import Options
    from cuda_ext.block_mask import BlockMask

__all__ = [
    "reference_attention",
    "reference_attention_varlen",
    "reference_gated_linear",
    "reference_gated_mlp",
    "reference_gemm",
    "reference_linear",
    "reference_linear_cross_entropy",
    "reference_linear_log_prob",
    "reference_mlp",
]

# GEMM family


def reference_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``activation(alpha * a @ b + beta * c + bias)`` for a (..., M, K), b (..., K, N), c broadcast to (..., M, N),
    bias (N,)."""
    out = alpha * (a @ b)
    if c is not None:
        out = out + beta * c
    if bias is not None:
        out = out + bias
    return ACTIVATIONS[activation].function(out).to(out_dtype or a.dtype)


def reference_scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scaling_a: str,
    scale_b: Tensor,
    scaling_b: str,
    *,
    bias: Tensor | None = None,
    input: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """`cuda_ext.scaled_mm`, in float64."""
    out = scaled_elements(mat_a, scale_a, scaling_a) @ scaled_elements(mat_b.t(), scale_b, scaling_b).t()
    if bias is not None:
        out = out + bias.double()
    return out if input is None else out + beta * input.double()


def scaled_elements(matrix: Tensor, scales: Tensor, scaling: str) -> Tensor:
    """An operand of `cuda_ext.scaled_mm` (lines, K) times its scales, in float64."""
    each = scales.double()
    if scaling == "RowWise":
        each = each.reshape(-1, 1)
    if scaling == "BlockWise128x128":
        each = each.t().repeat_interleave(128, 0)[: matrix.shape[0]]
    if scaling.startswith("BlockWise"):
        each = each.repeat_interleave(128, 1)[:, : matrix.shape[1]]
    return matrix.double() * each


def float8_numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of the format that are finite and not negative, in order, in float64."""
    bits = torch.arange(0x7F if dtype == torch.float8_e4m3fn else 0x7C, dtype=torch.uint8)
    return bits.view(dtype).double()


def float8_neighbours(magnitudes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of magnitudes in float64: the index in `float8_numbers` of the number below, and the fraction of the way from
    there to the next; 0 from the largest on."""
    numbers = float8_numbers(dtype).to(magnitudes.device)
    below = torch.searchsorted(numbers, magnitudes.contiguous(), right=True) - 1
    following = (below + 1).clamp(max=len(numbers) - 1)
    fraction = (magnitudes - numbers[below]) / (numbers[following] - numbers[below])
    return below, torch.where(below == following, 0.0, fraction)


def stochastic_float8(
    x: Tensor, scales: Tensor, scaling: str, dtype: torch.dtype, *, seed: int, offset: int, transpose: bool = False
) -> Tensor:
    """The data of `cuda_ext.fp8.quantize` with ``stochastic=True``, in float64, of x (lines, elements) without NaN: of
    the copy, or the transpose of `quantize_both`."""
    inverse = scaled_elements(torch.ones_like(x), 1 / scales, scaling).float()
    scaled = (x.float() * inverse).double()
    below, fraction = float8_neighbours(scaled.abs(), dtype)
    least_normal = 2.0**-6 if dtype == torch.float8_e4m3fn else 2.0**-14
    fraction = torch.where(scaled.abs() < least_normal, (fraction * 2**28).floor() / 2**28, fraction)
    lines, elements = x.shape
    line = torch.arange(lines, device=x.device)[:, None] * (-(-elements // 4) * 4)
    words = philox_uint32(seed, offset + transpose, line + torch.arange(elements, device=x.device))
    numbers = float8_numbers(dtype).to(x.device)
    rounded = numbers[below + (words.double() / 2**32 >= 1 - fraction).long()]
    return torch.where(scaled.signbit(), -rounded, rounded)


def reference_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    indices: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """The four forms of `cuda_ext.grouped_mm`, a product after the other; reads `offs`, int (groups,), on the host."""
    if indices is not None and mat_b.dim() == 3:
        mat_a = mat_a[indices]
    elif indices is not None:
        mat_b = mat_b[indices] if mat_a.dim() == 2 else mat_b[:, indices]
    ends = [0, *offs.tolist()] if offs is not None else []
    spans = [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
    if offs is None:
        out = mat_a @ mat_b if bias is None else torch.baddbmm(bias.unsqueeze(1), mat_a, mat_b)
    elif mat_a.dim() == 2 and mat_b.dim() == 3:
        groups = [mat_a[span] @ mat_b[g] + (0 if bias is None else bias[g]) for g, span in enumerate(spans)]
        out = torch.cat([*groups, mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])])
    elif mat_a.dim() == 2:
        products = [mat_a[:, span] @ mat_b[span] for span in spans]
        out = torch.stack(products) if products else mat_a.new_zeros(0, len(mat_a), mat_b.shape[1])
    else:
        groups = [mat_a[g] @ mat_b[:, span] for g, span in enumerate(spans)]
        out = torch.cat([*groups, mat_a.new_zeros(mat_a.shape[1], mat_b.shape[1] - ends[-1])], dim=1)
    return hidden_of(out, activation, gated).to(out_dtype or mat_a.dtype)


def reference_mixture_of_experts(
    input: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str | Callable[[Tensor], Tensor] | None = "silu",
    gated: bool = True,
) -> Tensor:
    """The arguments of `cuda_ext.mixture_of_experts`: all tokens go through each expert, with a weight of 0 if it is
    none of theirs."""
    out = torch.zeros(input.shape, dtype=torch.promote_types(input.dtype, torch.float32))
    for e in range(len(w_up)):
        hidden = hidden_of(F.linear(input, w_up[e], None if b_up is None else b_up[e]), activation, gated)
        result = F.linear(hidden, w_down[e], None if b_down is None else b_down[e])
        weight = (expert_weights * (expert_ids == e)).sum(-1, keepdim=True)
        out = out + result * weight.to(out.dtype)
    return out.to(input.dtype)


def hidden_of(product: Tensor, activation: str | Callable[[Tensor], Tensor] | None, gated: bool) -> Tensor:
    """Between the products of an expert."""
    if callable(activation):
        return activation(product)
    gate, up = product.chunk(2, dim=-1) if gated else (product, None)
    hidden = ACTIVATIONS[activation].function(gate)
    return hidden if up is None else hidden * up


def reference_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual`` for input (..., K), weight (N, K), bias (N,), residual (...,
    N)."""
    out = ACTIVATIONS[activation].function(F.linear(input, weight, bias))
    return out if residual is None else out + residual


def reference_gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> Tensor:
    """``activation(gate) * up`` (..., N), where ``[gate, up] = input @ weight.T + bias``; weight (2N, K), bias
    (2N,)."""
    gate, up = F.linear(input, weight, bias).chunk(2, dim=-1)
    return ACTIVATIONS[activation].function(gate) * up


def reference_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "gelu",
    residual: Tensor | None = None,
) -> Tensor:
    """``activation(input @ weight1.T + bias1) @ weight2.T + bias2 + residual`` for weight1 (F, K), weight2 (N, F)."""
    hidden = reference_linear(input, weight1, bias1, activation=activation)
    return reference_linear(hidden, weight2, bias2, residual=residual)


def reference_gated_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "silu",
    residual: Tensor | None = None,
) -> Tensor:
    """``(activation(gate) * up) @ weight2.T + bias2 + residual`` for weight1 (2F, K) = [gate; up], weight2 (N, F)."""
    hidden = reference_gated_linear(input, weight1, bias1, activation=activation)
    return reference_linear(hidden, weight2, bias2, residual=residual)


# loss


def reference_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    scale: float = 1.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    method: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """The loss as `cuda_ext.linear_cross_entropy` defines it, through the full matrix of logits.

    input (..., K), linear_weight (V, K), linear_bias (V,), weight (V,), target (...) of int64 or (..., V) of
    probabilities -> the loss, 0-dim or (...), and on request lse (...) and entropy (...), float32, or float64 for
    float64 inputs. The product and the bias are rounded to the dtype of the inputs; what follows is in the dtype of the
    results. ``z_loss`` adds ``z_loss * lse**2`` for every target that is not ``ignore_index``, and with "mean" its mean
    over those. A class of probability zero adds nothing to the entropy. ``method`` is ignored.
    """
    logits = _logits(input, linear_weight, linear_bias, softcap, scale)  # (..., V)
    indices = not target.is_floating_point()
    classes = logits.shape[-1]
    loss = F.cross_entropy(
        logits.reshape(-1, classes),
        target.reshape(-1) if indices else target.reshape(-1, classes).to(logits.dtype),
        weight=None if weight is None else weight.to(logits.dtype),
        reduction=reduction,
        ignore_index=ignore_index if indices else -100,
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        loss = loss.reshape(logits.shape[:-1])
    lse = torch.logsumexp(logits, dim=-1)
    if z_loss != 0.0:
        counted = target != ignore_index if indices else torch.ones_like(lse, dtype=torch.bool)
        penalty = torch.where(counted, z_loss * lse.square(), 0.0)
        loss = loss + {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / counted.sum()}[reduction]
    more = [lse] * return_lse + [_entropy(logits)] * return_entropy
    return (loss, *more) if more else loss


def reference_linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float = 0.0,
    scale: float = 1.0,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities (...) of target (...), int64, under the softmax of the logits of
    `reference_linear_cross_entropy`, 0 where it is ``ignore_index``; and on request entropies (...)."""
    logits = _logits(input, linear_weight, linear_bias, softcap, scale)
    ignored = target == ignore_index
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, target.masked_fill(ignored, 0)[..., None]).squeeze(-1)
    log_prob = chosen.masked_fill(ignored, 0.0)
    return (log_prob, _entropy(logits)) if return_entropy else log_prob


def _logits(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, softcap: float, scale: float) -> Tensor:
    """``softcap(scale * (input @ linear_weight.T + linear_bias))`` (..., V), from the product on in float32 or 64."""
    product = F.linear(input, linear_weight, linear_bias)
    logits = scale * product.to(_float32_or_float64(input.dtype))
    return softcap * torch.tanh(logits / softcap) if softcap > 0.0 else logits


def _entropy(logits: Tensor) -> Tensor:
    """The entropy of the softmax over the last dim."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum(dim=-1)


# attention


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = False,
    seed: int = 0,
    offset: int = 0,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as `cuda_ext.flash_attention` defines it, through the full matrix of scores.

    query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv) -> (B, Sq, H, Dv), and with ``return_lse`` also lse
    (B, H, Sq). ``options`` are the keyword arguments of `cuda_ext.flash_attention`.

    The logit of query i and key j is ``softcap * tanh(scale * q.k / softcap) - slope * |i + Sk - Sq - j| + attn_bias``:
    the soft cap comes before ALiBi and ``attn_bias``. ``relative_bias`` (.., 2 R + 1) adds element R + clamp(d, -R, R),
    where d = j - (i + Sk - Sq). ``attn_mask`` hides the keys where it is False; both broadcast to
    (B, H, Sq, Sk). ``block_mask`` hides what its `to_dense` has False. ``causal`` and ``window`` are aligned
    bottom-right: query i is at key position i + Sk - Sq. ``sinks`` (H,) adds one logit without a value to the
    denominator, and lse includes it. A row that sees no key gives zeros and lse = sink, or without sinks lse = -inf
    and zero gradients. Dropout removes probabilities by the Philox
    numbers of (``seed``, ``offset``), see `dropout_mask`. ``deterministic`` is ignored.
    """
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = key.shape[1]
    keep, dropout_p = None, options.get("dropout_p", 0.0)
    if dropout_p > 0.0:
        row = torch.arange(batch * heads * seqlen_q, device=query.device).view(batch, heads, seqlen_q)
        keep = dropout_mask(dropout_p, seed, offset, row, seqlen_k)
    out, lse = _attention(query, key, value, keep, **options)
    return (out, lse) if return_lse else out


def reference_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    seed: int = 0,
    offset: int = 0,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:
    """`reference_attention` of every sequence of a packed batch, one after the other.

    query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, Dv), cu_seqlens int32 (batch + 1,) -> (total_q,
    H, Dv), and with ``return_lse`` also lse (H, total_q). ``attn_bias`` and ``attn_mask`` broadcast to (B, H,
    max_seqlen_q, max_seqlen_k). ``max_seqlen_k`` (default: the longest sequence of keys) sets the pitch of the
    dropout numbers. Rows after the last sequence give zeros and an lse of -inf.
    """
    total_q, heads, _ = query.shape
    dropout_p, slopes = options.get("dropout_p", 0.0), options.get("alibi_slopes")
    relative = options.get("relative_bias")
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if max_seqlen_k is None:
        max_seqlen_k = max((end - start for start, end in pairwise(starts_k)), default=0)
    outs, lses = (
        [query.new_zeros(0, heads, value.shape[-1])],
        [query.new_zeros(heads, 0, dtype=_float32_or_float64(query.dtype))],
    )
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(starts_q), pairwise(starts_k), strict=True)):
        keep = None
        if dropout_p > 0.0:
            row = torch.arange(heads, device=query.device)[:, None] * total_q + torch.arange(
                q0, q1, device=query.device
            )
            keep = dropout_mask(dropout_p, seed, offset, row, k1 - k0, max_seqlen_k)[None]
        own: Options = {
            **options,
            "alibi_slopes": slopes[n] if slopes is not None and slopes.dim() == 2 else slopes,
            "attn_bias": _part_of_sequence(options.get("attn_bias"), n, q1 - q0, k1 - k0),
            "relative_bias": relative if relative is None or relative.dim() < 3 else relative[n % len(relative)],
            "attn_mask": _part_of_sequence(_dense_mask(**options), n, q1 - q0, k1 - k0),
            "block_mask": None,
        }
        out, lse = _attention(query[None, q0:q1], key[None, k0:k1], value[None, k0:k1], keep, **own)
        outs.append(out[0])
        lses.append(lse[0])
    tail = total_q - starts_q[-1]
    outs.append(outs[0].new_zeros(tail, *outs[0].shape[1:]))
    lses.append(lses[0].new_full((heads, tail), -math.inf))
    return (torch.cat(outs), torch.cat(lses, dim=1)) if return_lse else torch.cat(outs)


def _dense_mask(
    *, attn_mask: Tensor | None = None, block_mask: BlockMask | None = None, **others: Any
) -> Tensor | None:
    if block_mask is None:
        return attn_mask
    return block_mask.to_dense() if attn_mask is None else block_mask.to_dense() & attn_mask


def _part_of_sequence(whole: Tensor | None, n: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    """The part (1, H, Sq, Sk) of a bias or mask, which broadcasts to (B, H, max Sq, max Sk), for sequence n."""
    if whole is None:
        return None
    whole = whole[(None,) * (4 - whole.dim())]
    part = whole if whole.shape[0] == 1 else whole[n : n + 1]
    part = part if part.shape[2] == 1 else part[:, :, :seqlen_q]
    return part if part.shape[3] == 1 else part[..., :seqlen_k]


def _attention(
    query: Tensor,  # (B, Sq, H, D)
    key: Tensor,  # (B, Sk, Hk, D)
    value: Tensor,  # (B, Sk, Hk, Dv)
    keep: Tensor | None,  # (B, H, Sq, Sk)
    *,
    alibi_slopes: Tensor | None = None,  # (H,) or (B, H)
    sinks: Tensor | None = None,  # (H,)
    attn_bias: Tensor | None = None,  # broadcasts to (B, H, Sq, Sk)
    attn_mask: Tensor | None = None,  # the same, boolean
    relative_bias: Tensor | None = None,  # (2 R + 1,), (H or 1, 2 R + 1) or (B or 1, H or 1, 2 R + 1)
    block_mask: BlockMask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    heads, seqlen_q, seqlen_k = query.shape[2], query.shape[1], key.shape[1]
    group = heads // key.shape[2] if key.shape[2] else 1
    key, value = key.repeat_interleave(group, dim=2), value.repeat_interleave(group, dim=2)
    scale = 1.0 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale

    scores = scale * (query.transpose(1, 2) @ key.permute(0, 2, 3, 1))  # (B, H, Sq, Sk)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seqlen_q, device=query.device)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=query.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype).reshape(-1, heads, 1, 1)
        scores = scores - slopes * (i - j).abs().to(scores.dtype)
    if attn_bias is not None:
        scores = scores + attn_bias.to(scores.dtype)
    if relative_bias is not None:
        most = relative_bias.shape[-1] // 2
        scores = scores + relative_bias.to(scores.dtype)[..., most + (j - i).clamp(-most, most)]
    attn_mask = _dense_mask(attn_mask=attn_mask, block_mask=block_mask)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    left, right = window or (None, None)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if causal:
        right = 0
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right

    # The last column is the sink.
    logits = F.pad(scores.masked_fill(~visible, -math.inf), (0, 1), value=-math.inf)
    if sinks is not None:
        logits = torch.cat(
            [logits[..., :-1], sinks.to(scores.dtype).view(1, heads, 1, 1).expand_as(logits[..., -1:])], dim=-1
        )
    # Empty rows are made finite, so that the softmax and its gradient contain no NaN; their result is masked below.
    empty = (logits == -math.inf).all(dim=-1, keepdim=True)  # (B, H, Sq, 1)
    logits = logits.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, dim=-1).masked_fill(empty.squeeze(-1), -math.inf)  # (B, H, Sq)
    probabilities = torch.softmax(logits, dim=-1)[..., :-1].masked_fill(~visible | empty, 0.0)
    if keep is not None:
        probabilities = probabilities * keep / (1.0 - dropout_p)
    out = (probabilities @ value.transpose(1, 2)).transpose(1, 2)  # (B, Sq, H, Dv)
    return out, lse.to(_float32_or_float64(query.dtype))


def _float32_or_float64(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
