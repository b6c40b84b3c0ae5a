"""Withheld tensors: gone by name, the others as they were."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.defences.updates import SHAPES, copied, quick, random_update, same

from unmask.defences import withhold
from unmask.errors import InputError


@quick
@given(st.lists(st.sampled_from(["wte", "attn", "bias", "h.0", "nowhere"]), min_size=1))
def test_what_matches_is_gone_and_the_rest_is_the_same(patterns):
    matching = [name for name in SHAPES if any(pattern in name for pattern in patterns)]
    assume(0 < len(matching) < len(SHAPES))
    evidence = random_update()
    before = copied(evidence)
    after = withhold(evidence, patterns)
    assert same(evidence, before)
    assert same(after, evidence.only(*(name for name in SHAPES if name not in matching)))


def test_nothing_to_withhold_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"no name of the 4 tensors contains 'embed', 'wpe'.*names are wte\.weight"):
        withhold(random_update(), ["embed", "wpe"])


def test_nothing_left_to_send_is_refused():
    with pytest.raises(InputError, match=r"each of the 4 tensors.*'weight', 'bias'.*nothing would be sent"):
        withhold(random_update(), ["weight", "bias"])


@pytest.mark.parametrize("patterns", ["wte", [], [""], ["wte", ""]])
def test_patterns_are_a_list_of_parts_of_names(patterns):
    with pytest.raises(InputError, match="a list of parts of names"):
        withhold(random_update(), patterns)
