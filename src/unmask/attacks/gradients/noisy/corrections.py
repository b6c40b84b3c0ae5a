"""Texts of a noisy update, corrected by what the client leaves when it is run again on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.attacks.gradients.noisy.text_weights import weigh_texts
from unmask.errors import InputError
from unmask.evidence.gradients import Update
from unmask.proof.agreement import agree
from unmask.proof.replay import replay
from unmask.proof.updates import UpdateProof

_MOST_REPLAYS = 4

Correct = Callable[[list[TextEnding], Mapping[str, Tensor]], list[TextEnding]]


def correct_texts(proof: UpdateProof, endings: Sequence[TextEnding], correct: Correct) -> tuple[list[TextEnding], bool]:
    """Replay the client, correct what it says is wrong, and again, until it agrees or nothing is left to correct.

    Second, whether local steps make so much of rounding that no replay can agree.
    """
    evidence, model, chosen = proof.evidence, proof.model, list(endings)
    for _ in range(_MOST_REPLAYS):
        texts = [ending.proposed for ending in chosen]
        found = proof.replay_blurred(texts)
        if found is None or found.holds:
            break
        try:
            if is_unstable(proof, chosen):
                return chosen, True
            changed = weigh_texts(evidence, model, chosen) if evidence.update is Update.GRADIENT else chosen
            changed = correct(chosen, proof.update_of(texts)) if changed == chosen else changed
        except InputError:  # the stated client does not take these texts
            break
        if changed == chosen:
            break
        chosen = changed
    return chosen, False


def is_unstable(proof: UpdateProof, endings: Sequence[TextEnding]) -> bool:
    """Whether local steps make so much of rounding that the same texts in another order give another update.

    Sums over a batch are rounded differently in another order. Where training diverges, each step multiplies that, and
    no replay can agree unless it has the client's own order.
    """
    evidence, texts = proof.evidence, [ending.proposed for ending in endings]
    tokens = [text.tokens for text in texts for _ in range(text.count)]
    if evidence.update is not Update.DELTA or evidence.num_steps in (None, 1) or len(set(tokens)) < 2:
        return False
    again = proof.update_of(texts)
    other = replay(evidence, proof.model, tokens[::-1])
    return not agree(evidence.with_tensors({name: again[name] for name in evidence.gradients}), other).holds
