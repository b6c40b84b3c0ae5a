"""Encoders to attack, texts to attack them with, and one attack with everything that is written down about it."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from synthetic import bert_shape
from transformers import AutoTokenizer

import unmask
from unmask.attacks.gradients.encoder import attack as encoder
from unmask.attacks.gradients.encoder.search import EncoderSearch
from unmask.evidence import GradientEvidence
from unmask.models import Model, load_model
from unmask.models.catalog import resolve
from unmask.recovery import RecoveredTexts, Recovery
from unmask.scores import score_texts

Tokens = list[int]
Attack = Callable[[GradientEvidence, Model], Recovery[RecoveredTexts]]
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A model of the tables."""

    label: str
    load: Callable[[], Model]


def _bert_base() -> Model:
    return bert_shape(tokenizer=AutoTokenizer.from_pretrained(resolve("minilm-l6"), local_files_only=True))


ROWS = {
    "minilm": Row("MiniLM-L6, real weights", lambda: load_model("minilm-l6")),
    "bert-base": Row("BERT-base shape, random weights", _bert_base),
}


# ---- texts that are nobody's


def word_salad(
    model: Model, num_texts: int, min_tokens: int, max_tokens: int, *, seed: int, distinct: bool = False
) -> list[Tokens]:
    """Invented texts: whole words of the tokenizer between its frame, Zipf-distributed over an order of the seed's.

    With `distinct`, no word comes twice in all the texts: no position then lends its tokens to another, which is the
    easiest case for Algorithm 3.
    """
    words = torch.tensor(whole_words(model.tokenizer))
    generator = torch.Generator().manual_seed(seed)
    shuffled = words[torch.randperm(len(words), generator=generator)]
    weights = 1.0 / torch.arange(1, len(words) + 1)
    first, last = model.frame_tokens or (0, 0)
    texts = []
    for _ in range(num_texts):
        length = int(torch.randint(min_tokens, max_tokens + 1, (1,), generator=generator)) - 2
        drawn = torch.multinomial(weights, length, replacement=not distinct, generator=generator)
        weights[drawn] *= not distinct
        texts.append([first, *shuffled[drawn].tolist(), last])
    return texts


@cache
def whole_words(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that are lower-case words of three letters or more: they stay what they are if a text is encoded."""
    vocabulary = tokenizer.get_vocab().items()
    is_word = {
        token: word.isascii() and word.isalpha() and word.islower() and len(word) > 2 for word, token in vocabulary
    }
    return tuple(sorted(token for token, whole in is_word.items() if whole))


# ---- one attack


@contextmanager
def watched() -> Iterator[list[EncoderSearch]]:
    """The searches that are started meanwhile: a recovery does not tell its Gauss–Newton steps."""
    searches: list[EncoderSearch] = []

    class Watched(EncoderSearch):
        def search(self, effort: int = 1) -> None:
            searches.append(self)
            super().search(effort)

    with mock.patch.object(encoder, "EncoderSearch", Watched):
        yield searches


def attacked(attack: Attack, evidence: GradientEvidence, model: Model, texts: Sequence[Tokens]) -> Result:
    """Attack first; only then compare with the truth."""
    with watched() as searches:
        started, cpu_started = time.perf_counter(), time.process_time()
        recovered = attack(evidence, model)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    counts = {"steps": sum(s.num_steps for s in searches), "anchors": sum(s.num_anchors for s in searches)}
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        **(counts if searches else {}),
        **compared(recovered, model, texts),
        "status": recovered.status.name,
        "reason": recovered.reason,
        "certificate_holds": recovered.certificate.holds,
    }


def compared(recovered: Recovery[RecoveredTexts], model: Model, texts: Sequence[Tokens]) -> Result:
    """Exact texts, those under the certificate apart, and ROUGE over words; [CLS] and [SEP] are no words."""
    held = Counter(map(tuple, texts))
    certain = Counter(text.tokens for text in recovered.value.certain for _ in range(text.count))
    score = score_texts(
        recovered.value.expand(), texts, lambda tokens: model.tokenizer.decode(tokens, skip_special_tokens=True)
    )
    return {
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "exact": round(score.exact_rate * len(texts)),
        "certain": certain.total(),
        "certain_exact": (certain & held).total(),
        "false_certain": (certain - held).total(),
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
    }


# ---- what makes a result the same


def key_of(spec: Any) -> str:
    """A hash of a dataclass of settings."""
    return hashlib.sha256(json.dumps(asdict(spec), sort_keys=True).encode()).hexdigest()[:16]


@cache
def code() -> str:
    """A hash of the package's source: it is kept with each result, so that a table can tell old ones apart."""
    digest = hashlib.sha256()
    package = Path(unmask.__file__).parent
    for part in ("attacks", "linalg", "models"):
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
