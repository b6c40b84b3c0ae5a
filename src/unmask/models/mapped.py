"""Weights that stay on the disk: safetensors maps them, and each part's pages are given back once it has run.

    load     float32 safetensors are mapped, not read: a page of weights is read when it is first used
    release  after a block has run, its pages are given back, where all weights would fill more than half of the memory

What a pass holds is then one block, the embedding and the output layer. Weights of another precision on the disk are
converted when they are loaded, and then held as a whole.

Limits: Linux, 5.4 or later; elsewhere nothing is given back, and the system decides. Pages that were written to are
kept. Cost: a pass reads every block from the disk again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_LIMIT = "UNMASK_MEMORY_GB"  # what this process may hold, where the machine's free memory does not tell
_PAGE_OUT = 21  # MADV_PAGEOUT: clean pages of a file are dropped, written ones are not lost
_SHARE = 0.5  # of the free memory; more weights than that are given back block by block
_RANGES = "_mapped_ranges"


def free_bytes() -> int:
    """Memory that may be used: what the system calls available, or `$UNMASK_MEMORY_GB` if that is less."""
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    free = pages * os.sysconf("SC_PAGE_SIZE") if pages else sys.maxsize
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    limit = os.environ.get(_LIMIT)
    return min(free, int(float(limit) * 1e9)) if limit else free


def release_blocks(hf: nn.Module) -> bool:
    """Give back the pages of a model's blocks whenever one has run, if they are mapped and too many to be held."""
    files = list(_mapped_files())
    blocks = [block for part in hf.modules() if isinstance(part, nn.ModuleList) for block in part]
    ranges = {block: [each for each in map(_range, block.parameters()) if _lies_in(each, files)] for block in blocks}
    if sum(size for found in ranges.values() for _, size in found) <= _SHARE * free_bytes():
        return False
    for block, found in ranges.items():
        setattr(block, _RANGES, found)
        block.register_forward_hook(_after)
    return True


def release(block: nn.Module) -> None:
    """Give back the pages of a block, where they are to be given back."""
    _page_out(getattr(block, _RANGES, ()))


def is_released(block: nn.Module) -> bool:
    """Whether a block's pages are given back once it has run."""
    return bool(getattr(block, _RANGES, ()))


def release_weight(weight: Tensor) -> None:
    """Give back the pages of one mapped weight."""
    _page_out([_range(weight)])


def _after(block: nn.Module, given: Any, made: Any) -> None:
    release(block)


def _range(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight.numel() * weight.element_size()


def _page_out(ranges: Iterable[tuple[int, int]]) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for address, size in ranges:
        first, last = -(-address // page) * page, (address + size) // page * page
        if last > first:
            _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _PAGE_OUT)


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Addresses at which safetensors files are mapped, from first to last."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.endswith(".safetensors"):
            first, _, last = line.split()[0].partition("-")
            yield int(first, 16), int(last, 16)


def _lies_in(place: tuple[int, int], files: Iterable[tuple[int, int]]) -> bool:
    return any(first <= place[0] and sum(place) <= last for first, last in files)


_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
