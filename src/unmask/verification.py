"""Checks texts against evidence, without any search: what `proof` decides, for every kind of evidence.

Whoever is told that a text was recovered can check it with this, on another machine: it needs the evidence, the model
and the text, and neither the attack nor its seed. A proof file keeps what was claimed, with digests of the evidence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unmask.arguments import require_token_ids
from unmask.attacks.gradients.stated_task import believe
from unmask.attacks.outputs.vectors.known_texts import KnownTextsAttack
from unmask.attacks.recover import TextEvidence, as_client_ran_it, channel_of
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.progress import Progress, shown_unless_watched
from unmask.proof.encoder_updates import EncoderProof, EncoderText
from unmask.proof.states import judge_states
from unmask.proof.updates import UpdateProof, merge_copies
from unmask.proof.verdicts import Decision, Ground, ProposedText, TextVerdict, Verdict
from unmask.recovery import RecoveredTexts, Recovery
from unmask.whole_files import written_whole

FORMAT, VERSION = "unmask.proof", 1
Given = str | Sequence[int] | ProposedText


class ProofError(InputError):
    """A proof file that cannot be read, or that is not of this evidence."""


def verify(
    evidence: TextEvidence, model: Model, texts: Sequence[Given], *, progress: Progress | None = None
) -> Verdict:
    """Whether the evidence is of these texts: each is certain, one of a class, refuted, or undecided.

    `texts` are strings, token ids, or `ProposedText` with counts; of an update all that the batch holds, of states and
    caches one for each row, in their order. Nothing is searched: a text that is not given is not found.
    """
    require_model(model)
    channel_of(evidence)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InputError(f"texts must be a list of texts, got {type(texts).__name__}")
    proposed = merge_copies([_as_proposed(model, text) for text in texts])
    if not proposed:
        raise InputError("there is no text to verify; give one at least")
    evidence.check(model)
    with shown_unless_watched(progress):
        ready = evidence.to(model.device)
        ran = as_client_ran_it(model, evidence.compute_dtype)
        if isinstance(ready, GradientEvidence):
            return _verify_update(ready, ran, proposed)
        if isinstance(ready, VectorEvidence):
            return _verify_vectors(ready, ran, proposed)
        return judge_states(ready, ran, [text.tokens for text in proposed for _ in range(text.count)])


def _as_proposed(model: Model, text: Given) -> ProposedText:
    if isinstance(text, ProposedText):
        return text
    tokens = tuple(model.encode(text)) if isinstance(text, str) else require_token_ids("texts", text)
    if not tokens:
        raise InputError("a text has no tokens; leave it out")
    if max(tokens) >= model.vocab_size:
        raise InputError(f"token {max(tokens)} is beyond the model's vocabulary of {model.vocab_size}")
    return ProposedText(tuple(tokens))


def _verify_update(evidence: GradientEvidence, model: Model, texts: list[ProposedText]) -> Verdict:
    evidence, _ = believe(evidence, model)
    if model.causal:
        exact = UpdateProof(evidence, model).judge(texts)
        blurred = None if exact.ground is not Ground.NONE else UpdateProof(evidence, model).judge_blurred(texts)
        return exact if blurred is None or blurred.ground is Ground.NONE else blurred
    given = [EncoderText(text.tokens, count=text.count) for text in texts]
    proof = EncoderProof(evidence, model)
    why = "after masked-token training a text's masks are not known" if evidence.task is Task.MASKED_TOKEN else ""
    exact = proof.judge(given, why_masked=why)
    return proof.judge(given, blurred=True, why_masked=why) if exact.ground is Ground.NONE else exact


def _verify_vectors(evidence: VectorEvidence, model: Model, texts: list[ProposedText]) -> Verdict:
    """Which of the vectors, if any, each text has."""
    found = KnownTextsAttack(texts=tuple(text.tokens for text in texts))(evidence, model)
    by_tokens = {text.tokens: text for text in found.value.texts if text.row is not None}
    verdicts = []
    for text in texts:
        read = by_tokens.get(text.tokens)
        if read is None:
            decision = Decision.REFUTED if found.value.certain else Decision.UNDECIDED
            verdicts.append(TextVerdict(text, decision, float("inf"), why="no stored vector is that of this text"))
        elif read.certain or read.ambiguities:
            decision = Decision.CERTAIN if read.certain else Decision.ONE_OF_THESE
            verdicts.append(TextVerdict(text, decision, read.residual, read.ambiguities))
        else:
            why = "its vector is a stored one, which has too few digits to exclude all others"
            verdicts.append(TextVerdict(text, Decision.UNDECIDED, read.residual, why=why))
    ground = Ground.VECTORS if found.certificate.holds else Ground.NONE
    return Verdict(ground, tuple(verdicts), found.certificate.tolerance, found.certificate.rejected)


# ---- proof files


@dataclass(frozen=True)
class Claim:
    """A text as it was claimed: certain, or one of a class."""

    tokens: tuple[int, ...]
    text: str
    count: int
    certain: bool
    row: int | None = None


@dataclass(frozen=True)
class ProofFile:
    """What was claimed of evidence, and digests of the evidence and the model that it was claimed of."""

    evidence: str
    sha256: str
    model: str
    model_fingerprint: str
    status: str
    claims: tuple[Claim, ...]

    def write(self, path: Path) -> Path:
        """Write it as JSON."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        with written_whole(path) as part:
            part.write_text(json.dumps(document, ensure_ascii=True, indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> ProofFile:
        """Read one; whatever is no proof is refused."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, Mapping) or document.get("format") != FORMAT:
                raise ProofError(f"{path} is no proof: `unmask recover text … --proof {path.name}` writes one")
            if document.get("version") != VERSION:
                raise ProofError(f"{path} has version {document.get('version')}, and this unmask reads {VERSION}")
            claims = tuple(_read_claim(claim) for claim in document["claims"])
            names = ("evidence", "sha256", "model", "model_fingerprint", "status")
            fields: dict[str, Any] = {name: str(document[name]) for name in names}
        except (OSError, UnicodeDecodeError) as error:
            raise ProofError(f"{path} cannot be read: {error}") from None
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ProofError(f"{path} is no complete proof: {error}") from None
        return cls(claims=claims, **fields)


def _read_claim(claim: Mapping[str, Any]) -> Claim:
    tokens, count, row = require_token_ids("tokens", claim["tokens"], ProofError), claim["count"], claim.get("row")
    if not tokens or not isinstance(count, int) or count < 1 or not isinstance(claim["certain"], bool):
        raise ValueError("a claim needs tokens, a count of 1 or more, and whether it is certain")
    return Claim(tokens, str(claim["text"]), count, claim["certain"], row if isinstance(row, int) else None)


def prove(evidence: Path, model: Model, name: str, recovery: Recovery[RecoveredTexts]) -> ProofFile:
    """What a recovery claims of an evidence file; guesses are no claims."""
    claims = tuple(
        Claim(text.tokens, text.text, text.count, text.certain, text.row)
        for text in recovery.value.texts
        if text.certain or text.ambiguities
    )
    return ProofFile(str(evidence), digest_of(evidence), name, model.fingerprint(), recovery.status.name, claims)


def check_proof(proof: ProofFile, evidence: TextEvidence, model: Model) -> Verdict:
    """Verify the claims of a proof file; one that was certain and is not any more is undecided."""
    if proof.model_fingerprint != model.fingerprint():
        raise ProofError("the proof was made with another model than the one given; load the weights that it names")
    if not proof.claims:
        raise ProofError("the proof claims no text, so there is nothing to verify")
    verdict = verify(evidence, model, [ProposedText(claim.tokens, claim.count) for claim in proof.claims])
    certain = {claim.tokens for claim in proof.claims if claim.certain}
    weaker = "it was claimed as certain, and other texts explain the evidence as well"
    texts = tuple(
        replace(text, decision=Decision.UNDECIDED, why=weaker)
        if text.text.tokens in certain and text.decision is Decision.ONE_OF_THESE
        else text
        for text in verdict.texts
    )
    return replace(verdict, texts=texts)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
