"""Writes the C++ file of a PTX file: one function per kernel, and a table of them for the runtime (runtime.h)."""

from __future__ import annotations

from collections.abc import Iterator

from .operands import Names, cpp_type
from .parse import Entry, Instruction, Label, Local, Module, Registers, Scope, Unsupported, split_operands
from .translate import translate

_SITE = "<site>"
_PER_LINE = 16
_LOCAL_BYTES, _LOCAL_ALIGNMENT = 64, 16  # operations.h, Thread::local


def emit(module: Module) -> str:
    """C++ for all entries of `module`. Raises Unsupported for what has no translation."""
    lines = ['#include "operations.h"', '#include "runtime.h"', "", "namespace cuda_ext::ptx {", ""]
    strings = {name: f"string_{index}" for index, name in enumerate(module.strings)}
    for name, text in module.strings.items():
        lines.append(f"static const unsigned char {strings[name]}[] = {{{', '.join(map(str, (*text, 0)))}}};")
    table = []
    for index, entry in enumerate(module.entries):
        try:
            lines += _Function(module, entry, index, strings).lines()
        except Unsupported as error:
            raise Unsupported(f"{module.name}, {entry.name}: {error}") from None
        table.append(_row(entry, index))
    lines += ["static const Entry entries[] = {", *table, "};" if table else "{}};"]
    architecture = int(module.target.removeprefix("sm_").rstrip("a"))
    lines += [f"static const Registered registered(entries, {len(table)}, {architecture});", "", "}", ""]
    return "\n".join(lines)


def _row(entry: Entry, index: int) -> str:
    parameters = ", ".join(f"{{{each.size}, {each.offset}}}" for each in entry.parameters)
    waits = any(isinstance(each, Instruction) and ".acquire." in each.opcode and each.opcode.startswith("ld.global")
                for each in entry.body)  # fmt: skip
    return (
        f'  {{"{entry.name}", entry_{index}, {{{parameters}}}, {entry.max_threads}, {entry.min_blocks}, '
        f"{'true' if waits else 'false'}}},"
    )


class _Function:
    def __init__(self, module: Module, entry: Entry, index: int, strings: dict[str, str]) -> None:
        self._module, self._entry, self._index = module, entry, index
        self._names = Names(shared=module.shared, addresses=dict(strings))
        self._names.parameters = {each.name: each.offset for each in entry.parameters}
        for statement in entry.body:
            if isinstance(statement, Label):
                self._names.labels[statement.name] = statement.name.replace("$", "")
        self._sites: list[str] = []
        self._scopes: list[list[str]] = []  # names that a block declares
        self._arrays: list[str] = []

    def lines(self) -> Iterator[str]:
        bodies = [each for each in self._entry.body if not isinstance(each, Local)]
        self._place_local_memory()
        first = next((i for i, each in enumerate(bodies) if not isinstance(each, Registers)), len(bodies))
        declared = [each for each in bodies[:first] if isinstance(each, Registers)]
        for each in declared:
            self._names.registers.update(dict.fromkeys(each.names, each.type))
        self._find_tuples()
        body = [text for each in bodies[first:] for text in self._statement(each)]
        if self._sites:
            yield f"static constexpr Site sites_{self._index}[] = {{"
            yield from (f"    {site}," for site in self._sites)
            yield "};"
        size = max((each.offset + each.size for each in self._entry.parameters), default=0)
        yield f"static void entry_{self._index}(const std::byte* parameters) {{  // {self._entry.name}"
        yield f"  [[maybe_unused]] Thread thread(parameters, {size});"
        yield from self._arrays
        for each in declared:
            own = [self._names.variable(name) for name in each.names if name not in self._names.variables]
            for begin in range(0, len(own), _PER_LINE):
                yield f"  {cpp_type(each.type)} {', '.join(own[begin : begin + _PER_LINE])};"
        yield from body
        yield "}"
        yield ""

    def _statement(self, statement: object) -> Iterator[str]:
        if isinstance(statement, Label):
            yield f"{self._names.labels[statement.name]}:;"
        elif isinstance(statement, Registers):
            if not self._scopes:
                raise Unsupported(f"registers {statement.names} are declared after the first instruction")
            for name in statement.names:
                if name in self._names.registers:
                    raise Unsupported(f"register {name} of a block shadows another one")
                self._names.registers[name] = statement.type
                self._scopes[-1].append(name)
            yield f"  {cpp_type(statement.type)} {', '.join(map(self._names.variable, statement.names))};"
        elif isinstance(statement, Scope):
            if statement.opens:
                self._scopes.append([])
            else:
                for name in self._scopes.pop():
                    del self._names.registers[name]
            yield "  {" if statement.opens else "  }"
        elif isinstance(statement, Instruction):
            text = translate(statement, self._names, _SITE)
            if _SITE in text:
                place = f"{statement.place}, " if statement.place else ""
                self._sites.append(f'{{"{place}{self._module.name}", {statement.line}}}')
                text = text.replace(_SITE, f"sites_{self._index}[{len(self._sites) - 1}]")
            yield f"  {text}"

    def _place_local_memory(self) -> None:
        """Only vprintf needs it: an array that an index has moved to local memory would be slow."""
        local = [each for each in self._entry.body if isinstance(each, Local)]
        prints = any(isinstance(each, Instruction) and each.opcode == "call.uni" for each in self._entry.body)
        for each in local:
            fits = each.size <= _LOCAL_BYTES and each.alignment <= _LOCAL_ALIGNMENT
            if not (prints and fits and len(local) == 1):
                raise Unsupported(f"local memory {each.name} of {each.size} bytes")
            self._names.addresses[each.name] = "thread.local"

    def _find_tuples(self) -> None:
        """Finds the register tuples of wgmma. They become arrays, because the emulator accesses them until the thread
        waits."""
        tuples: dict[tuple[str, ...], str] = {}
        for each in self._entry.body:
            if not (isinstance(each, Instruction) and each.opcode.startswith("wgmma.mma_async")):
                continue
            for operand in each.operands:
                names = split_operands(operand.strip("{}"))
                if not operand.startswith("{") or names in tuples:
                    continue
                if any(name in self._names.variables for name in names):
                    raise Unsupported(f"line {each.line}: registers {operand} are in another tuple of a wgmma too")
                tuples[names] = array = f"tuple_{len(tuples)}"
                kind = self._names.type_of(names[0])
                self._arrays.append(f"  {cpp_type(kind)} {array}[{len(names)}];")
                self._names.variables.update({name: f"{array}[{i}]" for i, name in enumerate(names)})
