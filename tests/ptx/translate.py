"""One PTX instruction to C++. An opcode, a modifier or an operand that no rule takes is refused: what nvcc means by it
has to be looked up in the PTX ISA and written down, not guessed.

The C++ calls the emulator (csrc/simt/api.h) for everything that the emulator acts out or counts (the rules of
`effects`), operations.h for arithmetic that C++ has no operator for, and is plain C++ else (the rules of `arithmetic`).
"""

from __future__ import annotations

from . import arithmetic, effects
from .operands import Modifiers, Names, Operands, rules
from .parse import Instruction, Unsupported

__all__ = ["arithmetic", "effects", "translate"]  # importing them registers the rules


def translate(instruction: Instruction, names: Names, site: str) -> str:
    """C++ for one instruction; `site` is an expression for where it stands. Raises Unsupported."""
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
