"""Logits of chosen tokens, from answers that show few of them."""

from __future__ import annotations

import math

import pytest
import torch

from unmask.attacks.queries.logit_reading import LogitReader, open_reader, random_prompts
from unmask.evidence.logits import FunctionLogitOracle, LogitEvidence, LogitView

VOCAB, NUM_PROMPTS = 300, 20
# Differences of float32 log-probabilities after a bias of at most 100.
FLOAT32 = 1e-4


def table(prompts):
    rows = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    return 3 * (rows[prompts[:, 0]] + rows[prompts[:, -1]].roll(1, dims=1))


def prompts_and_truth(evidence):
    prompts = random_prompts(evidence, NUM_PROMPTS, 2, torch.Generator().manual_seed(2))
    return prompts, table(torch.tensor(prompts)).double()


@pytest.mark.parametrize("top", [2, 3, 5, 20])
def test_carlini_section_5_differences_of_biased_log_probabilities_are_those_of_logits(top):
    evidence = LogitEvidence(FunctionLogitOracle(table, VOCAB, top=top))
    prompts, truth = prompts_and_truth(evidence)
    reader, tokens = open_reader(evidence, prompts, list(range(120)))
    before = evidence.ledger.num_asked
    values = reader(prompts, tokens)
    assert (values - (truth[:, tokens] - truth[:, [reader.anchor]])).abs().max() < FLOAT32
    # One answer reads top − 1 tokens; those whose bias must be raised are asked for again.
    least = NUM_PROMPTS * math.ceil(len(tokens) / (top - 1))
    assert least <= evidence.ledger.num_asked - before <= 1.1 * least


def test_no_larger_bias_is_used_than_prompts_need():
    evidence = LogitEvidence(FunctionLogitOracle(table, VOCAB, top=5))
    prompts, truth = prompts_and_truth(evidence)
    reader, _ = open_reader(evidence, prompts, list(range(40)))
    assert reader.bias < evidence.oracle.max_bias
    assert reader.bias >= float(truth[:8].max() - truth[:8, :5].min()) / 2


def test_what_cannot_be_lifted_stays_unknown_or_closes_the_way():
    weak = LogitEvidence(FunctionLogitOracle(table, VOCAB, top=5, max_bias=0.5))
    prompts, _ = prompts_and_truth(weak)
    assert open_reader(weak, prompts, list(range(40))) is None
    single = LogitEvidence(FunctionLogitOracle(table, VOCAB, top=1))
    assert open_reader(single, prompts, list(range(40))) is None
    assert single.ledger.num_asked == 0


def test_tokens_without_a_name_are_left_out():
    class Nameless(FunctionLogitOracle):
        def pieces(self, questions):
            for places, values in super().pieces(questions):
                asked = torch.tensor([questions[place].tokens for place in places])
                yield places, values.masked_fill(asked % 7 == 0, math.nan)

    evidence = LogitEvidence(Nameless(table, VOCAB, top=6))
    prompts, _ = prompts_and_truth(evidence)
    reader, tokens = open_reader(evidence, prompts, list(range(50)))
    assert sorted([*tokens, reader.anchor]) == [token for token in range(50) if token % 7]
    assert not reader(prompts, tokens).isnan().any()


def test_the_noise_of_an_anchor_is_evened_out():
    """Noise of differences is white after `evened`, but for the prompt's constant; the rank of a signal stays."""
    generator = torch.Generator().manual_seed(0)
    evidence = LogitEvidence(FunctionLogitOracle(table, VOCAB, top=6))
    reader = LogitReader(evidence, 50.0, anchor=0)
    noise = torch.randn(20000, 2, 6, generator=generator, dtype=torch.float64)
    differences = (noise[:, :, 1:] - noise[:, :, :1]).flatten(1)
    raw, even = differences.T.cov(), reader.evened(differences).T.cov()
    white = torch.eye(10, dtype=torch.float64) - 0.1  # but for the direction in which all ten tokens move together
    assert (raw - white).abs().max() > 0.9
    assert (even - white).abs().max() < 0.05  # 20,000 samples: 0.01 is one standard deviation
    low_rank = torch.randn(8, 3, generator=generator, dtype=torch.float64) @ differences[:3]
    assert torch.linalg.matrix_rank(reader.evened(low_rank)) == 3


@pytest.mark.parametrize("anchor", [None, 0])
def test_the_constant_of_a_prompt_is_taken_away(anchor):
    """With an anchor it is the anchor's logit, the same in every answer; answers may be of different sizes."""
    reader = LogitReader(
        LogitEvidence(FunctionLogitOracle(table, VOCAB, top=None if anchor is None else 5)), anchor=anchor
    )
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.allclose(reader.evened(values), reader.evened(values + torch.arange(4.0)[:, None]))


def test_prompts_are_distinct_and_of_the_kind_that_is_taken():
    evidence = LogitEvidence(FunctionLogitOracle(table, 5))
    prompts = random_prompts(evidence, 400, 2, torch.Generator().manual_seed(0))
    assert len(prompts) == len(set(prompts)) == 25

    class Texts(FunctionLogitOracle):
        view = LogitView(VOCAB, takes_tokens=False)

    texts = random_prompts(LogitEvidence(Texts(table, VOCAB)), 50, 2, torch.Generator().manual_seed(0))
    assert len(set(texts)) == 50
    assert all(isinstance(text, str) and len(text.split()) == 2 for text in texts)
