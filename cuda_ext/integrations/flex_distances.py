"""Biases of a score_mod that depend on query and key through their distance alone, `kv - q`.

Such a bias is evaluated once for each distance. That nothing else counts is shown by evaluation, too: the first time at
all positions, and at each call in several whole rows and columns. So a term that depends on the query or the key is
always found, and one of single positions is found the first time.

Captured floating-point tensors may get new values between calls, as parameters in training. Therefore the first time
it is shown for other values of these tensors, too. Without this, a term whose values are 0 now, as those of a new
parameter, would not be seen, though it may have a gradient. Where it fails, the bias counts as one of distances only
for the values that it was shown for, and only if it has no gradient. What is not found are terms that begin to act
later, because values are compared, and only at few positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cuda_ext.integrations.captures import Captures, References

__all__ = ["Distances", "bias_of_distances", "has_derivative", "slopes_of"]

Places = tuple[Tensor, Tensor]  # queries and keys, (P,) each; or (R, 1) and (K,), for R whole rows

_LINES, _MORE_LINES = 4, 8  # rows, and as many columns; the second if positions are too many to look at all of them
_ALWAYS, _FOR_VALUES, _NEVER = "always", "for values that were shown", "never"
_MAX_KNOWN = 512
_random = random.Random()  # does not change the numbers of the user


class Distances(NamedTuple):
    """Evaluates a score_mod by distance."""

    evaluate: Callable[[Tensor, Tensor, Tensor], Tensor]  # (score, *Places) -> (B or 1, H or 1, P), or (.., R, K)
    queries: int
    keys: int
    device: torch.device
    rounding: float  # relative, that the kernels would not notice
    at_once: int  # positions that are evaluated together
    may_be_all: bool  # False: there are too many positions to look at all of them

    def bias(self, score: Tensor) -> Tensor:
        """(B or 1, H or 1, Sq + Sk - 1): of distances `kv - q` from `1 - Sq` to `Sk - 1`, in the first column and row,
        with the graph to what the score_mod has captured."""
        return self.evaluate(score, *self._edges())

    def _edges(self) -> Places:
        zeros = torch.zeros(self.queries + self.keys - 1, dtype=torch.int64, device=self.device)
        rows = torch.arange(self.queries - 1, 0, -1, device=self.device)
        columns = torch.arange(self.keys, device=self.device)
        return torch.cat([rows, zeros[: self.keys]]), torch.cat([zeros[: self.queries - 1], columns])

    @torch.no_grad()
    def checked(self, score: Tensor) -> Tensor | None:
        """`bias(score)`, or None if the values in some rows and columns are others."""
        edges, (lines, *more) = self._edges(), self.lines(_LINES)
        values = self.evaluate(score, *(torch.cat(both) for both in zip(edges, lines)))
        wanted, of_lines = values.split([len(edges[0]), len(lines[0])], -1)
        return wanted if self._agree(of_lines, *lines, wanted) and self.agrees(more, score, wanted) else None

    def places(self) -> Iterator[Places]:
        """All of them, or if these are too many, some rows and columns."""
        if not self.may_be_all:
            return self.lines(_MORE_LINES)
        queries, keys = (torch.arange(size, device=self.device) for size in (self.queries, self.keys))
        return ((part.unsqueeze(1), keys) for part in queries.split(max(1, self.at_once // self.keys)))

    def lines(self, count: int) -> Iterator[Places]:
        """Whole rows and columns, the last ones among them. The first ones are those of `bias`."""
        every_query, every_key = (torch.arange(size, device=self.device) for size in (self.queries, self.keys))
        rows, columns = (
            torch.tensor([size - 1, *(_random.randrange(size) for _ in range(count - 1))], device=self.device)
            for size in (self.queries, self.keys)
        )
        queries = torch.cat([rows.repeat_interleave(self.keys), every_query.repeat(count)])
        keys = torch.cat([every_key.repeat(count), columns.repeat_interleave(self.queries)])
        return zip(queries.split(self.at_once), keys.split(self.at_once))

    @torch.no_grad()
    def agrees(self, places: Iterable[Places], score: Tensor, wanted: Tensor) -> bool:
        """Whether the values of these places are those of their distance, of `bias(score)`."""
        return all(self._agree(self.evaluate(score, *each), *each, wanted) for each in places)

    def _agree(self, values: Tensor, queries: Tensor, keys: Tensor, wanted: Tensor) -> bool:
        if queries.dim() == 2:  # row q is a window that begins at the distance of key 0
            expected = wanted.unfold(-1, self.keys, 1).index_select(-2, self.queries - 1 - queries.squeeze(1))
        else:
            expected = wanted[..., keys - queries + self.queries - 1]
        if torch.equal(values, expected):  # nearly always
            return True
        close = (values - expected).abs() <= self.rounding * expected.abs()
        return bool(torch.where(expected == -torch.inf, values == -torch.inf, close).all())


def bias_of_distances(
    distances: Distances, captures: Captures, where: Hashable, zero: Tensor, of: Callable[[float], float]
) -> Tensor | None:
    """`Distances.bias` of a score of 0, or None unless the score_mod does the same to a score wherever the distance is
    the same.

    Args:
        where: what decides besides the captures: lengths and device.
        of: what becomes of a score, without the bias.
    """
    form, key = (captures.form, where), (captures.key, where)
    fixed = [each for each in captures.tensors if not each.is_floating_point()]
    verdict = _recall(form, fixed, captures)
    bias = None if verdict == _NEVER else distances.bias(zero)
    if bias is None or (verdict == _FOR_VALUES and has_derivative(bias)):
        return None
    number = _random.choice((-1, 1)) * _random.uniform(0.5, 8.0)
    score = torch.full((), number, dtype=torch.float64, device=zero.device)
    wanted = distances.checked(score)
    found = wanted is not None and _adds(bias.detach(), of(number), wanted)
    is_shown = verdict == _ALWAYS or (verdict != "" and _recall(key, captures.tensors, captures) != "")
    if found and wanted is not None and not is_shown:
        found = distances.agrees(distances.places(), score, wanted)
        if found and not verdict:
            verdict = _ALWAYS if _holds_for_others(distances, captures.tensors, score) else _FOR_VALUES
        if found and verdict == _FOR_VALUES:
            _remember(key, verdict, captures.tensors, captures)
    _remember(form, verdict if found else _NEVER, fixed, captures)
    return bias if found and (verdict == _ALWAYS or not has_derivative(bias)) else None


def _adds(bias: Tensor, modified: float, values: Tensor) -> bool:
    """Whether the values are the sums."""
    close = (values - bias - modified).abs() <= 1e-4 * (bias.abs() + abs(modified)) + 1e-30
    return bool(torch.where(bias == -torch.inf, values == -torch.inf, close).all())


def has_derivative(tensor: Tensor) -> bool:
    """Whether something may be differentiated with respect to what it was computed from."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.requires_grad or is_wrapped or forward_ad.unpack_dual(tensor).tangent is not None


def slopes_of(bias: Tensor, queries: int, keys: int) -> tuple[Tensor, bool] | None:
    """Those of ALiBi, `(H or 1,)`, if this bias (H or 1, Sq + Sk - 1) has this form: `-slope * |d|`, or if the second
    is True `slope * d`, where `d` is the distance from the diagonal, which is aligned bottom-right."""
    if keys < 2:
        return None
    distance = torch.arange(1 - keys, queries, device=bias.device).double()
    slopes = bias[:, :1].double() / distance[0]
    for is_signed, wanted in ((False, -slopes * distance.abs()), (True, slopes * distance)):
        if bool(((bias - wanted).abs() <= 1e-6 * wanted.abs() + 1e-9).all()):
            return slopes.flatten(), is_signed
    return None


# What was shown before

_known: dict[Hashable, tuple[str, References]] = {}


def _recall(name: Hashable, tensors: list[Tensor], captures: Captures) -> str:
    verdict, references = _known.get(name, ("", None)) if captures.is_complete else ("", None)
    return verdict if references is not None and references.are_to(tensors) else ""


def _remember(name: Hashable, verdict: str, tensors: list[Tensor], captures: Captures) -> None:
    if captures.is_complete:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[name] = verdict, References(tensors)


# Other values


def _holds_for_others(distances: Distances, tensors: list[Tensor], score: Tensor) -> bool:
    if not any(each.is_floating_point() for each in tensors):
        return True
    with _OtherValues(tensors), torch.enable_grad():
        wanted = distances.bias(score)
        # With a derivative, it comes from a tensor that has kept its values.
        return not has_derivative(wanted) and distances.agrees(distances.places(), score, wanted)


class _OtherValues(TorchFunctionMode):
    """PyTorch's functions get other values in place of those of these floating-point tensors, without a gradient."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._others: dict[int, Tensor | None] = {id(each): None for each in tensors if each.is_floating_point()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _other(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._others:
            return tensor
        found = self._others[id(tensor)]
        if found is None:
            found = self._others[id(tensor)] = _changed(tensor.detach())
        return found


def _changed(tensor: Tensor) -> Tensor:
    """Each element changed by 40 to 90 percent, so that comparisons change, too; the sign stays. torch.vmap allows no
    random numbers, so their place is taken by the last digits of sines."""
    numbers = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
    numbers = (numbers + 100.0 * _random.random()).sin() * 1e4
    change = 0.4 + 0.5 * numbers.frac().abs()
    signed = torch.where(numbers.floor() % 2 == 0, change, -change)
    size = torch.where(tensor == 0, 2.0, tensor.double())
    return torch.where(tensor.isfinite(), tensor + signed * size, tensor).to(tensor.dtype)
