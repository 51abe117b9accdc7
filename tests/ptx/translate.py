"""Translates one PTX instruction to C++. Opcodes, modifiers and operands without a rule are refused: their meaning must
be looked up in the PTX ISA, not guessed.

The C++ calls the emulator (csrc/simt/api.h) for everything that the emulator executes or counts (the rules of
`effects`), and operations.h for arithmetic without a C++ operator; the rest is plain C++ (the rules of `arithmetic`).
"""

from __future__ import annotations

from . import arithmetic, effects
from .operands import Modifiers, Names, Operands, rules
from .parse import Instruction, Unsupported

__all__ = ["arithmetic", "effects", "translate"]  # importing them registers the rules


def translate(instruction: Instruction, names: Names, site: str) -> str:
    """C++ for one instruction; `site` is a C++ expression for its source location. Raises Unsupported."""
    first, *rest = instruction.opcode.split(".")
    modifiers, operands = Modifiers(rest), Operands(names, instruction.operands)
    try:
        if first not in rules:
            raise Unsupported("unknown opcode")
        code = rules[first](modifiers, operands, site)
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
