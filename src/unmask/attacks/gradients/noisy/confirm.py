"""Which texts of a noisy update are certain: the client, run again, sends it up to its digits or its noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from unmask.attacks.gradients.decoder.client_replay import ClientReplay
from unmask.attacks.gradients.decoder.confirm import Confirmation, Proof, confirm_client, is_coarse
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.decoder.prefix_search import Node
from unmask.attacks.gradients.noisy.near_tokens import ReplayedTexts, find_confusable
from unmask.attacks.gradients.noisy.text_weights import weigh_texts
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement, agree
from unmask.proof.noisy_agreement import Loss, agree_with_noise
from unmask.proof.replay import can_replay, replay, why_stopped

_MOST_REPLAYS = 4

Correct = Callable[[list[TextEnding], Mapping[str, Tensor]], list[TextEnding]]


def confirm_noisy(
    evidence: GradientEvidence, model: Model, endings: Sequence[TextEnding], correct: Correct
) -> Confirmation:
    """Replay the client, correct what it says is wrong, and again, until it agrees or nothing is left to correct."""
    chosen, passes = list(endings), 0
    if not can_replay(evidence, sum(ending.count for ending in chosen)):
        return Confirmation(Proof.NONE, chosen)
    agreement: Agreement | None = None
    try:
        for _ in range(_MOST_REPLAYS):
            texts = [ending.node[1] for ending in chosen for _ in range(ending.count)]
            again = replay(evidence, model, texts)
            passes += len(texts)
            proof, agreement = judge(evidence, model, again, sum(len(text) - 1 for text in texts))
            if proof is not Proof.NONE:
                done = Confirmation(proof, chosen, agreement, num_passes=passes)
                if proof is Proof.CLIENT:
                    done = confirm_client(model, ClientReplay(chosen, agreement, passes))
                return replace(done, refuted=_find_confusable(evidence, model, chosen, again, proof))
            if is_unstable(evidence, model, texts, again):
                return Confirmation(Proof.NONE, chosen, agreement, num_passes=2 * passes, is_unstable=True)
            changed = weigh_texts(evidence, model, chosen) if evidence.update is Update.GRADIENT else chosen
            changed = correct(chosen, again) if changed == chosen else changed
            if changed == chosen:
                break
            chosen = changed
    except InputError as error:
        return Confirmation(Proof.NONE, chosen, agreement, num_passes=passes, stopped=why_stopped(error))
    return Confirmation(Proof.NONE, chosen, agreement, num_passes=passes)


def is_unstable(
    evidence: GradientEvidence, model: Model, texts: Sequence[tuple[int, ...]], again: Mapping[str, Tensor]
) -> bool:
    """Whether local steps make so much of rounding that the same texts in another order give another update.

    Sums over a batch are rounded differently in another order. Where training diverges, each step multiplies that, and
    no replay can agree unless it has the client's own order.
    """
    if evidence.update is not Update.DELTA or evidence.num_steps in (None, 1) or len(set(texts)) < 2:
        return False
    other = replay(evidence, model, list(texts)[::-1])
    return not agree(evidence.with_tensors({name: again[name] for name in evidence.gradients}), other).holds


def _find_confusable(
    evidence: GradientEvidence, model: Model, endings: list[TextEnding], again: Mapping[str, Tensor], proof: Proof
) -> frozenset[Node]:
    """Texts in which a token near one of theirs could stand as well."""
    num_labels = sum(ending.count * (len(ending.node[1]) - 1) for ending in endings)
    texts = [ending.node[1] for ending in endings]
    replayed = ReplayedTexts(texts, [(len(tokens) - 1) / num_labels for tokens in texts], again)
    return frozenset(endings[place].node for place in find_confusable(evidence, model, replayed, loss_behind(proof)))


def loss_behind(proof: Proof) -> Loss:
    """What a replay that agrees has allowed for."""
    return Loss.DIGITS if proof is Proof.ROUNDED_CLIENT else Loss.NOISE


def judge(
    evidence: GradientEvidence, model: Model, again: Mapping[str, Tensor], num_labels: int
) -> tuple[Proof, Agreement]:
    """As if nothing were lost, as after local steps; else as digits or noise allow."""
    if not is_coarse(evidence, model):
        exact = agree(evidence, again)
        if exact.holds:
            return Proof.CLIENT, exact
    found = agree_with_noise(evidence, again, num_labels)
    if not found.holds:
        return Proof.NONE, found.agreement
    return Proof.ROUNDED_CLIENT if found.loss is Loss.DIGITS else Proof.NOISY_CLIENT, found.agreement
