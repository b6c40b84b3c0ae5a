"""How often wrong tokens agree by chance: a bound that holds, and is not far off."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts.chance import ChanceAgreement
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.models.readouts import STREAM

SPECTRA = {"even": torch.ones(8), "steep": 2.0 ** -torch.arange(8.0), "flat in one direction": torch.eye(8)[0]}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_it_is_never_below_what_is_counted(spectrum):
    variances = SPECTRA[spectrum].double()
    drawn = torch.randn(200_000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = (drawn * variances.sqrt()).norm(dim=1)
    chance = ChanceAgreement(variances)
    for radius in (0.3, 1.0, 2.0):
        counted = float((lengths <= radius).double().mean())
        assert counted <= chance(radius) <= 1
        assert chance(radius) <= 60 * counted + 1e-4  # Chernoff's bound is off by a polynomial factor


def test_states_that_differ_by_less_than_the_radius_always_agree():
    assert ChanceAgreement(torch.full((8,), 1e-8, dtype=torch.float64))(0.1) == pytest.approx(1)
    assert ChanceAgreement(torch.zeros(8, dtype=torch.float64))(1e-9) == pytest.approx(1)


def test_the_bound_is_of_the_states_as_they_are_compared(tiny_llama):
    """One large number in all states is most of their norm, and says nothing: entries are weighed."""
    table = templates_for(tiny_llama, 2).in_context.seen
    plain = ChanceAgreement.of(tiny_llama, table, STREAM)
    assert plain(2e-4) < 1e-20
    table.shift[3] += 1e5
    assert ChanceAgreement.of(tiny_llama, table, STREAM)(2e-4) < 1e-20
    table.shift[3] -= 1e5
