"""Which of the texts that an adversary expects are behind vectors: embed them all and compare.

    candidates    lines of a file: names, templates with every value, system prompts that are public
    screen        every candidate's vector beside every stored one
    proof         the closest one's vector in float64 is the stored one, and that of no neighbour is (proof.py)

Works for texts of any length, and where no search can: the last state of a decoder, or a row of its logits.

Limits: finds what is in the file. That a text is not there says nothing of other texts.
Cost: one forward pass a candidate, and one comparison a candidate and vector.
Source: a dictionary attack, as on stored passwords; the proof is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.agreement import measure_computing_error, stored_vectors
from unmask.attacks.outputs.vectors.claim import claim_texts
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.effects_cache import read_sentences
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.proof import Prover
from unmask.attacks.run import Progress, Run, silent
from unmask.errors import InputError
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.models.pooling import max_length_of
from unmask.recovery import RecoveredTexts, Recovery

_AT_ONCE = {"cpu": 256, "cuda": 16_384}  # candidates
_NUM_CLOSE = 8  # of a vector, which are compared exactly
_NOT_READ = "no candidate is the text, which says nothing of other texts"


@dataclass(frozen=True)
class KnownTextsAttack:
    """Settings: a file with one candidate a line, or `texts`, as strings or as all of their token ids."""

    file: str = ""
    texts: tuple[str | tuple[int, ...], ...] = ()

    @torch.no_grad()
    def __call__(self, evidence: VectorEvidence, model: Model, progress: Progress = silent) -> Recovery[RecoveredTexts]:
        """The candidate behind every vector, if there is one."""
        run = Run(progress=progress)
        embedder = Embedder(model, evidence.recipe)
        candidates = _encode(model, embedder, self._lines())
        stored = stored_vectors(evidence, measure_computing_error(embedder, model, evidence.compute_dtype))
        off = torch.full((len(stored), 0), torch.inf, dtype=torch.float64, device=model.device)
        rows = torch.zeros((len(stored), 0), dtype=torch.long, device=model.device)
        at_once = _AT_ONCE.get(model.device.type, 256)
        for start in range(0, len(candidates), at_once):
            progress("comparing known texts", start, len(candidates))
            vectors = embedder.precise(TextBatch.of(candidates[start : start + at_once], model.device))
            excess = torch.stack([each.excess(vectors) for each in stored])
            new = torch.arange(start, start + len(vectors), device=rows.device).expand(len(stored), -1)
            off, rows = torch.cat([off, excess.to(off)], 1), torch.cat([rows, new], 1)
            off, order = off.sort(dim=1)
            off, rows = off[:, :_NUM_CLOSE], rows.gather(1, order)[:, :_NUM_CLOSE]
        prove = Prover(embedder, compute_once(model, "likeness of tokens", lambda: likeness_of(model)))
        read = []
        for each, closest in zip(stored, rows.tolist(), strict=True):
            near = [candidates[row] for row in closest]
            found = prove(each, near[0], TextBatch.of(near, model.device))
            read.append(found if found.agrees else replace(found, tokens=()))
        return claim_texts(read, model, len(candidates), run, not_read=_NOT_READ)

    def _lines(self) -> Sequence[str | tuple[int, ...]]:
        if bool(self.file) == bool(self.texts):
            raise InputError(
                "known-texts needs the texts to look for: known-texts:file=PATH, one a line, or in Python "
                "KnownTextsAttack(texts=(…))"
            )
        lines = self.texts or _read_lines(Path(self.file))
        if not lines:
            raise InputError(f"the file {self.file} has no text in it; write one candidate a line")
        return lines


@dataclass(frozen=True)
class EmbeddingLikeness:
    """Tokens are alike where their embeddings are."""

    rows: Float[Tensor, "vocab d"]
    log_prior: Float[Tensor, " vocab"]


def likeness_of(model: Model) -> EmbeddingLikeness:
    """Likeness by the token embedding, and frequencies in ordinary sentences."""
    tokens: Int[Tensor, " n"] = torch.tensor([token for text in read_sentences(model) for token in text])
    counts = torch.bincount(tokens, minlength=model.vocab_size).to(model.device)
    return EmbeddingLikeness(model.parameter(model.token_embedding).detach().float(), (counts + 0.01).log())


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the file of known texts {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the file of known texts {path} is not UTF-8 text: {error.reason}") from error
    return list(dict.fromkeys(line for line in text.splitlines() if line.strip()))


def _encode(model: Model, embedder: Embedder, lines: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Tokens of candidates without those that frame every text, cut as the model's folder says."""
    opening, closing = embedder.frame
    prefix = model.decode(embedder.recipe.prefix) if embedder.recipe.prefix else ""
    longest = max_length_of(model) - len(opening) - len(closing)
    found = []
    for line in lines:
        framed = tuple(model.encode(prefix + line)) if isinstance(line, str) else line
        if isinstance(line, str) and framed[: len(opening)] != opening:  # one word with the prefix: as if apart
            framed = (*opening, *model.encode(line)[len(opening) - len(embedder.recipe.prefix) :])
        found.append(framed[len(opening) : len(framed) - len(closing)][:longest])
    candidates = list(dict.fromkeys(text for text in found if text))
    if not candidates:
        raise InputError("none of the known texts has a token of its own; write candidates that the tokenizer reads")
    return candidates
