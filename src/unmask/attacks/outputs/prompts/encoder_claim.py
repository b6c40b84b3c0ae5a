"""What is said of an encoder's texts that were read: status, certificate, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from unmask.attacks.outputs.prompts.claim import searches_of_rows
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens_ambiguity
from unmask.attacks.run import Run
from unmask.models.adapter import Model
from unmask.recovery import Certificate, RecoveredText, RecoveredTexts, Recovery, Status
from unmask.shapes import Tokens

_CLEAR = 3.0  # another token must be off by more than this many tolerances
_CLAIM = (
    "Every state of a certain text, recomputed from all of its recovered tokens, equals the observed one. The smallest "
    "rejected error is that of a text with one token replaced by the likeliest other one."
)


@dataclass(frozen=True)
class EncoderText:
    """The closest text that was found; `rejected` is how far off the nearest other text is, where that was tested.

    `equals` are, by position, the tokens that all give the states seen, where there are several.
    """

    tokens: Tokens
    distances: Float[Tensor, " n"]
    tolerances: Float[Tensor, " n"]
    rejected: float | None
    num_texts: int
    equals: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stands_out: bool = True  # whether states point nearer to tokens than noise would
    why_unbound: str = ""  # why the states do not tell that they are those of one text, where they do not

    @property
    def proven(self) -> bool:
        """Whether all states agree, and those of other texts clearly do not, up to tokens that no state tells apart."""
        agrees = bool((self.distances <= self.tolerances).all())
        return agrees and self.rejected is not None and self.rejected > _CLEAR * float(self.tolerances.max())

    @property
    def is_bound(self) -> bool:
        """Whether the states tell that they are those of one text, in this order."""
        return not self.why_unbound

    @property
    def is_exact(self) -> bool:
        """Whether these tokens give the states seen, and no others do."""
        return self.proven and not self.equals

    @property
    def certain(self) -> bool:
        """Whether this is the text, and no other one."""
        return self.is_exact and self.is_bound

    @property
    def certain_tokens(self) -> frozenset[int]:
        """Tokens that stand in the text and nowhere beside others like them."""
        places = enumerate(self.tokens.tolist()) if self.proven else ()
        return frozenset(token for position, token in places if position not in self.equals)


def claim_encoder_prompts(texts: Sequence[EncoderText], model: Model, run: Run) -> Recovery[RecoveredTexts]:
    """Certain texts first; only what is proven supports the bag of tokens."""
    ordered = sorted(texts, key=lambda text: (not text.certain, not text.proven))
    proven = [text for text in ordered if text.proven]
    status = _status(texts)
    runs = sum(text.num_texts for text in texts)
    return Recovery(
        value=RecoveredTexts(
            tuple(_as_recovered_text(text, model) for text in ordered),
            frozenset().union(*(text.certain_tokens for text in proven)),
            tuple(dict.fromkeys(equal for text in proven for equal in text.equals.values())),
        ),
        status=status,
        reason=_reason(texts),
        certificate=_certificate(proven) if status.conclusive else Certificate.none("no text gives all of the states"),
        cost=run.cost(candidates=runs, forward_passes=runs),
        used=("states",),
        searches=tuple(
            search
            for text in texts
            for search in searches_of_rows(text.proven, text.is_bound or text.is_exact, not text.stands_out)
        ),
    )


def _as_recovered_text(text: EncoderText, model: Model) -> RecoveredText:
    tokens = tuple(text.tokens.tolist())
    ambiguities = tuple(
        equal_tokens_ambiguity(model, position, equal)
        for position, equal in text.equals.items()
        if text.proven and text.is_bound
    )
    return RecoveredText(
        tokens, model.decode(tokens), text.certain, float(text.distances.max()), ambiguities=ambiguities
    )


def _status(texts: Sequence[EncoderText]) -> Status:
    if texts and all(text.certain for text in texts):
        return Status.RECOVERED
    if any(text.certain_tokens for text in texts):
        return Status.PARTIAL
    return Status.NOT_IDENTIFIABLE if any(text.proven for text in texts) else Status.NOTHING_FOUND


def _certificate(proven: Sequence[EncoderText]) -> Certificate:
    worst = max(proven, key=lambda text: float((text.distances / text.tolerances).max()))
    index = int((worst.distances / worst.tolerances).argmax())
    rejected = min(text.rejected for text in proven if text.rejected is not None)
    details = {"texts_run_a_text": sum(text.num_texts for text in proven) / len(proven)}
    return Certificate(_CLAIM, float(worst.distances[index]), float(worst.tolerances[index]), rejected, details)


def _reason(texts: Sequence[EncoderText]) -> str:
    num_exact, num_proven = sum(text.is_exact for text in texts), sum(text.proven for text in texts)
    parts = [f"texts that give all observed states when recomputed: {num_exact} of {len(texts)}"]
    parts += dict.fromkeys(text.why_unbound for text in texts if text.proven and text.why_unbound)
    if num_proven > num_exact:
        parts.append(
            "texts proven except for tokens with equal embeddings, which no state tells apart: "
            f"{num_proven - num_exact}"
        )
    rest = [text for text in texts if not text.proven]
    if rest:
        agreeing = sum(int((text.distances <= text.tolerances).sum()) for text in rest)
        total = sum(len(text.tokens) for text in rest)
        parts.append(
            f"the others are guesses without any certain token ({agreeing} of {total} states agree): the budget ended, "
            "noise was added, or they are pairs"
        )
    if drowned := sum(not text.stands_out for text in rest):
        parts.append(
            f"in {drowned} of them no token's state is nearer than chance has it: noise, or what is left out, hides "
            "all of them"
        )
    return "; ".join(parts) + "."
