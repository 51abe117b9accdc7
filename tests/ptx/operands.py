"""Operands and modifiers of PTX instructions as C++, and the registry of translation rules by opcode.

Registers become local variables: bool, unsigned integers by width, float and double. An integer register that holds a
float, or vice versa, is bit-cast. Operand and register have the same width, as in "Operand Type Checking" of the PTX
ISA; only loads, stores and conversions accept a wider register.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .parse import SIZES, Unsupported, split_operands

# C++ expression and type of each special register.
_SPECIAL = {
    "%tid.x": ("simt::thread_index()", "u32"),
    "%ntid.x": ("simt::block_size()", "u32"),
    "%ctaid.x": ("simt::block_index(0)", "u32"),
    "%ctaid.y": ("simt::block_index(1)", "u32"),
    "%ctaid.z": ("simt::block_index(2)", "u32"),
    "%nctaid.x": ("simt::grid_size(0)", "u32"),
    "%nctaid.y": ("simt::grid_size(1)", "u32"),
    "%nctaid.z": ("simt::grid_size(2)", "u32"),
    "%cluster_ctarank": ("simt::cluster_rank()", "u32"),
    "%cluster_nctarank": ("simt::cluster_size()", "u32"),
    # Advances by one nanosecond per read, so an endless wait is reported as a deadlock before its timeout expires.
    "%globaltimer": ("thread.time()", "u64"),
}
INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
FLOATS = ("f32", "f64")


def cpp_type(ptx: str) -> str:
    if ptx == "pred":
        return "bool"
    if ptx in FLOATS:
        return {"f32": "float", "f64": "double"}[ptx]
    return f"{'' if ptx[0] == 's' else 'u'}int{8 * SIZES[ptx]}_t"


def _fits(held: str, ptx: str, wider: bool) -> bool:
    """Whether a register of type `held` is valid for an operand of type `ptx`."""
    if "pred" in (held, ptx):
        return held == ptx
    return SIZES[held] == SIZES[ptx] or (wider and SIZES[held] > SIZES[ptx])


@dataclass
class Names:
    """The names that occur in an entry."""

    registers: dict[str, str] = field(default_factory=dict)  # "%r1": "b32"
    variables: dict[str, str] = field(default_factory=dict)  # of registers that are elements of an array
    parameters: dict[str, int] = field(default_factory=dict)  # offsets
    shared: set[str] = field(default_factory=set)
    addresses: dict[str, str] = field(default_factory=dict)  # of strings and local memory, as C++ arrays
    labels: dict[str, str] = field(default_factory=dict)

    def type_of(self, register: str) -> str:
        if register not in self.registers:
            raise Unsupported(f"expected a register, got {register}")
        return self.registers[register]

    def variable(self, register: str) -> str:
        self.type_of(register)
        own = register.replace("%", "_") if register.startswith("%") else f"own_{register}"
        return self.variables.get(register, own)


class Operands:
    """The operands of one instruction, as C++."""

    def __init__(self, names: Names, operands: Sequence[str]) -> None:
        self.names = names
        self._left = list(operands)

    def next(self) -> str:
        if not self._left:
            raise Unsupported("expected one more operand")
        return self._left.pop(0)

    def more(self) -> bool:
        return bool(self._left)

    def end(self) -> None:
        if self._left:
            raise Unsupported(f"expected no more operands, got {', '.join(self._left)}")

    # Reading.

    def value(self, ptx: str, wider: bool = False) -> str:
        """The next operand as an expression of type `ptx`."""
        return self.read(self.next(), ptx, wider)

    def read(self, operand: str, ptx: str, wider: bool = False) -> str:
        """An operand as an expression of type `ptx`. With `wider`, a register may have more bits; the lowest count."""
        names, target = self.names, cpp_type(ptx)
        if operand in names.registers:
            variable, held = names.variable(operand), names.registers[operand]
            if not _fits(held, ptx, wider):
                raise Unsupported(f"expected a register of type {ptx}, got {operand} of type {held}")
            if held in FLOATS and ptx not in FLOATS:
                return f"{target}(as_bits({variable}))"
            if held not in FLOATS and ptx in FLOATS:
                return f"as_{target}({variable})"
            return variable if cpp_type(held) == target else f"{target}({variable})"
        if operand in _SPECIAL:
            expression, held = _SPECIAL[operand]
            if held != ptx:
                raise Unsupported(f"expected a register of type {ptx}, got {operand} of type {held}")
            return f"{target}({expression})"
        if operand in names.shared:
            return f"{target}(thread.shared)"
        if operand in names.addresses:
            return f"{target}(reinterpret_cast<uint64_t>({names.addresses[operand]}))"
        if operand in names.parameters:
            return f"{target}(thread.parameter({names.parameters[operand]}))"
        return self._constant(operand, ptx)

    def _constant(self, text: str, ptx: str) -> str:
        if match := re.fullmatch(r"0([fd])([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            code, bits = (">f", 4) if match[1] == "f" else (">d", 8)
            if ptx not in FLOATS and bits == SIZES[ptx]:
                return f"{cpp_type(ptx)}(0x{match[2]}ull)"
            if ptx != f"f{8 * bits}":
                raise Unsupported(f"expected a number of type {ptx}, got {text}")
            number: float = struct.unpack(code, bytes.fromhex(match[2]))[0]
            if number - number != 0 or (number == 0 and match[2][0] != "0"):  # no literal has these bits
                return f"as_{cpp_type(ptx)}({cpp_type(f'b{8 * bits}')}(0x{match[2]}ull))"
            return number.hex() + ("f" if bits == 4 else "")
        if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)", text) and ptx not in FLOATS:
            number = int(text, 0)
            if ptx == "pred":
                return "true" if number else "false"
            return f"{cpp_type(ptx)}(0x{number & (1 << 8 * SIZES[ptx]) - 1:x}ull)"
        raise Unsupported(f"expected a register or a number of type {ptx}, got {text}")

    def number(self) -> int:
        """The next operand, which must be a constant."""
        text = self.next()
        if not re.fullmatch(r"\d+", text):
            raise Unsupported(f"expected a constant, got {text}")
        return int(text)

    def braced(self) -> tuple[str, ...]:
        """The names in braces of the next operand."""
        text = self.next()
        if not (text.startswith("{") and text.endswith("}")):
            raise Unsupported(f"expected operands in braces, got {text}")
        return split_operands(text[1:-1])

    def values(self, ptx: str, count: int) -> list[str]:
        elements = self.braced()
        if len(elements) != count:
            raise Unsupported(f"expected {count} operands in braces, got {len(elements)}")
        return [self.read(each, ptx) for each in elements]

    def address(self, ptx: str = "u32") -> str:
        """The next operand, an address in brackets."""
        text = self.next()
        if not (text.startswith("[") and text.endswith("]")):
            raise Unsupported(f"expected an address in brackets, got {text}")
        return self.sum(text[1:-1], ptx)

    def call_parameter(self, ptx: str) -> str | None:
        """The variable of the next operand, "[param0+0]", if it is a parameter or result of a call."""
        match = re.fullmatch(r"\[([a-z]\w*)\+0\]", self._left[0]) if self._left else None
        if match is None or match[1] not in self.names.registers:
            return None
        self.next()
        if SIZES[self.names.type_of(match[1])] != SIZES[ptx]:
            raise Unsupported(f"expected a parameter of type {ptx}, got {match[1]}")
        return self.names.variable(match[1])

    def sum(self, text: str, ptx: str) -> str:
        base, _, offset = text.partition("+")
        expression = self.read(base.strip(), ptx, wider=True)
        return f"{expression} + {cpp_type(ptx)}({int(offset)})" if offset else expression

    # Writing.

    def assign(self, operand: str, ptx: str, expression: str, wider: bool = False) -> str:
        """A statement that writes a value of type `ptx` to a register. With `wider`, the register may have more bits,
        to which the value is extended."""
        held = self.names.type_of(operand)
        if not _fits(held, ptx, wider):
            raise Unsupported(f"expected a register for a value of type {ptx}, got {operand} of type {held}")
        if held in FLOATS and ptx not in FLOATS:
            expression = f"as_{cpp_type(held)}({expression})"
        elif held not in FLOATS and ptx in FLOATS:
            expression = f"as_bits({expression})"
        elif held != "pred" and cpp_type(held) != cpp_type(ptx):
            expression = f"{cpp_type(ptx)}({expression})"  # sign extension starts from this width
        return f"{self.names.variable(operand)} = {expression};"


class Modifiers:
    """The modifiers of an opcode, consumed from left to right."""

    def __init__(self, words: Sequence[str]) -> None:
        self._left = list(words)

    def may(self, *words: str) -> str | None:
        """Consumes and returns the next modifier if it is one of `words`."""
        return self._left.pop(0) if self._left and self._left[0] in words else None

    def must(self, *words: str) -> str:
        if (word := self.may(*words)) is None:
            got = f".{self._left[0]}" if self._left else "none"
            raise Unsupported(f"expected the modifier .{' or .'.join(words)}, got {got}")
        return word

    def all(self, *words: str) -> None:
        for word in words:
            self.must(word)

    def end(self) -> None:
        if self._left:
            raise Unsupported(f"unknown modifier .{self._left[0]}")

    def match(self, pattern: str) -> re.Match[str]:
        """Consumes the next modifier, which must match `pattern`."""
        if not self._left or (found := re.fullmatch(pattern, self._left[0])) is None:
            raise Unsupported(f"expected a modifier like {pattern}, got {self._left[:1]}")
        self._left.pop(0)
        return found


# A rule translates an instruction to C++, given its modifiers, its operands and an expression for its location.
Rule = Callable[[Modifiers, Operands, str], str | list[str]]
rules: dict[str, Rule] = {}


def opcode(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for opcodes with this first word."""

    def add(rule: Rule) -> Rule:
        for name in names:
            assert name not in rules
            rules[name] = rule
        return rule

    return add
