"""Rows of prefixes that grow with cached keys and values, against transformers' own forward pass of each by itself."""

from __future__ import annotations

import pytest
import torch
from tests.reference.layer_inputs import layer_inputs

from unmask.attacks.gradients.decoder.prefix_rows import Growth
from unmask.attacks.gradients.sites import down_site, output_site
from unmask.linalg import quick_products
from unmask.models import Model, Role
from unmask.protocols import observe_gradients

DECODERS = ("tiny_gpt2", "tiny_llama", "tiny_mistral")
FIRST, SECOND, THIRD = torch.tensor([5, 17]), torch.tensor([99, 250, 8]), torch.tensor([3, 44])
PARITY = 2e-5  # float32, in another order
SITES = {"output": (output_site, Role.ATTENTION_OUT), "down": (down_site, Role.MLP_OUT)}


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=[False, True], ids=["all digits", "quick"])
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of rows that are screened, relative: on some CPUs they have two digits or three."""
    if not request.param:
        monkeypatch.setattr(quick_products, "_has_tiles", lambda: False)
    return 1e-2 if request.param and quick_products._has_tiles() else PARITY


def growth_of(model: Model, site: str, budget: int = 2**30) -> tuple[Growth, str]:
    make, role = SITES[site]
    found = make(observe_gradients(model, [[5, 17, 99]], task="classification"), model)
    return Growth(model, found.rows, found.span.width, budget), model.linear(role, 0).parameter


def expected(model: Model, parameter: str, *tokens: int) -> torch.Tensor:
    return layer_inputs(model, torch.tensor([tokens]), parameter)[0, -1]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = PARITY) -> None:
    torch.testing.assert_close(ours, theirs, atol=max(PARITY, tolerance * float(theirs.norm())), rtol=PARITY)


@torch.no_grad()
@pytest.mark.parametrize("site", SITES)
def test_rows_are_those_of_the_forward_pass(decoder, site, tolerance):
    growth, parameter = growth_of(decoder, site)
    first, second, third = (growth.at(place, tokens) for place, tokens in enumerate((FIRST, SECOND, THIRD)))
    for row, token in zip(growth.first_rows(first), FIRST.tolist(), strict=True):
        close(row, expected(decoder, parameter, token))
    ones = growth.begin(first, torch.tensor([0, 1]))
    twos = growth.extend(ones, second, torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1]))
    assert twos.tokens.tolist() == [[5, 8], [17, 99], [17, 250]]
    assert (twos.next_position, len(twos)) == (2, 3)
    ((begin, rows),) = growth.extension_rows(twos, third)
    assert begin == 0
    matrix = torch.randn(rows.shape[-1], 7, generator=torch.Generator().manual_seed(0))
    ((_, products),) = growth.extension_products(twos, third, matrix)
    close(products, rows @ matrix, tolerance)
    for prefix, extended in zip(twos.tokens.tolist(), rows, strict=True):
        for token, row in zip(THIRD.tolist(), extended, strict=True):
            close(row, expected(decoder, parameter, *prefix, token), tolerance)
    for prefix, row in zip(twos.tokens.tolist(), growth.rows_of_prefixes(twos), strict=True):
        close(row, expected(decoder, parameter, *prefix))


@torch.no_grad()
def test_a_small_budget_gives_the_same_rows_in_chunks(decoder, tolerance):
    pieces = {}
    for budget in (1, 2**30):
        growth, _ = growth_of(decoder, "down", budget)
        prefixes = growth.begin(growth.at(0, SECOND), torch.arange(3))
        chunks = list(growth.extension_rows(prefixes, growth.at(1, THIRD)))
        pieces[budget] = [begin for begin, _ in chunks], torch.cat([rows for _, rows in chunks])
    assert pieces[1][0] == [0, 1, 2]
    assert pieces[2**30][0] == [0]
    close(pieces[1][1], pieces[2**30][1], tolerance)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [FIRST, SECOND])
def test_what_is_known_of_another_position_changes_nothing(decoder, tokens):
    growth, _ = growth_of(decoder, "output")
    before = growth.at(1, FIRST)
    again, anew = growth.at(4, tokens, before), growth.at(4, tokens)
    for name in ("states", "queries", "keys", "values"):
        assert torch.equal(getattr(again, name), getattr(anew, name))
    assert (again.known is before.known) == (tokens is FIRST and not decoder.learned_positions)


@torch.no_grad()
def test_prefixes_may_begin_later(tiny_gpt2):
    """Learned positions: the same tokens, begun at 4, have other rows."""
    growth, _ = growth_of(tiny_gpt2, "output")
    later = growth.begin(growth.at(4, FIRST), torch.tensor([0]))
    assert later.next_position == 5
    now = growth.begin(growth.at(0, FIRST), torch.tensor([0]))
    assert not torch.allclose(growth.rows_of_prefixes(later), growth.rows_of_prefixes(now), atol=1e-2)
