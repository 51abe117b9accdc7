"""Mixtures of experts: a router and the experts it sends each token to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cuda_ext._activations import ACTIVATIONS, NAMES, listed
from cuda_ext._expert_parallel import shares
from cuda_ext._experts import mixture_of_experts
from cuda_ext._fp8_recipes import EXPERTS_RECIPES, checked_experts_recipe
from cuda_ext._gemm import gemm
from cuda_ext.fp8 import ConvertibleLayer, convertible_layers
from cuda_ext.nn.linear import MLP, GatedMLP


class RouterLosses(NamedTuple):
    """What a router adds to the loss of a model, and the numbers behind it."""

    balance: Tensor
    """float32: ``experts * sum_e f_e p_e`` with the fraction f of the chosen (token, expert) pairs and the mean
    probability p of expert e; 1 if both are equal for all experts (Fedus et al., Switch Transformers, arXiv 2101.03961,
    equations 4 to 6, for ``top_k`` experts a token). transformers' ``router_aux_loss`` is ``top_k`` times this."""
    z: Tensor
    """float32: the mean of the squared log-sum-exp of a token's logits (Zoph et al., ST-MoE, arXiv 2202.08906,
    equation 5)."""
    load: Tensor
    """(experts,), int64: the number of tokens sent to each."""


class Router(nn.Module):
    """The ``top_k`` experts of each token, and their weights; see `MixtureOfExperts`.

    State dict: ``weight`` (experts, K) and, with ``correction``, the buffer ``e_score_correction_bias`` (experts,),
    which stays float32 when the module is converted to another dtype.

    Shape: input (tokens, K) -> logits (tokens, experts) float32, weights (tokens, top_k) float32, ids (tokens, top_k)
    int64. The logits are not rounded to the dtype of the input.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        features: int,
        experts: int,
        top_k: int,
        *,
        scoring: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_groups: int = 1,
        top_expert_groups: int = 1,
        correction: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"MixtureOfExperts: expected scoring 'softmax' or 'sigmoid', got {scoring!r}")
        if expert_groups < 1 or experts % expert_groups or not 1 <= top_expert_groups <= expert_groups:
            raise ValueError(
                f"MixtureOfExperts: expected expert_groups that divide {experts} experts and 1 <= top_expert_groups <= "
                f"expert_groups, got expert_groups={expert_groups} and top_expert_groups={top_expert_groups}"
            )
        most = experts // expert_groups * top_expert_groups
        if not 1 <= top_k <= most:
            raise ValueError(
                f"MixtureOfExperts: expected top_k from 1 to {most}, the experts in {top_expert_groups} of "
                f"{expert_groups} groups, got {top_k}"
            )
        self.experts, self.top_k, self.scoring, self.normalize = experts, top_k, scoring, normalize
        self.scale, self.expert_groups, self.top_expert_groups = scale, expert_groups, top_expert_groups
        self.weight = nn.Parameter(torch.empty(experts, features, device=device, dtype=dtype))
        bias = torch.zeros(experts, device=device, dtype=torch.float32) if correction else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """What `to`, `half` and the like call. Steps of 1e-3 are less than the rounding of a correction of 16 bits."""
        exact = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if exact is not None and moved is not None and moved.dtype != exact.dtype:
            self.e_score_correction_bias = exact.to(moved.device)
        return self

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(input.dtype, torch.float32)
        logits = gemm(input, self.weight.t(), out_dtype=wide)
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ids = self._choose(scores.detach())
        weights = scores.gather(-1, ids)
        if self.normalize:
            # Not 0: sigmoids can all be.
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
        return logits, weights * self.scale, ids

    def _choose(self, scores: Tensor) -> Tensor:
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.top_expert_groups < self.expert_groups:
            in_groups = scores.unflatten(-1, (self.expert_groups, -1))
            best = in_groups.topk(min(2, in_groups.shape[-1]), dim=-1).values.sum(-1)
            chosen = best.topk(self.top_expert_groups, dim=-1).indices
            hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
            scores = in_groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.top_k, dim=-1).indices

    def losses(self, logits: Tensor, ids: Tensor) -> RouterLosses:
        """Of the logits and ids that `forward` returned. Without tokens the losses are 0."""
        probabilities = logits.softmax(-1)
        if self.scoring == "sigmoid":
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        # Not bincount, whose size depends on values when it is compiled.
        load = torch.zeros(self.experts, dtype=torch.int64, device=ids.device)
        load = load.scatter_add(0, ids.reshape(-1), torch.ones_like(ids.reshape(-1)))
        tokens = max(ids.shape[0], 1)
        fractions, means = load.to(logits.dtype) / (tokens * self.top_k), probabilities.sum(0) / tokens
        z = logits.logsumexp(-1).square().sum() / tokens
        return RouterLosses(self.experts * (fractions * means).sum(), z, load)

    @torch.no_grad()
    def adjust_correction(self, load: Tensor, rate: float = 1e-3, *, group: dist.ProcessGroup | None = None) -> None:
        """Once per step: makes experts with less than the mean load more likely to be chosen, and others less, as
        DeepSeek-V3 balances experts without a loss (arXiv 2412.19437, section 2.1.2).

        Args:
            load: (experts,), `RouterLosses.load`, summed over the micro-batches of the step.
            rate: how much is added or subtracted. Default 1e-3.
            group: the ranks whose tokens this router sends, of which each gives the load of its own; all call this
                together. Corrections of ranks that are not told of each other's loads move apart. Default None: `load`
                is of all tokens.
        """
        if self.e_score_correction_bias is None:
            raise RuntimeError("Router.adjust_correction: expected a router with correction=True")
        if group is not None:
            load = load.clone()
            dist.all_reduce(load, group=group)
        below_mean = torch.sign(load.sum() - len(load) * load)  # exact for integers
        self.e_score_correction_bias += rate * below_mean.to(self.e_score_correction_bias.dtype)

    def extra_repr(self) -> str:
        grouped = ""
        if self.expert_groups > 1:
            grouped = f", expert_groups={self.expert_groups}, top_expert_groups={self.top_expert_groups}"
        return (
            f"features={self.weight.shape[1]}, experts={self.experts}, top_k={self.top_k}, scoring={self.scoring}, "
            f"normalize={self.normalize}, scale={self.scale:g}{grouped}, "
            f"correction={self.e_score_correction_bias is not None}"
        )


class _Ranks:
    """A process group, which copies of a module share."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Ranks:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise RuntimeError(
                "MixtureOfExperts: expected no group to pickle the layer, got a process group, which cannot be saved; "
                "save the state dict, torch.save(layer.state_dict(), path), and load it into a layer made with a group"
            )
        return self.__dict__


class Experts(nn.Module):
    """The feed-forward layers of all experts; see `MixtureOfExperts`. `forward` is `cuda_ext.mixture_of_experts`.

    State dict: ``gate_up_proj`` (experts, 2F, K), the rows of the gate first (``up_proj`` (experts, F, K) without a
    gate), and ``down_proj`` (experts, K, F), with ``_bias`` behind the names of biases.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        hidden_features: int,
        experts: int,
        *,
        activation: str | None = "silu",
        gated: bool = True,
        bias: bool = False,
        group: dist.ProcessGroup | None = None,
        fp8: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fp8 = checked_experts_recipe(fp8)
        if activation not in ACTIVATIONS:
            raise RuntimeError(
                f"MixtureOfExperts: expected activation {listed(NAMES, 'or')} or None, got {activation!r}"
            )
        self.activation, self.gated, self.total, self._ranks = activation, gated, experts, _Ranks(group)
        if group is not None:
            experts = shares(experts, group.size())[group.rank()]
        self._up = "gate_up_proj" if gated else "up_proj"
        up = 2 * hidden_features if gated else hidden_features
        shapes = {self._up: (experts, up, features), "down_proj": (experts, features, hidden_features)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            own = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"{name}_bias", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As those of `torch.nn.Linear`, for each expert."""
        for name in (self._up, "down_proj"):
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            bound = 1 / math.sqrt(max(weight.shape[2], 1))
            for parameter in (weight, bias):
                if parameter is not None:
                    nn.init.uniform_(parameter, -bound, bound)

    def forward(self, input: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return mixture_of_experts(
            input,
            ids,
            weights,
            getattr(self, self._up),
            self.down_proj,
            getattr(self, f"{self._up}_bias"),
            self.down_proj_bias,
            activation=self.activation,
            gated=self.gated,
            experts=self.total,
            group=self._ranks.group,
            fp8=self.fp8,
        )

    def extra_repr(self) -> str:
        experts, features, hidden = self.down_proj.shape
        number = f"{experts}" if self._ranks.group is None else f"{experts} of {self.total}"
        bias = self.down_proj_bias is not None
        return (
            f"features={features}, hidden_features={hidden}, experts={number}, activation={self.activation}, "
            f"gated={self.gated}, bias={bias}" + f", fp8={self.fp8}" * (self.fp8 is not None)
        )


def _convertible(module: nn.Module) -> ConvertibleLayer | None:
    if not isinstance(module, Experts):
        return None
    return ConvertibleLayer((module.down_proj.shape[1], module.down_proj.shape[2]), EXPERTS_RECIPES)


convertible_layers.append(_convertible)


class MixtureOfExperts(nn.Module):
    """The feed-forward layer of Mixtral, Qwen-MoE and DeepSeek-V3: each token goes to ``top_k`` of ``experts`` MLPs.

    No token is dropped. `cuda_ext.mixture_of_experts` says how experts are computed, and what memory backward needs.

    Args:
        features: K, the size of the last dimension of input and output.
        hidden_features: F, the size of an expert's hidden layer.
        experts: their number.
        top_k: how many each token goes to.
        activation: a name that `cuda_ext.gemm` takes (default "silu"), or None.
        gated: whether experts are gated. Default True.
        bias: whether the layers of experts have biases. Default False.
        scoring: "softmax" (default) of a token's logits or "sigmoid" of each.
        normalize: whether the weights of a token's experts sum to 1. Default True.
        scale: of the weights, after that. Default 1.
        expert_groups, top_expert_groups: experts come in ``expert_groups`` equal groups, and a token's experts are in
            the ``top_expert_groups`` of them whose two best scores have the largest sums (DeepSeek-V3, arXiv
            2412.19437). Default 1 and 1.
        correction: whether a buffer, which only `gate.adjust_correction` changes, is added to the scores when experts
            are chosen, not to their weights. It stays float32. Default False.
        group: a process group of ranks that share the experts, each with as equal a part of them as possible, for
            tokens of their own (expert parallelism); see `cuda_ext.mixture_of_experts`. Router and shared experts are
            on all ranks. Copies of the layer share the group; it cannot be pickled. Default None: all are here.
        shared_hidden_features: the size of the hidden layer of an MLP for all tokens, whose output is added. Default 0,
            none.
        fp8: "rowwise_with_gw_hp" or "blockwise": experts and shared experts multiply in FP8, as
            `cuda_ext.mixture_of_experts` says; the router does not. Default None.
        device, dtype: of the parameters. float16, bfloat16, float32 or float64.

    Shape: input (..., K) -> (..., K); ``residual``, if given, broadcasts to the output. With ``return_losses=True``
    also `RouterLosses`.

    State dict: ``gate.weight``, ``experts.gate_up_proj``, ``experts.down_proj``, and where they exist
    ``gate.e_score_correction_bias``, ``shared_experts.*``, as in transformers' Mixtral, Qwen3-MoE and DeepSeek-V3.

    Raises:
        ValueError: numbers of experts or of their groups that do not fit, or an unknown `scoring`.
        RuntimeError: an unknown activation; from pickle and `torch.save`, with a process group.

    Example::

        layer = cuda_ext.nn.MixtureOfExperts(64, 32, experts=8, top_k=2)
        out, losses = layer(torch.randn(2, 10, 64), return_losses=True)
        (out.square().mean() + 0.01 * losses.balance + 0.001 * losses.z).backward()
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        experts: int,
        top_k: int,
        *,
        activation: str | None = "silu",
        gated: bool = True,
        bias: bool = False,
        scoring: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        expert_groups: int = 1,
        top_expert_groups: int = 1,
        correction: bool = False,
        group: dist.ProcessGroup | None = None,
        shared_hidden_features: int = 0,
        fp8: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        mlp: dict[str, Any] = {"activation": activation, "bias": bias, **factory}
        self.gate = Router(
            features,
            experts,
            top_k,
            scoring=scoring,
            normalize=normalize,
            scale=scale,
            expert_groups=expert_groups,
            top_expert_groups=top_expert_groups,
            correction=correction,
            **factory,
        )
        mlp["fp8"] = fp8
        self.experts = Experts(features, hidden_features, experts, gated=gated, group=group, **mlp)
        self.shared_experts: nn.Module | None = None
        if shared_hidden_features:
            self.shared_experts = (GatedMLP if gated else MLP)(features, shared_hidden_features, **mlp)

    def forward(
        self, input: Tensor, residual: Tensor | None = None, *, return_losses: bool = False
    ) -> Tensor | tuple[Tensor, RouterLosses]:
        tokens = input.reshape(-1, input.shape[-1])
        logits, weights, ids = self.gate(tokens)
        of_tokens = (*input.shape[:-1], ids.shape[-1])
        out = self.experts(input, ids.reshape(of_tokens), weights.reshape(of_tokens))
        if self.shared_experts is not None:
            out = self.shared_experts(input, out)
        if residual is not None:
            out = out + residual
        return (out, self.gate.losses(logits, ids)) if return_losses else out
