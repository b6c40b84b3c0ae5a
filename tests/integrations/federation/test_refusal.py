"""What a client keeps to itself."""

import pytest

from unmask.audit.findings.finding import Outcome
from unmask.errors import InputError
from unmask.integrations.federation.refusal import refused_outcomes


def test_what_is_refused():
    assert refused_outcomes(False, save_evidence=True) == frozenset()
    assert refused_outcomes("leaks") == {Outcome.LEAK, Outcome.ERROR}
    assert refused_outcomes(True) == refused_outcomes("unless-clear") == set(Outcome) - {Outcome.NO_LEAK}


def test_mistakes():
    with pytest.raises(InputError, match="refuse must be one of"):
        refused_outcomes("always")
    with pytest.raises(InputError, match="leave save_evidence out"):
        refused_outcomes("leaks", save_evidence=True)
