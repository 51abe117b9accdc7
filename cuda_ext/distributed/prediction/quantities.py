"""Parsers of quantities with units on command lines: ``400Gbit``, ``12.5 GB/s``, ``0us``, ``25MiB``, ``2%``.

The case of a unit matters only for ``b``, a bit, and ``B``, a byte.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

Parser = Callable[[str], float]
FactorOf = Callable[[str], "float | None"]  # of a unit; None if it is unknown

_PREFIXES = {"": 1.0} | {prefix: 1e3 ** (n + 1) for n, prefix in enumerate("kmgtp")}
_PREFIXES |= {f"{prefix}i": 1024.0 ** (n + 1) for n, prefix in enumerate("kmgt")}
_SIZE = re.compile(r"(?P<prefix>(?:[kmgt]i?)?)b(?:ytes?)?", re.IGNORECASE)
_RATE = re.compile(
    r"(?P<prefix>(?:[kmgt]i?)?)(?:(?P<bit>(?-i:b)|bits?)|(?-i:B)|bytes?)(?:/s(?:ec)?|ps)?", re.IGNORECASE
)
_FLOPS = re.compile(r"(?P<prefix>[kmgtp]?)(?:flops?)?(?:/s(?:ec)?)?", re.IGNORECASE)
_SECONDS = re.compile(r"(?P<prefix>[muµμn]?)s(?:ec)?", re.IGNORECASE)
_PARTS_OF_A_SECOND = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9}


def _seconds(unit: str) -> float | None:
    match = _SECONDS.fullmatch(unit)
    return _PARTS_OF_A_SECOND[match["prefix"].lower()] if match else None


def _bytes(unit: str) -> float | None:
    match = _SIZE.fullmatch(unit)
    return _PREFIXES[match["prefix"].lower()] if match else None


def _mib_or_bytes(unit: str) -> float | None:
    return _bytes(unit or "MiB")


def _bytes_per_second(unit: str) -> float | None:
    match = _RATE.fullmatch(unit)
    return _PREFIXES[match["prefix"].lower()] / (8 if match["bit"] else 1) if match else None


def _flop_rate(unit: str) -> float | None:
    match = _FLOPS.fullmatch(unit)
    return _PREFIXES[match["prefix"].lower()] if match else None


def _percent(unit: str) -> float | None:
    return 0.01 if unit == "%" else None


def _in(factor_of: FactorOf, example: str, *, zero: bool = False) -> Parser:
    """A parser of a finite number and a unit. ``zero``: whether 0 is allowed, which needs no unit."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D*)", text.strip())
        number, unit = (float(match[1]), match[2]) if match else (math.nan, "")
        factor = 1.0 if zero and number == 0 and not unit else factor_of(unit)
        if not match or factor is None:
            raise argparse.ArgumentTypeError(f"expected a number and a unit such as {example}, got {text!r}")
        value = number * factor
        if not (value < math.inf and (value > 0 or zero)):
            least = "0 or more" if zero else "above 0"
            raise argparse.ArgumentTypeError(f"expected a finite value, {least}, such as {example}, got {text!r}")
        return value

    return parse


seconds = _in(_seconds, "200ms")
latency = _in(_seconds, "5us", zero=True)
bandwidth = _in(_bytes_per_second, "400Gbit or 50GB/s")
flop_rate = _in(_flop_rate, "400T")
some_bytes = _in(_mib_or_bytes, "25MiB")
percent = _in(_percent, "2%", zero=True)
