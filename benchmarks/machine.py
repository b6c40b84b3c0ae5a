"""The machine that a number was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Processor, cores in use, torch's version and a GPU if there is one, in one line."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}{gpu}"
