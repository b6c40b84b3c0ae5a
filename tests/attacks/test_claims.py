"""What is claimed where nothing was found."""

from __future__ import annotations

import pytest

from unmask.attacks.claims import claim_nothing, guess_texts
from unmask.attacks.run import Run
from unmask.recovery import RecoveredTexts, Status


@pytest.mark.parametrize("status", [s for s in Status if not s.conclusive], ids=lambda s: s.name)
def test_nothing_is_claimed(status):
    recovery = claim_nothing(Run(), status, "because")
    assert recovery.status is status
    assert recovery.reason == "because"
    assert recovery.value == RecoveredTexts()
    assert not recovery.certificate.holds
    assert recovery.cost.seconds > 0
    assert not recovery.looked_for  # it reports no search


def test_guesses_are_texts_that_claim_nothing(tiny_llama):
    ranked = [((5, 6), 0.1), ((7,), 0.2), ((8,), 0.3)]
    guesses = guess_texts(tiny_llama, iter(ranked), 2)
    assert [(text.tokens, text.residual, text.certain) for text in guesses] == [
        ((5, 6), 0.1, False),
        ((7,), 0.2, False),
    ]
    assert len(guess_texts(tiny_llama, ranked)) == 3
