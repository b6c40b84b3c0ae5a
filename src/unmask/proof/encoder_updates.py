"""Is an encoder's update that of these texts? What arrives explains it, or the client, run again, sends it.

    arrivals  one gradient: what arrives at the texts' rows explains every tensor below, whatever the labels are
    client    local training, few digits or noise: the client is run again, with labels that are read off what arrives
              and then, where it still disagrees, changed one at a time
    spans     texts are missing: every row of a text lies in the spans of later blocks, those of its edits do not

After masked-token training a text is proposed as the model was given it, with what it had been and how well its labels
explain what arrives: those were read off the gradient of the last block.

Limits: the head must be known and linear, or part of the model; at most f tokens. Cost: as in `updates.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement, agree
from unmask.proof.alternatives import COUNT_IS_UNSTATED, EQUAL, counts_by_means, equal_inputs, equal_token, open_count
from unmask.proof.arrivals import Arrivals, TextInput, highest_layer, replay_arrivals
from unmask.proof.later_spans import IN_SPAN, distance_from, distance_of_edits, spans_of_blocks
from unmask.proof.near_tokens import ReplayedTexts, find_confusable, gradient_scale
from unmask.proof.noisy_agreement import Loss, agree_with_noise
from unmask.proof.replay import another_client, can_replay, replay, why_not_replayed, why_stopped
from unmask.proof.updates import is_coarse, merge_copies
from unmask.proof.verdicts import Decision, EncoderText, Ground, TextVerdict, Tokens, Verdict
from unmask.recovery import Ambiguity
from unmask.wording import count_noun

_ARRIVES = 1e-3  # of the largest: a text at which less arrives is not in the batch
_EXPLAINED = 1e-2  # of what arrives: labels that leave more are not those of the text
_CLEAR = 10.0  # times as far as a row in a span may be: those of a text's edits are
_VISIBLE = 5.0  # tolerances, from which on a text's share of the update shows
_MOST_LABELLED = 16  # texts whose labels are changed one at a time
MAY_BE_MASKED = (
    "the task is not stated, and gradients arrive at some tokens only: words may have been masked; state the task"
)


@dataclass(frozen=True)
class _Reading:
    """By which ground texts agree, how well, and why some of them are not covered."""

    ground: Ground
    agreement: Agreement | None = None
    doubts: Mapping[EncoderText, tuple[Decision, str]] = field(default_factory=dict)
    misfits: Mapping[EncoderText, float] = field(default_factory=dict)
    tolerance: float = 0.0
    rejected: float | None = None
    tells_inputs: bool = False  # embedding rows were compared one by one, so that equal tokens are told apart
    is_pooled: bool = False  # a gradient arrives at every first token alone, or at every token: one label a text
    num_passes: int = 0


@dataclass
class EncoderProof:
    """What one update of an encoder says of texts. `frame`: the tokens that open and close every text."""

    evidence: GradientEvidence
    model: Model
    stopped: str = field(default="", init=False)  # why the client was not run, where memory is short

    def judge(
        self, texts: Sequence[EncoderText], *, blurred: bool = False, is_masked: bool = False, why_masked: str = ""
    ) -> Verdict:
        """Decide on texts. `blurred`: there may be noise or few digits, which a client is compared up to.

        `is_masked`: texts have originals; `why_masked`: why they have none though words may be masked.
        """
        texts = merge_copies(texts)
        if not texts:
            return Verdict(Ground.NONE, ())
        found = self._read(texts, blurred)
        if self.evidence.task is None and not is_masked and not why_masked and not found.is_pooled:
            why_masked = MAY_BE_MASKED
        return self._decide(texts, found, is_masked, why_masked)

    def _read(self, texts: Sequence[EncoderText], blurred: bool) -> _Reading:
        nothing = _Reading(Ground.NONE, doubts=dict.fromkeys(texts, _UNPROVEN))
        if is_coarse(self.evidence, self.model) and not blurred:
            return nothing
        if blurred and len(texts) != (self.evidence.num_texts or len(texts)):
            return nothing  # no replay fits while texts are missing
        arrivals, rows, is_merged = self._arrivals(texts)
        if self.evidence.update is Update.DELTA or blurred:
            return self._read_client(texts, arrivals, rows, blurred) or nothing
        if arrivals is None or not arrivals.agreement.holds:
            found = self._read_spans(texts)
            return replace(found, agreement=None if arrivals is None else arrivals.agreement)
        arriving = torch.zeros(len(texts), dtype=arrivals.sizes.dtype, device=rows.device)
        arriving.scatter_reduce_(0, rows[:, 0], arrivals.sizes.to(rows.device), "amax")
        missing = Decision.UNDECIDED, "nothing arrives at it: it is not in the batch, or the model is sure of its label"
        return _Reading(
            Ground.ARRIVALS,
            arrivals.agreement,
            {t: missing for t, size in zip(texts, arriving.tolist(), strict=True) if size <= _ARRIVES},
            dict.fromkeys(texts, arrivals.agreement.misfit_as_is),
            arrivals.agreement.tolerance,
            tells_inputs=self.model.token_embedding in arrivals.compared and not is_merged,
            is_pooled=len(rows) == len(texts) or bool((arrivals.sizes > _ARRIVES).all()),
            num_passes=2 * len(texts),
        )

    # ---- what arrives

    def _arrivals(self, texts: Sequence[EncoderText]) -> tuple[Arrivals | None, Int[Tensor, "n 2"], bool]:
        """What arrives at first tokens, if that explains the update; else at all tokens."""
        evidence, model = self.evidence, self.model
        inputs = [given(text) for text in texts]
        firsts = torch.tensor([(index, 0) for index in range(len(inputs))])
        if evidence.pooling != "mean":
            found, is_merged = self._explain(inputs, firsts)
            top = highest_layer(evidence, model)
            only_firsts = evidence.pooling == "first" and top is not None and top.is_last(model)
            if found is not None and (found.agreement.holds or only_firsts):
                return found, firsts, is_merged
        rows = torch.tensor([(index, place) for index, text in enumerate(inputs) for place in range(len(text.tokens))])
        found, is_merged = self._explain(inputs, rows)
        return found, rows, is_merged

    def _explain(self, inputs: Sequence[TextInput], rows: Int[Tensor, "n 2"]) -> tuple[Arrivals | None, bool]:
        """What arrives, and whether rows of equal tokens were added up for it."""
        found = replay_arrivals(self.evidence, self.model, inputs, rows)
        if found is None or found.agreement.holds:
            return found, False
        classes = equal_inputs(self.model, {token for text in inputs for token in text.tokens})
        if not classes:
            return found, False
        return replay_arrivals(self.evidence, self.model, inputs, rows, list(dict.fromkeys(classes.values()))), True

    # ---- the client, run again

    def _read_client(
        self, texts: Sequence[EncoderText], arrivals: Arrivals | None, rows: Int[Tensor, "n 2"], blurred: bool
    ) -> _Reading | None:
        """Run the client again with the labels that explain the update best."""
        evidence, model = self.evidence, self.model
        is_pair = any(text.types is not None or text.count > 1 for text in texts)
        if evidence.task is not Task.CLASSIFICATION or not can_replay(evidence, len(texts)) or is_pair:
            return None
        labels = read_labels(evidence, model, [given(text) for text in texts], arrivals, rows)
        tokens = [text.tokens for text in texts]
        try:
            again = replay(evidence, model, tokens, labels=labels)
            ground, agreement = self._compare(again, tokens, blurred)
            passes = len(texts)
            for changed in self._relabel(labels) if ground is Ground.NONE and len(texts) <= _MOST_LABELLED else ():
                other = replay(evidence, model, tokens, labels=changed)
                passes += len(texts)
                if agree(evidence, other).misfit_as_is < agree(evidence, again).misfit_as_is:
                    labels[:], again = changed, other
                    ground, agreement = self._compare(again, tokens, blurred)
                if ground is not Ground.NONE:
                    break
            if ground is Ground.NONE:
                return _Reading(ground, agreement, dict.fromkeys(texts, _UNPROVEN), num_passes=passes)
            doubts = {} if ground.is_lossy else self._find_traceless(tokens, labels, texts, agreement)
            if ground.is_lossy:
                replayed = ReplayedTexts(tokens, [1 / len(tokens)] * len(tokens), again, labels)
                loss = Loss.DIGITS if ground is Ground.ROUNDED_CLIENT else Loss.NOISE
                why = Decision.UNDECIDED, "a token less, or one near a token of it, would send the same"
                doubts = {texts[place]: why for place in find_confusable(evidence, model, replayed, loss)}
        except InputError as error:
            self.stopped = why_stopped(error)
            return None
        misfit = agreement.misfit if ground is Ground.SCALED_CLIENT else agreement.misfit_as_is
        tells = model.token_embedding in again and model.token_embedding in evidence.gradients and not ground.is_lossy
        return _Reading(
            ground,
            agreement,
            doubts,
            dict.fromkeys(texts, misfit),
            agreement.tolerance,
            tells_inputs=tells,
            is_pooled=True,
            num_passes=passes,
        )

    def _find_traceless(
        self, tokens: Sequence[Tokens], labels: Sequence[int], texts: Sequence[EncoderText], agreement: Agreement
    ) -> dict[EncoderText, tuple[Decision, str]]:
        """Texts whose own share of the update is no larger than what the agreement allows."""
        part = replace(self.evidence, update=Update.GRADIENT)
        step = 1 / gradient_scale(self.evidence)
        doubts = {}
        for text, own, label in zip(texts, tokens, labels, strict=True):
            alone = replay(part, self.model, [own], labels=[label])
            names = set(alone) & set(self.evidence.gradients)
            share = max(
                (
                    abs(step) / len(tokens) * float(alone[name].norm()) / float(seen.norm())
                    for name in names
                    if bool((seen := self.evidence.gradients[name]).any())
                ),
                default=0.0,
            )
            if share <= _VISIBLE * agreement.tolerance:
                doubts[text] = Decision.UNDECIDED, "its share of the update is less than the agreement allows for"
        return doubts

    def _relabel(self, labels: list[int]) -> Iterator[list[int]]:
        """Labels with one of them changed; `labels` may be replaced meanwhile by what fits better."""
        evidence = self.evidence
        number = len(evidence.head) if evidence.head is not None else int(getattr(self.model.config, "num_labels", 2))
        for index in range(len(labels)):
            for label in range(number):
                if label != labels[index]:
                    yield [*labels[:index], label, *labels[index + 1 :]]

    def _compare(self, again: Mapping[str, Tensor], texts: Sequence[Tokens], blurred: bool) -> tuple[Ground, Agreement]:
        """As it is, up to a factor, or up to digits or noise; under noise a token more or less must show."""
        exact = None if is_coarse(self.evidence, self.model) else agree(self.evidence, again)
        if exact is not None and exact.holds:
            return Ground.CLIENT, exact
        if not blurred:
            assert exact is not None  # else nothing was run
            return Ground.SCALED_CLIENT if exact.holds_up_to_scale else Ground.NONE, exact
        found = agree_with_noise(self.evidence, again, sum(map(len, texts)))
        if not found.holds:
            return Ground.NONE, found.agreement
        return Ground.ROUNDED_CLIENT if found.loss is Loss.DIGITS else Ground.NOISY_CLIENT, found.agreement

    # ---- spans of later blocks

    def _read_spans(self, texts: Sequence[EncoderText]) -> _Reading:
        spans = spans_of_blocks(self.evidence, self.model, (1, self.model.num_blocks // 2))
        doubts: dict[EncoderText, tuple[Decision, str]] = {}
        misfits, rejected = {}, []
        for text in texts:
            misfits[text] = distance_from(self.model, given(text), spans)
            if misfits[text] > IN_SPAN:
                doubts[text] = Decision.UNDECIDED, "no span of a later block tells its rows from others"
            else:
                lowest = min(spans)
                rejected.append(distance_of_edits(self.model, given(text), lowest, spans[lowest]))
                if rejected[-1] <= _CLEAR * IN_SPAN:
                    doubts[text] = Decision.UNDECIDED, "another token at a place of it lies in the spans as well"
        if len(doubts) == len(texts):  # another model, or another loss, may have sent it
            return _Reading(Ground.NONE, doubts={t: (Decision.UNDECIDED, why) for t, (_, why) in doubts.items()})
        return _Reading(
            Ground.DEEP_SPANS, None, doubts, misfits, IN_SPAN, min(rejected, default=None), num_passes=2 * len(texts)
        )

    # ---- from what agrees to what is said

    def _decide(self, texts: Sequence[EncoderText], found: _Reading, is_masked: bool, why_masked: str) -> Verdict:
        stated, evidence = self.evidence.num_texts, self.evidence
        merged: dict[Tokens, TextVerdict] = {}
        told = self._counts_are_told(texts, found.ground, is_masked)
        by_label = self._equal_labels(texts) if is_masked else {}
        by_input = equal_inputs(self.model, {token for text in texts for token in text.tokens}, evidence)
        for text in sorted(texts, key=lambda text: found.misfits.get(text, math.inf)):
            decision, why = found.doubts.get(text, (Decision.CERTAIN, ""))
            if decision is Decision.CERTAIN and why_masked:
                decision, why = Decision.UNDECIDED, why_masked
            if decision is Decision.CERTAIN and text.unexplained > _EXPLAINED:
                decision, why = Decision.UNDECIDED, "what arrives at it has no single label"
            points = tuple(self._equal_tokens(text, {} if found.tells_inputs else by_input, by_label))
            if decision is Decision.CERTAIN and points:
                decision, why = Decision.ONE_OF_THESE, points[0].reason
            count = text.count if told and decision in (Decision.CERTAIN, Decision.ONE_OF_THESE) else 1
            misfit = found.misfits.get(text, math.inf)
            points = points if decision is Decision.ONE_OF_THESE else ()
            made = TextVerdict(text.proposed, decision, misfit, points, count, why)
            if (other := merged.get(made.text.tokens)) is not None:  # masking made two copies of one text differ
                doubtful = other if other.decision is not Decision.CERTAIN else made
                made = replace(doubtful, misfit=max(misfit, other.misfit), count=count + other.count)
            merged[made.text.tokens] = made
        verdicts, problems = list(merged.values()), []
        total = sum(text.count for text in verdicts if text.decision is not Decision.REFUTED)
        if not found.ground.is_whole:
            problems.append(self.stopped or why_not_replayed(evidence) or another_client(evidence))
        if stated is not None and len(verdicts) > stated:
            why = f"the batch holds {count_noun(stated, 'text')}, so these are too many, and none is certain"
            verdicts = [replace(t, decision=Decision.UNDECIDED, points=(), count=1, why=why) for t in verdicts]
            problems.append(why)
        elif stated != total:
            unseen = ", or nothing was masked in them" if is_masked else ""
            why = f"found {total} of {count_noun(stated or 0, 'text')}; the rest are missing or are copies{unseen}"
            open_ = open_count(COUNT_IS_UNSTATED if stated is None else why)
            said = (Decision.CERTAIN, Decision.ONE_OF_THESE)
            verdicts = [replace(t, count=1, points=(*t.points, open_) if t.decision in said else ()) for t in verdicts]
            problems.append(open_.reason)
        return Verdict(
            found.ground,
            tuple(verdicts),
            found.tolerance,
            found.rejected,
            found.agreement,
            tuple(problems),
            found.num_passes,
            stopped=self.stopped,
        )

    def _counts_are_told(self, texts: Sequence[EncoderText], ground: Ground, is_masked: bool) -> bool:
        """Whether counts are known: as many as were stated, and each text once, or as the weights of its labels say.

        A mean of means must not give other counts.
        """
        counts = [text.count for text in texts]
        if self.evidence.num_clients != 1 or sum(counts) != self.evidence.num_texts:
            return False
        if not is_masked:
            return ground.is_whole and max(counts) == 1
        return counts_by_means(counts, [text.num_labels for text in texts], sum(counts)) in (None, counts)

    def _equal_labels(self, texts: Sequence[EncoderText]) -> Mapping[int, tuple[int, ...]]:
        """Tokens that were read off labels, whose output rows others share."""
        if self.model.token_head is None:
            return {}
        restored = {token for text in texts for token in text.proposed.tokens}
        near = near_rows(self.model.token_head.embedding.detach(), sorted(restored), EQUAL)
        return {token: others for token, others in near.items() if len(others) > 1}

    def _equal_tokens(
        self,
        text: EncoderText,
        by_input: Mapping[int, tuple[int, ...]],
        by_label: Mapping[int, tuple[int, ...]],
    ) -> Iterator[Ambiguity]:
        """A class for every token of a text that stands for several, as input or as label."""
        for place, (seen, token) in enumerate(zip(text.tokens, text.proposed.tokens, strict=True)):
            members = by_input.get(token) if seen == token else None
            members = members or by_label.get(token)
            if members:
                yield equal_token(self.model, place, members)


def given(text: EncoderText) -> TextInput:
    """A text as the model takes it."""
    return TextInput(text.tokens, 0, text.types)


_UNPROVEN = Decision.UNDECIDED, "no client that was run again sends this update"


def read_labels(
    evidence: GradientEvidence,
    model: Model,
    inputs: Sequence[TextInput],
    arrivals: Arrivals | None,
    rows: Int[Tensor, "n 2"],
) -> list[int]:
    """Of every text the label whose loss would send what arrives: the one of the largest cosine.

    What arrives of a weight delta points against the gradient. Without a known head, the first label of all.
    """
    if evidence.head is None or arrivals is None:
        return [0] * len(inputs)
    sign = -1.0 if evidence.update is Update.DELTA else 1.0
    head, pooling = evidence.head.to(model.device, model.dtype), evidence.pooling or "first"
    labels = []
    for index, text in enumerate(inputs):
        mine = (rows[:, 0] == index).nonzero()[:, 0]
        arrived = sign * arrivals.rows[mine.to(arrivals.rows.device)].double()
        wanted = [_send_down(model, text, head, pooling, label)[rows[mine, 1]] for label in range(len(head))]
        scores = [functional.cosine_similarity(arrived.flatten(), sent.double().flatten(), dim=0) for sent in wanted]
        labels.append(int(torch.stack(scores).argmax()))
    return labels


def _send_down(
    model: Model, text: TextInput, head: Float[Tensor, "c d"], pooling: str, label: int
) -> Float[Tensor, "n d"]:
    """What a label's loss sends to the last block's sums at every token of a text."""
    tokens = torch.tensor([text.tokens], device=model.device)
    last = model.num_blocks - 1
    with torch.no_grad():
        stream = model.hidden_states(tokens, num_blocks=last)[-1]
        positions = torch.arange(tokens.shape[1], device=model.device)[None]
        mask = torch.ones_like(tokens, dtype=torch.bool)
        attended = model.after_attention(last, stream, model.mixed_values(last, stream, positions, mask))
        sums = model.mlp_sum(last, attended, model.mlp_hidden(last, attended))
    with torch.enable_grad():
        sums.requires_grad_(True)
        states = model.after_last_sum(sums)
        pooled = states.mean(1) if pooling == "mean" else states[:, -1 if pooling == "last" else 0]
        loss = functional.cross_entropy(pooled @ head.T, torch.tensor([label], device=model.device))
        return torch.autograd.grad(loss, sums)[0][0]
