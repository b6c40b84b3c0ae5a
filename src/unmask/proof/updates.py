"""Is an update that of these texts? It is computed again from them, compared, and what else would agree is spelt out.

    client    the whole update is what the stated client sends for these texts, tensor by tensor
    rows      it is what the texts' rows give for some loss on top of them (`update_rows.py`)
    spans     texts are missing, and every row of a text lies in the spans of later blocks (`update_rows.py`)

The first that holds is the ground of what is certain. Then every line of the table of alternatives is asked.

Limits: see `Ambiguity`. Cost: one client's work for the first, about the same for each of the others if it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.evidence.tensor_files import StoredTensors, by_size
from unmask.linalg.coarse import Coarseness, storage_of
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement, agree
from unmask.proof.alternatives import (
    COUNT_IS_UNSTATED,
    Explains,
    Situation,
    are_equal_labels,
    counts_by_means,
    equal_inputs,
    find_alternatives,
    may_be_fewer,
    open_count,
    with_token,
)
from unmask.proof.arrivals import Arrivals
from unmask.proof.label_flow import Prefix
from unmask.proof.near_tokens import ReplayedTexts, find_confusable
from unmask.proof.noisy_agreement import Loss, NoisyAgreement, agree_with_noise
from unmask.proof.replay import another_client, can_replay, replay, replay_and_agree, why_not_replayed, why_stopped
from unmask.proof.sketched_replay import SketchedClient
from unmask.proof.update_rows import Doubts, RowReading, arrivals_at, is_labelled, read_rows, read_spans
from unmask.proof.verdicts import Decision, EncoderText, Ground, ProposedText, TextVerdict, Tokens, Verdict
from unmask.wording import count_noun

_MOST_MEMBERS = 16  # of a class of equal tokens that are tried one by one
_TELLING = 4096  # entries other than zero, in which a grid, few digits or missing ones show
_CONFUSABLE = "a token less, or one near a token of it, would send the same up to what was lost"

Side = Literal["left", "right"]
Texts = Sequence[ProposedText]
Copied = TypeVar("Copied", ProposedText, EncoderText)


@dataclass(frozen=True)
class Replayed:
    """How well the client agrees; `is_merged` if rows of equal tokens were added up."""

    agreement: Agreement
    is_merged: bool = False


@dataclass
class UpdateProof:
    """What one update says of texts; what was computed for some of them is kept.

    `client`: one that has run its forward passes over the texts, but for their last tokens.
    """

    evidence: GradientEvidence
    model: Model
    client: SketchedClient | None = None
    num_passes: int = field(default=0, init=False)
    stopped: str = field(default="", init=False)  # why the client was not run, where memory is short

    def __post_init__(self) -> None:
        self.working = as_gradient(self.evidence)
        self.labelled = is_labelled(self.evidence, self.model)
        self._replayed: dict[tuple[object, ...], Replayed] = {}
        self._arrivals: dict[tuple[Prefix, ...], tuple[list[Prefix], Arrivals | None, bool]] = {}
        self._likely: dict[tuple[Tokens, int], float] = {}
        self._again: tuple[tuple[ProposedText, ...], Mapping[str, Tensor]] | None = None

    def judge(self, texts: Texts, *, beside: Sequence[Prefix] = ()) -> Verdict:
        """Decide on texts of an update that is exact. `beside`: prefixes that have rows as well; nothing is claimed."""
        texts = merge_copies(texts)
        if not texts:
            return Verdict(Ground.NONE, ())
        found = self.replay(texts)
        if found is not None and (found.agreement.holds or found.agreement.holds_up_to_scale):
            return self._conclude_replay(texts, found)
        if self.is_coarse:
            return self._undecided(texts, None if found is None else found.agreement)
        rows = read_rows(self.working, self.model, texts, beside, self.arrivals_at)
        return self._conclude_rows(texts, rows or read_spans(self.working, self.model, texts), found)

    @cached_property
    def is_coarse(self) -> bool:
        """Whether few digits or only some entries were sent: a replay agrees with nearly right texts too."""
        return is_coarse(self.working, self.model)

    def arrivals_at(self, leaves: Sequence[Prefix]) -> tuple[list[Prefix], Arrivals | None, bool]:
        """What arrives at every prefix of some texts that has a row of its own; and whether equal rows are merged."""
        key = tuple(sorted(leaves))
        if key not in self._arrivals:
            self.num_passes += 2 * len(leaves)
            self._arrivals[key] = arrivals_at(self.working, self.model, key)
        return self._arrivals[key]

    # ---- the client, run again

    def replay(self, texts: Texts) -> Replayed | None:
        """The best agreement over the sides that batches are padded on; None where the client is not run again."""
        lengths = {len(text.tokens) for text in texts}
        is_stated = self.labelled and can_replay(self.evidence, sum(text.count for text in texts), by_tensor=True)
        if not is_stated or self.is_coarse or min(lengths) < 2 or max(lengths) > self.model.max_positions:
            return None
        sides: list[Side] = ["left"] if any(text.start for text in texts) else ["right", "left"]
        found: list[Replayed] = []
        for side in sides[: 1 if len(lengths) == 1 else 2]:
            try:
                found.append(self._run(texts, side))
            except InputError as error:
                self.stopped = why_stopped(error)
                return None
            if found[-1].agreement.holds:
                break
        return min(found, key=lambda each: each.agreement.misfit_as_is)

    def _run(self, texts: Texts, side: Side) -> Replayed:
        """The client on texts; rows of equal tokens are added up if they do not agree one by one."""
        key = (side, *((text.tokens, text.count) for text in texts))
        if key not in self._replayed:
            tokens = [text.tokens for text in texts for _ in range(text.count)]

            def run(**options: Any) -> Agreement:
                self.num_passes += len(tokens)
                return replay_and_agree(
                    self.evidence,
                    self.model,
                    tokens,
                    padding_side=side,
                    client=self.client,
                    likely=self._likely,
                    **options,
                )

            found = Replayed(run())
            classes = [] if found.agreement.holds else self._classes(texts)
            if classes:
                by_token = [name for name in (self.model.token_embedding, self.model.unembedding_name) if name]
                merged = run(by_token=by_token, equal=classes)
                found = Replayed(merged, is_merged=True) if merged.holds else found
            self._replayed[key] = found
        return self._replayed[key]

    def _classes(self, texts: Texts) -> list[tuple[int, ...]]:
        tokens = {token for text in texts for token in text.tokens}
        return list(dict.fromkeys(equal_inputs(self.model, tokens).values()))

    def _conclude_replay(self, texts: Texts, found: Replayed) -> Verdict:
        ground = Ground.CLIENT if found.agreement.holds else Ground.SCALED_CLIENT
        if found.is_merged:
            texts, found = self._with_told_members(texts, found)

        def explains(text: ProposedText, place: int, token: int) -> bool:
            other = self.replay(with_token(texts, text, place, token))
            if other is None or (other.is_merged and not found.is_merged):
                return False
            return other.agreement.holds if ground is Ground.CLIENT else other.agreement.holds_up_to_scale

        here = self._situation(texts, ground, found.agreement, explains)
        agreement = found.agreement
        misfit = agreement.misfit_as_is if ground is Ground.CLIENT else agreement.misfit
        return self._decide(here, {}, dict.fromkeys(texts, misfit), agreement.tolerance)

    def _with_told_members(self, texts: Texts, found: Replayed) -> tuple[Texts, Replayed]:
        """The member of a class that agrees without rows being added up, in all places of it, if one alone does."""
        classes = self._classes(texts)
        if len(classes) != 1 or len(classes[0]) > _MOST_MEMBERS:
            return texts, found
        right = []
        for member in classes[0]:
            chosen = [
                replace(text, tokens=tuple(member if t in classes[0] else t for t in text.tokens)) for text in texts
            ]
            other = self.replay(chosen)
            if other is not None and other.agreement.holds and not other.is_merged:
                right.append((chosen, other))
        return right[0] if len(right) == 1 else (texts, found)

    # ---- up to few digits, or noise

    def judge_blurred(self, texts: Texts) -> Verdict:
        """The same of an update that may have few digits or noise: a client agrees up to these, or not at all."""
        texts = merge_copies(texts)
        found = self.replay_blurred(texts)
        if found is None:
            return self._undecided(texts, None)
        if isinstance(found, Agreement):
            return self._conclude_replay(texts, Replayed(found)) if found.holds else self._undecided(texts, found)
        if not found.holds:
            return self._undecided(texts, found.agreement)
        ground = Ground.ROUNDED_CLIENT if found.loss is Loss.DIGITS else Ground.NOISY_CLIENT
        num_labels = sum(text.count * (len(text.tokens) - 1) for text in texts)
        shares = [(len(text.tokens) - 1) / num_labels for text in texts]
        replayed = ReplayedTexts([text.tokens for text in texts], shares, self.update_of(texts))
        near = find_confusable(self.evidence, self.model, replayed, found.loss)
        doubts = {texts[place]: (Decision.UNDECIDED, _CONFUSABLE) for place in near}

        def explains(text: ProposedText, place: int, token: int) -> bool:
            other = self.replay_blurred(with_token(texts, text, place, token))
            return other is not None and other.holds

        here = self._situation(texts, ground, found.agreement, explains)
        return self._decide(here, doubts, dict.fromkeys(texts, found.agreement.misfit), found.agreement.tolerance)

    def replay_blurred(self, texts: Texts) -> Agreement | NoisyAgreement | None:
        """How the client agrees: exactly, else as digits or noise allow; None where it is not run again."""
        is_stated = self.labelled and can_replay(self.evidence, sum(text.count for text in texts))
        if not is_stated or any(text.start or len(text.tokens) < 2 for text in texts):
            return None
        try:
            again = self.update_of(texts)
        except InputError as error:
            self.stopped = why_stopped(error)
            return None
        exact = None if self.is_coarse else agree(self.evidence, again)
        if exact is not None and exact.holds:
            return exact
        return agree_with_noise(self.evidence, again, sum((len(text.tokens) - 1) * text.count for text in texts))

    def update_of(self, texts: Texts) -> Mapping[str, Tensor]:
        """What the client sends for texts; that of the last ones is kept."""
        if self._again is None or self._again[0] != tuple(texts):
            tokens = [text.tokens for text in texts for _ in range(text.count)]
            self._again = tuple(texts), replay(self.evidence, self.model, tokens)
            self.num_passes += len(tokens)
        return self._again[1]

    # ---- rows of the texts

    def _conclude_rows(self, texts: Texts, rows: RowReading, replayed: Replayed | None) -> Verdict:
        self.num_passes += rows.num_passes

        def explains(text: ProposedText, place: int, token: int) -> bool:
            is_read = (text.start, text.tokens[: place + 1]) in rows.read_labels
            is_input = not self.labelled or place < len(text.tokens) - 1
            if is_read and not are_equal_labels(self.model, text.tokens[place], token):
                return False
            return not (is_input and rows.tells_inputs)

        agreement = rows.arrivals.agreement if rows.arrivals else replayed.agreement if replayed else None
        here = replace(
            self._situation(texts, rows.ground, agreement, explains),
            reads_inside=rows.reads_inside,
            has_masked_labels=rows.has_masked_labels,
            goes_on=rows.goes_on,
            shows_ends=rows.shows_ends,
        )
        found = self._decide(here, rows.doubts, rows.misfits, rows.tolerance, rows.problems)
        return replace(found, rejected=rows.rejected)

    # ---- from what agrees to what is said

    def _undecided(self, texts: Texts, agreement: Agreement | None) -> Verdict:
        doubts = dict.fromkeys(texts, (Decision.UNDECIDED, "no client that was run again sends this update"))
        here = self._situation(texts, Ground.NONE, agreement, lambda *_: False)
        return self._decide(here, doubts, dict.fromkeys(texts, math.inf), 0.0)

    def _situation(self, texts: Texts, ground: Ground, agreement: Agreement | None, explains: Explains) -> Situation:
        return Situation(self.evidence, self.model, texts, ground, self.labelled, explains, agreement, self._likely)

    def _decide(
        self,
        here: Situation,
        doubts: Doubts,
        misfits: Mapping[ProposedText, float],
        tolerance: float,
        problems: Sequence[str] = (),
    ) -> Verdict:
        """Every text with what the table of alternatives leaves open about it, and what is open about all of them."""
        texts, ground, stated = here.texts, here.ground, self.evidence.num_texts
        doubts = dict(doubts)
        if ground is Ground.NONE:  # nothing says that this is how the update was made
            doubts = {text: (Decision.UNDECIDED, why) for text, (_, why) in doubts.items()}
        if stated is not None and len(texts) > stated:
            why = f"the batch holds {count_noun(stated, 'text')}, so these are too many, and none is certain"
            doubts = dict.fromkeys(texts, (Decision.UNDECIDED, why)) | {
                text: doubt for text, doubt in doubts.items() if doubt[0] is Decision.REFUTED
            }
            problems = [*problems, why]
        for text in texts:
            if text not in doubts and self._is_part_of_another(text, here):
                doubts[text] = Decision.UNDECIDED, "it may be the beginning of another text"
            if text not in doubts and ground.is_replay and min(here.likely(text)) > 1 - here.silent:
                doubts[text] = Decision.UNDECIDED, "the model is sure of all of its tokens, so it leaves no trace"
        covered = [text for text in texts if text not in doubts]
        points = find_alternatives(here) if covered else {}
        refuted = [text for text, (decision, _) in doubts.items() if decision is Decision.REFUTED]
        why_open = self._why_counts_are_open(here, covered, refuted)
        told = self._counts_are_told(here)
        verdicts = []
        for text in texts:
            open_points = points.get(text, ()) if text in covered else ()
            decision, why = doubts.get(text, (Decision.CERTAIN, ""))
            if open_points:  # what is open about a text may lie in what is missing: then it is a guess
                decision = Decision.ONE_OF_THESE if ground.is_whole else Decision.UNDECIDED
                why = open_points[0].reason
            is_said = decision in (Decision.CERTAIN, Decision.ONE_OF_THESE)
            counts = (open_count(why_open),) if why_open and is_said else ()
            is_run = len(set(text.tokens)) == 1 and not self.model.learned_positions
            count = text.count if is_said and told and not is_run else 1
            said = (*open_points, *counts) if is_said else ()
            verdicts.append(TextVerdict(text, decision, misfits[text], said, count, why))
        if why_open:
            problems = [*problems, open_count(why_open).reason]
        if not ground.is_whole:
            problems = [self._why_unexplained(texts), *problems]
        return Verdict(
            ground,
            tuple(verdicts),
            tolerance,
            agreement=here.agreement,
            problems=tuple(problems),
            num_passes=self.num_passes,
            stopped=self.stopped,
        )

    def _why_unexplained(self, texts: Texts) -> str:
        return self.stopped or why_not_replayed(self.evidence, by_tensor=True) or another_client(self.evidence)

    def _is_part_of_another(self, text: ProposedText, here: Situation) -> bool:
        """Whether what seems to be a text of its own may be the start of another one.

        A text of one repeated token may be the run at another's start; an end inside a longer text may be a masked
        label.
        """
        others = [other.tokens for other in here.texts if other is not text and other.start == text.start]
        if not here.shows_ends and any(other[: len(text.tokens)] == text.tokens for other in others):
            return True  # its last label, or its end, may be that of the longer one
        stated = self.evidence.all_tokens_predicted is True if self.labelled else self.evidence.task is not None
        if not stated and any(other[: len(text.tokens)] == text.tokens for other in others):
            return True
        if not stated:  # of two runs the shorter one is a part
            others = [other for other in others if len(set(other)) > 1]
        if len(set(text.tokens)) > 1 or self.model.learned_positions or (stated and text not in here.of_open_runs):
            return False
        return any(other[0] == text.tokens[0] for other in others)

    def _counts_are_told(self, here: Situation) -> bool:
        """Whether the weights of labels are counts: as many as texts were stated, in a mean over one client's tokens.

        That it is one is not known: a mean of each text's own mean must not give as many texts with other counts. Nor
        is it known that every text has a label.
        """
        counts = [text.count for text in here.texts]
        is_plain = here.ground.is_replay and here.ground is not Ground.SCALED_CLIENT
        if self.evidence.num_clients != 1 or not is_plain or sum(counts) != self.evidence.num_texts:
            return False
        return not may_be_fewer(counts, self.labelled) and self._counts_by_means(here) in (None, counts)

    def _counts_by_means(self, here: Situation) -> list[int] | None:
        labels = [len(text.tokens) - 1 for text in here.texts]
        return counts_by_means([text.count for text in here.texts], labels, self.evidence.num_texts or 0)

    def _why_counts_are_open(self, here: Situation, covered: Texts, refuted: Texts) -> str | None:
        """Why it is open how often texts occur; None where it is known.

        Where runs of a first token are open, so is the number of texts that start with it.
        """
        stated = self.evidence.num_texts
        texts = [text for text in here.texts if text not in refuted]
        if stated is None:
            return COUNT_IS_UNSTATED
        total = sum(text.count for text in texts)
        runs = bool(here.of_open_runs)
        counts = {text.count for text in texts}
        is_one = here.ground is Ground.CLIENT and self.evidence.num_clients == 1 and len(counts) > 1
        if is_one and total > stated and self._counts_by_means(here) is None:
            return f"the client sends this update for {count_noun(total, 'text')}, but {stated} were stated"
        if len(texts) == stated and here.ground.is_whole and len(covered) == len(texts) and not runs:
            return None  # each of them occurs, so each occurs once
        if not self._counts_are_told(here):
            if here.ground.is_replay and total == stated and math.gcd(*counts) > 1:
                return (
                    f"found {len(texts)} of {total} texts; the rest are copies, or texts of one token, which leave no "
                    "trace"
                )
            return f"found {len(texts)} of {count_noun(stated, 'text')}; a text's weight need not be its count"
        if total == stated and not runs:
            return None
        return f"found {total} of {count_noun(stated, 'text')}; the rest are copies or cannot be seen"


def merge_copies(texts: Sequence[Copied]) -> list[Copied]:
    """Each text once, with how often it was proposed."""
    counts: dict[Copied, int] = {}
    for text in texts:
        if text.tokens:
            one = replace(text, count=1)
            counts[one] = counts.get(one, 0) + text.count
    return [replace(text, count=count) for text, count in counts.items()]


def is_coarse(evidence: GradientEvidence, model: Model) -> bool:
    """Whether the update has few digits, or only some of its entries: a replay agrees with nearly right texts too."""
    if evidence.compute_dtype in (torch.bfloat16, torch.float16):
        return True
    # Any tensor tells: the smallest that has entries enough to see levels in.
    sizes = by_size(evidence.gradients)
    telling = next((name for name in sizes if int(evidence.gradients[name].count_nonzero()) >= _TELLING), sizes[-1])
    update = evidence.gradients[telling]
    if storage_of(update).kind is Coarseness.FINE:
        return False
    weights = {**dict(model.named_parameters()), **evidence.adapters}.get(telling)
    return evidence.update is not Update.DELTA or weights is None or not _is_difference(update, weights.detach())


def _is_difference(delta: Tensor, weights: Tensor) -> bool:
    """Whether a delta is coarse only as any difference of two weights is: by their rounding, which a replay shares."""
    return bool(((weights + delta) - weights == delta).all())


def as_gradient(evidence: GradientEvidence) -> GradientEvidence:
    """One plain step of gradient descent as its gradient, −Δ/learning rate; everything else as it is.

    Where the learning rate is not known, the gradient is right up to a factor.
    """
    plain = evidence.optimizer in (None, "sgd") and not evidence.weight_decay and not evidence.momentum
    if evidence.update is not Update.DELTA or evidence.num_steps not in (None, 1) or not plain:
        return evidence
    rate = evidence.learning_rate or 1.0
    sent = evidence.gradients
    if isinstance(sent, StoredTensors):
        return replace(evidence, gradients=sent.divided_by(-rate), update=Update.GRADIENT)
    gradients = {name: delta / -rate for name, delta in sent.items()}
    return replace(evidence, gradients=gradients, update=Update.GRADIENT)
