"""Rules for instructions that the emulator executes: memory, barriers, warps, copies, matrices, clusters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .operands import Modifiers, Operands, Rule, cpp_type, opcode
from .parse import SIZES, Unsupported, split_operands

# Memory.


@opcode("cvta")
def _cvta(m: Modifiers, o: Operands, site: str) -> str:
    generic = m.may("to") is None
    space = m.must("global", "shared", "param", "local")
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
    """`load` is a call with {to} as placeholder for its destination."""
    if len(parts) == 1 and SIZES[o.names.type_of(parts[0])] == SIZES[ptx]:
        return [load.format(to=f"&{o.names.variable(parts[0])}")]
    element = f"thread.vector.{cpp_type(ptx)}"
    reads = [o.assign(part, ptx, f"{element}s[{i}]", wider=True) for i, part in enumerate(parts) if part != "_"]
    return [load.format(to="&thread.vector"), *reads]


def _store_from(o: Operands, parts: Sequence[str], ptx: str, store: str) -> list[str]:
    """`store` is a call with {value} as placeholder for its source."""
    if len(parts) == 1 and parts[0] in o.names.registers and SIZES[o.names.type_of(parts[0])] >= SIZES[ptx]:
        return [store.format(value=f"&{o.names.variable(parts[0])}")]
    element = f"thread.vector.{cpp_type(ptx)}s"
    return [*(f"{element}[{i}] = {o.read(part, ptx, wider=True)};" for i, part in enumerate(parts)),
            store.format(value="&thread.vector")]  # fmt: skip


_SCALARS = tuple(name for name in SIZES if name not in ("f16", "bf16"))
_MAX_VECTOR = 16  # bytes


def _width(m: Modifiers) -> tuple[int, str]:
    """Number and type of the accessed elements."""
    count = {None: 1, "v2": 2, "v4": 4}[m.may("v2", "v4")]
    ptx = m.must(*_SCALARS)
    if count * SIZES[ptx] > _MAX_VECTOR:
        raise Unsupported(f"expected a vector of at most {_MAX_VECTOR} bytes, got {count} of type {ptx}")
    return count, ptx


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
    count, ptx = _width(m)
    parts, size = _vector(count, o.next()), count * SIZES[ptx]
    if space == "param" and (result := o.call_parameter(ptx)):
        return [o.assign(parts[0], ptx, result)]
    if space == "param":
        return _load_into(o, parts, ptx, f"thread.load_parameter({{to}}, {o.address('u64')}, {size}, {site});")
    if space == "global":
        load = f"simt::load_global({{to}}, pointer({o.address('u64')}), {size}, {read_only}, {site});"
        return _load_into(o, parts, ptx, load)
    function = "load_shared" if space == "shared" else "load_shared_cluster"
    return _load_into(o, parts, ptx, f"simt::{function}({{to}}, {o.address()}, {size}, {site});")


@opcode("st")
def _st(m: Modifiers, o: Operands, site: str) -> list[str]:
    space = m.must("global", "shared", "shared::cluster", "local", "param")
    if space == "global" and m.may("release"):
        m.must("gpu", "sys")
        m.must("u32", "b32")
        return [f"simt::store_release(pointer<uint32_t>({o.address('u64')}), {o.value('u32')}, {site});"]
    if space == "global":
        m.may("cs")
    count, ptx = _width(m)
    size = count * SIZES[ptx]
    if space == "param":
        if (argument := o.call_parameter(ptx)) is None:
            raise Unsupported("expected a parameter of a call")
        return [f"{argument} = {o.value(ptx)};"]
    if space == "local":
        store = f"thread.store_local({o.address('u64')}, {{value}}, {size}, {site});"
    elif space == "global":
        store = f"simt::store_global(pointer({o.address('u64')}), {{value}}, {size}, {site});"
    else:
        function = "store_shared" if space == "shared" else "store_shared_cluster"
        store = f"simt::{function}({o.address()}, {{value}}, {size}, {site});"
    return _store_from(o, _vector(count, o.next()), ptx, store)


def _atomic(returns: bool) -> Rule:
    def rule(m: Modifiers, o: Operands, site: str) -> str | list[str]:
        m.must("global")
        ordered = m.may("acq_rel") if returns else None
        if ordered:
            m.must("gpu")
        operation = m.must("add", "or", "max")
        if not returns and operation == "add" and m.may("v4"):
            m.must("f32")
            address = o.address("u64")
            values = [f"thread.vector.floats[{i}] = {x};" for i, x in enumerate(o.values("f32", 4))]
            return [*values, f"simt::reduce_add(pointer<float>({address}), thread.vector.floats, 4, {site});"]
        ptx = m.must(
            *(
                ("u32",)
                if ordered
                else ("u32", "s32", "u64", "f32")
                if operation == "add"
                else ("u32",)
                if operation == "max"
                else ("b32",)
            )
        )
        to = o.next() if returns else None
        function = f"atomic_{operation}" + "_acq_rel" * bool(ordered)
        call = f"simt::{function}(pointer<{cpp_type(ptx)}>({o.address('u64')}), {o.value(ptx)}, {site})"
        return f"{call};" if to is None else o.assign(to, ptx, call)

    return rule


opcode("atom")(_atomic(True))
opcode("red")(_atomic(False))


@opcode("prefetch")
def _prefetch(m: Modifiers, o: Operands, site: str) -> str:
    m.must("tensormap")
    o.address("u64")
    return ";"


@opcode("call")
def _call(m: Modifiers, o: Operands, site: str) -> str:
    m.must("uni")
    result, function = o.next().strip("() "), o.next()
    if function != "vprintf":
        raise Unsupported(f"expected a call of vprintf, got {function}")
    form, arguments = (o.read(o.next().strip("() "), "u64") for _ in range(2))
    return o.assign(result, "b32", f"print({form}, {arguments}, {site})")


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


_MATRIX_TYPES = {"f16": "kFloat16", "bf16": "kBFloat16", "tf32": "kTf32", "e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
_FLOAT8 = ("e4m3", "e5m2")  # two operands may be of both
# By shape and type: the function of operations.h, and the registers of b; a has twice as many.
_MMA = {
    ("m16n8k16", "f16"): ("mma_m16n8k16<true>", 2),
    ("m16n8k16", "bf16"): ("mma_m16n8k16<false>", 2),
    ("m16n8k8", "tf32"): ("mma_m16n8k8_tf32", 2),
    ("m16n8k8", "f16"): ("mma_m16n8k8", 1),
}


@opcode("mma")
def _mma(m: Modifiers, o: Operands, site: str) -> str:
    m.all("sync", "aligned")
    shape = m.must("m16n8k32", "m16n8k16", "m16n8k8")
    m.all("row", "col", "f32")
    if shape == "m16n8k32":
        types = (f"simt::MatrixType::{_MATRIX_TYPES[m.must(*_FLOAT8)]}" for _ in range(2))
        function, registers = f"mma_m16n8k32<{', '.join(types)}>", 2
    else:
        m.must(kind := m.must(*(kind for of, kind in _MMA if of == shape)))
        function, registers = _MMA[shape, kind]
    m.must("f32")
    d = [o.names.variable(each) for each in o.braced() if o.names.type_of(each) == "f32"]
    a, b, c = o.values("b32", 2 * registers), o.values("b32", registers), o.values("f32", 4)
    if len(d) != 4:
        raise Unsupported("expected 4 registers of type f32 for the sum")
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
    """Tensor map and coordinates of the next operand, [map, {x, y}]."""
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
        cluster = m.may("acquire") or m.may("relaxed")
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
    if not expect and m.may("shared::cluster"):
        m.must("b64")
        _unused(o)
        return f"simt::barrier_arrive_remote({o.address()}, {site});"
    m.all("shared::cta", "b64")
    _unused(o)
    if expect:
        return f"simt::barrier_arrive_expect({barrier()}, {o.value('u32')}, {site});"
    return f"simt::barrier_arrive({barrier()}, {site});"


def _unused(o: Operands) -> None:
    """Skips the next operand, a barrier state, which is never read and stays unwritten."""
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


_WGMMA_TYPES = {"8": ("tf32",), "16": ("f16", "bf16"), "32": _FLOAT8}  # by depth


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
    shape = m.match(r"m64n(\d+)k(8|16|32)")
    m.must("f32")
    a_type = m.must(*_WGMMA_TYPES[shape[2]])
    b_type = m.must(*(_FLOAT8 if a_type in _FLOAT8 else (a_type,)))
    n = int(shape[1])
    if n % 8 != 0 or not 8 <= n <= 256:
        raise Unsupported(f"expected a multiple of 8 up to 256 for N, got {n}")
    d = tuple_variable(o, n // 2)
    a = o.next()
    in_registers = a.startswith("{")
    if in_registers and shape[2] != "16":
        raise Unsupported("expected a descriptor of A")
    fragment = tuple_variable(o, 4, a) if in_registers else "nullptr"
    a_descriptor = "0" if in_registers else o.read(a, "u64")
    b_descriptor, accumulate = o.value("u64"), o.value("pred")
    if (scales := (o.number(), o.number())) != (1, 1):
        raise Unsupported(f"expected operands that are not negated, got {scales}")
    majors = ["0", "0"]
    if shape[2] == "16":
        majors = [str(o.number()) for _ in range(1 if in_registers else 2)]
    a_major, b_major = ("0", majors[0]) if in_registers else (majors[0], majors[1])
    return (
        f"wgmma(thread.accumulators({d}), {{simt::MatrixType::{_MATRIX_TYPES[a_type]}, "
        f"simt::MatrixType::{_MATRIX_TYPES[b_type]}, {n}, {fragment}, {a_descriptor}, {b_descriptor}, "
        f"{a_major} != 0, {b_major} != 0, {accumulate}}}, {site});"
    )


def tuple_variable(o: Operands, count: int, text: str | None = None) -> str:
    """The array for the registers in braces of the next operand; see emit.py."""
    names = split_operands((text or o.next())[1:-1])
    if len(names) != count:
        raise Unsupported(f"expected {count} registers in braces, got {len(names)}")
    array, _, first = o.names.variable(names[0]).partition("[")
    if [o.names.variable(name) for name in names] != [f"{array}[{i}]" for i in range(count)] or first != "0]":
        raise Unsupported("expected the registers of an array, in order")
    return array
