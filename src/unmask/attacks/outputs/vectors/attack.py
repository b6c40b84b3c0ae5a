"""The exact text behind a sentence embedding: proposed by fitted effects of tokens, proven by embedding it again.

    effects    how a vector moves when a token is put in, fitted once a model and kept on disk (insertion_effects.py)
    search     from the empty text, best first, many vectors at once; then again from the texts that it ended with,
               without their doubtful tokens (search.py, attempts.py, restarts.py)
    proof      the text's vector, computed again, is the stored one to its last digit; no neighbour's is (proof.py)

384 numbers hold far more than a sentence of some tokens. What limits the attack is the search and not the vector: long
texts that are not found end as guesses with most of their words.

Limits: texts of up to about 16 tokens, and on a GPU half of those up to 32. Noise leaves guesses. Vectors that were
rotated with a secret key, or come from an unknown model, give nothing.
Cost: for MiniLM some 12 s on two cores, once; another model is fitted for minutes. Then seconds for a text of 6 to 12
tokens.
Source: ours. vec2text (arXiv 2310.06816) trains a corrector for every encoder and proves nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice

import torch

from unmask.attacks.outputs.vectors.agreement import StoredVector, measure_computing_error, stored_vectors
from unmask.attacks.outputs.vectors.attempts import AttemptSettings
from unmask.attacks.outputs.vectors.claim import ReadVector, claim_texts
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.effects_cache import load_effects
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.language_prior import USUAL_LANGUAGE, load_language
from unmask.attacks.outputs.vectors.proof import Prover
from unmask.attacks.outputs.vectors.proposals import Proposer
from unmask.attacks.outputs.vectors.search import TextSearch, VectorSearch
from unmask.attacks.run import Progress, Run, silent
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.recovery import RecoveredTexts, Recovery

_PLAIN, _LANGUAGE = AttemptSettings(0.004), AttemptSettings(0.003, nats=2.0)
_AGAIN, _LANGUAGE_AGAIN = (replace(each, dropped=0.3, patience=8) for each in (_PLAIN, _LANGUAGE))
# One after the other, the last part over and over: on a CPU a language model costs more than it saves at first.
_FIRST = {"cpu": (_PLAIN, _AGAIN, _AGAIN, _LANGUAGE), "cuda": (_PLAIN, _LANGUAGE)}
_LATER = {"cpu": (_LANGUAGE_AGAIN, _AGAIN), "cuda": (_LANGUAGE_AGAIN,)}
_NUM_ATTEMPTS = {"cpu": 8, "cuda": 40}
_AT_ONCE = {"cpu": 1, "cuda": 64}  # vectors
_EXPANDED_AT_ONCE = {"cpu": 1, "cuda": 2}  # texts of one vector
_NOT_READ = (
    "the search ended with a guess: the text is longer than was searched for, noise was added, the vector was made in "
    "another way, or the budget was too small (raise the effort)"
)
_IN_ONE_RUN = 4  # times as many vectors wait for a place
_PARTS = 100  # of a vector, that its progress is told in


@dataclass(frozen=True)
class EmbeddingAttack:
    """Settings: texts embedded in one attempt, attempts (`effort` times as many), seconds a vector.

    Longer texts than usual get larger attempts. `max_attempts=0` stands for 8, and 40 on a GPU. `language` is a model
    that writes, of the catalogue or a folder; 'none': tokens are ranked by frequency alone.
    """

    max_texts: int = 12_000
    max_attempts: int = 0
    effort: int = 1
    seconds: float = 600.0
    language: str = USUAL_LANGUAGE

    @torch.no_grad()
    def __call__(self, evidence: VectorEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """A text for every vector."""
        run = Run(progress=progress)
        embedder = Embedder(model, evidence.recipe)
        effects = compute_once(model, ("insertion effects", evidence.recipe), lambda: load_effects(embedder, progress))
        num_before = embedder.num_texts  # a fit, once a model, is no cost of this attack
        stored = stored_vectors(evidence, measure_computing_error(embedder, model, evidence.compute_dtype))
        reader = _Reader(
            TextSearch(embedder, Proposer(effects), language=lambda: load_language(self.language, model)),
            model,
            self._attempts(model),
            self.seconds,
        )
        at_once, read, started = _IN_ONE_RUN * reader.at_once, [], time.perf_counter()
        for start in range(0, len(stored), at_once):
            read += reader.read(stored[start : start + at_once], start, len(stored), progress)
        stopped = time.perf_counter() - started >= self.seconds * len(stored)
        num_texts = embedder.num_texts - num_before
        return claim_texts(read, model, num_texts, run, not_read=_NOT_READ, stopped=stopped)

    def _attempts(self, model: Model) -> tuple[AttemptSettings, ...]:
        kind = model.device.type
        count = self.effort * (self.max_attempts or _NUM_ATTEMPTS.get(kind, 8))
        first, later = (table.get(kind, table["cpu"]) for table in (_FIRST, _LATER))
        wide = _EXPANDED_AT_ONCE.get(kind, 1)
        chosen = islice(chain(first, cycle(later)), count)
        plain = self.language == "none"
        return tuple(
            replace(each, max_texts=self.max_texts, texts_at_once=wide, nats=None if plain else each.nats)
            for each in chosen
        )


@dataclass(frozen=True)
class _Reader:
    """Everything that does not depend on the vectors."""

    search: TextSearch
    model: Model
    attempts: tuple[AttemptSettings, ...]
    seconds: float

    @property
    def at_once(self) -> int:
        """Vectors that are searched together."""
        return _AT_ONCE.get(self.model.device.type, 1)

    def read(self, stored: list[StoredVector], done: int, total: int, progress: Progress) -> list[ReadVector]:
        """Search some vectors together, and test what was found."""
        started, device = time.perf_counter(), self.model.device
        searches = [VectorSearch(each.vector.to(device, torch.float32), each.agrees, self.attempts) for each in stored]
        if any(self.search.embedder.frame):
            empty = self.search.embedder.exact(TextBatch.of([()], device))
            for each, search in zip(stored, searches, strict=True):
                search.has_reached = bool(each.agrees(empty)[0])

        def watch() -> bool:
            read = sum(1.0 if search.is_done else search.share for search in searches)
            progress("reading vectors", round(_PARTS * (done + read)), _PARTS * total)
            return time.perf_counter() - started < self.seconds * len(searches)

        progress("reading vectors", _PARTS * done, _PARTS * total)
        self.search.run(searches, watch, self.at_once)
        prove = Prover(self.search.embedder, self.search.proposer.effects)
        return [prove(each, search.text, search.close) for each, search in zip(stored, searches, strict=True)]
