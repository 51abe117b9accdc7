"""What FlexAttention's score_mod computes, in the terms of `flash_attention`.

A score_mod is served if it is ``softcap(factor * score) + bias(b, h, q, kv)``. It is recognised by evaluation: first of
many scores, from tiny to huge, at some positions, for the factor and the cap; then of one random score at all positions
that it depends on, which must give the same form. If a bias depends on the distance of key and query alone, this is
done once, and then in some rows and columns (`flex_distances`). Which of b, h, q and kv it depends on is exact:
`torch.vmap` leaves out the dimensions that it does not use.

Otherwise it may be ``factor(b, h, q) * score + bias(b, h, q, kv)``: the derivative by the score is evaluated at all
positions that it depends on, and multiplies the rows of the query.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ext._mask_mods import GatherIndexing
from cuda_ext.integrations.captures import Captures, References, captures_of
from cuda_ext.integrations.flex_distances import Distances, bias_of_distances, has_derivative, slopes_of

__all__ = ["MAX_BIAS", "Modification", "NotServed", "Positions", "recognise"]

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_BIAS = 64 * 2**20  # elements of a table of biases
_ELEMENTS_AT_ONCE = 4 * 2**20

_SIZES = [10.0 ** (step / 3) for step in range(-18, 13)]  # three to a decade: one is in the bend of any softcap
_SCORES = [0.0, 1e30, -1e30, 1.0, *(sign * size for size in _SIZES for sign in (1.0, -1.0))]
_HUGE = 1  # where it is in _SCORES
_MAX_KNOWN = 256
_random = random.Random()  # does not change the numbers of the user


class NotServed(Exception):
    """The reason why a call is left to PyTorch."""


class Positions(NamedTuple):
    """How many of each, where, and in which dtype biases are computed."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys


class Form(NamedTuple):
    """``softcap * tanh(factor * score / softcap)``, or ``factor * score`` if softcap is 0, and a bias."""

    factor: float = 1.0
    softcap: float = 0.0
    depends: tuple[bool, ...] = (False, False, False, False)  # the bias, on b, h, q, kv
    has_bias: bool = False
    is_of_distances: bool = False  # the bias
    slopes: Tensor | None = None  # (H,): the bias is -slope * |d|, or if `is_signed` slope * d, as in flash_attention
    is_signed: bool = False

    def of(self, score: float) -> float:
        scaled = self.factor * score
        return self.softcap * math.tanh(scaled / self.softcap) if self.softcap else scaled


class Modification(NamedTuple):
    """Arguments for `flash_attention`; `factor` multiplies the scale."""

    factor: float = 1.0
    softcap: float = 0.0
    row_factor: Tensor | None = None  # (B, H, Sq, 1), 1 where it does not depend: multiplies the rows of query
    alibi_slopes: Tensor | None = None
    attn_bias: Tensor | None = None
    relative_bias: Tensor | None = None


_known: dict[Hashable, tuple[Form, References]] = {}


def recognise(
    score_mod: ScoreMod, positions: Positions, hides_future: Callable[[], bool], *, may_wait: bool = True
) -> Modification:
    """`hides_future`: whether a block mask hides all keys to the right of the diagonal, which is aligned bottom-right.
    Without `may_wait` nothing may be read from the device.

    What is recognised is kept for functions that capture constants only. Of others, the factor and the cap are kept, if
    their bias is one of distances, until a tensor changes.

    Raises:
        NotServed: it is of no such form.
    """
    try:
        return _of_constant_factor(score_mod, positions, hides_future, may_wait)
    except NotServed as reason:
        factor = _factor_of_rows(score_mod, positions) if may_wait else None
        if factor is None:
            raise reason from None
    found = _of_constant_factor(_without_factor(score_mod), positions, hides_future, may_wait)
    return found._replace(row_factor=factor)


def _of_constant_factor(
    score_mod: ScoreMod, positions: Positions, hides_future: Callable[[], bool], may_wait: bool
) -> Modification:
    captures = captures_of(score_mod)
    form, bias = _recall(captures, positions), None
    if form is None or captures.tensors:
        if not may_wait:
            raise NotServed("a score_mod that captures tensors, in a CUDA graph")
        if form is not None:
            form, bias = _by_distance(score_mod, positions, form, captures)
        if form is None or not form.is_of_distances:
            form = _form_of(score_mod, positions)
            if form.depends[2] and form.depends[3]:
                form, bias = _by_distance(score_mod, positions, form, captures)
        if form.has_bias and not form.is_of_distances:
            bias = _bias_of(score_mod, positions, form, prove=True)
        _remember(captures, positions, form)
    found = Modification(form.factor, form.softcap)
    if form.slopes is not None and (not form.is_signed or hides_future()):
        return found._replace(alibi_slopes=form.slopes)
    if not form.has_bias:
        return found
    if form.is_of_distances:
        bias = _distances(score_mod, positions, form).bias(_zero(positions)) if bias is None else bias
        return found._replace(relative_bias=_centred(bias, positions))
    bias = _bias_of(score_mod, positions, form, prove=False) if bias is None else bias
    return found._replace(attn_bias=bias.to(positions.dtype).contiguous())


def _without_factor(score_mod: ScoreMod) -> ScoreMod:
    """The score and the bias alone."""

    def plus_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + score_mod(torch.zeros_like(score), b, h, q, kv)

    return plus_bias


def _factor_of_rows(score_mod: ScoreMod, positions: Positions) -> Tensor | None:
    """The factor of the score, with the graph to what score_mod has captured; None if it has none that depends on b, h
    and q alone."""

    def slope(score: Tensor, *place: Tensor) -> Tensor:
        found: Any = torch.func.jvp(lambda score: score_mod(score, *place), (score,), (torch.ones_like(score),))
        return found[1]

    zero = _zero(positions)
    try:
        depends = tuple(stride != 0 for stride in _evaluate(slope, zero, _some_places(positions)).stride())
        if depends[3] or _elements(positions, Form(depends=depends)) > MAX_BIAS:
            return None
        factor = _evaluate(slope, zero, _used_places(positions, Form(depends=depends)))
        return factor if _is_factor(factor.detach(), score_mod, positions) else None
    except NotServed:
        return None


@torch.no_grad()
def _is_factor(factor: Tensor, score_mod: ScoreMod, positions: Positions) -> bool:
    """Whether the score is multiplied by it at all positions: at a random score, and at a huge one."""
    zero = _zero(positions)
    depends = tuple(stride != 0 for stride in _evaluate(score_mod, zero, _some_places(positions)).stride())
    depends = tuple(one or size > 1 for one, size in zip(depends, factor.shape))
    if not bool(factor.isfinite().all()) or _elements(positions, Form(depends=depends)) > MAX_BIAS:
        return False
    places = _used_places(positions, Form(depends=depends))
    start = _evaluate(score_mod, zero, places)
    is_hidden = start == -torch.inf
    for score in (_random.choice((-1, 1)) * _random.uniform(0.5, 8.0), 1e20):
        values, change = _evaluate(score_mod, zero + score, places), factor * score
        close = (values - start - change).abs() <= 1e-4 * (start.abs() + change.abs()) + 1e-30
        if not bool(torch.where(is_hidden, values == -torch.inf, close).all()):
            return False
    return True


def _key_of(captures: Captures, positions: Positions) -> Hashable:
    return captures.key, positions, torch.is_grad_enabled()


def _recall(captures: Captures, positions: Positions) -> Form | None:
    form, references = _known.get(_key_of(captures, positions), (None, None)) if captures.is_complete else (None, None)
    return form if references is not None and references.are_to(captures.tensors) else None


def _remember(captures: Captures, positions: Positions, form: Form) -> None:
    if captures.is_complete and (form.is_of_distances or not captures.tensors):
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[_key_of(captures, positions)] = form, References(captures.tensors)


# Evaluation


def _evaluate(
    score_mod: ScoreMod,
    score: Tensor,
    places: Sequence[Tensor],
    *,
    at_least_one_score: bool = False,
    in_pairs: bool = False,
) -> Tensor:
    """(B, H, Sq, Sk) for these positions, or (scores, B, H, Sq, Sk); the stride is 0 where it does not depend. If
    queries and keys are in pairs, (B, H, pairs). A place that is a number has no dimension there."""
    function: Any = score_mod
    for numbers in ((3, 4), (2,), (1,)) if in_pairs else ((4,), (3,), (2,), (1,)):
        if places[numbers[0] - 1].dim():
            function = torch.vmap(function, in_dims=tuple(0 if each in numbers else None for each in range(5)))
    if at_least_one_score:
        function = torch.vmap(function, in_dims=(0, None, None, None, None))
    try:
        with GatherIndexing():
            values = function(score, *places)
    except Exception as error:
        raise NotServed(f"score_mod cannot be mapped over positions: {type(error).__name__}") from error
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise NotServed("score_mod returns no floating-point tensor")
    return values


def _every_place(positions: Positions) -> list[Tensor]:
    return [torch.arange(size, device=positions.device) for size in positions.sizes]


def _some_places(positions: Positions) -> list[Tensor]:
    """At least two of each, the first and the last among them."""
    queries = [_random.randrange(positions.queries) for _ in range(3)]
    numbers = [
        [],
        [_random.randrange(positions.heads) for _ in range(2)],
        queries,
        [_random.randrange(positions.keys), *(min(each, positions.keys - 1) for each in queries[:2])],
    ]
    ends = [[0, size - 1] for size in positions.sizes]
    return [torch.tensor(end + more, device=positions.device) for end, more in zip(ends, numbers)]


# Recognition


def _form_of(score_mod: ScoreMod, positions: Positions) -> Form:
    scores = torch.tensor(_SCORES, dtype=torch.float64, device=positions.device)
    places = _some_places(positions)
    values = _evaluate(score_mod, scores, places, at_least_one_score=True)
    depends = tuple(stride != 0 for stride in values.stride()[1:])
    if any(depends) and bool((values[0] == -torch.inf).all()):
        # Hidden positions show nothing, and a cache of pages may hide nearly all.
        places = _visible_places(score_mod, positions, Form(depends=depends)) or places
        values = _evaluate(score_mod, scores, places, at_least_one_score=True)
    if values.requires_grad:
        _check_constant_slope(score_mod, scores, places)
    for dim, is_used in enumerate(depends, 1):
        values = values if is_used else values.narrow(dim, 0, 1)
    form = _fitted(values.detach().double().flatten(1).cpu(), scores.cpu())
    has_bias = any(depends) or bool((values[0] != 0).any()) or values.requires_grad
    return form._replace(depends=depends, has_bias=has_bias)


def _visible_places(score_mod: ScoreMod, positions: Positions, form: Form) -> list[Tensor]:
    """A few that are not hidden at all scores; empty if there are none, or too many positions to look at all."""
    if _elements(positions, form) > MAX_BIAS:
        return []
    scores = torch.tensor([0.0, 1e30, -1e30], dtype=positions.dtype, device=positions.device)
    with torch.no_grad():
        values = _evaluate(score_mod, scores, _used_places(positions, form), at_least_one_score=True)
    visible = (values != -torch.inf).any(0).nonzero()
    chosen = [_random.randrange(len(visible)) for _ in range(4)] if len(visible) else []
    return list(visible[[0, *chosen]].unbind(1)) if chosen else []


def _check_constant_slope(score_mod: ScoreMod, scores: Tensor, places: Sequence[Tensor]) -> None:
    """A factor is passed as a number. If it had a gradient, this would be lost."""

    def function(score: Tensor) -> Tensor:
        return _evaluate(score_mod, score, places, at_least_one_score=True)

    slope: Any = torch.func.jvp(function, (scores,), (torch.ones_like(scores),))[1]
    if slope.requires_grad:
        raise NotServed("score_mod multiplies the score by a tensor that requires grad")


def _fitted(values: Tensor, scores: Tensor) -> Form:
    """Of values (scores, places)."""
    start = values[0]
    hidden = start == -torch.inf
    if not bool((values[:, hidden] == -torch.inf).all()):
        raise NotServed("score_mod hides a position only for some scores")
    start = start[~hidden]
    if not bool(start.isfinite().all()):
        raise NotServed("score_mod gives NaN or +inf")
    if start.numel() == 0:
        return Form()
    changes = values[:, ~hidden] - start
    tolerance = 1e-6 * start.abs() + 1e-300
    for form in _candidates(changes[:, 0], scores):
        wanted = torch.tensor([form.of(score) for score in scores.tolist()], dtype=torch.float64).unsqueeze(1)
        if bool(((changes - wanted).abs() <= tolerance + 1e-6 * wanted.abs()).all()):
            return form
    raise NotServed(
        "score_mod is no function that attention has: factor * score or softcap * tanh(score / softcap), and a bias "
        "that depends on positions only"
    )


def _candidates(changes: Tensor, scores: Tensor) -> list[Form]:
    """A factor, and a soft cap with a factor, from one position."""
    found = []
    factor = float(changes[_HUGE]) / float(scores[_HUGE])  # the rounding of the bias vanishes here
    if math.isfinite(factor):
        found.append(Form(factor))
    cap = float(changes[_HUGE])
    if math.isfinite(cap) and cap != 0.0:
        shares = changes / cap
        bend = int((shares.nan_to_num(2.0) - 0.5).abs().argmin())
        if 0.0 < float(shares[bend]) < 1.0:
            inside = math.atanh(float(shares[bend])) / float(scores[bend])
            nearest = float(torch.tensor(cap, dtype=torch.float32))  # a bias rounds the cap
            cap = nearest if abs(nearest - cap) <= 1e-12 * abs(cap) else cap
            found.append(Form(cap * inside, abs(cap)))
    return found


# Biases


def _elements(positions: Positions, form: Form) -> int:
    """Of a table of all positions that the bias depends on."""
    return math.prod(size for size, is_used in zip(positions.sizes, form.depends) if is_used)


def _used_places(positions: Positions, form: Form) -> list[Tensor]:
    return [each if is_used else each[:1] for each, is_used in zip(_every_place(positions), form.depends)]


def _zero(positions: Positions) -> Tensor:
    return torch.zeros((), dtype=positions.dtype, device=positions.device)


def _distances(score_mod: ScoreMod, positions: Positions, form: Form) -> Distances:
    used = list(zip(_every_place(positions)[:2], form.depends))
    outer = [each if is_used else each[0] for each, is_used in used]

    def evaluate(score: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        in_pairs = queries.dim() == 1
        queries = queries if in_pairs else queries.squeeze(1)
        values = _evaluate(score_mod, score, (*outer, queries, keys), in_pairs=in_pairs)
        for axis in (0, 1):
            values = values if form.depends[axis] else values.unsqueeze(axis)
        return values

    _, _, queries, keys = positions.sizes
    rounding = 2 * torch.finfo(positions.dtype).eps
    at_once = max(1, _ELEMENTS_AT_ONCE // math.prod(len(each) for each, is_used in used if is_used))
    may_be_all = _elements(positions, form) <= MAX_BIAS
    return Distances(evaluate, queries, keys, positions.device, rounding, at_once, may_be_all)


def _by_distance(
    score_mod: ScoreMod, positions: Positions, form: Form, captures: Captures
) -> tuple[Form, Tensor | None]:
    """With the bias of distances, and its slopes if it is that of ALiBi, if it depends on nothing else."""
    distances = _distances(score_mod, positions, form)
    bias = bias_of_distances(distances, captures, (positions, form.depends), _zero(positions), form.of)
    if bias is None:
        return form._replace(is_of_distances=False), None
    form = form._replace(is_of_distances=True, slopes=None)
    # The kernels keep slopes in float32. They have no gradient.
    if form.depends[0] or positions.dtype == torch.float64 or has_derivative(bias):
        return form, bias
    if found := slopes_of(bias[0], positions.queries, positions.keys):
        slopes = found[0].to(positions.dtype).expand(positions.heads).contiguous()
        form = form._replace(slopes=slopes, is_signed=found[1])
    return form, bias


def _centred(bias: Tensor, positions: Positions) -> Tensor:
    """A bias of distances as `relative_bias`: the middle is the diagonal that is aligned bottom-right."""
    longest = max(positions.queries, positions.keys)
    bias = F.pad(bias, (longest - positions.keys, longest - positions.queries))  # distances that do not occur
    bias = bias.to(positions.dtype)
    return bias if bias.shape[0] > 1 else bias[0]


def _bias_of(score_mod: ScoreMod, positions: Positions, form: Form, *, prove: bool) -> Tensor:
    """The bias, of size 1 where it does not depend, with the graph to what score_mod has captured."""
    if _elements(positions, form) > MAX_BIAS:
        raise NotServed(f"score_mod needs a bias of more than {MAX_BIAS} elements")
    places, zero = _used_places(positions, form), _zero(positions)
    bias = _evaluate(score_mod, zero, places)
    if prove:
        score = _random.choice((-1, 1)) * _random.uniform(0.5, 8.0)
        with torch.no_grad():
            values = _evaluate(score_mod, zero + score, places)
            start, change = bias.detach(), form.of(score)
            error = (values - start - change).abs()
            close = error <= 1e-4 * (start.abs() + abs(change)) + 1e-30
            if not bool(torch.where(start == -torch.inf, values == -torch.inf, close).all()):
                raise NotServed(
                    "score_mod is no function that attention has: what it does to a score depends on the position, or "
                    "its bias is NaN or +inf somewhere"
                )
    return bias
