"""Texts' parts of the embeddings' gradients: the batch explains all of them, a wrong token does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, FRAME, candidates_of, classified

from unmask.attacks.gradients.encoder.input_gradients import InputGradients
from unmask.attacks.gradients.encoder.problem import Problem, set_up


@pytest.fixture(scope="module")
def problem(tiny_bert) -> Problem:
    evidence = classified(tiny_bert)
    with torch.no_grad():
        found = set_up(evidence, tiny_bert, candidates_of(tiny_bert, evidence), FRAME)
    assert isinstance(found, Problem), found
    return found


@pytest.fixture(scope="module")
def gradients(tiny_bert, problem) -> InputGradients:
    found = InputGradients.of(classified(tiny_bert), problem)
    assert found is not None
    return found


def test_the_batch_leaves_nothing(gradients):
    fit = gradients.fit(BATCH)
    assert fit.left < 1e-5
    assert float(gradients.rest(fit).norm()) < 1e-2 * float(gradients.rows.norm())


def test_a_wrong_token_leaves_more_and_a_refit_is_a_fit(gradients):
    wrong = (BATCH[0][0], BATCH[1][1], *BATCH[0][2:])
    again = gradients.refit(gradients.fit(BATCH), [(0, wrong)])
    assert again.left > 1e-3
    assert again.left == pytest.approx(gradients.fit([wrong, *BATCH[1:]]).left, rel=1e-3)


def test_without_a_head_or_embeddings_it_tells_nothing(tiny_bert, problem):
    evidence = classified(tiny_bert)
    assert InputGradients.of(replace(evidence, head=None), problem) is None
    frozen = {name: g for name, g in evidence.gradients.items() if name != tiny_bert.token_embedding}
    assert InputGradients.of(replace(evidence, gradients=frozen), problem) is None
