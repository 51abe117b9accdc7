"""Rules for instructions on registers: arithmetic, comparisons, conversions, jumps."""

from __future__ import annotations

from collections.abc import Sequence

from .operands import BITS, FLOATS, INTEGERS, Modifiers, Operands, Rule, cpp_type, opcode
from .parse import SIZES, Unsupported, split_operands


def _plain(expression: str, types: Sequence[str], rounds: bool = False) -> Rule:
    """d = expression of {a}, {b}, ... of one type. With `rounds`, floats may have the modifier .rn."""
    inputs = [name for name in "abc" if f"{{{name}}}" in expression]

    def rule(m: Modifiers, o: Operands, site: str) -> str:
        ptx = m.must(*(FLOATS if rounds and m.may("rn") else types))
        to = o.next()
        values = {name: o.value(ptx) for name in inputs}
        return o.assign(to, ptx, expression.format(**values, site=site, type=cpp_type(ptx)))

    return rule


_NUMBERS = (*INTEGERS, *FLOATS)
opcode("add")(_plain("{a} + {b}", _NUMBERS, rounds=True))
opcode("sub")(_plain("{a} - {b}", _NUMBERS, rounds=True))
opcode("neg")(_plain("-{a}", ("s16", "s32", "s64", *FLOATS)))
opcode("abs")(_plain("absolute({a})", ("s32", "s64", *FLOATS)))
opcode("min")(_plain("minimum({a}, {b})", _NUMBERS))
opcode("max")(_plain("maximum({a}, {b})", _NUMBERS))
opcode("and")(_plain("{a} & {b}", ("pred", *BITS)))
opcode("or")(_plain("{a} | {b}", ("pred", *BITS)))
opcode("xor")(_plain("{a} ^ {b}", ("pred", *BITS)))
opcode("copysign")(_plain("copy_sign({a}, {b})", FLOATS))
opcode("rem")(_plain("remainder({a}, {b}, {site})", INTEGERS))


@opcode("not")
def _not(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must("pred", *BITS), o.next()
    return o.assign(to, ptx, f"{'!' if ptx == 'pred' else '~'}{o.value(ptx)}")


@opcode("div")
def _div(m: Modifiers, o: Operands, site: str) -> str:
    rounding = m.may("rn")
    ptx = m.must(*FLOATS) if rounding else m.must(*INTEGERS)
    to, a, b = o.next(), o.value(ptx), o.value(ptx)
    return o.assign(to, ptx, f"{a} / {b}" if rounding else f"quotient({a}, {b}, {site})")


def _product(adds: bool) -> Rule:
    def rule(m: Modifiers, o: Operands, site: str) -> str:
        half = m.must("lo", "hi", "wide") if adds else m.may("lo", "hi", "wide")
        if half is None:
            m.may("rn")
            ptx, to = m.must(*FLOATS), o.next()
            return o.assign(to, ptx, f"{o.value(ptx)} * {o.value(ptx)}")
        ptx = m.must("u16", "u32", "s16", "s32") if half == "wide" else m.must(*INTEGERS)
        result = ptx[0] + str(2 * int(ptx[1:])) if half == "wide" else ptx
        to, a, b = o.next(), o.value(ptx), o.value(ptx)
        product = f"{half}_product({a}, {b})"
        return o.assign(to, result, f"{product} + {o.value(result)}" if adds else product)

    return rule


opcode("mul")(_product(False))
opcode("mad")(_product(True))


@opcode("fma")
def _fma(m: Modifiers, o: Operands, site: str) -> str:
    rounding = m.must("rn", "rm")
    ptx, to = m.must(*(FLOATS if rounding == "rn" else ("f32",))), o.next()
    function = "std::fma" if rounding == "rn" else "fma_down"
    return o.assign(to, ptx, f"{function}({o.value(ptx)}, {o.value(ptx)}, {o.value(ptx)})")


# Functions that the hardware approximates are accurate to about one rounding here.
def _function(expression: str, exact: bool = False) -> Rule:
    """d = expression of {a}. With `exact`, a correctly rounded version of the instruction exists too."""

    def rule(m: Modifiers, o: Operands, site: str) -> str:
        if m.must("approx", *("rn",) * exact) == "rn":
            ptx, to = m.must(*FLOATS), o.next()
            return o.assign(to, ptx, expression.format(a=o.value(ptx)))
        flushes = m.may("ftz") is not None
        ptx, to = m.must("f32"), o.next()
        if not flushes:
            return o.assign(to, ptx, expression.format(a=o.value(ptx)))
        return o.assign(to, ptx, f"simt::flush({expression.format(a=f'simt::flush({o.value(ptx)})')})")

    return rule


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


def _shift_by(function: str, types: Sequence[str]) -> Rule:
    def rule(m: Modifiers, o: Operands, site: str) -> str:
        ptx, to = m.must(*types), o.next()
        return o.assign(to, ptx, f"{function}({o.value(ptx)}, {o.value('u32')})")

    return rule


opcode("shl")(_shift_by("shift_left", BITS))
opcode("shr")(_shift_by("shift_right", (*BITS, *INTEGERS)))


@opcode("bfi")
def _bfi(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must("b32", "b64"), o.next()
    return o.assign(to, ptx, f"insert_bits({o.value(ptx)}, {o.value(ptx)}, {o.value('u32')}, {o.value('u32')})")


@opcode("prmt")
def _prmt(m: Modifiers, o: Operands, site: str) -> str:
    m.must("b32")
    to = o.next()
    return o.assign(to, "b32", f"permute_bytes({o.value('b32')}, {o.value('b32')}, {o.value('b32')})")


_COMPARISONS = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# Float comparisons that are true if an operand is a NaN: the negation of these.
_UNORDERED = {"equ": ("<", ">"), "ltu": (">=",), "leu": (">",), "gtu": ("<=",), "geu": ("<",), "neu": ("==",)}


@opcode("setp")
def _setp(m: Modifiers, o: Operands, site: str) -> str:
    comparison = m.must("ne", "num", "nan", *_COMPARISONS, *_UNSIGNED, *_UNORDERED)
    combine = m.may("and", "or", "xor")
    ptx = m.must(*BITS, *INTEGERS, *FLOATS)
    to, a, b = o.next(), o.value(ptx), o.value(ptx)
    if comparison in ("num", "nan", *_UNORDERED) and ptx not in FLOATS:
        raise Unsupported(f"expected floats for .{comparison}")
    if ptx in BITS and comparison not in ("eq", "ne"):
        raise Unsupported("expected .eq or .ne for bits")
    if comparison in _UNSIGNED and ptx[0] != "u":
        raise Unsupported(f"expected unsigned numbers for .{comparison}")
    if comparison in _UNORDERED:
        expression = " && ".join(f"!({a} {sign} {b})" for sign in _UNORDERED[comparison])
    elif comparison in ("num", "nan"):
        expression = f"{'!' * (comparison == 'num')}std::isunordered({a}, {b})"
    elif comparison == "ne":
        expression = f"{a} < {b} || {a} > {b}" if ptx in FLOATS else f"{a} != {b}"
    else:
        expression = f"{a} {(_COMPARISONS | _UNSIGNED)[comparison]} {b}"
    if combine:
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        expression = f"({expression}) {sign} {o.value('pred')}"
    return o.assign(to, "pred", expression)


@opcode("selp")
def _selp(m: Modifiers, o: Operands, site: str) -> str:
    ptx, to = m.must(*BITS, *INTEGERS, *FLOATS), o.next()
    a, b = o.value(ptx), o.value(ptx)
    return o.assign(to, ptx, f"{o.value('pred')} ? {a} : {b}")


@opcode("mov")
def _mov(m: Modifiers, o: Operands, site: str) -> str | list[str]:
    ptx, to = m.must("pred", *BITS, *INTEGERS, *FLOATS), o.next()
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


_FLOAT8 = {"e4m3x2": "float8_e4m3_t", "e5m2x2": "float8_e5m2_t"}


def _cvt_float8(m: Modifiers, o: Operands, rounding: str | None) -> str | None:
    """Conversions of pairs of 8-bit floats: from two floats, or to two float16."""
    if rounding == "rn" and m.may("satfinite"):
        kind = _FLOAT8[m.must(*_FLOAT8)]
        m.must("f32")
        to, high, low = o.next(), o.value("f32"), o.value("f32")
        return o.assign(to, "b16", f"to_float8_pair<{kind}>({high}, {low})")
    if rounding == "rn" and m.may("f16x2"):
        if (source := m.may(*_FLOAT8)) is None:
            m.must("f32")
            return _cvt_pair(o, "to_half")
        to = o.next()
        return o.assign(to, "b32", f"float8_pair_to_half<{_FLOAT8[source]}>({o.value('b16')})")
    return None


def _cvt_pair(o: Operands, narrow: str) -> str:
    to = o.next()
    return o.assign(to, "b32", f"uint32_t(simt::{narrow}({o.value('f32')}).bits) << 16 | "
                               f"simt::{narrow}({o.value('f32')}).bits")  # fmt: skip


@opcode("cvt")
def _cvt(m: Modifiers, o: Operands, site: str) -> str:
    types = (*INTEGERS, "u8", "s8", *FLOATS)
    rounding = m.may("rn", "rna", *_ROUND_TO_INTEGER)
    if m.may("sat"):
        m.all("f32", "f32")
        to = o.next()
        return o.assign(to, "f32", f"saturate({o.value('f32')})")
    if (float8 := _cvt_float8(m, o, rounding)) is not None:
        return float8
    target = m.must("f16", "bf16", "bf16x2", "tf32", *types)
    source = m.must("f16", "bf16", *types)
    kind = (rounding, target, source)
    if kind == ("rn", "bf16x2", "f32"):
        return _cvt_pair(o, "to_bfloat16")
    to = o.next()
    if kind in (("rn", "f16", "f32"), ("rn", "bf16", "f32")):
        return o.assign(to, "b16", f"simt::{'to_half' if target == 'f16' else 'to_bfloat16'}({o.value('f32')}).bits")
    if kind in ((None, "f32", "f16"), (None, "f32", "bf16")):
        return o.assign(to, "f32", f"simt::to_float({'half' if source == 'f16' else 'bfloat16'}_t{{{o.value('b16')}}})")
    if kind == ("rna", "tf32", "f32"):
        return o.assign(to, "b32", f"simt::to_tf32({o.value('f32')})")
    a = o.value(source, wider=source in (*INTEGERS, "u8", "s8"))
    if source in FLOATS and target in FLOATS:
        if source == target and rounding in _ROUND_TO_INTEGER:
            return o.assign(to, target, f"{_ROUND_TO_INTEGER[rounding]}({a})")
        if rounding == (None if SIZES[target] > SIZES[source] else "rn") and source != target:
            return o.assign(to, target, f"{cpp_type(target)}({a})")
    elif source in types and target in types:
        if source in FLOATS and rounding in _ROUND_TO_INTEGER:
            number = f"to_integer<{cpp_type(target)}>({_ROUND_TO_INTEGER[rounding]}({a}))"
            return o.assign(to, target, number, wider=True)
        if rounding == ("rn" if target in FLOATS else None) and source not in FLOATS:
            return o.assign(to, target, f"{cpp_type(target)}({a})", wider=target not in FLOATS)
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
