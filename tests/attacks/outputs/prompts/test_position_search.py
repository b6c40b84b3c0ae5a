"""The token of one position: found by its state wherever the table ranks it, and never another one."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts.continuation import Continuation, Trial
from unmask.attacks.outputs.prompts.position_search import (
    FoundToken,
    Observation,
    SearchSettings,
    TestedTokens,
    TokenStatus,
    find_token,
)
from unmask.attacks.outputs.prompts.side_by_side import read_alone
from unmask.attacks.outputs.prompts.templates import templates_for
from unmask.models import Model

LAYER, KNOWN, TOKEN = 2, [5, 17, 99], 250
TestedTokens.__test__ = False  # a class of the package, no test


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@torch.no_grad()
def find(
    model: Model, state: torch.Tensor | None = None, scores=None, settings=None, leading=None, **seen
) -> FoundToken:
    templates = templates_for(model, LAYER)
    text = Continuation.start(model, LAYER, middle_layer=templates.middle_layer)
    text = text.advance(text.run(torch.tensor(KNOWN)), len(KNOWN))
    if state is None:
        state = model.hidden_states(torch.tensor([[*KNOWN, TOKEN]]), num_blocks=LAYER)[LAYER][0, -1]
    facts = {
        "tolerance": 1e-4,
        "usual": 1e-5,
        "noise_variance": 0.0,
        "confirm": False,
        "against_all": False,
        "noisy": False,
        **seen,
    }
    even = torch.zeros(model.vocab_size)
    order = even if scores is None else scores
    sighting = Observation(state, torch.ones_like(state), **facts)
    settings = settings or SearchSettings()
    return read_alone(find_token(sighting, text, templates, order, even, settings, leading=leading))


def test_the_token_is_found_even_where_the_table_ranks_it_last(model):
    worst = -torch.nn.functional.one_hot(torch.tensor(TOKEN), model.vocab_size).float()
    for scores in (None, worst, -worst):
        found = find(model, scores=scores)
        assert (found.token, found.standing) == (TOKEN, TokenStatus.AGREES)
        assert found.distance < 1e-4 < found.runner_up
        assert found.continuation.num_known == len(KNOWN) + 1
    assert find(model, scores=-worst).num_candidates == SearchSettings().first  # the first batch had it


def test_all_directions_rank_as_the_state_itself(model):
    worst = -torch.nn.functional.one_hot(torch.tensor(TOKEN), model.vocab_size).float()
    rotation = torch.linalg.qr(torch.randn(model.width, model.width, generator=torch.Generator().manual_seed(0))).Q
    whole, turned = find(model, scores=worst), find(model, scores=worst, leading=rotation)
    assert (turned.token, turned.num_candidates) == (whole.token, whole.num_candidates)
    few = find(model, scores=worst, leading=rotation[: model.width // 4])
    assert (few.token, few.standing) == (TOKEN, TokenStatus.AGREES)
    assert few.num_jacobians > 0


def test_noise_is_judged_by_all_entries(model):
    """Where noise may be, leading directions are not used: whiteness is a statement about every entry."""
    state = model.hidden_states(torch.tensor([[*KNOWN, TOKEN]]), num_blocks=LAYER)[LAYER][0, -1].detach()
    noise = torch.randn(len(state), generator=torch.Generator().manual_seed(1))
    noisy = state + 0.02 * state.norm() * noise / noise.norm()
    leading = torch.eye(model.width)[:4]
    ours, whole = find(model, noisy, noisy=True, leading=leading), find(model, noisy, noisy=True)
    assert (ours.token, ours.standing, ours.noise) == (whole.token, whole.standing, whole.noise)
    assert (ours.num_candidates, ours.num_jacobians) == (whole.num_candidates, whole.num_jacobians)


def test_the_slow_way_gives_the_same(model):
    """Every token of the vocabulary, sent through the model by itself."""
    with torch.no_grad():
        everyone = torch.cat(
            [torch.tensor(KNOWN).expand(model.vocab_size, -1), torch.arange(model.vocab_size)[:, None]], 1
        )
        states = model.hidden_states(everyone, num_blocks=LAYER)[LAYER][:, -1]
    seen = states[TOKEN]
    distances = ((states - seen).norm(dim=1) / seen.norm()).sort().values
    found = find(model, settings=SearchSettings(max_linearisations=0, first=model.vocab_size))
    assert found.num_candidates == model.vocab_size
    assert found.runner_up == pytest.approx(float(distances[1]), rel=1e-3)


def test_a_state_that_no_token_has_is_said_to_have_none(model):
    foreign = torch.randn(model.width, generator=torch.Generator().manual_seed(0))
    found = find(model, foreign)
    assert found.standing is TokenStatus.NONE_AGREES
    assert not found.standing.is_proven
    assert found.num_candidates == model.vocab_size


def test_a_budget_is_kept(model):
    foreign = torch.randn(model.width, generator=torch.Generator().manual_seed(0))
    assert find(model, foreign, settings=SearchSettings(max_candidates=30)).num_candidates == 30


def test_equal_tokens_do_not_compete():
    tested = TestedTokens.none(torch.zeros(4))
    states = torch.zeros(3, 4)
    trial = Trial(torch.tensor([7, 8, 9]), states, states, (), ())
    tested.add(trial, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(4))
    assert (tested.token, tested.distance, len(tested)) == (7, pytest.approx(0.1), 3)
    assert tested.runner_up({}) == pytest.approx(0.2)
    assert tested.runner_up({7: (7, 8)}) == pytest.approx(0.3)
    assert tested.runner_up({7: (7, 8, 9)}) == float("inf")
