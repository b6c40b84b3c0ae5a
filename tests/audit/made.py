"""What tests of audits are made of: findings, plans, and a small model in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tests.tiny_models import bert_config, llama_sizes, random_model, word_tokenizer

from unmask.audit.cases.case import case_id
from unmask.audit.findings.finding import Finding, digest_of
from unmask.audit.plan import Plan, load_plan

# Words of the small models' tokenizer; no two texts share one.
WORDS = tuple(" ".join(f"w{10 * text + place + 5}" for place in range(4 + text % 3)) for text in range(8))
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \u202eevil\u2066 \ud800 <script>alert(1)</script> [bold]x[/bold] \r\n\u2028"
TEXT_CHANCE = {"exact_texts": 0, "token_recall": 0.2, "rouge2": 0.0}
EVERYTHING = {"exact_texts": 2, "near_exact_texts": 2, "exact_rate": 1.0, "rouge2": 1.0, "token_recall": 1.0}
EVERYTHING |= {"weights_found": 1, "weights_rate": 1.0, "weight_error": 0.0}
# Fields of a finding whose attack looked for everything, and finds everything where nothing protects.
LOOKED: dict[str, Any] = {
    "looked_for": ("texts", "tokens", "weights"),
    "control": {"id": "c0", "case": {}, "status": "RECOVERED", "reason": "all of it", "metrics": EVERYTHING},
}


def spec(**changes: Any) -> dict[str, Any]:
    """A specification of a case of the gradients."""
    plain: dict[str, Any] = {"channel": "gradients", "model": "m", "dtype": "float32", "batch_size": 2, "clients": 1}
    plain |= {"data": {"name": "notes", "sha256": "ab" * 32}, "task": "default", "protocol": "fedsgd"}
    return {**plain, "defences": [], "attack": "default", "seed": 0, **changes}


def finding(
    status: str = "RECOVERED",
    metrics: Mapping[str, float] | None = None,
    case: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Finding:
    """A finding that leaks everything unless said otherwise."""
    said = spec() if case is None else case
    everything = {"exact_texts": 2, "exact_rate": 1.0, "rouge2": 1.0, "token_recall": 1.0}
    fields = {"metrics": everything if metrics is None else metrics, "chance": TEXT_CHANCE, **changes}
    return Finding(case_id(said), said, status, "a reason", **fields)


def sealed(document: Mapping[str, Any]) -> str:
    """A document as a line whose digest is right, whatever it says."""
    return json.dumps({**document, "digest": digest_of(document)})


def save_bert(folder: Path, seed: int = 0) -> Path:
    """A tiny BERT with a tokenizer of whole words, as `save_pretrained` writes it."""
    word_tokenizer().save_pretrained(folder)
    random_model(transformers.BertForMaskedLM, bert_config(), seed=seed).save_pretrained(folder)
    return folder


def save_llama(folder: Path, seed: int = 0) -> Path:
    """A tiny decoder with the same tokenizer."""
    word_tokenizer().save_pretrained(folder)
    config = transformers.LlamaConfig(**llama_sizes())
    random_model(transformers.LlamaForCausalLM, config, seed=seed).save_pretrained(folder)
    return folder


def write_plan(path: Path, *groups: str, top: str = "") -> Path:
    """A plan file with its data beside it."""
    (path.parent / "notes.txt").write_text("\n".join(WORDS), encoding="utf-8")
    path.write_text("\n".join((top, '[data.notes]\nfile = "notes.txt"', *groups)), encoding="utf-8")
    return path


def make_plan(folder: Path, *groups: str, top: str = "") -> Plan:
    """The same, read."""
    return load_plan(write_plan(folder / "plan.toml", *groups, top=top))


def random_group(seeds: Sequence[int] = (0, 1, 2), extra: str = "") -> str:
    """A group of cheap cases without a model."""
    return f'[[queries]]\nsecrets = ["random:heads=1,width=4"]\nseeds = {list(seeds)}\n{extra}\n'
