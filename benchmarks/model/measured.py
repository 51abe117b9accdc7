"""Which prediction belongs to a measurement."""

from __future__ import annotations

import re

from benchmarks import results
from benchmarks.model.bucket_work import Pack
from benchmarks.model.gpus import Gpu
from benchmarks.suites.bench_attention import Problem

Key = tuple[object, ...]


def key_of_gemm(m: int, n: int, k: int, dtype: str, layout: str) -> Key:
    return ("gemm", m, n, k, dtype, layout)


def key_of_pack(pack: Pack) -> Key:
    return (pack.op, pack.elements, pack.entries, pack.tensors, pack.bucket)


def key_of_attention(problem: Problem, backward: bool, dtype: str) -> Key:
    return ("attention", problem, backward, dtype)


def problem_of(m: results.Measurement) -> Problem | None:
    """The problem of a measurement, parsed from its name in bench_attention.py; None if it is not modelled."""
    name = re.fullmatch(r"B=(\d+) S=(\d+) H=(\d+)(?:/(\d+))? D=(\d+)", m.case)
    op = re.fullmatch(r"flash_attention (?:full|causal|window (\d+))", m.op)
    if name is None or op is None:
        return None
    batch, length, heads, kv_heads, dim = (int(number or 0) for number in name.groups())
    window = int(op[1]) if op[1] else None
    return Problem(batch, length, heads, dim, kv_heads=kv_heads, causal="full" not in m.op, window=window)


def key_of(m: results.Measurement) -> Key | None:
    """The prediction's key; None if the case is not modelled. bench_gemm.py and bench_bucket.py write these `extra`."""
    if m.suite == "attention":
        problem = problem_of(m)
        return key_of_attention(problem, m.phase == "backward", m.dtype) if problem else None
    if m.phase != "forward":
        return None
    if m.op in ("gemm", "gemm tf32"):
        dtype = "tf32" if m.op == "gemm tf32" else m.dtype
        return ("gemm", *(m.extra.get(name) for name in ("M", "N", "K")), dtype, m.extra.get("layout"))
    if m.suite == "bucket":
        return (m.op, m.extra.get("elements"), m.extra.get("tensors"), m.dtype, m.extra.get("bucket dtype"))
    return None


def measurements(gpu: Gpu) -> dict[Key, float]:
    """key -> measured seconds of ours on this GPU; the newest measurement counts."""
    found: dict[Key, results.Measurement] = {}
    for folder in results.iter_devices(results.ROOT):
        if folder.name != gpu.folder:
            continue
        for m in results.read(folder):
            if m.side != results.OURS or m.device != "cuda" or m.seconds is None:
                continue
            key = key_of(m)
            if key is not None and (key not in found or m.date >= found[key].date):
                found[key] = m
    return {key: m.seconds for key, m in found.items() if m.seconds is not None}
