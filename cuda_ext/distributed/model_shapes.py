"""Names, shapes and dtypes of a model's parameters, from files of several kinds or from the sizes of a transformer."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"} | {name: name for name in ITEMSIZE}
# No real header comes near; the first bytes of another kind of file, read as a length, do.
_LONGEST_HEADER = 1 << 28


class ShapesError(ValueError):
    """A file that does not tell a model's shapes, and why, in one line."""


@dataclass(frozen=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def bytes(self, wire_dtype: str | None = None) -> int:
        """That travel: in ``wire_dtype``, a key of ITEMSIZE, or by default in the parameter's own dtype."""
        return self.numel * ITEMSIZE[wire_dtype or self.dtype]


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder with gated MLPs and grouped heads; ``kv``: width of all keys of a token."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    kv: int

    def parameters(self) -> list[Parameter]:
        """In order of registration, bfloat16; embedding and output are not tied."""
        found: list[tuple[str, tuple[int, ...]]] = [("embedding", (self.vocab, self.hidden))]
        for layer in range(self.layers):
            shapes: dict[str, tuple[int, ...]] = {
                "attention_norm": (self.hidden,),
                "query": (self.hidden, self.hidden),
                "key": (self.kv, self.hidden),
                "value": (self.kv, self.hidden),
                "out": (self.hidden, self.hidden),
                "mlp_norm": (self.hidden,),
                "gate": (self.ffn, self.hidden),
                "up": (self.ffn, self.hidden),
                "down": (self.hidden, self.ffn),
            }
            found += [(f"layers.{layer}.{name}", shape) for name, shape in shapes.items()]
        found += [("norm", (self.hidden,)), ("output", (self.vocab, self.hidden))]
        return [Parameter(name, shape, "bfloat16") for name, shape in found]


PRESETS = {
    "llama-8b": Transformer(layers=32, hidden=4096, ffn=14336, vocab=128256, kv=1024),
    "llama-70b": Transformer(layers=80, hidden=8192, ffn=28672, vocab=128256, kv=1024),
}


def read(path: Path) -> list[Parameter]:
    """Parameters in order of registration as far as the file tells it.

    - text: a line ``name 4096x4096 bfloat16`` each, the dtype float32 if left out, ``#`` begins a comment;
    - JSON: ``{"name": [4096, 4096]}`` or ``{"name": {"shape": [4096, 4096], "dtype": "BF16"}}``;
    - .safetensors, whose header alone is read, or the index JSON of several such files beside it. These have lost the
      order; that of names is taken, numbers in them by value.

    Raises ShapesError.
    """
    try:
        if path.suffix == ".safetensors":
            return _by_name(_described(_header(path), path))
        text = path.read_text()
        if path.suffix == ".json" or text.lstrip().startswith("{"):
            return _from_json(json.loads(text), path)
    except OSError as error:
        raise ShapesError(f"{error.filename or path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ShapesError(f"{path}: expected text, JSON or a name that ends in .safetensors, got other bytes") from None
    except json.JSONDecodeError as error:
        raise ShapesError(f"{path}: expected JSON: {error}") from None
    return _checked([_from_line(line, f"{path}, line {n}") for n, line in _lines(text)], path)


def _lines(text: str) -> list[tuple[int, str]]:
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, line) for n, line in lines if line]


def _from_line(line: str, where: str) -> Parameter:
    name, *rest = line.split()
    if len(rest) not in (1, 2) or not re.fullmatch(r"\d+(x\d+)*", rest[0]):
        raise ShapesError(f'{where}: expected "name 4096x4096" and perhaps a dtype, got "{line}"')
    return Parameter(name, tuple(map(int, rest[0].split("x"))), _dtype(rest[1] if rest[1:] else "float32", where))


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
        found.append(Parameter(name, tuple(shape), _dtype(about.get("dtype", "float32"), where)))
    return _checked(found, path)


def _header(path: Path) -> dict[str, Any]:
    """Of a .safetensors file: 8 bytes that give its length, and so much JSON."""
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


def _by_name(parameters: list[Parameter]) -> list[Parameter]:
    def key(parameter: Parameter) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", parameter.name)]

    return sorted(parameters, key=key)


def _checked(parameters: list[Parameter], path: Path) -> list[Parameter]:
    if not sum(parameter.numel for parameter in parameters):
        raise ShapesError(f"{path}: expected parameters, got none with an element")
    return parameters
