"""Says how a result differs from the exact one, and where: what is needed to find the fault without another run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SPANS = 6  # spans of indices that are listed
MAP = 16  # rows and columns of a map of tiles, at most
LINES = 4096  # of a matrix, among which lines at the wrong place are looked for
DOUBTFUL = 0.25  # errors of this part of what is allowed are larger than rounding
PERIODS = (2, 4, 8, 16, 32, 64, 128)


def compare(what: str, actual: Tensor, exact: Tensor, tolerance: float) -> tuple[str, float]:
    """What is wrong, empty if nothing, and the largest error. Both errors and `tolerance` are relative to the largest
    element. Infinities must be equal; a NaN equals nothing."""
    actual, exact = actual.detach().double(), exact.detach().to(actual.dtype).double()
    if actual.shape != exact.shape:
        return f"{what}: expected shape {tuple(exact.shape)}, got {tuple(actual.shape)}", math.inf
    if actual.numel() == 0:
        return "", 0.0
    finite = exact.isfinite()
    largest = float(exact.abs().where(finite, 0.0).max())
    error = (actual - exact).abs().where(finite, torch.where(actual == exact, 0.0, math.inf))
    error = error.nan_to_num(nan=math.inf, posinf=math.inf)
    worst = float(error.max())
    relative = worst / largest if largest else worst
    wrong = ~(error <= tolerance * largest)
    count = int(wrong.sum())
    if not count:
        return "", relative
    first = tuple(int(i) for i in wrong.nonzero()[0])
    parts = [
        f"{what}: {count} of {wrong.numel()} elements are wrong by more than {tolerance * largest:.2g}, the first at "
        f"{first}: expected {float(exact[first]):.6g}, got {float(actual[first]):.6g}",
        _largest_error(actual, exact, error, tolerance * largest),
        *_values(actual, exact, wrong),
        # Also where errors are small by chance, or patterns would have holes.
        *_places(error > DOUBTFUL * tolerance * largest),
        *_moved_lines(actual, exact, wrong),
    ]
    return "; ".join(part for part in parts if part), relative


def _largest_error(actual: Tensor, exact: Tensor, error: Tensor, allowed: float) -> str:
    value, place = error.where(error.isfinite(), -1.0).flatten().max(0)
    if float(value) <= allowed:  # the others are infinite
        return ""
    at = tuple(int(i) for i in torch.unravel_index(place, error.shape))
    return f"largest error {float(value):.3g} at {at}: expected {float(exact[at]):.6g}, got {float(actual[at]):.6g}"


def _values(actual: Tensor, exact: Tensor, wrong: Tensor) -> list[str]:
    """What the wrong elements have in common."""
    got, wanted = actual[wrong], exact[wrong]
    found = []
    for name, count in (
        ("NaN", int(got.isnan().sum())),
        ("infinite", int(got.isinf().sum())),
        ("zero", int((got == 0).sum())),
    ):
        if count:
            found.append(f"{'all' if count == len(got) else count} {name}")
    clear = got.isfinite() & (wanted.abs() > 0.5 * wanted[wanted.isfinite()].abs().mean()) & (got != 0)
    if int(clear.sum()) >= 8:
        ratios = (got[clear] / wanted[clear]).sort().values
        low, middle, high = (float(ratios[int(q * (len(ratios) - 1))]) for q in (0.1, 0.5, 0.9))
        if high - low < 0.03 * abs(middle):
            found.append(f"got {middle:.4g} times what was expected")
    return found


def _places(wrong: Tensor) -> list[str]:
    """Which indices of each dim are concerned, and maps of the last two dims, (sequence, head dim) of attention."""
    found, box = [], 1
    for dim, size in enumerate(wrong.shape):
        if size == 1:
            continue
        others = [d for d in range(wrong.dim()) if d != dim]
        indices = (wrong.any(others) if others else wrong).nonzero().flatten().tolist()
        box *= len(indices)
        found.append(f"dim {dim}: {'all' if len(indices) == size else indices_in_words(indices, size) + ' of'} {size}")
    if not found:
        return []
    share, text = int(wrong.sum()) / box, f"in {', '.join(found)}"
    matrix = _matrices(wrong)
    if share == 1.0:
        return [f"{text}, all of these"]
    found = [f"{text}, {max(0.1, 100 * share):.1f} % of these"]
    tile = [max(bound, 8 * math.ceil(size / MAP / 8)) for bound, size in zip((64, 64), matrix.shape[1:])]
    found.append(_map(matrix, tile[0], tile[1]))
    if min(matrix.shape[1:]) >= 8:
        folded = torch.stack([_folded(each) for each in matrix]).any(0)
        if not bool(folded.all()):
            found.append(f"places within 8 x 8: {_drawn(2 * folded)}")
    return found


def _matrices(tensor: Tensor) -> Tensor:
    """(n, rows, columns); of attention's (B, S, H, D) a matrix is (S, D)."""
    if tensor.dim() == 4:
        tensor = tensor.transpose(1, 2)
    while tensor.dim() < 2:
        tensor = tensor[None]
    return tensor.reshape(-1, *tensor.shape[-2:])


def _folded(wrong: Tensor) -> Tensor:
    rows, columns = (math.ceil(size / 8) for size in wrong.shape)
    padded = wrong.new_zeros(8 * rows, 8 * columns)
    padded[: wrong.shape[0], : wrong.shape[1]] = wrong
    return padded.view(rows, 8, columns, 8).any(2).any(0)


def _map(matrices: Tensor, tile_rows: int, tile_columns: int) -> str:
    """Of each tile, whether nothing, something or everything is wrong in any of the matrices."""
    wrong = matrices.any(0)
    tiles = [
        [int(tile.any()) + int(tile.all()) for tile in band.split(tile_columns, 1)] for band in wrong.split(tile_rows)
    ]
    if len(tiles) * len(tiles[0]) == 1:
        return ""
    return f"tiles of {tile_rows} x {tile_columns}: {_drawn(torch.tensor(tiles))}"


def _drawn(levels: Tensor) -> str:
    """ "X.x/..." for two rows: X wholly wrong, x in part."""
    return "/".join("".join(".xX"[level] for level in row) for row in levels.tolist())


def indices_in_words(indices: list[int], size: int) -> str:
    """ "0-7, 64-71", or "4-7 mod 8" where that is all of them."""
    if not indices:
        return "none"
    spans = _spans(indices)
    if len(spans) > 2:
        for period in PERIODS:
            residues = sorted({index % period for index in indices})
            if (
                2 * period <= size
                and len(residues) < period
                and len(indices) == sum(1 for i in range(size) if i % period in set(residues))
            ):
                return f"{', '.join(_spans(residues)[:SPANS])} mod {period}"
    more = f" and {len(spans) - SPANS} more spans" if len(spans) > SPANS else ""
    return ", ".join(spans[:SPANS]) + more


def _spans(indices: list[int]) -> list[str]:
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(begin) if begin == end else f"{begin}-{end}" for begin, end in spans]


def _moved_lines(actual: Tensor, exact: Tensor, wrong: Tensor) -> list[str]:
    """Whether wrong rows or columns of the first wrong matrix are right ones of another place."""
    wrongs = _matrices(wrong)
    at = int(wrongs.flatten(1).any(1).nonzero()[0])
    got, wanted, bad = _matrices(actual)[at], _matrices(exact)[at], wrongs[at]
    found = []
    for name in ("rows", "columns"):
        places = bad.any(1).nonzero().flatten()[:LINES]
        if got.shape[1] >= 8 and 2 <= got.shape[0] <= LINES:
            distances = torch.cdist(got[places].nan_to_num(1e30, 1e30, -1e30), wanted.nan_to_num())
            least, sources = distances.min(1)
            moved = (least < 0.1 * wanted.nan_to_num().norm(dim=1)[sources]) & (sources != places)
            if bool(moved.any()):
                pairs = list(zip(places[moved].tolist(), sources[moved].tolist()))
                shifts = {place - source for place, source in pairs}
                some = ", ".join(f"{place} from {source}" for place, source in pairs[:4])
                all_by = f", all by {shifts.pop():+d}" if len(shifts) == 1 else ""
                found.append(f"{len(pairs)} {name} are those of other places: {some}{all_by}")
        got, wanted, bad = got.t(), wanted.t(), bad.t()
    return found
