"""The linear model of tokens' states: exact where states are linear, kept, and better than chance elsewhere."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.prompts import templates
from unmask.attacks.outputs.prompts.ranking import direct_metric
from unmask.attacks.outputs.prompts.templates import TokenStates, measure_templates, middle_layer_of, templates_for
from unmask.attacks.run import silent
from unmask.models.readouts import STREAM, CacheReadout, NormReadout


def test_a_linear_layer_is_found_again(monkeypatch):
    monkeypatch.setattr(templates, "_RIDGE", 1e-12)
    generator = torch.Generator().manual_seed(0)
    features, slope, shift = (torch.randn(size, generator=generator) for size in ((90, 6), (6, 6), (6,)))
    tokens = torch.randint(0, 90, (400,), generator=generator)
    fitted = templates.fit_states(features, tokens, features[tokens] @ slope + shift)
    assert torch.allclose(fitted.means(torch.arange(90)), features @ slope + shift, atol=1e-4)
    assert float(fitted.covariance.norm()) < 1e-8


def test_the_covariance_is_that_of_what_is_left():
    generator = torch.Generator().manual_seed(1)
    features, tokens = torch.randn(50, 4, generator=generator), torch.randint(0, 50, (20_000,), generator=generator)
    noise = torch.randn(20_000, 4, generator=generator) @ torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    fitted = templates.fit_states(features, tokens, features[tokens] + noise)
    assert torch.allclose(fitted.covariance.diagonal(), torch.tensor([1.0, 4.0, 9.0, 16.0]), rtol=0.1)


def test_spread_is_between_tokens_and_around_them():
    features = torch.randn(1000, 3, generator=torch.Generator().manual_seed(2))
    table = TokenStates(features, 2 * torch.eye(3), torch.zeros(3), 5 * torch.eye(3))
    assert torch.allclose(table.spread, 4 * torch.cov(features.T) + 5 * torch.eye(3), atol=1e-4)


def test_features_are_tokens_alone_after_one_block(tiny_llama):
    features = templates.compute_token_features(tiny_llama)
    with torch.no_grad():
        alone = tiny_llama.hidden_states(torch.tensor([[17], [400]]), num_blocks=1)[1][:, 0]
    assert torch.allclose(features[[17, 400]], alone, atol=1e-5)


def test_templates_are_kept_while_the_model_lives(tiny_gpt2):
    first = templates_for(tiny_gpt2, 2)
    assert templates_for(tiny_gpt2, 2) is first
    assert templates_for(tiny_gpt2, 1) is not first


def test_the_middle_lies_below_the_layer(tiny_gpt2, smollm2):
    assert [middle_layer_of(smollm2, layer) for layer in (0, 1, 6, 15, 30)] == [0, 0, 3, 7, 10]
    assert measure_templates(tiny_gpt2, 3).middle_layer == 1


def test_a_state_in_context_names_its_token(tiny_llama):
    """Random weights, a context that was never calibrated on: the token is among the first quarter, not anywhere."""
    text = torch.tensor([[5, 17, 99, 250, 8, 44, 45, 46]])
    with torch.no_grad():
        states = tiny_llama.hidden_states(text, num_blocks=1)[1][0]
    metric = direct_metric(templates_for(tiny_llama, 1).in_context.seen)
    scores = metric.scores(states[2:] @ metric.whiten.T)
    ranks = (scores > scores.gather(1, text[0, 2:, None])).sum(1)
    assert float(ranks.float().median()) < tiny_llama.vocab_size / 4


@pytest.mark.parametrize("readout", [STREAM, NormReadout(), CacheReadout(1, (0,))])
def test_templates_from_the_disk_are_those_that_were_measured(tiny_llama, monkeypatch, tmp_path, readout):
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path))
    monkeypatch.setattr(templates, "_WORTH_KEEPING", 0)
    measured = templates._fit_once(tiny_llama, 1, readout, silent)
    assert len(list((tmp_path / "templates").iterdir())) == 1
    monkeypatch.setattr(templates, "measure_templates", None)  # nothing is measured again
    read = templates._fit_once(tiny_llama, 1, readout, silent)
    for place in ("in_context", "alone"):
        for name in ("seen", "middle"):
            ours, theirs = (getattr(getattr(each, place), name) for each in (read, measured))
            assert all(torch.equal(getattr(ours, part), getattr(theirs, part)) for part in vars(theirs))
    assert (read.layer, read.middle_layer) == (measured.layer, measured.middle_layer)


def test_small_models_leave_nothing_on_the_disk(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv("UNMASK_CACHE", str(tmp_path))
    templates._fit_once(tiny_llama, 1, STREAM, silent)
    assert not list(tmp_path.iterdir())
