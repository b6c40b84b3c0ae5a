"""Fresh sequences, which no learner used: many of one length, and a few of every other length up to 128 tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.queries.query_run import QueryRun
from unmask.errors import EvidenceError, NoAnswerError, UnmaskError
from unmask.evidence.oracles import Answers, Sequences
from unmask.linalg.heads import HeadWeights
from unmask.progress import track
from unmask.recovery import Certificate

NUM_FRESH = 48
FRESH_LENGTH = 6
_ALL_UP_TO, _LONGEST = 16, 128  # every length up to 16 is asked, and 128
_NUM_BETWEEN = 23  # lengths between the two, drawn anew for every run
_NOISE, _MORE = 1e-2, 3.0  # of an answer; times what fresh sequences are off by
_NUM_ORDINARY, _ADDED = 16, 8.0  # sequences without a boost; times the deviation of what is added to answers
_SHOWN = 4  # lengths that a sentence lists
# What a service, or a function of this process, may say to sequences that are too long for it.
_REFUSALS = (UnmaskError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def fresh_sequences(
    heads: HeadWeights,
    boost: float,
    max_norm: float,
    generator: torch.Generator,
    count: int = NUM_FRESH,
    length: int = FRESH_LENGTH,
    first: int = 0,
) -> Float[Tensor, "b n d"]:
    """Random sequences on which every head's scores are of the order of one, in turn, from head `first` on.

    With `boost` R the asking token is divided by R and the others are multiplied by it, which leaves scores alone and
    lets answers stand out from what is added to them. A token that is alone has no score, and is multiplied.
    """
    width = heads.v.shape[1]
    X = torch.randn(count, length, width, generator=generator, dtype=torch.float64).to(heads.W.device)
    sizes = torch.linalg.matrix_norm(heads.W).clamp_min(1e-30) / width  # the score of two random unit tokens
    turn = torch.arange(first, first + count, device=X.device) % max(1, len(heads))
    norm = (2 / sizes[turn]).sqrt() if len(heads) else torch.ones(count, device=X.device, dtype=X.dtype)
    boost = max(1.0, min(boost, max_norm / float(norm.max())))
    X = X / X.norm(dim=2, keepdim=True) * norm.clamp(max=max_norm / boost)[:, None, None]
    return X * boost if length == 1 else torch.cat([X[:, :-1] * boost, X[:, -1:] / boost], dim=1)


def draw_lengths(generator: torch.Generator) -> list[int]:
    """1 to 16, 23 of those between 16 and 128, and 128, but not the length that all other fresh sequences have."""
    between = torch.randperm(_LONGEST - _ALL_UP_TO - 1, generator=generator)[:_NUM_BETWEEN] + _ALL_UP_TO + 1
    every = [*range(1, _ALL_UP_TO + 1), *sorted(between.tolist()), _LONGEST]
    return [length for length in every if length != FRESH_LENGTH]


@dataclass(frozen=True)
class OtherLengths:
    """How an oracle answers sequences of other lengths: as it was learned, otherwise, or not at all."""

    equal: tuple[int, ...]
    other: tuple[int, ...]  # answered otherwise
    refused: int | None  # the first length that is not answered; longer ones were not asked
    worst: float  # of an answer, the largest error
    allowed: float
    num_queries: int

    @property
    def agree(self) -> bool:
        """Whether no length is answered otherwise."""
        return not self.other

    @property
    def longest(self) -> int:
        """The largest number of tokens that was checked."""
        return max((FRESH_LENGTH, *self.equal))

    @property
    def remark(self) -> str:
        """A sentence on what does not agree, or was refused; empty where every length agrees."""
        if not self.agree:
            shown, more = ", ".join(map(str, self.other[:_SHOWN])), len(self.other) - _SHOWN
            others = f"sequences of {shown} tokens" + (f", and of {more} other lengths," if more > 0 else "")
            by = f", by {self.worst:.1e} of an answer where {self.allowed:.1e} is explained" if self.allowed else ""
            return f" But the oracle is another function at other lengths: it answers {others} otherwise{by}."
        if self.refused is not None:
            return f" Sequences of {self.refused} tokens are refused, so this was checked up to {self.longest} tokens."
        return ""

    def extend(self, certificate: Certificate) -> Certificate:
        """The certificate with the lengths that were checked, where all of them agree."""
        if not self.agree or not self.equal:
            return certificate
        claim = f"{certificate.claim} So are those of {len(self.equal)} other lengths, up to {self.longest} tokens."
        details = {"lengths_checked": float(len(self.equal)), "longest_checked": float(self.longest)}
        return replace(certificate, claim=claim, details={**certificate.details, **details})


def check_lengths(
    run: QueryRun,
    learned: Callable[[Sequences], Answers],
    heads: HeadWeights,
    boost: float,
    fresh: Sequences,
    certificate: Certificate,
) -> OtherLengths:
    """One fresh sequence of each of 39 lengths, so that a service that treats some lengths otherwise is seen.

        |f(X) − f̂(X)| ≤ max(min(τ, 0.01), 3·ρ)·max(rms f̂, |f̂(X)|)

    Notation: f the oracle, f̂ what was `learned`; τ and ρ the tolerance and the residual of the `certificate` of the
    `fresh` sequences of one length, rms f̂ over these. Above a hundredth of an answer τ is noise, and ρ tells how much
    of it there is: it excuses no other function. Sequences are drawn for `heads` and `boost`.
    Limits: a length between 17 and 127 is asked in one run of five. What longer sequences are answered is not known.
    Cost: 39 queries, fewer where the oracle limits the length.
    """
    size, longest = float(learned(fresh).square().mean().sqrt()), min(run.profile.max_norm, 1e12)

    def measure(length: int) -> float:
        X = fresh_sequences(heads, boost, longest, run.generator, 1, length, first=length)
        answer, expected = run.evidence.ask(X), learned(X)
        if answer.shape != expected.shape:
            return torch.inf
        return float((answer - expected).abs().max()) / max(size, float(expected.abs().max()))

    return ask_other_lengths(run, measure, max(min(certificate.tolerance, _NOISE), _MORE * certificate.residual))


def check_ordinary(
    run: QueryRun, learned: Callable[[Sequences], Answers], heads: HeadWeights, boost: float, residual: float
) -> str:
    """A sentence where tokens of ordinary norm are not answered as learned; empty where they are.

        |f(X) − f̂(X)| ≤ 8·τ + 3·ρ·rms f̂

    A boost divides whatever is added to answers: noise, and any other function that is bounded as well.

    Notation: as for `check_lengths`; ρ the `residual`, τ the deviation of what the oracle adds.
    Cost: 16 queries, none where nothing is added.
    """
    added = run.profile.absolute_error
    if not added or boost <= 1:
        return ""
    X = fresh_sequences(heads, 1.0, min(run.profile.max_norm, 1e12), run.generator, _NUM_ORDINARY)
    expected = learned(X)
    worst = float((run.evidence.ask(X) - expected).abs().max())
    allowed = _ADDED * added + _MORE * residual * float(expected.square().mean().sqrt())
    if worst <= allowed:
        return ""
    return (
        f" But answers to tokens of ordinary norm are off by {worst:.1e}, where {allowed:.1e} is explained: another "
        "function that is bounded is added to these heads."
    )


def ask_other_lengths(run: QueryRun, measure: Callable[[int], float], allowed: float) -> OtherLengths:
    """`measure` the error of an answer at each length, until one is refused."""
    asked_before, refused = run.num_asked, None
    off: dict[int, float] = {}
    for length in track(draw_lengths(run.generator), "checking other lengths"):
        try:
            off[length] = measure(length)
        except (EvidenceError, NoAnswerError):
            raise
        except _REFUSALS:
            refused = length
            break
    equal = tuple(length for length, error in off.items() if error <= allowed)
    other = tuple(length for length in off if length not in equal)
    worst = max(off.values(), default=0.0)
    return OtherLengths(equal, other, refused, worst, allowed, run.num_asked - asked_before)
