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

import torch

from unmask.arguments import require_count, require_token_ids
from unmask.attacks.gradients.stated_task import believe
from unmask.attacks.outputs.vectors.known_texts import KnownTextsAttack
from unmask.attacks.recover import TextEvidence, as_client_ran_it, channel_of
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.evidence.vectors import VectorEvidence
from unmask.models.adapter import Model
from unmask.models.load import require_model
from unmask.progress import Progress, shown_unless_watched
from unmask.proof.encoder_updates import EncoderProof
from unmask.proof.states import judge_states
from unmask.proof.updates import UpdateProof, merge_copies
from unmask.proof.verdicts import Decision, EncoderText, Ground, ProposedText, TextVerdict, Verdict
from unmask.recovery import AmbiguityKind, RecoveredText, RecoveredTexts, Recovery
from unmask.whole_files import written_whole
from unmask.wording import count_noun

_LONGEST, _MOST_COPIES = 100_000, 65_536
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
    proposed = [_as_proposed(model, text) for text in texts]
    if not proposed:
        raise InputError("there is no text to verify; give one at least")
    evidence.check(model)
    with shown_unless_watched(progress), torch.inference_mode(False), torch.enable_grad():
        ready = evidence.to(model.device)
        ran = as_client_ran_it(model, evidence.compute_dtype)
        if isinstance(ready, GradientEvidence):
            return _verify_update(ready, ran, merge_copies(proposed))
        if isinstance(ready, VectorEvidence):
            return _verify_vectors(ready, ran, merge_copies(proposed))
        return judge_states(ready, ran, [text.tokens for text in proposed for _ in range(text.count)])


def _as_proposed(model: Model, text: Given) -> ProposedText:
    proposed = text if isinstance(text, ProposedText) else None
    tokens = model.encode(text) if isinstance(text, str) else text if proposed is None else proposed.tokens
    given = require_token_ids("texts", tokens)
    if not given or len(given) > _LONGEST:
        raise InputError(f"a text has {len(given):,} tokens; it must have one, and {_LONGEST:,} at most")
    if max(given) >= model.vocab_size:
        raise InputError(f"token {max(given)} is beyond the model's vocabulary of {model.vocab_size:,}")
    if proposed is None:
        return ProposedText(given)
    require_count("count", proposed.count)
    if proposed.count > _MOST_COPIES:
        raise InputError(f"count is {proposed.count:,}; a text is verified {_MOST_COPIES:,} times at most")
    require_count("start", proposed.start, least=0)
    return replace(proposed, tokens=given)


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
    rows: dict[tuple[int, ...], list[RecoveredText]] = {}
    for read in found.value.texts:
        rows.setdefault(read.tokens, []).append(read)
    num_vectors = len(evidence.vectors)
    all_told = sum(len(own) for own in rows.values() if own[0].certain) == num_vectors  # each of another text
    verdicts = []
    for text in texts:
        own = rows.get(text.tokens, [])
        if not own:
            decision = Decision.REFUTED if all_told else Decision.UNDECIDED
            verdicts.append(TextVerdict(text, decision, float("inf"), why="no stored vector is that of this text"))
        elif own[0].certain or own[0].ambiguities:
            decision = Decision.CERTAIN if own[0].certain else Decision.ONE_OF_THESE
            verdicts.append(TextVerdict(text, decision, own[0].residual, own[0].ambiguities, len(own)))
        else:
            why = "its vector is a stored one, which has too few digits to exclude all others"
            verdicts.append(TextVerdict(text, Decision.UNDECIDED, own[0].residual, why=why))
    ground = Ground.VECTORS if found.certificate.holds else Ground.NONE
    left = num_vectors - sum(len(own) for own in rows.values())
    problems = (f"{count_noun(left, 'vector')} of {num_vectors} are of none of these texts",) if left > 0 else ()
    return Verdict(ground, tuple(verdicts), found.certificate.tolerance, found.certificate.rejected, problems=problems)


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
    is_count = isinstance(count, int) and not isinstance(count, bool) and 0 < count <= _MOST_COPIES
    is_text = 0 < len(tokens) <= _LONGEST and max(tokens) < 2**31
    if not is_count or not is_text or not isinstance(claim["certain"], bool):
        raise ValueError(f"a claim needs tokens, a count from 1 to {_MOST_COPIES:,}, and whether it is certain")
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
    claimed: dict[tuple[int, ...], list[Claim]] = {}
    for claim in proof.claims:
        claimed.setdefault(claim.tokens, []).append(claim)
    return replace(verdict, texts=tuple(_compare(text, claimed[text.text.tokens]) for text in verdict.texts))


def _compare(text: TextVerdict, claims: Sequence[Claim]) -> TextVerdict:
    """A verdict beside what was claimed: where less holds, it is undecided."""
    if text.decision is Decision.ONE_OF_THESE and any(claim.certain for claim in claims):
        why = "it was claimed as certain, and other texts explain the evidence as well"
        return replace(text, decision=Decision.UNDECIDED, why=why)
    count = sum(claim.count for claim in claims)
    is_open = any(point.kind is AmbiguityKind.COUNT for point in text.points)
    if text.decision is Decision.CERTAIN and (count > 1 if is_open else count not in (1, text.count)):
        why = f"it was claimed {count} times, and that is not what the evidence says"
        return replace(text, decision=Decision.UNDECIDED, why=why)
    return text


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
