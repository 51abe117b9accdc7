"""One PTX instruction to C++. An opcode, a modifier or an operand that is not known here is refused: what nvcc means by
it has to be looked up in the PTX ISA and written down, not guessed.

The C++ calls the emulator (csrc/simt/api.h) for everything that the emulator acts out or counts, operations.h for
arithmetic that C++ has no operator for, and is plain C++ else. Registers are local variables: bool, unsigned integers
by width, float and double; an integer register that holds a float, or the other way round, is read through its bits.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .parse import SIZES, Instruction, Unsupported, split_operands

_SPECIAL = {
    "%tid.x": "simt::thread_index()",
    "%ntid.x": "simt::block_size()",
    "%ctaid.x": "simt::block_index(0)",
    "%ctaid.y": "simt::block_index(1)",
    "%ctaid.z": "simt::block_index(2)",
    "%nctaid.x": "simt::grid_size(0)",
    "%nctaid.y": "simt::grid_size(1)",
    "%nctaid.z": "simt::grid_size(2)",
    "%cluster_ctarank": "simt::cluster_rank()",
    "%cluster_nctarank": "simt::cluster_size()",
    "%globaltimer": "thread.time()",  # a nanosecond later at each look: a wait that nobody ends is a deadlock sooner
}
_INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
_BITS = ("b16", "b32", "b64")
_FLOATS = ("f32", "f64")
_VECTORS = {None: 1, "v2": 2, "v4": 4}


def cpp_type(ptx: str) -> str:
    if ptx == "pred":
        return "bool"
    if ptx in _FLOATS:
        return {"f32": "float", "f64": "double"}[ptx]
    return f"{'' if ptx[0] == 's' else 'u'}int{8 * SIZES[ptx]}_t"


@dataclass
class Names:
    """What the names of an entry stand for."""

    registers: dict[str, str] = field(default_factory=dict)  # "%r1": "b32"
    variables: dict[str, str] = field(default_factory=dict)  # of registers that have no variable of their own
    parameters: dict[str, int] = field(default_factory=dict)  # offsets
    shared: set[str] = field(default_factory=set)
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

    def value(self, ptx: str) -> str:
        """The next operand as an expression of type `ptx`."""
        return self.read(self.next(), ptx)

    def read(self, operand: str, ptx: str) -> str:
        names, target = self.names, cpp_type(ptx)
        if operand in names.registers:
            variable, held = names.variable(operand), names.registers[operand]
            if (held == "pred") != (ptx == "pred"):
                raise Unsupported(f"expected a register of type {ptx}, got {operand} of type {held}")
            if held in _FLOATS and ptx not in _FLOATS:
                return f"{target}(as_bits({variable}))"
            if held not in _FLOATS and ptx in _FLOATS:
                return f"as_{target}({variable})"
            return variable if cpp_type(held) == target else f"{target}({variable})"
        if operand in _SPECIAL:
            return f"{target}({_SPECIAL[operand]})"
        if operand in names.shared:
            return f"{target}(thread.shared)"
        if operand in names.parameters:
            return f"{target}(thread.parameter({names.parameters[operand]}))"
        return self._constant(operand, ptx)

    def _constant(self, text: str, ptx: str) -> str:
        if match := re.fullmatch(r"0([fd])([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            code, bits = (">f", 4) if match[1] == "f" else (">d", 8)
            if ptx not in _FLOATS and bits == SIZES[ptx]:
                return f"{cpp_type(ptx)}(0x{match[2]}ull)"
            if ptx != f"f{8 * bits}":
                raise Unsupported(f"expected a number of type {ptx}, got {text}")
            number: float = struct.unpack(code, bytes.fromhex(match[2]))[0]
            if number - number != 0 or (number == 0 and match[2][0] != "0"):  # no literal has these bits
                return f"as_{cpp_type(ptx)}({cpp_type(f'b{8 * bits}')}(0x{match[2]}ull))"
            return number.hex() + ("f" if bits == 4 else "")
        if re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)", text) and ptx not in _FLOATS:
            number = int(text, 0)
            if ptx == "pred":
                return "true" if number else "false"
            return f"{cpp_type(ptx)}(0x{number & (1 << 8 * SIZES[ptx]) - 1:x}ull)"
        raise Unsupported(f"expected a register or a number of type {ptx}, got {text}")

    def number(self) -> int:
        """The next operand, which has to be a constant."""
        text = self.next()
        if not re.fullmatch(r"\d+", text):
            raise Unsupported(f"expected a constant, got {text}")
        return int(text)

    def braced(self) -> tuple[str, ...]:
        """The names in braces that come next."""
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

    def sum(self, text: str, ptx: str) -> str:
        base, _, offset = text.partition("+")
        expression = self.read(base.strip(), ptx)
        return f"{expression} + {cpp_type(ptx)}({int(offset)})" if offset else expression

    # Writing.

    def assign(self, operand: str, ptx: str, expression: str) -> str:
        """A statement that writes a value of type `ptx` to a register, which is extended to its width."""
        held = self.names.type_of(operand)
        if (held == "pred") != (ptx == "pred") or SIZES.get(held, 0) < SIZES.get(ptx, 0):
            raise Unsupported(f"expected a register for a value of type {ptx}, got {operand} of type {held}")
        if held in _FLOATS and ptx not in _FLOATS:
            expression = f"as_{cpp_type(held)}({expression})"
        elif held not in _FLOATS and ptx in _FLOATS:
            expression = f"as_bits({expression})"
        elif held != "pred" and cpp_type(held) != cpp_type(ptx):
            expression = f"{cpp_type(ptx)}({expression})"  # the sign is extended from here
        return f"{self.names.variable(operand)} = {expression};"


class Modifiers:
    """What follows the first word of an opcode, taken from left to right."""

    def __init__(self, words: Sequence[str]) -> None:
        self._left = list(words)

    def may(self, *words: str) -> str | None:
        """The next word, if it is one of these."""
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
        """The next word, which has to fit `pattern`."""
        if not self._left or (found := re.fullmatch(pattern, self._left[0])) is None:
            raise Unsupported(f"expected a modifier like {pattern}, got {self._left[:1]}")
        self._left.pop(0)
        return found


Handler = Callable[[Modifiers, Operands, str], str | list[str]]
_handlers: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        for name in names:
            _handlers[name] = handler
        return handler

    return add


def translate(instruction: Instruction, names: Names, site: str) -> str:
    """C++ for one instruction; `site` is an expression for where it stands. Raises Unsupported."""
    first, *rest = instruction.opcode.split(".")
    modifiers, operands = Modifiers(rest), Operands(names, instruction.operands)
    try:
        if first not in _handlers:
            raise Unsupported("unknown opcode")
        code = _handlers[first](modifiers, operands, site)
        modifiers.end()
        operands.end()
        text = code if isinstance(code, str) else " ".join(code)
        if instruction.predicate:
            condition = operands.read(instruction.predicate.lstrip("!"), "pred")
            text = f"if ({'!' * instruction.predicate.startswith('!')}{condition}) {{ {text} }}"
    except Unsupported as error:
        line = f"{instruction.opcode} {', '.join(instruction.operands)}"
        raise Unsupported(f"line {instruction.line}, {line}: {error}") from None
    return text


# Arithmetic.


def _plain(expression: str, types: Sequence[str], rounding: Sequence[str] = ()) -> Handler:
    """d = expression of {a}, {b}, ... of one type."""
    inputs = [name for name in "abc" if f"{{{name}}}" in expression]

    def handler(m: Modifiers, o: Operands, site: str) -> str:
        m.may(*rounding)
        ptx = m.must(*types)
        to = o.next()
        values = {name: o.value(ptx) for name in inputs}
        return o.assign(to, ptx, expression.format(**values, site=site, type=cpp_type(ptx)))

    return handler


_NUMBERS = (*_INTEGERS, *_FLOATS)
opcode("add")(_plain("{a} + {b}", _NUMBERS, ("rn",)))
opcode("sub")(_plain("{a} - {b}", _NUMBERS, ("rn",)))
opcode("neg")(_plain("-{a}", ("s16", "s32", "s64", *_FLOATS)))
opcode("abs")(_plain("absolute({a})", ("s32", "s64", *_FLOATS)))
opcode("min")(_plain("minimum({a}, {b})", _NUMBERS))
opcode("max")(_plain("maximum({a}, {b})", _NUMBERS))
opcode("and")(_plain("{a} & {b}", ("pred", *_BITS)))
opcode("or")(_plain("{a} | {b}", ("pred", *_BITS)))
opcode("xor")(_plain("{a} ^ {b}", ("pred", *_BITS)))
opcode("copysign")(_plain("copy_sign({a}, {b})", _FLOATS))
opcode("rem")(_plain("remainder({a}, {b}, {site})", _INTEGERS))


@opcode("not")
def _not(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must("pred", *_BITS), o.next()
    return o.assign(to, ptx, f"{'!' if ptx == 'pred' else '~'}{o.value(ptx)}")


@opcode("div")
def _div(m: Modifiers, o: Operands, site: str) -> str:
    rounding = m.may("rn")
    ptx = m.must(*_FLOATS) if rounding else m.must(*_INTEGERS)
    to, a, b = o.next(), o.value(ptx), o.value(ptx)
    return o.assign(to, ptx, f"{a} / {b}" if rounding else f"quotient({a}, {b}, {site})")


def _product(adds: bool) -> Handler:
    def handler(m: Modifiers, o: Operands, site: str) -> str:
        half = m.must("lo", "hi", "wide") if adds else m.may("lo", "hi", "wide")
        if half is None:
            m.may("rn")
            ptx, to = m.must(*_FLOATS), o.next()
            return o.assign(to, ptx, f"{o.value(ptx)} * {o.value(ptx)}")
        ptx = m.must("u16", "u32", "s16", "s32") if half == "wide" else m.must(*_INTEGERS)
        result = ptx[0] + str(2 * int(ptx[1:])) if half == "wide" else ptx
        to, a, b = o.next(), o.value(ptx), o.value(ptx)
        product = f"{half}_product({a}, {b})"
        return o.assign(to, result, f"{product} + {o.value(result)}" if adds else product)

    return handler


opcode("mul")(_product(False))
opcode("mad")(_product(True))


@opcode("fma")
def _fma(m: Modifiers, o: Operands, site: str) -> str:
    rounding = m.must("rn", "rm")
    ptx, to = m.must(*(_FLOATS if rounding == "rn" else ("f32",))), o.next()
    function = "std::fma" if rounding == "rn" else "fma_down"
    return o.assign(to, ptx, f"{function}({o.value(ptx)}, {o.value(ptx)}, {o.value(ptx)})")


# What the hardware approximates is exact here, nearly; subnormal numbers are not flushed.
def _function(expression: str, exact: bool = False) -> Handler:
    """d = expression of {a}; `exact`: the instruction exists with correct rounding too."""

    def handler(m: Modifiers, o: Operands, site: str) -> str:
        if m.must("approx", *("rn",) * exact) == "approx":
            m.may("ftz")
            ptx = m.must("f32")
        else:
            ptx = m.must(*_FLOATS)
        to = o.next()
        return o.assign(to, ptx, expression.format(a=o.value(ptx)))

    return handler


opcode("ex2")(_function("std::exp2({a})"))
opcode("lg2")(_function("std::log2({a})"))
opcode("rcp")(_function("1 / {a}", exact=True))
opcode("sqrt")(_function("std::sqrt({a})", exact=True))
opcode("rsqrt")(_function("1 / std::sqrt({a})"))


@opcode("tanh")
def _tanh(m: Modifiers, o: Operands, site: str) -> str:
    m.all("approx", "f32")
    to = o.next()
    return o.assign(to, "f32", f"std::tanh({o.value('f32')})")


def _shift_by(function: str, types: Sequence[str]) -> Handler:
    def handler(m: Modifiers, o: Operands, site: str) -> str:
        ptx, to = m.must(*types), o.next()
        return o.assign(to, ptx, f"{function}({o.value(ptx)}, {o.value('u32')})")

    return handler


opcode("shl")(_shift_by("shift_left", _BITS))
opcode("shr")(_shift_by("shift_right", (*_BITS, *_INTEGERS)))


@opcode("bfi")
def _bfi(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must("b32", "b64"), o.next()
    return o.assign(to, ptx, f"insert_bits({o.value(ptx)}, {o.value(ptx)}, {o.value('u32')}, {o.value('u32')})")


_COMPARISONS = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# Of floats, true where one is a NaN: neither of these.
_UNORDERED = {"equ": ("<", ">"), "ltu": (">=",), "leu": (">",), "gtu": ("<=",), "geu": ("<",), "neu": ("==",)}


@opcode("setp")
def _setp(m: Modifiers, o: Operands, site: str) -> str:
    comparison = m.must("ne", "num", "nan", *_COMPARISONS, *_UNSIGNED, *_UNORDERED)
    combine = m.may("and", "or", "xor")
    ptx = m.must(*_BITS, *_INTEGERS, *_FLOATS)
    to, a, b = o.next(), o.value(ptx), o.value(ptx)
    if comparison in ("num", "nan", *_UNORDERED) and ptx not in _FLOATS:
        raise Unsupported(f"expected floats for .{comparison}")
    if comparison in _UNSIGNED and ptx[0] != "u":
        raise Unsupported(f"expected unsigned numbers for .{comparison}")
    if comparison in _UNORDERED:
        expression = " && ".join(f"!({a} {sign} {b})" for sign in _UNORDERED[comparison])
    elif comparison in ("num", "nan"):
        expression = f"{'!' * (comparison == 'num')}std::isunordered({a}, {b})"
    elif comparison == "ne":
        expression = f"{a} < {b} || {a} > {b}" if ptx in _FLOATS else f"{a} != {b}"
    else:
        expression = f"{a} {(_COMPARISONS | _UNSIGNED)[comparison]} {b}"
    if combine:
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        expression = f"({expression}) {sign} {o.value('pred')}"
    return o.assign(to, "pred", expression)


@opcode("selp")
def _selp(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must(*_BITS, *_INTEGERS, *_FLOATS), o.next()
    a, b = o.value(ptx), o.value(ptx)
    return o.assign(to, ptx, f"{o.value('pred')} ? {a} : {b}")


@opcode("mov")
def _mov(m: Modifiers, o: Operands, site: str) -> str | list[str]:
    ptx, to = m.must("pred", *_BITS, *_INTEGERS, *_FLOATS), o.next()
    size = SIZES.get(ptx, 0)
    if to.startswith("{"):
        parts = split_operands(to[1:-1])
        part, whole = f"b{8 * size // len(parts)}", o.value(ptx)
        shifted = [f"{whole} >> {8 * size // len(parts) * i}" for i in range(len(parts))]
        return [o.assign(each, part, f"{cpp_type(part)}({value})") for each, value in zip(parts, shifted)]
    source = o.next()
    if source.startswith("{"):
        parts = split_operands(source[1:-1])
        bits = 8 * size // len(parts)
        values = [f"{cpp_type(ptx)}({o.read(each, f'b{bits}')}) << {bits * i}" for i, each in enumerate(parts)]
        return o.assign(to, ptx, f"{cpp_type(ptx)}({' | '.join(values)})")
    return o.assign(to, ptx, o.read(source, ptx))


_ROUND_TO_INTEGER = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}


@opcode("cvt")
def _cvt(m: Modifiers, o: Operands, site: str) -> str:
    types = (*_INTEGERS, "u8", "s8", *_FLOATS)
    rounding = m.may("rn", "rna", *_ROUND_TO_INTEGER)
    if m.may("sat"):
        m.all("f32", "f32")
        to = o.next()
        return o.assign(to, "f32", f"saturate({o.value('f32')})")
    target = m.must("f16", "bf16", "f16x2", "bf16x2", "tf32", *types)
    source = m.must("f16", "bf16", *types)
    to = o.next()
    kind = (rounding, target, source)
    if kind in (("rn", "f16x2", "f32"), ("rn", "bf16x2", "f32")):
        narrow = "to_half" if target == "f16x2" else "to_bfloat16"
        return o.assign(to, "b32", f"uint32_t(simt::{narrow}({o.value('f32')}).bits) << 16 | "
                                   f"simt::{narrow}({o.value('f32')}).bits")  # fmt: skip
    if kind in (("rn", "f16", "f32"), ("rn", "bf16", "f32")):
        return o.assign(to, "b16", f"simt::{'to_half' if target == 'f16' else 'to_bfloat16'}({o.value('f32')}).bits")
    if kind in ((None, "f32", "f16"), (None, "f32", "bf16")):
        return o.assign(to, "f32", f"simt::to_float({'half' if source == 'f16' else 'bfloat16'}_t{{{o.value('b16')}}})")
    if kind == ("rna", "tf32", "f32"):
        return o.assign(to, "b32", f"simt::to_tf32({o.value('f32')})")
    a = o.value(source)
    if source in _FLOATS and target in _FLOATS:
        if source == target and rounding in _ROUND_TO_INTEGER:
            return o.assign(to, target, f"{_ROUND_TO_INTEGER[rounding]}({a})")
        if rounding == (None if SIZES[target] > SIZES[source] else "rn") and source != target:
            return o.assign(to, target, f"{cpp_type(target)}({a})")
    elif source in types and target in types:
        if source in _FLOATS and rounding in _ROUND_TO_INTEGER:
            return o.assign(to, target, f"to_integer<{cpp_type(target)}>({_ROUND_TO_INTEGER[rounding]}({a}))")
        if rounding == ("rn" if target in _FLOATS else None) and source not in _FLOATS:
            return o.assign(to, target, f"{cpp_type(target)}({a})")
    raise Unsupported(f"no such conversion from {source} to {target}")


# Control.


@opcode("bra")
def _bra(m: Modifiers, o: Operands, site: str) -> str:
    m.may("uni")
    label = o.next()
    if label not in o.names.labels:
        raise Unsupported(f"no such label: {label}")
    return f"goto {o.names.labels[label]};"


@opcode("ret", "exit")
def _ret(m: Modifiers, o: Operands, site: str) -> str:
    return "return;"


@opcode("trap")
def _trap(m: Modifiers, o: Operands, site: str) -> str:
    return f"trap({site});"


# Memory.


@opcode("cvta")
def _cvta(m: Modifiers, o: Operands, site: str) -> str:
    generic = m.may("to") is None
    space = m.must("global", "shared", "param")
    m.must("u64")
    to = o.next()
    address = o.value("u64")
    if space == "shared":
        address = f"thread.generic(uint32_t({address}))" if generic else f"thread.window_address({address}, {site})"
    return o.assign(to, "u64", address)


def _vector(count: int, text: str) -> list[str]:
    parts = split_operands(text[1:-1]) if text.startswith("{") else (text,)
    if len(parts) != count:
        raise Unsupported(f"expected {count} operands in braces, got {text}")
    return list(parts)


def _load_into(o: Operands, parts: Sequence[str], ptx: str, load: str) -> list[str]:
    """`load` is a call with {to} for where it writes."""
    if len(parts) == 1 and SIZES[o.names.type_of(parts[0])] == SIZES[ptx]:
        return [load.format(to=f"&{o.names.variable(parts[0])}")]
    element = f"thread.vector.{cpp_type(ptx)}"
    reads = [o.assign(part, ptx, f"{element}s[{i}]") for i, part in enumerate(parts) if part != "_"]
    return [load.format(to="&thread.vector"), *reads]


def _store_from(o: Operands, parts: Sequence[str], ptx: str, store: str) -> list[str]:
    """`store` is a call with {value} for where it reads."""
    if len(parts) == 1 and parts[0] in o.names.registers and SIZES[o.names.type_of(parts[0])] >= SIZES[ptx]:
        return [store.format(value=f"&{o.names.variable(parts[0])}")]
    element = f"thread.vector.{cpp_type(ptx)}s"
    return [*(f"{element}[{i}] = {o.read(part, ptx)};" for i, part in enumerate(parts)),
            store.format(value="&thread.vector")]  # fmt: skip


_SCALARS = tuple(SIZES)


@opcode("ld")
def _ld(m: Modifiers, o: Operands, site: str) -> list[str]:
    space = m.must("param", "global", "shared", "shared::cluster")
    if space == "global" and m.may("acquire"):
        m.must("gpu", "sys")
        m.must("u32", "b32")
        to = o.next()
        return [o.assign(to, "u32", f"thread.load_acquire({o.address('u64')}, {site})")]
    read_only = "false"
    if space == "global":
        m.may("cs")
        read_only = "true" if m.may("nc") else "false"
    count = _VECTORS[m.may("v2", "v4")]
    ptx = m.must(*_SCALARS)
    parts, size = _vector(count, o.next()), count * SIZES[ptx]
    if space == "param":
        return _load_into(o, parts, ptx, f"thread.load_parameter({{to}}, {o.address('u64')}, {size}, {site});")
    if space == "global":
        load = f"simt::load_global({{to}}, pointer({o.address('u64')}), {size}, {read_only}, {site});"
        return _load_into(o, parts, ptx, load)
    function = "load_shared" if space == "shared" else "load_shared_cluster"
    return _load_into(o, parts, ptx, f"simt::{function}({{to}}, {o.address()}, {size}, {site});")


@opcode("st")
def _st(m: Modifiers, o: Operands, site: str) -> list[str]:
    space = m.must("global", "shared", "shared::cluster")
    if space == "global" and m.may("release"):
        m.must("gpu", "sys")
        m.must("u32", "b32")
        return [f"simt::store_release(pointer<uint32_t>({o.address('u64')}), {o.value('u32')}, {site});"]
    if space == "global":
        m.may("cs")
    count = _VECTORS[m.may("v2", "v4")]
    ptx = m.must(*_SCALARS)
    size = count * SIZES[ptx]
    if space == "global":
        store = f"simt::store_global(pointer({o.address('u64')}), {{value}}, {size}, {site});"
    else:
        function = "store_shared" if space == "shared" else "store_shared_cluster"
        store = f"simt::{function}({o.address()}, {{value}}, {size}, {site});"
    return _store_from(o, _vector(count, o.next()), ptx, store)


def _atomic(returns: bool) -> Handler:
    def handler(m: Modifiers, o: Operands, site: str) -> str:
        m.must("global")
        ordered = m.may("acq_rel")
        if ordered:
            m.must("gpu")
        operation = m.must("add", "or")
        ptx = m.must(*(("u32",) if ordered else ("u32", "s32", "u64", "f32") if operation == "add" else ("b32",)))
        to = o.next() if returns else None
        function = f"atomic_{operation}" + "_acq_rel" * bool(ordered)
        call = f"simt::{function}(pointer<{cpp_type(ptx)}>({o.address('u64')}), {o.value(ptx)}, {site})"
        return f"{call};" if to is None else o.assign(to, ptx, call)

    return handler


opcode("atom")(_atomic(True))
opcode("red")(_atomic(False))


@opcode("prefetch")
def _prefetch(m: Modifiers, o: Operands, site: str) -> str:
    m.must("tensormap")
    o.address("u64")
    return ";"


# Threads and warps.


@opcode("bar")
def _bar(m: Modifiers, o: Operands, site: str) -> str:
    kind = m.must("sync", "arrive", "warp")
    if kind == "warp":
        m.must("sync")
        return f"simt::sync_warp({o.value('u32')}, {site});"
    barrier = o.next()
    if kind == "sync" and not o.more() and barrier == "0":
        return f"simt::sync_threads({site});"
    number = o.read(barrier, "s32")
    return f"simt::named_barrier({number}, {o.value('s32')}, {'true' if kind == 'sync' else 'false'}, {site});"


@opcode("membar")
def _membar(m: Modifiers, o: Operands, site: str) -> str:
    m.must("gl")
    return f"simt::fence_device({site});"


@opcode("shfl")
def _shfl(m: Modifiers, o: Operands, site: str) -> list[str]:
    m.must("sync")
    mode = m.must("idx", "up", "down", "bfly")
    m.must("b32")
    to, _, valid = o.next().partition("|")
    value, lane, clamp, mask = (o.value("u32") for _ in range(4))
    code = [f"thread.lane = shuffle_{mode}({lane}, {clamp});"]
    if valid:
        code.append(o.assign(valid, "pred", "thread.lane >= 0"))
    return [*code, o.assign(to, "u32", f"simt::shuffle({value}, thread.shuffled_lane(), {mask}, {site})")]


@opcode("vote")
def _vote(m: Modifiers, o: Operands, site: str) -> str:
    m.must("sync")
    mode = m.must("ballot", "any", "all")
    m.must("b32" if mode == "ballot" else "pred")
    to, predicate = o.next(), o.value("pred")
    mask = o.value("u32")
    votes = f"simt::ballot({predicate}, {mask}, {site})"
    if mode == "ballot":
        return o.assign(to, "b32", votes)
    return o.assign(to, "pred", f"{votes} {'!= 0' if mode == 'any' else f'== {mask}'}")


@opcode("elect")
def _elect(m: Modifiers, o: Operands, site: str) -> str:
    m.must("sync")
    ignored, _, to = o.next().partition("|")
    if ignored != "_":
        raise Unsupported(f"expected _ for the elected lane, got {ignored}")
    return o.assign(to, "pred", f"elect({o.value('u32')}, {site})")


# Copies and matrices.


def _matrices(m: Modifiers) -> tuple[int, str]:
    m.all("sync", "aligned", "m8n8")
    count = int(m.must("x1", "x2", "x4")[1])
    transposed = "true" if m.may("trans") else "false"
    m.all("shared", "b16")
    return count, transposed


@opcode("ldmatrix")
def _ldmatrix(m: Modifiers, o: Operands, site: str) -> list[str]:
    count, transposed = _matrices(m)
    parts = _vector(count, o.next())
    load = f"simt::ldmatrix(thread.vector.uint32_ts, {count}, {transposed}, {o.address()}, {site});"
    return [load, *(o.assign(part, "b32", f"thread.vector.uint32_ts[{i}]") for i, part in enumerate(parts))]


@opcode("stmatrix")
def _stmatrix(m: Modifiers, o: Operands, site: str) -> list[str]:
    count, transposed = _matrices(m)
    row = o.address()
    writes = [f"thread.vector.uint32_ts[{i}] = {value};" for i, value in enumerate(o.values("b32", count))]
    return [*writes, f"simt::stmatrix({row}, thread.vector.uint32_ts, {count}, {transposed}, {site});"]


@opcode("mma")
def _mma(m: Modifiers, o: Operands, site: str) -> str:
    m.all("sync", "aligned")
    shape = m.must("m16n8k16", "m16n8k8")
    m.all("row", "col", "f32")
    types = ("f16", "bf16") if shape == "m16n8k16" else ("tf32",)
    m.must(kind := m.must(*types))
    m.must("f32")
    d = [o.names.variable(each) for each in o.braced() if o.names.type_of(each) == "f32"]
    a, b, c = o.values("b32", 4), o.values("b32", 2), o.values("f32", 4)
    if len(d) != 4:
        raise Unsupported("expected 4 registers of type f32 for the sum")
    function = "mma_m16n8k8_tf32" if kind == "tf32" else f"mma_m16n8k16<{'true' if kind == 'f16' else 'false'}>"
    return f"{function}({', '.join((*d, *a, *b, *c))}, {site});"


@opcode("cp")
def _cp(m: Modifiers, o: Operands, site: str) -> str:
    if m.may("reduce"):
        m.all("async", "bulk", "tensor")
        return _tensor_store(m, o, site, "add")
    m.must("async")
    if m.may("commit_group"):
        return f"simt::cp_async_commit({site});"
    if m.may("wait_group"):
        return f"simt::cp_async_wait({o.number()}, {site});"
    if m.may("bulk"):
        return _bulk(m, o, site)
    cache = m.must("ca", "cg")
    m.all("shared", "global")
    to, source, size = o.address(), o.address("u64"), o.number()
    if size not in ((4, 8, 16) if cache == "ca" else (16,)):
        raise Unsupported(f"no copy of {size} bytes with .{cache}")
    valid = o.value("s32") if o.more() else str(size)
    return f"simt::cp_async({to}, pointer({source}), {size}, {valid}, {site});"


def _bulk(m: Modifiers, o: Operands, site: str) -> str:
    if m.may("commit_group"):
        return f"simt::bulk_commit({site});"
    if m.may("wait_group"):
        read = "true" if m.may("read") else "false"
        return f"simt::bulk_wait({o.number()}, {read}, {site});"
    if m.may("tensor"):
        return _tensor_copy(m, o, site)
    if m.must("shared::cluster", "global") == "shared::cluster":
        m.all("global", "mbarrier::complete_tx::bytes")
        to, source, size = o.address(), o.address("u64"), o.value("u32")
        return f"simt::bulk_load({to}, pointer({source}), {size}, thread.barrier({o.address()}, {site}), {site});"
    m.all("shared::cta", "bulk_group")
    return f"simt::bulk_store(pointer({o.address('u64')}), {o.address()}, {o.value('u32')}, {site});"


def _tile(o: Operands, rank: int) -> tuple[str, str]:
    """The tensor map and the coordinates of the next operand, [map, {x, y}]."""
    text = o.next()
    match = re.fullmatch(r"\[\s*([^,]+),\s*\{([^}]*)\}\s*\]", text)
    if match is None or len(at := split_operands(match[2])) != rank:
        raise Unsupported(f"expected a tensor map and {rank} coordinates, got {text}")
    return f"pointer<uint64_t>({o.sum(match[1], 'u64')})", ", ".join(o.read(each, "s32") for each in at)


def _tensor_copy(m: Modifiers, o: Operands, site: str) -> str:
    rank = int(m.match(r"([1-5])d")[1])
    if m.may("global"):
        return _tensor_store(m, o, site, rank=rank)
    m.all("shared::cluster", "global", "tile", "mbarrier::complete_tx::bytes")
    multicast = m.may("multicast::cluster")
    to = o.address()
    tensor, at = _tile(o, rank)
    barrier = f"thread.barrier({o.address()}, {site})"
    blocks = o.value("u16") if multicast else "0"
    return f"tma_load({to}, {tensor}, {barrier}, {blocks}, {site}, {at});"


def _tensor_store(m: Modifiers, o: Operands, site: str, operation: str = "", rank: int = 0) -> str:
    if not rank:
        rank = int(m.match(r"([1-5])d")[1])
        m.must("global")
    m.must("shared::cta")
    if operation:
        m.must(operation)
    m.all("tile", "bulk_group")
    tensor, at = _tile(o, rank)
    return f"tma_store({tensor}, {o.address()}, {'true' if operation else 'false'}, {site}, {at});"


# sm_90: mbarriers, clusters, wgmma.


@opcode("mbarrier")
def _mbarrier(m: Modifiers, o: Operands, site: str) -> str | list[str]:
    operation = m.must("init", "inval", "arrive", "expect_tx", "try_wait")

    def barrier() -> str:
        return f"thread.barrier({o.address()}, {site})"

    if operation in ("init", "inval"):
        m.all("shared::cta", "b64")
        word = barrier()
        if operation == "inval":
            return f"simt::barrier_invalidate({word}, {site});"
        return f"simt::barrier_init({word}, {o.value('s32')}, {site});"
    if operation == "expect_tx":
        m.all("relaxed", "cta", "shared::cta", "b64")
        return f"simt::barrier_expect({barrier()}, {o.value('u32')}, {site});"
    if operation == "try_wait":
        m.must("parity")
        cluster = m.may("acquire")
        if cluster:
            m.must("cluster")
        m.all("shared::cta", "b64")
        to = o.next()
        wait = f"simt::barrier_wait({barrier()}, {o.value('u32')}, {'true' if cluster else 'false'}, {site});"
        return [wait, o.assign(to, "pred", "true")]
    if m.may("release"):
        m.all("cluster", "shared::cluster", "b64")
        _unused(o)
        return f"simt::barrier_arrive_remote({o.address()}, {site});"
    expect = m.may("expect_tx")
    m.all("shared::cta", "b64")
    _unused(o)
    if expect:
        return f"simt::barrier_arrive_expect({barrier()}, {o.value('u32')}, {site});"
    return f"simt::barrier_arrive({barrier()}, {site});"


def _unused(o: Operands) -> None:
    """The next operand is a state of a barrier, which nothing here has a use for: it stays unwritten."""
    state = o.next()
    if state != "_":
        o.names.type_of(state)


@opcode("fence")
def _fence(m: Modifiers, o: Operands, site: str) -> str:
    if m.must("proxy", "mbarrier_init") == "proxy":
        m.all("async", "shared::cta")
        return f"simt::fence_async_shared({site});"
    m.all("release", "cluster")
    return f"simt::fence_barrier_init({site});"


@opcode("barrier")
def _cluster_barrier(m: Modifiers, o: Operands, site: str) -> str:
    m.must("cluster")
    if m.must("arrive", "wait") == "wait":
        m.must("acquire")
        return f"simt::cluster_wait({site});"
    relaxed = m.must("release", "relaxed") == "relaxed"
    return f"simt::cluster_arrive({'true' if relaxed else 'false'}, {site});"


@opcode("mapa")
def _mapa(m: Modifiers, o: Operands, site: str) -> str:
    m.all("shared::cluster", "u32")
    to = o.next()
    return o.assign(to, "u32", f"simt::mapa({o.value('u32')}, {o.value('s32')}, {site})")


@opcode("griddepcontrol")
def _griddepcontrol(m: Modifiers, o: Operands, site: str) -> str:
    waits = m.must("wait", "launch_dependents") == "wait"
    return f"simt::{'grid_dependency_wait' if waits else 'grid_launch_dependents'}({site});"


@opcode("setmaxnreg")
def _setmaxnreg(m: Modifiers, o: Operands, site: str) -> str:
    increase = m.must("inc", "dec") == "inc"
    m.all("sync", "aligned", "u32")
    return f"simt::set_max_registers({o.number()}, {'true' if increase else 'false'}, {site});"


_WGMMA_TYPES = {"f16": "kFloat16", "bf16": "kBFloat16", "tf32": "kTf32"}


@opcode("wgmma")
def _wgmma(m: Modifiers, o: Operands, site: str) -> str:
    operation = m.must("fence", "commit_group", "wait_group", "mma_async")
    m.all("sync", "aligned")
    if operation == "fence":
        return f"simt::wgmma_fence({site});"
    if operation == "commit_group":
        return f"simt::wgmma_commit({site});"
    if operation == "wait_group":
        return f"simt::wgmma_wait({o.number()}, {site});"
    shape = m.match(r"m64n(\d+)k(8|16)")
    m.must("f32")
    kind = m.must(*(("tf32",) if shape[2] == "8" else ("f16", "bf16")))
    m.must(kind)
    n = int(shape[1])
    d = tuple_variable(o, n // 2)
    a = o.next()
    in_registers = a.startswith("{")
    fragment = tuple_variable(o, 4, a) if in_registers else "nullptr"
    a_descriptor = "0" if in_registers else o.read(a, "u64")
    b_descriptor, accumulate = o.value("u64"), o.value("pred")
    if (scales := (o.number(), o.number())) != (1, 1):
        raise Unsupported(f"expected operands that are not negated, got {scales}")
    majors = ["0", "0"]
    if kind != "tf32":
        majors = [str(o.number()) for _ in range(1 if in_registers else 2)]
    a_major, b_major = ("0", majors[0]) if in_registers else (majors[0], majors[1])
    return (
        f"wgmma(thread.accumulators({d}), {{simt::WgmmaType::{_WGMMA_TYPES[kind]}, {n}, {fragment}, {a_descriptor}, "
        f"{b_descriptor}, {a_major} != 0, {b_major} != 0, {accumulate}}}, {site});"
    )


def tuple_variable(o: Operands, count: int, text: str | None = None) -> str:
    """The array that holds the registers in braces that come next; see emit.py."""
    names = split_operands((text or o.next())[1:-1])
    if len(names) != count:
        raise Unsupported(f"expected {count} registers in braces, got {len(names)}")
    array, _, first = o.names.variable(names[0]).partition("[")
    if [o.names.variable(name) for name in names] != [f"{array}[{i}]" for i in range(count)] or first != "0]":
        raise Unsupported("expected the registers of an array, in order")
    return array
