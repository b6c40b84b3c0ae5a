"""What is proposed to the proof, and what it answers: each text is certain, one of a class, refuted, or undecided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unmask.proof.agreement import Agreement
from unmask.recovery import Ambiguity

Tokens = tuple[int, ...]


class Decision(Enum):
    """What the proof says of a text. The value of a member is the sentence that a user reads."""

    CERTAIN = "The batch holds exactly this text."
    ONE_OF_THESE = "The batch holds this text or another one of the class that is spelt out: they explain it equally."
    REFUTED = "The batch does not hold this text: what it would have left in the evidence is not there."
    UNDECIDED = "The evidence neither proves nor refutes this text."


class Ground(Enum):
    """What the certainty of texts rests on. The value is the claim that the certificate makes."""

    CLIENT = "the client, run again on these texts, sends the same update: every tensor agrees"
    SCALED_CLIENT = "the client, run again on these texts, sends this update up to one factor: every tensor agrees"
    ROUNDED_CLIENT = "the client, run again on these texts, sends the same update, up to the digits that were sent"
    NOISY_CLIENT = "the client, run again on these texts, sends this update up to noise: what is left has no structure"
    ARRIVALS = "the texts' rows, and no others, explain every tensor of the update below the loss"
    DEEP_SPANS = "every row of a certain text lies in the gradients' spans in the first block and in later ones"
    STATES = "every row of a certain text, computed again from its tokens alone, equals the one seen"
    VECTORS = "the vector of every certain text, computed again, equals a stored one, and that of no neighbour does"
    NONE = "nothing that was computed again confirms a text"

    @property
    def is_replay(self) -> bool:
        """Whether the client was run again and sends this update."""
        return self in (Ground.CLIENT, Ground.SCALED_CLIENT, Ground.ROUNDED_CLIENT, Ground.NOISY_CLIENT)

    @property
    def is_lossy(self) -> bool:
        """Whether the client agrees only up to what digits or noise have taken."""
        return self in (Ground.ROUNDED_CLIENT, Ground.NOISY_CLIENT)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the evidence is left unexplained."""
        return self.is_replay or self in (Ground.ARRIVALS, Ground.STATES, Ground.VECTORS)


@dataclass(frozen=True)
class ProposedText:
    """A text, how often the batch holds it, and the position of its first token; nothing of how it was found."""

    tokens: Tokens
    count: int = 1
    start: int = 0


@dataclass(frozen=True)
class EncoderText:
    """A text as the model was given it; after masked-token training what it had been, by labels that were read."""

    tokens: Tokens
    types: Tokens | None = None
    original: Tokens | None = None
    count: int = 1
    num_labels: int = 0
    unexplained: float = 0.0  # share of what arrives at it that its labels do not explain

    @property
    def proposed(self) -> ProposedText:
        """The text itself."""
        return ProposedText(self.tokens if self.original is None else self.original, self.count)


@dataclass(frozen=True)
class TextVerdict:
    """What the proof says of one text: `points` spell out its class, `why` says what keeps it from being decided."""

    text: ProposedText
    decision: Decision
    misfit: float
    points: tuple[Ambiguity, ...] = ()
    count: int = 1
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the proof says of all texts together.

    `problems` are sentences on what is open about the batch as a whole; where there are none and every text is certain,
    the batch is these texts.
    """

    ground: Ground
    texts: tuple[TextVerdict, ...]
    tolerance: float = 0.0
    rejected: float | None = None
    agreement: Agreement | None = None
    problems: tuple[str, ...] = ()
    num_passes: int = 0
    stopped: str = ""  # why the client was not run again, where memory is short

    @property
    def certain(self) -> Sequence[TextVerdict]:
        """The texts that are certain."""
        return [text for text in self.texts if text.decision is Decision.CERTAIN]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is open: the batch is these texts, each as often as is said."""
        everyone = bool(self.texts) and len(self.certain) == len(self.texts)
        return everyone and self.ground.is_whole and not self.problems
