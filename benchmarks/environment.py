"""What a measurement depends on besides the code: device, clocks, versions. A probe that fails returns nothing."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import cuda_ext

ROOT = Path(__file__).resolve().parent.parent


def describe(device: str) -> dict[str, Any]:
    """Properties of the device "cpu" or "cuda" and of the software; constant during a run."""
    properties: dict[str, Any] = {
        "device": device_name(device),
        "cache_bytes": cache_bytes(device),
        "cuda_ext": cuda_ext.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device == "cuda":
        p = torch.cuda.get_device_properties(0)
        properties |= {
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_bytes": p.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": nvidia_smi("driver_version"),
            "power_limit": nvidia_smi("power.limit"),
        }
    return properties


def device_name(device: str) -> str:
    """ "NVIDIA H200", or the CPU's name with its number of cores."""
    return torch.cuda.get_device_name(0) if device == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"


def state(device: str) -> dict[str, Any]:
    """Current clocks and temperature."""
    if device == "cuda":
        clocks = nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,power.draw").split(", ")
        if len(clocks) != 4:
            return {}
        return dict(zip(("sm_clock", "memory_clock", "temperature", "power"), clocks))
    found: dict[str, Any] = {}
    megahertz = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    if megahertz:
        found["clock"] = f"{max(map(float, megahertz)):.0f} MHz"
    temperatures = [_text(path) for path in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    if degrees := [int(t) / 1000 for t in temperatures if t.strip().lstrip("-").isdigit()]:
        found["temperature"] = f"{max(degrees):.0f}"
    if hasattr(os, "getloadavg"):
        found["load"] = f"{os.getloadavg()[0]:.2f}"
    return found


@functools.cache
def cpu_name() -> str:
    """ "Intel Xeon 2.80GHz", without trademark signs."""
    match = re.search(r"^model name\s*:\s*(.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    return " ".join(re.sub(r"\((?:R|TM|r|tm)\)|\bCPU\b|\bProcessor\b|@", " ", name).split())


@functools.cache
def cache_bytes(device: str) -> int:
    """Size of the last-level cache; 64 MiB if it cannot be found."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [_text(path).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if re.fullmatch(r"\d+K", size)), default=64 << 20)


@functools.cache
def commit() -> str:
    """The commit of the source tree, with a "+" if it has changes; "" outside of git."""
    try:
        git = ["git", "-C", str(ROOT)]
        name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")


def nvidia_smi(query: str) -> str:
    """The answer for the first visible GPU; "" if there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
