"""What can be known of a plan before it runs: missing extras and weights, unknown models, tasks and layers they lack.

Models are built from their configuration alone, without memory for their weights, so this takes seconds for any size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unmask.attacks.table import DEFAULT, Attack
from unmask.audit.cases.case import Case
from unmask.audit.channels.table import CHANNEL_AUDITS
from unmask.errors import UnmaskError
from unmask.models.catalog import CATALOG, is_offline, list_models, resolve
from unmask.models.outline import Outline, outline_of
from unmask.specs import split_text

# Protocol → the package that it needs, and the extra that brings it.
_EXTRAS: Mapping[str, tuple[str, str]] = {"dpsgd": ("opacus", "dp"), "lora": ("peft", "lora")}


def find_problems(cases: Sequence[Case], engine: str = "local") -> dict[str, list[str]]:
    """Sentences about what cannot run, each with the ids of its cases; empty where nothing is known to be wrong."""
    problems: dict[str, list[str]] = {}
    outlines = outlines_of(cases)
    for case in cases:
        name = case["model"]
        found = [_missing_extra(case), _model_problem(case, outlines.get(name))]
        if engine == "ray" and importlib.util.find_spec("ray") is None:
            found.append("--engine ray needs Ray, which is not installed; run: pip install 'unmask[ray]'")
        for sentence in filter(None, found):
            problems.setdefault(sentence, []).append(case.id)
    return problems


def outlines_of(cases: Sequence[Case]) -> dict[str, Outline | str | None]:
    """The models of cases without their weights, or why one cannot load; None where only its conversion shows."""
    return {name: _outline(name) for name in dict.fromkeys(case["model"] for case in cases) if name}


def _missing_extra(case: Case) -> str | None:
    protocol, _ = split_text(str(case.spec.get("protocol", "")))
    package, extra = _EXTRAS.get(protocol, ("", ""))
    if not package or importlib.util.find_spec(package) is not None:
        return None
    return f"the protocol '{protocol}' needs {package}, which is not installed; run: pip install 'unmask[{extra}]'"


def _outline(name: str) -> Outline | str | None:
    """The model without its weights; why it cannot load; or None where that shows only when it is converted."""
    try:
        listing = next((entry for entry in list_models() if entry.name == name), None)
        if listing is not None and listing.install_command:
            return f"the weights of '{name}' are not installed; run: {listing.install_command}"
        if listing is not None and listing.converted is False:
            return None
        source = resolve(name)
        if isinstance(source, Path) and not any(source.glob("*.safetensors")):
            return f"the folder {source} has no weights; expected *.safetensors"
        return outline_of(_build(source))
    except UnmaskError as error:
        return str(error)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        return f"the model '{name}' cannot be loaded: {reason} The catalogue has {', '.join(CATALOG)}"


def _build(source: Path | str) -> Any:
    """A transformers model on the meta device; of a hub name the configuration alone is asked for."""
    import transformers

    from unmask.models.gguf_cache import quiet_transformers

    with quiet_transformers(), torch.device("meta"):
        offline = isinstance(source, Path) or is_offline()
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=offline, trust_remote_code=False)
        kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=False)


def _model_problem(case: Case, model: Outline | str | None) -> str | None:
    """What a case asks of its model, and the model lacks."""
    if model is None or isinstance(model, str):
        return model
    attack = None if case["attack"] == DEFAULT else Attack.parse(case["attack"])
    fault = None if attack is None else attack.find_model_fault(model.causal)
    return fault or CHANNEL_AUDITS[case["channel"]].find_model_fault(case.spec, model)
