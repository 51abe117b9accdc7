"""Parses PTX text to modules, entries and instructions. Syntax that nvcc does not use for this project is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath


class Unsupported(Exception):
    """PTX that cannot be translated."""


@dataclass(frozen=True, slots=True)
class Instruction:
    line: int  # in the PTX file
    place: str  # in the CUDA source, "gemm_sm80.cuh:120"; empty if nvcc gives none
    wrapper: str  # line of csrc/arch that contains it, "memory.cuh:65"; empty if none
    predicate: str  # "", "%p1" or "!%p1"
    opcode: str  # "ld.global.v4.u32"
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Registers:
    type: str  # "b32"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """The begin or end of a block; asm strings use blocks to declare local registers."""

    opens: bool


@dataclass(frozen=True, slots=True)
class Local:
    """Memory of one thread: the arguments of vprintf."""

    name: str
    size: int
    alignment: int


Statement = Instruction | Label | Registers | Scope | Local


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    size: int
    offset: int


@dataclass
class Entry:
    name: str
    parameters: list[Parameter]
    max_threads: int = 1024  # per block
    min_blocks: int = 0  # per SM
    body: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    name: str  # of the file
    target: str  # "sm_80"
    shared: set[str] = field(default_factory=set)  # names of the block's dynamic shared memory
    strings: dict[str, bytes] = field(default_factory=dict)  # formats of vprintf
    entries: list[Entry] = field(default_factory=list)


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
SIZES |= {name + str(8 * size): size for size in (4, 8) for name in "busf"}

# Frames in these folders wrap instructions and intrinsics; messages name their caller.
_WRAPPERS = ("/csrc/arch/", "/include/")

_LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?$")
_FILE = re.compile(r'\.file\s+(\d+) "([^"]*)"')
_ENTRY = re.compile(r"\.entry (\w+)\((.*)\)(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?$")
_STRING = re.compile(r"\.global \.align 1 \.b8 ([\w$]+)\[\d+\] = \{([\d, ]+)\}$")
_LOCAL = re.compile(r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]$")
_PRINT = ".extern .func  (.param .b32 func_retval0) vprintf"
_SHARED = re.compile(r"\.extern \.shared \.align (\d+) \.b8 (\w+)\[\]$")
# Alignment of a block's shared memory on the emulator. A device guarantees it only if the kernel declares it.
_SHARED_ALIGNMENT = 1024
_INSTRUCTION = re.compile(r"(?:@(!?[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):\s*")


def parse(text: str, name: str) -> Module:
    """Parses `text`; `name` is the file name for messages."""
    return _Parser(text, name).module()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        lines = [line.strip() for line in text.splitlines()]
        self._lines = [line if line.startswith(".file") else line.partition("//")[0].strip() for line in lines]
        self._name = name
        self._files = {int(match[1]): match[2] for line in self._lines if (match := _FILE.match(line))}
        self._callers: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._place, self._wrapper = "", ""

    def _refuse(self, line: int, what: str) -> Unsupported:
        return Unsupported(f"{self._name}:{line}: {what}")

    def module(self) -> Module:
        module = Module(self._name, "")
        at = 0
        while at < len(self._lines):
            line = self._lines[at]
            if line.startswith(".section"):  # debug information, up to its closing brace
                while not self._lines[at].endswith("}"):
                    at += 1
            elif line.startswith(".target"):
                module.target = line.split()[1].rstrip(",")
            elif ".entry " in line:
                at = self._entry(module, at)
            elif match := _SHARED.match(line.rstrip(";")):
                if int(match[1]) < _SHARED_ALIGNMENT:
                    raise self._refuse(at + 1, f"expected shared memory aligned to {_SHARED_ALIGNMENT}, got {line!r}")
                module.shared.add(match[2])
            elif match := _STRING.match(line.rstrip(";")):
                module.strings[match[1]] = bytes(map(int, match[2].split(",")))
            elif line == _PRINT:
                while self._lines[at] != ";":
                    at += 1
            elif line and not line.startswith((".version", ".address_size", ".file")):
                raise self._refuse(at + 1, f"expected an entry or dynamic shared memory, got {line!r}")
            at += 1
        return module

    def _entry(self, module: Module, at: int) -> int:
        """Parses the entry that begins at line index `at`; returns the index of its last line."""
        first, head = at, []
        while self._lines[at] != "{":
            head.append(self._lines[at])
            at += 1
        match = _ENTRY.search("\n".join(head))
        assert match is not None, head
        entry = Entry(match[1], self._parameters(match[2], first + 1))
        for directive in filter(None, match[3].splitlines()):
            key, _, numbers = directive.partition(" ")
            values = [int(number) for number in numbers.split(",")]
            if key == ".maxntid" and values[1:] == [1, 1]:
                entry.max_threads = values[0]
            elif key == ".minnctapersm":
                entry.min_blocks = values[0]
            else:
                raise self._refuse(first + 1, f"cannot enforce {directive!r} of {entry.name}")
        depth, at, begin = 1, at + 1, at + 1
        pending = ""
        self._place, self._wrapper = "", ""
        while depth > 0:
            line = self._lines[at]
            if re.match(r"\.loc\s", line):
                self._note_place(line, at + 1)
                line = ""
            begin = begin if pending else at
            pending = f"{pending} {line}".strip()
            statements, pending = _split(pending)
            for text in statements:
                depth += {"{": 1, "}": -1}.get(text, 0)
                if depth > 0:
                    entry.body.extend(self._statements(text, begin + 1))
                begin = at
            at += 1
        module.entries.append(entry)
        return at - 1

    def _parameters(self, text: str, line: int) -> list[Parameter]:
        parameters, end = [], 0
        for each in filter(None, (each.strip() for each in text.split(","))):
            match = _PARAMETER.match(each)
            if match is None:
                raise self._refuse(line, f"expected a parameter, got {each!r}")
            size = SIZES[match[2]]
            alignment = int(match[1] or size)
            offset = -(-end // alignment) * alignment
            parameters.append(Parameter(match[3], size * int(match[4] or 1), offset))
            end = offset + parameters[-1].size
        return parameters

    def _statements(self, text: str, line: int) -> Iterator[Statement]:
        while match := _LABEL.match(text):
            yield Label(match[1])
            text = text[match.end() :]
        if not text or text.startswith(".pragma"):
            return
        if text in ("{", "}"):
            yield Scope(text == "{")
        elif text.startswith(".reg"):
            kind, names = text.split(None, 2)[1:]
            yield Registers(kind.lstrip("."), tuple(_expand(names)))
        elif text.startswith(".param"):  # of a call
            kind, name = text.split()[1:]
            yield Registers(kind.lstrip("."), (name,))
        elif match := _LOCAL.match(text):
            yield Local(match[2], int(match[3]), int(match[1]))
        elif text.startswith("."):
            raise self._refuse(line, f"expected an instruction or registers, got {text!r}")
        else:
            match = _INSTRUCTION.fullmatch(text)
            if match is None:
                raise self._refuse(line, f"expected an instruction, got {text!r}")
            yield Instruction(line, self._place, self._wrapper, match[1] or "", match[2], split_operands(match[3]))

    def _note_place(self, text: str, line: int) -> None:
        match = _LOC.match(text)
        if match is None:
            raise self._refuse(line, f"expected a source line, got {text!r}")
        frame: tuple[str, ...] = match.groups()[:3]
        if match[4]:
            self._callers[frame] = match.groups()[3:]
        else:
            self._callers.pop(frame, None)
        frames = [frame]
        while (caller := self._callers.get(frames[-1])) is not None and caller not in frames:
            frames.append(caller)
        # The innermost frame outside the wrappers, or the outermost frame.
        own = next((each for each in frames if not any(part in self._path(each) for part in _WRAPPERS)), frames[-1])
        self._place = self._describe(own)
        self._wrapper = next((self._describe(each) for each in frames if _WRAPPERS[0] in self._path(each)), "")

    def _path(self, frame: tuple[str, ...]) -> str:
        return self._files.get(int(frame[0]), "")

    def _describe(self, frame: tuple[str, ...]) -> str:
        """ "gemm_sm80.cuh:120"."""
        return "" if frame[1] == "0" else f"{PurePosixPath(self._path(frame)).name}:{frame[1]}"


def _split(text: str) -> tuple[list[str], str]:
    """Complete statements without semicolons, and the remaining text."""
    statements = []
    while text:
        labels = ""
        while match := _LABEL.match(text):
            labels += match[0]
            text = text[match.end() :]
        if text[:1] in ("{", "}"):
            statements += [*filter(None, [labels]), text[0]]
            text = text[1:].lstrip()
            continue
        whole, semicolon, rest = text.partition(";")
        if not semicolon:
            if labels and not text:
                statements.append(labels)
                labels = ""
            return statements, labels + text
        statements.append(labels + whole.strip())
        text = rest.lstrip()
    return statements, ""


def _expand(names: str) -> Iterator[str]:
    """Expands %r<3> to %r0, %r1, %r2."""
    for name in (name.strip() for name in names.split(",")):
        if match := re.fullmatch(r"(%\w+)<(\d+)>", name):
            yield from (f"{match[1]}{i}" for i in range(int(match[2])))
        else:
            yield name


_OPERAND = re.compile(r"(?:\[[^]]*\]|\{[^}]*\}|[^,\[{])+")


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at the commas outside brackets and braces."""
    return tuple(part for each in _OPERAND.findall(text) if (part := each.strip()))
