"""References and the tolerance rule: what every op of the package is held against.

Each ``reference_*`` function repeats the signature and the meaning of one public op in a few lines of plain PyTorch.
It works in whatever dtype it is given, and torch's autograd differentiates it, so the same function serves twice: in
float64 it is the reference, and in the dtype of the op under test it is the plain PyTorch evaluation whose error sets
the tolerance (`assert_close_to_reference`). Attention here holds the whole Sq x Sk matrix of scores; it is made to be
right and easy to read, not to be fast.

`emulated` runs the CUDA kernels on a machine without a GPU.

Importing this module needs torch alone, not the compiled library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Emulation",
    "assert_close_to_reference",
    "assert_op_matches_reference",
    "dropout_mask",
    "emulated",
    "is_emulating",
    "philox_uint32",
    "reference_attention",
    "reference_attention_varlen",
    "reference_gated_linear",
    "reference_gated_mlp",
    "reference_gemm",
    "reference_linear",
    "reference_mlp",
]

_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


# Emulation


@dataclass(frozen=True)
class Emulation:
    """What the emulated kernels of an `emulated` block did, up to now or, after the block, up to its end."""

    _module: Any
    _before: dict[str, int]
    _final: dict[str, int]

    @property
    def counters(self) -> dict[str, int]:
        """Instructions and bytes by name, summed over all launches and threads.

        ``blocks``, ``mma``, ``wgmma``, ``ldmatrix``, ``shuffle``, ``barrier``, ``atomic``; bytes moved by
        ``cp_async``, ``tma_load``, ``tma_store``, ``global_load``, ``global_store``; 32-byte sectors of global memory
        touched; ``wavefronts`` of shared memory, and how many they were without bank conflicts (``ideal``).
        """
        return self._final or {name: count - self._before[name] for name, count in self._module.counters().items()}

    @property
    def sync_sites(self) -> list[tuple[str, int, str]]:
        """File, line and instruction of every synchronisation call that a kernel of this process has reached."""
        return list(self._module.sync_sites())


_emulation_settings: list[tuple[Any, dict[str, Any]]] = []


@contextmanager
def emulated(
    arch: str = "sm_80",
    mode: str = "eager",
    schedule: str = "fifo",
    seed: int = 0,
    *,
    check_races: bool = False,
    ordered_sums: bool = False,
    threads: int = 0,
    skip: tuple[str, int, str] | None = None,
    processors: int = 4,
) -> Iterator[Emulation]:
    """Within the block the public ops on CPU tensors run the *CUDA* kernels, on an emulator.

    The kernels are the very sources that nvcc compiles, started by the same launchers with the same heuristics; an op
    without a CUDA kernel raises NotImplementedError. The first use compiles them with the C++ compiler, which takes
    one to three minutes and a source checkout. All threads of the process are affected; blocks may be nested.

    Args:
        arch: the GPU that is emulated: "sm_80", "sm_89", which has less shared memory, or "sm_90a".
        mode: "eager": asynchronous copies and products are done when they are issued. "lazy": at the last moment that
            the kernel's waits allow, and until then there are NaNs where they write.
        schedule: "fifo": warps run in turn. "pct": by random priorities, drawn anew now and then (Burckhardt et al.,
            A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010).
        seed: of the schedule.
        check_races: hold every access to memory against those that nothing orders before it, plain loads and stores
            included; several times slower.
        ordered_sums: with `check_races`, atomic additions of floats are races too unless something orders them: for
            kernels that promise the same bits in every run.
        threads: of the host; 0 for all cores.
        skip: a synchronisation call (file, line, instruction) that does nothing: a test of tests.
        processors: multiprocessors of the GPU that is emulated, which decide how launchers divide the work: an A100 has
            108, an H200 132, an RTX 4090 128. So few by default that small problems already take several waves.

    Raises RuntimeError, naming kernel, thread, instruction and source line, for a race, a deadlock, an access out of
    bounds, a bad launch.

    >>> with emulated(mode="lazy", schedule="pct", seed=3) as emulation:
    ...     out = cuda_ext.gemm(a, b)
    >>> emulation.counters["mma"]
    """
    from cuda_ext import _emulator

    for name, value, allowed in (
        ("arch", arch, ("sm_80", "sm_89", "sm_90a")),
        ("mode", mode, ("eager", "lazy")),
        ("schedule", schedule, ("fifo", "pct")),
    ):
        if value not in allowed:
            raise ValueError(f"cuda_ext.testing.emulated: expected {name} to be one of {allowed}, got {value!r}")
    if not (isinstance(processors, int) and processors >= 1):
        raise ValueError(
            f"cuda_ext.testing.emulated: expected processors to be an int of at least 1, got {processors!r}"
        )
    module = _emulator.load(hooks=check_races)
    settings = {
        "compute_capability": int(arch.removeprefix("sm_").rstrip("a")),
        "lazy": mode == "lazy",
        "pct": schedule == "pct",
        "seed": seed,
        "check_races": check_races,
        "ordered_sums": ordered_sums,
        "threads": threads,
        "skip": skip,
        "processors": processors,
    }
    with _emulated_by(module, settings) as emulation:
        yield emulation


@contextmanager
def _emulated_by(module: Any, settings: dict[str, Any]) -> Iterator[Emulation]:
    """`emulated`, with the kernels of `module`, which has the functions of the module `_simt` (csrc/emulated)."""
    from cuda_ext._load import ops

    _emulation_settings.append((module, settings))
    emulation = Emulation(module, dict(module.counters()), {})
    try:
        _apply_emulation(ops)
        yield emulation
    finally:
        emulation._final.update(emulation.counters)
        _emulation_settings.pop()
        _apply_emulation(ops)


def is_emulating() -> bool:
    """Whether an `emulated` block is open."""
    return bool(_emulation_settings)


def _apply_emulation(ops: Any) -> None:
    """What the innermost block says, or no emulation outside of all."""
    if not _emulation_settings:
        ops._emulate(0)
        return
    module, settings = _emulation_settings[-1]
    module.configure(**settings)
    ops._emulate(module.kernels())


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
    return _ACTIVATIONS[activation](out).to(out_dtype or a.dtype)


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
    out = _ACTIVATIONS[activation](F.linear(input, weight, bias))
    return out if residual is None else out + residual


def reference_gated_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = "silu"
) -> Tensor:
    """``activation(gate) * up`` (..., N), where ``[gate, up] = input @ weight.T + bias``; weight (2N, K), bias
    (2N,)."""
    gate, up = F.linear(input, weight, bias).chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def reference_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "gelu",
) -> Tensor:
    """``activation(input @ weight1.T + bias1) @ weight2.T + bias2`` for weight1 (F, K), weight2 (N, F)."""
    return F.linear(reference_linear(input, weight1, bias1, activation=activation), weight2, bias2)


def reference_gated_mlp(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """``(activation(gate) * up) @ weight2.T + bias2`` for weight1 (2F, K) = [gate; up], weight2 (N, F)."""
    return F.linear(reference_gated_linear(input, weight1, bias1, activation=activation), weight2, bias2)


# attention


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as `cuda_ext.flash_attention` defines it, through the full matrix of scores.

    query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv) -> (B, Sq, H, Dv), and with ``return_lse`` also lse
    (B, H, Sq).

    The logit of query i and key j is ``softcap * tanh(scale * q.k / softcap) - slope * |i + Sk - Sq - j| + bias``: the
    soft cap comes before ALiBi and ``bias``, which broadcasts to (B, H, Sq, Sk); a boolean one hides the keys where it
    is False. ``causal`` and ``window`` are aligned bottom-right, so query i stands at key position i + Sk - Sq.
    ``sinks`` (H,) adds one logit without a value to the denominator, and lse includes it. A row that sees no key, for
    whatever reason, gives zeros and lse = sink, or without sinks lse = -inf and zero gradients. Dropout removes
    probabilities by the Philox numbers of (``seed``, ``offset``), see `dropout_mask`. ``deterministic`` is accepted for
    the sake of the signature.
    """
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = key.shape[1]
    keep = None
    if dropout_p > 0.0:
        row = torch.arange(batch * heads * seqlen_q, device=query.device).view(batch, heads, seqlen_q)
        keep = dropout_mask(dropout_p, seed, offset, row, seqlen_k)
    out, lse = _attention(query, key, value, causal, window, scale, softcap, alibi_slopes, sinks, bias, dropout_p, keep)
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
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`reference_attention` of every sequence of a packed batch, one after the other.

    query (total_q, H, D), key (total_k, Hk, D), value (total_k, Hk, Dv), cu_seqlens int32 (batch + 1,) -> (total_q,
    H, Dv), and with ``return_lse`` also lse (H, total_q). ``max_seqlen_k`` (default: the longest sequence of keys)
    sets the pitch of the dropout numbers.
    """
    total_q, heads, _ = query.shape
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if max_seqlen_k is None:
        max_seqlen_k = max((end - start for start, end in pairwise(starts_k)), default=0)
    outs, lses = (
        [query.new_zeros(0, heads, value.shape[-1])],
        [query.new_zeros(heads, 0, dtype=_lse_dtype(query.dtype))],
    )
    for n, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(starts_q), pairwise(starts_k), strict=True)):
        keep = None
        if dropout_p > 0.0:
            row = torch.arange(heads, device=query.device)[:, None] * total_q + torch.arange(
                q0, q1, device=query.device
            )
            keep = dropout_mask(dropout_p, seed, offset, row, k1 - k0, max_seqlen_k)[None]
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = _attention(
            query[None, q0:q1],
            key[None, k0:k1],
            value[None, k0:k1],
            causal,
            window,
            scale,
            softcap,
            slopes,
            sinks,
            None,
            dropout_p,
            keep,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return (torch.cat(outs), torch.cat(lses, dim=1)) if return_lse else torch.cat(outs)


def _attention(
    query: Tensor,  # (B, Sq, H, D)
    key: Tensor,  # (B, Sk, Hk, D)
    value: Tensor,  # (B, Sk, Hk, Dv)
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,  # (H,) or (B, H)
    sinks: Tensor | None,  # (H,)
    bias: Tensor | None,  # broadcasts to (B, H, Sq, Sk)
    dropout_p: float,
    keep: Tensor | None,  # (B, H, Sq, Sk)
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
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias.to(scores.dtype)
    left, right = window or (None, None)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if causal:
        visible &= j <= i
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
    # Empty rows are made finite, so that the softmax and its gradient hold no NaN; their result is masked below.
    empty = (logits == -math.inf).all(dim=-1, keepdim=True)  # (B, H, Sq, 1)
    logits = logits.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, dim=-1).masked_fill(empty.squeeze(-1), -math.inf)  # (B, H, Sq)
    probabilities = torch.softmax(logits, dim=-1)[..., :-1].masked_fill(~visible | empty, 0.0)
    if keep is not None:
        probabilities = probabilities * keep / (1.0 - dropout_p)
    out = (probabilities @ value.transpose(1, 2)).transpose(1, 2)  # (B, Sq, H, Dv)
    return out, lse.to(_lse_dtype(query.dtype))


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# random numbers

_MASK32 = 0xFFFFFFFF


def philox_uint32(seed: int, offset: int, elements: Tensor) -> Tensor:
    """The 32 random bits of each element, as int64 in [0, 2**32), in the shape of ``elements`` (int64, any shape, >=
    0).

    Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). The key is the two halves of
    ``seed``; the counter is the two halves of ``elements >> 2`` followed by the two halves of ``offset``; ``elements
    & 3`` picks one of the four words that come out.
    """
    block = elements >> 2
    words = _philox4x32_10(
        (
            block & _MASK32,
            (block >> 32) & _MASK32,
            torch.full_like(elements, offset & _MASK32),
            torch.full_like(elements, (offset >> 32) & _MASK32),
        ),
        (seed & _MASK32, (seed >> 32) & _MASK32),
    )
    return torch.stack(words, dim=-1).gather(-1, (elements & 3).unsqueeze(-1)).squeeze(-1)


def _philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_32x32(0xD2511F53, c0)
        high1, low1 = _multiply_32x32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _multiply_32x32(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product, in 16-bit halves because int64 cannot hold 64 unsigned bits."""
    upper, lower = factor * (x >> 16), factor * (x & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK32


def dropout_mask(
    dropout_p: float, seed: int, offset: int, row: Tensor, num_keys: int, max_num_keys: int | None = None
) -> Tensor:
    """Which attention probabilities stay: bool (*row.shape, num_keys).

    ``row`` (int64, any shape) numbers the rows of scores: ``(b * H + h) * Sq + i`` in a dense batch, ``h * total_q +
    i`` in a packed one, where i counts through the whole batch. Key j of a row is element ``row * pitch + j`` of
    `philox_uint32`, where pitch is ``max_num_keys`` (default: ``num_keys``) rounded up to a multiple of 4. The
    element stays if its 32 bits are at least ``floor(dropout_p * 2**32)``.
    """
    pitch = -(-(num_keys if max_num_keys is None else max_num_keys) // 4) * 4
    elements = row.unsqueeze(-1) * pitch + torch.arange(num_keys, device=row.device)
    return philox_uint32(seed, offset, elements) >= math.floor(dropout_p * 2**32)


# the tolerance rule


def assert_close_to_reference(
    actual: Tensor,
    low_precision: Tensor,
    reference: Tensor,
    *,
    factor: float = 2.0,
    atol: float | None = None,
    name: str = "output",
) -> None:
    """Asserts ``max|actual - reference| <= factor * max|low_precision - reference| + atol``.

    ``low_precision`` is the plain PyTorch evaluation in the dtype of ``actual``, ``reference`` the same in float64
    (or float32). The default ``atol`` is ``eps(actual.dtype) * max|reference|``, two roundings of the largest element;
    it matters where ``low_precision`` happens to be exact, or nearly. For a float64 ``actual``, above which there is
    no reference, it is ``1e-12 * max(1, max|reference|)``: some thousand roundings, and still far below any error of
    a formula. Where ``reference``, rounded to ``actual.dtype``, is NaN or infinite, ``actual`` has to hold the same,
    and nowhere else may it be NaN or infinite; such elements of ``reference`` and of ``low_precision`` count in no
    maximum.

    Raises AssertionError with the largest error, its position, and both values there.
    """
    if actual.shape != reference.shape or low_precision.shape != reference.shape:
        raise AssertionError(
            f"{name}: expected shape {tuple(reference.shape)}, got {tuple(actual.shape)} "
            f"(plain PyTorch: {tuple(low_precision.shape)})"
        )
    if actual.numel() == 0:
        return
    actual, low_precision, reference = actual.detach(), low_precision.detach(), reference.detach()
    rounded = reference.to(actual.dtype)
    finite = rounded.isfinite()
    same_special = torch.where(finite, actual.isfinite(), (actual == rounded) | (actual.isnan() & rounded.isnan()))
    if not same_special.all():
        position = _unravel(int((~same_special).flatten().nonzero()[0]), actual.shape)
        count = int((~same_special).sum())
        raise AssertionError(
            f"{name}: {actual[position].item()} at {position}, expected {reference[position].item()} "
            f"({count} such elements)"
        )

    exact = reference.double()
    if atol is None and actual.dtype == torch.float64:
        atol = 1e-12 * max(1.0, float(exact.abs().where(finite, 0.0).max()))
    elif atol is None:
        atol = torch.finfo(actual.dtype).eps * float(exact.abs().where(finite, 0.0).max())
    error = (actual.double() - exact).abs().where(finite, 0.0)
    plain_error = float((low_precision.double() - exact).abs().where(finite & low_precision.isfinite(), 0.0).max())
    worst = int(error.argmax())
    position, largest = _unravel(worst, actual.shape), float(error.flatten()[worst])
    if largest > factor * plain_error + atol:
        raise AssertionError(
            f"{name}: largest error {largest:.3e} at {position} (got {actual[position].item():.6g}, "
            f"expected {reference[position].item():.6g}) exceeds {factor:g} x {plain_error:.3e} "
            f"(plain PyTorch in {low_precision.dtype}) + {atol:.3e}"
        )


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        index, remainder = divmod(index, size)
        position.append(remainder)
    return tuple(reversed(position))


def assert_op_matches_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, Any] | None = None,
    *,
    reference_options: Mapping[str, Any] | None = None,
    factor: float = 2.0,
    gradient_factor: float = 2.0,
    atol: float | None = None,
    gradient_atol: Mapping[str, float] | None = None,
) -> None:
    """Holds an op and its gradients against a reference, by the rule of `assert_close_to_reference`.

    ``tensors`` and ``options`` become keyword arguments of both functions; ``reference_options`` go to the reference
    only (``seed`` and ``offset`` of a dropout). ``gradient_atol`` takes the place of ``atol`` for the gradients of the
    tensors it names. Runs ``op`` as it is, then ``reference`` in the same dtypes, then ``reference`` with the
    floating-point tensors in float64. Outputs may be a tensor or a tuple. Gradients are taken, for random gradients of
    the outputs (drawn from torch's global generator), of every tensor that has ``requires_grad``.
    """
    options = dict(options or {})
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def run(
        function: Callable[..., Any], extra: Mapping[str, Any], dtype: torch.dtype | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        arguments = {name: _fresh_leaf(tensor, dtype) for name, tensor in given.items()}
        result = function(**arguments, **extra)
        outputs = list(result) if isinstance(result, tuple) else [result]
        return outputs, {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}

    double_options = {k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in options.items()}
    extra = dict(reference_options or {})
    actual, actual_leaves = run(op, options, None)
    plain, plain_leaves = run(reference, {**options, **extra}, None)
    exact, exact_leaves = run(reference, {**double_options, **extra}, torch.float64)
    for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True)):
        assert a.dtype == p.dtype, f"output {n}: expected {p.dtype}, got {a.dtype}"
        assert_close_to_reference(a, p, e, factor=factor, atol=atol, name=f"output {n}")
    if not actual_leaves:
        return

    grad_outputs = [torch.randn(a.shape, dtype=torch.float64, device=a.device).to(a.dtype) for a in actual]

    def gradients(outputs: list[Tensor], leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        weighted = [g.to(o.dtype) for o, g in zip(outputs, grad_outputs, strict=True)]
        return torch.autograd.grad(outputs, list(leaves.values()), weighted)

    triples = zip(
        gradients(actual, actual_leaves), gradients(plain, plain_leaves), gradients(exact, exact_leaves), strict=True
    )
    for name, (a, p, e) in zip(actual_leaves, triples, strict=True):
        assert a.dtype == p.dtype, f"gradient of {name}: expected {p.dtype}, got {a.dtype}"
        own_atol = (gradient_atol or {}).get(name, atol)
        assert_close_to_reference(a, p, e, factor=gradient_factor, atol=own_atol, name=f"gradient of {name}")


def _fresh_leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A leaf of its own with the values and, unless the dtype changes, the strides of ``tensor``."""
    leaf = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        leaf = leaf.to(dtype, copy=True)
    return leaf.requires_grad_(tensor.requires_grad)
