"""One weight for several projections of the same input.

q, k and v, and likewise gate and up, are stored as the rows of one weight, so that one GEMM computes them all.
Checkpoints usually have separate weights. `join_on_load` makes a module load either form; `separated` returns its
tensors under the separate names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ext._load import ops


def join_on_load(
    module: nn.Module, joint: str, parts: dict[str, int], aliases: Mapping[str, str] | None = None
) -> None:
    """Lets ``module.load_state_dict`` load the rows of its child linear layer ``joint`` from separate layers.

    ``parts`` maps the names of the separate layers, in the order of their rows, to their numbers of rows: with
    ``{"gate_proj": F, "up_proj": F}`` the keys ``gate_proj.weight`` (F, K) and ``up_proj.weight`` (F, K) become
    ``gate_up_proj.weight`` (2F, K), and the biases likewise. ``aliases`` maps other key names to those of the
    module, for formats that differ only in names.

    Loading raises RuntimeError, like ``load_state_dict``, if only some of the parts are present, if one has the wrong
    shape, or if the joint key is present too; also with ``strict=False``, which allows missing layers but not missing
    parts of one.
    """
    module._joint_parts = {**getattr(module, "_joint_parts", {}), joint: parts}  # type: ignore[assignment]
    module.register_load_state_dict_pre_hook(
        functools.partial(_rename_and_join, joint=joint, parts=parts, aliases=aliases or {})
    )


def _rename_and_join(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    *,
    joint: str,
    parts: dict[str, int],
    aliases: Mapping[str, str],
) -> None:
    """The hook that `join_on_load` registers; a top-level function, so that the module can be pickled."""
    for alias, name in aliases.items():
        if prefix + alias in state_dict and prefix + name not in state_dict:
            state_dict[prefix + name] = state_dict.pop(prefix + alias)
    for kind, parameter in module.get_submodule(joint).named_parameters():
        key = f"{prefix}{joint}.{kind}"
        keys_of_parts = {f"{prefix}{part}.{kind}": rows for part, rows in parts.items()}
        if problem := _join(state_dict, key, keys_of_parts, parameter.shape):
            error_msgs.append(f"{type(module).__name__}: {problem}")
            state_dict.setdefault(key, parameter.detach())  # one clear error instead of this and "missing key"


def _join(state_dict: dict[str, Any], key: str, parts: dict[str, int], shape: torch.Size) -> str | None:
    """Replaces the keys of ``parts`` by ``key``; returns an error message, or None."""
    found = {name: state_dict.pop(name) for name in parts if name in state_dict}
    if not found:
        return None
    if key in state_dict:
        return f"expected either {key} or {', '.join(parts)}, got both"
    if missing := [name for name in parts if name not in found]:
        return f"expected {', '.join(parts)} together, got no {', '.join(missing)}"
    for name, rows in parts.items():
        expected = (rows, *shape[1:])
        if tuple(found[name].shape) != expected:
            return f"expected {name} of shape {expected}, got {tuple(found[name].shape)}"
    state_dict[key] = torch.cat(list(found.values()))
    return None


def separated(module: nn.Module, named_tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a model under the names of Llama-style checkpoints: the inverse of loading such a checkpoint.

    ``named_tensors`` (default: ``module.state_dict()``) may be any tensors with the names and shapes of the parameters,
    such as their gradients. Joint tensors are returned as their parts, which use the same memory
    (``gate_up_proj.weight`` (2F, K) as ``gate_proj.weight`` and ``up_proj.weight``, both (F, K)), all others unchanged.
    Each part has a storage of its own, by which savers tell tensors apart.
    """
    tensors = dict(module.state_dict() if named_tensors is None else named_tensors)
    known: dict[Any, list[Tensor]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for joint, parts in getattr(owner, "_joint_parts", {}).items():
            start = f"{prefix}." if prefix else ""
            for kind, _ in owner.get_submodule(joint).named_parameters():
                if (whole := tensors.pop(f"{start}{joint}.{kind}", None)) is not None:
                    pieces = _rows(whole, list(parts.values()), known)
                    tensors.update((f"{start}{part}.{kind}", piece) for part, piece in zip(parts, pieces, strict=True))
    return tensors


def _rows(whole: Tensor, counts: list[int], known: dict[Any, list[Tensor]]) -> Sequence[Tensor]:
    """The parts of ``whole``. ``known`` has earlier results: names of one tensor are names of the same parts."""
    pieces: Sequence[Tensor] = whole.split(counts)
    # A compiler does not see that tensors of different storages share memory. Of DTensors, savers see what is inside.
    if torch.compiler.is_compiling() or type(whole) not in (Tensor, nn.Parameter):
        return pieces
    if torch._C._functorch.is_functorch_wrapped_tensor(whole):
        return pieces
    is_shared = whole.is_cpu and whole.is_shared()
    apart = [ops._own_storage(piece, is_shared=is_shared) for piece in pieces]
    if any(each is None for each in apart):
        return pieces
    if torch.is_grad_enabled() and whole.requires_grad:
        apart = _Rows.apply(whole, *apart)
    return known.setdefault((whole.data_ptr(), whole.dtype, whole.shape, whole.stride(), whole.requires_grad), apart)


class _Rows(torch.autograd.Function):
    """The parts of a tensor, through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(whole)  # what saves a part does not see that this changes; backward then raises
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return torch.cat(gradients), *[None] * len(gradients)
