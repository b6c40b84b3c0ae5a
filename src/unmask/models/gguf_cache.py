"""A packaged GGUF file is converted once into a cached folder that transformers loads in a second.

A conversion happens in a temporary folder beside its target and is renamed into place when every file is on
the disk, so a folder under its final name is whole, whoever was killed and whoever raced. Its name holds the
model, the package's version, the file's size, the converter's version and the start of the file's sha256; all
but the hash are known without reading the 98 MB, and that is how a later load finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from safetensors import SafetensorError

from unmask.errors import InputError
from unmask.progress import shown_unless_watched, tell

CONVERTER_VERSION = 1  # raise it when the files that `write_safetensors` makes change
MANIFEST = "unmask.json"
SECONDS_A_DAY = 86_400
_TEMPORARY = re.compile(r"\.converting-(?P<host>.+)-(?P<pid>\d+)-\w+")


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file, the catalogue name it answers to and the version of the package that brought it."""

    name: str
    version: str
    file: Path

    @property
    def prefix(self) -> str:
        """The part of the cached folder's name that is known without reading the file."""
        return f"{self.name}-{self.version}-{self.file.stat().st_size}-c{CONVERTER_VERSION}-"


def cache_folder() -> Path:
    """`models` under `$UNMASK_CACHE`, else under `$XDG_CACHE_HOME/unmask`, else under `~/.cache/unmask`."""
    if chosen := os.environ.get("UNMASK_CACHE"):
        return Path(chosen).expanduser() / "models"
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "unmask" / "models"


def find_converted(source: GgufSource) -> Path | None:
    """The whole folder that an earlier conversion of `source` left, or None."""
    named = (folder for folder in cache_folder().glob("*") if folder.name.startswith(source.prefix))
    return next((folder for folder in sorted(named) if _is_whole(folder)), None)


def write_safetensors(gguf_file: Path, folder: Path) -> None:
    """De-quantise a GGUF language model to float32 and save it, with its tokenizer, as transformers does.

    A model loaded from GGUF refuses `save_pretrained`, so an empty model of its class is given its tensors.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # transformers draws the bar of the de-quantising past its own switch, straight to stderr.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()), _read_once():
        where, gguf = gguf_file.parent, gguf_file.name
        config = AutoConfig.from_pretrained(where, gguf_file=gguf)
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf, config=config)
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=gguf, config=config, dtype=torch.float32)
        del loaded.config.quantization_config
        with torch.device("meta"):
            plain = type(loaded)(loaded.config)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """For as long as it is open, a GGUF file is read once, and its tensors' names are found once.

    transformers reads it for the configuration, the tokenizer and the weights, and maps all names for every module.
    """
    import gguf

    with mock.patch.multiple(
        gguf, GGUFReader=cache(gguf.GGUFReader), get_tensor_name_map=cache(gguf.get_tensor_name_map)
    ):
        yield


def convert_once(source: GgufSource, convert: Callable[[Path, Path], None] = write_safetensors) -> Path:
    """Convert `source` into the cache and return the folder; safe against races and against being killed.

    `convert(gguf_file, folder)` fills the folder.
    """
    root = cache_folder()
    temporary = root / f".converting-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root, source.prefix)
        temporary.mkdir()
        with shown_unless_watched(None):
            tell(f"converting {source.name}, this once; about half a minute", 0, 1)
            convert(source.file, temporary)
        sha256 = _sha256(source.file)
        _seal(temporary, source, sha256)
        return _publish(temporary, root / f"{source.prefix}{sha256[:12]}")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"Converting {source.file.name} into {root} failed: {error}. The folder must be writable, with "
            "about 600 MB free; set UNMASK_CACHE to use another one."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hush transformers' warnings and loading bars (the bars of downloads stay), and restore them after."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    had_bars, hub_had_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()  # this silences the hub too
        if hub_had_bars:
            enable_progress_bars()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
        if not hub_had_bars:
            disable_progress_bars()


def _seal(folder: Path, source: GgufSource, sha256: str) -> None:
    """Write the manifest, then bring every file to the disk, readable by whoever may read the folder."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {
        "converter": CONVERTER_VERSION,
        "source": {"file": source.file.name, "version": source.version, "sha256": sha256},
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        shutil.copymode(folder / MANIFEST, path)  # safetensors writes files that only their owner can read
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())


def _publish(temporary: Path, target: Path) -> Path:
    """Rename into place; whoever comes second takes what is there."""
    try:
        os.rename(temporary, target)
    except OSError:
        if not _is_whole(target):
            raise
    return target


def _is_whole(folder: Path) -> bool:
    """Whether every file in the manifest is there with its size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _sweep(root: Path, prefix: str) -> None:
    """Remove what killed conversions left, and a folder of this source that has since lost files."""
    for folder in root.iterdir():
        if _is_abandoned(folder) or (folder.name.startswith(prefix) and not _is_whole(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether a temporary folder is of a process on this host that has ended, or a day old."""
    named = _TEMPORARY.fullmatch(folder.name)
    if named is None:
        return False
    if named["host"] == socket.gethostname() and not _is_running(int(named["pid"])):
        return True
    try:
        return time.time() - folder.stat().st_mtime > SECONDS_A_DAY
    except FileNotFoundError:
        return False  # its owner has just finished


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere signal 0 is not a question; age decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's process
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
