"""Which texts of an encoder are certain: what arrives explains the update, or the client, run again, sends it.

One gradient tells whatever the labels and the head are (`arrivals.py`). Local training does not, nor do few digits or
noise: the client is run again, with labels that are read off what arrives and then, where the replay still disagrees,
changed one at a time.

Limits: the head must be known and linear, or part of the model; at most f tokens. Cost: as in `confirm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from unmask.attacks.gradients.decoder.confirm import Proof, is_coarse
from unmask.attacks.gradients.encoder.position_candidates import Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.attacks.gradients.noisy.confirm import judge, loss_behind
from unmask.attacks.gradients.noisy.near_tokens import ReplayedTexts, find_confusable
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task, Update
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement, agree
from unmask.proof.arrivals import Arrivals, TextInput, highest_layer, replay_arrivals
from unmask.proof.later_spans import lies_in, spans_of_blocks
from unmask.proof.replay import can_replay, replay, why_stopped

_ARRIVES = 1e-3  # of the largest: a text at which less arrives is not in the batch
_MOST_TEXTS = 16  # whose labels are changed one at a time


@dataclass(frozen=True)
class EncoderConfirmation:
    """The proof, how well the replay fits, and the texts that it does not cover."""

    proof: Proof
    agreement: Agreement | None = None
    refuted: frozenset[Text] = frozenset()
    num_passes: int = 0
    is_pooled: bool = False  # a gradient arrives at every first token alone, or at every token: one label a text
    stopped: str = ""  # why the client was not run, where memory is short


def confirm_encoder(
    evidence: GradientEvidence, problem: Problem, texts: Sequence[Text], equal: Sequence[tuple[int, ...]] = ()
) -> EncoderConfirmation:
    """Replay what arrives, or the client; where neither explains the update, look at spans of later blocks."""
    model = problem.model
    if is_coarse(evidence, model) and not problem.is_noisy:
        return EncoderConfirmation(Proof.NONE, None, frozenset(texts))
    inputs = [text_input(problem, text) for text in texts]
    if problem.is_noisy and len(texts) != (evidence.num_texts or len(texts)):
        return EncoderConfirmation(Proof.NONE, None, frozenset(texts))  # no replay fits while texts are missing
    arrivals, rows = _arrivals(evidence, model, inputs, equal)
    if problem.drifts or problem.is_noisy:
        return _replay_client(evidence, problem, inputs, arrivals, rows, texts)
    if arrivals is not None and arrivals.agreement.holds:
        arriving = torch.zeros(len(texts), dtype=arrivals.sizes.dtype, device=rows.device)
        arriving.scatter_reduce_(0, rows[:, 0], arrivals.sizes.to(rows.device), "amax")
        absent = [text for text, size in zip(texts, arriving.tolist(), strict=True) if size <= _ARRIVES]
        is_pooled = len(rows) == len(texts) or bool((arrivals.sizes > _ARRIVES).all())
        return EncoderConfirmation(Proof.ARRIVALS, arrivals.agreement, frozenset(absent), 2 * len(texts), is_pooled)
    refuted = _outside_later_spans(evidence, model, inputs, texts)
    proof = Proof.NONE if refuted >= set(texts) else Proof.DEEP_SPANS
    return EncoderConfirmation(proof, None if arrivals is None else arrivals.agreement, refuted, 2 * len(texts))


def text_input(problem: Problem, text: Text) -> TextInput:
    """A text of places as the model takes it."""
    places = problem.places
    kinds = places.kind[list(text)].tolist()
    return TextInput(places.tokens_of(text), 0, tuple(kinds) if any(kinds) else None)


def _arrivals(
    evidence: GradientEvidence, model: Model, inputs: Sequence[TextInput], equal: Sequence[tuple[int, ...]]
) -> tuple[Arrivals | None, Int[Tensor, "n 2"]]:
    """What arrives at first tokens, if that explains the update; else at all tokens."""
    firsts = torch.tensor([(index, 0) for index in range(len(inputs))])
    if evidence.pooling != "mean":
        found = replay_arrivals(evidence, model, inputs, firsts, equal)
        top = highest_layer(evidence, model)
        only_firsts = evidence.pooling == "first" and top is not None and top.is_last(model)
        if found is not None and (found.agreement.holds or only_firsts):
            return found, firsts
    everywhere = [(index, place) for index, text in enumerate(inputs) for place in range(len(text.tokens))]
    rows = torch.tensor(everywhere)
    return replay_arrivals(evidence, model, inputs, rows, equal), rows


def _replay_client(
    evidence: GradientEvidence,
    problem: Problem,
    inputs: Sequence[TextInput],
    arrivals: Arrivals | None,
    rows: Int[Tensor, "n 2"],
    texts: Sequence[Text],
) -> EncoderConfirmation:
    """Run the client again with the labels that explain the update best."""
    model, everyone = problem.model, frozenset(texts)
    is_pair = any(text.types is not None for text in inputs)
    if evidence.task is not Task.CLASSIFICATION or not can_replay(evidence, len(texts)) or is_pair:
        return EncoderConfirmation(Proof.NONE, None, everyone)
    labels = _read_labels(evidence, model, inputs, arrivals, rows)
    if labels is None:
        return EncoderConfirmation(Proof.NONE, None, everyone)
    tokens = [text.tokens for text in inputs]
    try:
        again = replay(evidence, model, tokens, labels=labels)
        best = _judge(evidence, problem, again, tokens)
        passes = len(texts)
        for index in range(len(texts) if best[0] is Proof.NONE and len(texts) <= _MOST_TEXTS else 0):
            for label in range(_num_labels(evidence, model)):
                changed = [*labels[:index], label, *labels[index + 1 :]]
                if changed == labels or best[0] is not Proof.NONE:
                    continue
                other = replay(evidence, model, tokens, labels=changed)
                passes += len(texts)
                if agree(evidence, other).misfit_as_is < agree(evidence, again).misfit_as_is:
                    labels, again, best = changed, other, _judge(evidence, problem, other, tokens)
        proof, agreement = best
        refuted = everyone if proof is Proof.NONE else frozenset()
        if proof is not Proof.NONE and problem.is_noisy:
            replayed = ReplayedTexts(tokens, [1 / len(tokens)] * len(tokens), again, labels)
            refuted = frozenset(texts[k] for k in find_confusable(evidence, model, replayed, loss_behind(proof)))
    except InputError as error:
        return EncoderConfirmation(Proof.NONE, None, everyone, stopped=why_stopped(error))
    return EncoderConfirmation(proof, agreement, refuted, passes)


def _judge(
    evidence: GradientEvidence, problem: Problem, again: Mapping[str, Tensor], texts: Sequence[tuple[int, ...]]
) -> tuple[Proof, Agreement]:
    """Whether the client sends this update, as it is, up to a factor, or up to its digits or its noise.

    Under noise a token more or less must show, which is less than a label of a text.
    """
    if problem.is_noisy:
        return judge(evidence, problem.model, again, num_labels=sum(map(len, texts)))
    found = agree(evidence, again)
    if found.holds:
        return Proof.CLIENT, found
    return Proof.SCALED_CLIENT if found.holds_up_to_scale else Proof.NONE, found


def _num_labels(evidence: GradientEvidence, model: Model) -> int:
    return len(evidence.head) if evidence.head is not None else int(getattr(model.config, "num_labels", 2))


def _read_labels(
    evidence: GradientEvidence,
    model: Model,
    inputs: Sequence[TextInput],
    arrivals: Arrivals | None,
    rows: Int[Tensor, "n 2"],
) -> list[int] | None:
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


def _outside_later_spans(
    evidence: GradientEvidence, model: Model, inputs: Sequence[TextInput], texts: Sequence[Text]
) -> frozenset[Text]:
    """Texts with a row that a later block's span does not hold; all of them where no later block can tell."""
    spans = spans_of_blocks(evidence, model, (1, model.num_blocks // 2))
    return frozenset(text for text, given in zip(texts, inputs, strict=True) if not lies_in(model, given, spans))
