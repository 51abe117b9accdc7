"""Names, shapes and dtypes of a model's parameters, from files in several formats."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"} | {name: name for name in ITEMSIZE}
# Real headers are far smaller; the first bytes of other file formats, read as a length, are not.
_LONGEST_HEADER = 1 << 28
# Names in Transformers and torchtune; those of the second pattern are never tied to the output.
_EMBEDDING = re.compile(r"(?:^|\.)(?:wte|wpe|embed(?:_in|_tokens|_positions)?|(?:\w+_)?embeddings?)(?:\.weight)?$")
_OF_PLACES = re.compile(r"(?:wpe|position\w*|token_type\w*|segment\w*)(?:\.weight)?$")


class ShapesError(ValueError):
    """A file or option from which a model's shapes cannot be read; the message is one line."""


@dataclass(frozen=True)
class Parameter:
    """A parameter and how backward uses it.

    uses: multiplications per token and element: 1 for a layer's weight, a quarter for one of 8 experts of which a token
        uses 2, the number of positions for a convolution if an image counts as a token.
    looked_up: whether it is an embedding, whose gradient is complete only when backward ends. A lookup has no
        multiplications, ``uses=0``; an embedding that is tied to the output has ``uses=1``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    uses: float = 1.0
    looked_up: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def bytes(self, wire_dtype: str | None = None) -> int:
        """The bytes to send, in ``wire_dtype``, a key of ITEMSIZE; default the parameter's own dtype."""
        return self.numel * ITEMSIZE[wire_dtype or self.dtype]


def save(module: nn.Module, path: str | Path) -> None:
    """Writes the trained parameters of ``module`` as JSON for `read`, with the information which are embeddings.

    module: on any device, also the meta device, where parameters take no memory.
    """
    from torch import nn

    def parameters_of(embeddings: bool) -> set[nn.Parameter]:
        of_kind = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) == embeddings)
        return {p for member in of_kind for p in member.parameters(recurse=False)}

    looked_up, others = parameters_of(embeddings=True), parameters_of(embeddings=False)
    described = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            lookup = parameter in looked_up
            uses = int(parameter in others or not lookup)
            about = {"shape": list(parameter.shape), "dtype": str(parameter.dtype), "uses": uses, "lookup": lookup}
            described[name] = about
    Path(path).write_text(json.dumps(described, indent=0) + "\n")


def read(path: Path) -> list[Parameter]:
    """Reads parameters, in order of registration if the file has it.

    - text: a line ``name 4096x4096 bfloat16`` each; the dtype defaults to float32, may be followed by ``lookup`` and
      ``uses=0.25``, and ``#`` begins a comment;
    - JSON: ``{"name": [4096, 4096]}`` or ``{"name": {"shape": [4096, 4096], "dtype": "BF16"}}``, optionally with
      "lookup" and "uses";
    - .safetensors, of which only the header is read, or the index JSON of several such files next to it. They do not
      have the order; parameters are sorted by name, with numbers by value.

    For ``uses`` and ``lookup`` see `Parameter`; embeddings have ``uses=0`` by default. If a file marks no embeddings,
    they are recognised by name (see `guess_lookups`).

    Raises ShapesError.
    """
    try:
        if path.suffix == ".safetensors":
            return guess_lookups(_by_name(_described(_header(path), path)))
        text = path.read_text()
        if path.suffix == ".json" or text.lstrip().startswith("{"):
            content = json.loads(text)
            found = _from_json(content, path)
            return found if _marks_lookups(content) else guess_lookups(found)
    except OSError as error:
        raise ShapesError(f"{error.filename or path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ShapesError(f"{path}: expected text, JSON or a name that ends in .safetensors, got other bytes") from None
    except json.JSONDecodeError as error:
        raise ShapesError(f"{path}: expected JSON: {error}") from None
    found = _checked([_from_line(line, f"{path}, line {n}") for n, line in _lines(text)], path)
    return found if any(parameter.looked_up for parameter in found) else guess_lookups(found)


def guess_lookups(parameters: list[Parameter]) -> list[Parameter]:
    """``parameters`` with embeddings marked that have a usual name.

    A token embedding is assumed to be tied to the output if no other parameter has its shape.
    """

    def guess(parameter: Parameter) -> Parameter:
        if len(parameter.shape) != 2 or not _EMBEDDING.search(parameter.name):
            return parameter
        alone = all(other is parameter or other.shape != parameter.shape for other in parameters)
        tied = alone and not _OF_PLACES.search(parameter.name)
        return replace(parameter, uses=float(tied), looked_up=True)

    return [guess(parameter) for parameter in parameters]


def _marks_lookups(content: Mapping[str, Any]) -> bool:
    return any(isinstance(value, dict) and "lookup" in value for value in content.values())


def _lines(text: str) -> list[tuple[int, str]]:
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line]


def _from_line(line: str, where: str) -> Parameter:
    name, *rest = line.split()
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?: (?!lookup|uses=)(\S+))?(?: (lookup))?(?: uses=(\S+))?", " ".join(rest))
    if match is None:
        raise ShapesError(
            f'{where}: expected "name 4096x4096" and perhaps a dtype, lookup and uses=0.25, in this order, got "{line}"'
        )
    shape, dtype, lookup, uses = match.groups()
    shape = tuple(map(int, shape.split("x")))
    return Parameter(name, shape, _dtype(dtype or "float32", where), *_uses(uses, lookup is not None, where))


def _from_json(content: Any, path: Path) -> list[Parameter]:
    if isinstance(content, dict) and isinstance(content.get("weight_map"), dict):
        files = sorted({path.parent / str(name) for name in content["weight_map"].values()})
        return _by_name([parameter for file in files for parameter in _described(_header(file), file)])
    if not isinstance(content, dict):
        raise ShapesError(f"{path}: expected a JSON object of names, got {type(content).__name__}")
    return _described(content, path)


def _described(content: Mapping[str, Any], path: Path) -> list[Parameter]:
    found = []
    for name, value in content.items():
        if name == "__metadata__":
            continue
        where = f"{path}, {name}"
        about = value if isinstance(value, dict) else {"shape": value}
        shape = about.get("shape")
        if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
            raise ShapesError(f"{where}: expected a shape such as [4096, 4096], got {json.dumps(value)[:80]}")
        uses = _uses(about.get("uses"), about.get("lookup") is True, where)
        found.append(Parameter(name, tuple(shape), _dtype(about.get("dtype", "float32"), where), *uses))
    return _checked(found, path)


def _header(path: Path) -> dict[str, Any]:
    """The header of a .safetensors file: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        length = file.read(8)
        count = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        text = file.read(count) if 2 <= count <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ShapesError(f"{path}: expected a safetensors file, got one without its header")
    return header


def _dtype(name: Any, where: str) -> str:
    known = _DTYPES.get(str(name).removeprefix("torch."))
    if known is None:
        raise ShapesError(f"{where}: expected a dtype of {', '.join(ITEMSIZE)}, got {name}")
    return known


def _uses(given: Any, looked_up: bool, where: str) -> tuple[float, bool]:
    try:
        uses = float(given) if given is not None else float(not looked_up)
    except (TypeError, ValueError):
        uses = math.nan
    if not 0 <= uses < math.inf:
        raise ShapesError(f"{where}: expected uses of 0 or more, got {given}")
    return uses, looked_up


def _by_name(parameters: list[Parameter]) -> list[Parameter]:
    def key(parameter: Parameter) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", parameter.name)]

    return sorted(parameters, key=key)


def _checked(parameters: list[Parameter], path: Path) -> list[Parameter]:
    if not sum(parameter.numel for parameter in parameters):
        raise ShapesError(f"{path}: expected parameters, got none with an element")
    return parameters


def work_per_token(parameters: Iterable[Parameter]) -> float:
    """Multiplications by these parameters in forward, per token."""
    return sum(parameter.numel * parameter.uses for parameter in parameters)


def arrivals(parameters: Sequence[Parameter]) -> list[tuple[Parameter, float]]:
    """Parameters in order of arrival, each with the fraction of backward, 0 to 1, after which its gradient is ready.

    Gradients arrive in the reverse order of registration, each after its share of the work; the work of an embedding
    that is tied to the output comes first, but its gradient is ready when its lookup's is. Without any multiplications,
    all gradients arrive at the end.
    """
    total = work_per_token(parameters)
    done = work_per_token(parameter for parameter in parameters if parameter.looked_up)
    found = []
    for parameter in reversed(parameters):
        if not parameter.looked_up:
            done += work_per_token([parameter])
        found.append((parameter, done / total if total else 1.0))
    return found
