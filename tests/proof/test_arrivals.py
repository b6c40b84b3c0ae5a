"""What arrives at the top explains everything below, whatever the loss: if, and only if, the rows are right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from unmask.evidence import GradientEvidence
from unmask.models import Model, Role
from unmask.proof.arrivals import Arrivals, TextInput, down_inputs, highest_layer, replay_arrivals
from unmask.protocols import observe_gradients

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [44, 45, 46, 47, 48, 49]]
WRONG = {
    "a missing text": TEXTS[:2],
    "one wrong token": [TEXTS[0], TEXTS[1], [44, 45, 60, 47, 48, 49]],
    "another order of words": [[5, 99, 17, 17, 250], *TEXTS[1:]],
}
FAR = 30  # times the tolerance, which grows with the condition of the rows


def solve(evidence: GradientEvidence, model: Model, texts: Sequence[Sequence[int]]) -> Arrivals | None:
    """What arrives at every token of the texts; prefixes that texts share are asked for once."""
    rows = torch.tensor([(index, place) for index, text in enumerate(texts) for place in range(len(text))])
    return replay_arrivals(evidence, model, [TextInput(tuple(text)) for text in texts], rows)


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_the_right_rows_explain_the_update_whatever_the_loss(tiny, pooling):
    if tiny.causal and pooling == "first":
        pytest.skip("the first token of a decoder sees nothing but itself")
    evidence = observe_gradients(tiny, TEXTS, task="classification", pooling=pooling)
    found = solve(evidence, tiny, TEXTS)
    assert found is not None
    assert found.agreement.holds, found.agreement
    assert found.agreement.num_tensors > 10
    for name, texts in WRONG.items():
        wrong = solve(evidence, tiny, texts)
        assert wrong is not None
        assert not wrong.agreement.holds_up_to_scale, name
        assert wrong.agreement.misfit > FAR * found.agreement.tolerance, (name, wrong.agreement)


def test_nothing_arrives_at_a_text_that_is_not_there(tiny_gpt2, tiny_llama, tiny_bert):
    for model in (tiny_gpt2, tiny_llama, tiny_bert):
        evidence = observe_gradients(model, TEXTS, task="classification", pooling="mean")
        found = solve(evidence, model, [*TEXTS, [300, 301, 302]])
        assert found is not None
        assert found.agreement.holds
        sizes = found.sizes.tolist()
        # Least squares leaves rounding, 1e-6 times the condition; true rows are beyond a hundredth.
        assert max(sizes[-3:]) < 1e-3 < 1e-2 < min(sizes[:-3])


def test_only_ends_of_classified_texts_receive_something(tiny_llama):
    found = solve(observe_gradients(tiny_llama, TEXTS, task="classification", pooling="last"), tiny_llama, TEXTS)
    assert found is not None
    ends = [place == len(text) - 1 for text in TEXTS for place in range(len(text))]
    assert [size > 1e-3 for size in found.sizes.tolist()] == ends


def test_rows_are_returned_in_the_order_that_was_asked_for(tiny_llama):
    """More texts than are run at once, and rows in a shuffled order."""
    texts = [TextInput((7 + index, 100 + index)) for index in range(40)]
    evidence = observe_gradients(tiny_llama, [list(text.tokens) for text in texts], task="classification")
    rows = torch.tensor([(index, 1) for index in range(40)])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    plain, shuffled = (replay_arrivals(evidence, tiny_llama, texts, asked) for asked in (rows, rows[order]))
    assert plain is not None
    assert shuffled is not None
    assert plain.agreement.holds
    assert shuffled.agreement.holds
    torch.testing.assert_close(shuffled.rows, plain.rows[order], rtol=1e-6, atol=1e-9)


def test_next_token_training_is_explained_too(tiny_gpt2, tiny_llama):
    """The last token of a text is only a label: it has no row."""
    inner = [text[:-1] for text in TEXTS]
    for model in (tiny_gpt2, tiny_llama):
        found = solve(observe_gradients(model, TEXTS), model, inner)
        assert found is not None
        assert found.agreement.holds, found.agreement


def test_the_highest_layer_is_the_last_that_adds_to_the_stream(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS)
    top = highest_layer(evidence, tiny_llama)
    assert top is not None
    assert (top.block, top.role) == (2, Role.MLP_OUT)
    assert top.is_last(tiny_llama)
    lower = highest_layer(evidence.only("layers.0.", "layers.1.self_attn"), tiny_llama)
    assert lower is not None
    assert (lower.block, lower.role) == (1, Role.ATTENTION_OUT)
    assert not lower.is_last(tiny_llama)
    assert highest_layer(evidence.only("q_proj", "norm"), tiny_llama) is None


def test_a_part_of_the_update_is_explained_from_its_own_highest_layer(tiny_gpt2, tiny_llama):
    for model, part in ((tiny_llama, ["layers.0."]), (tiny_gpt2, ["h.0.", "h.1.attn"])):
        evidence = observe_gradients(model, TEXTS, task="classification", pooling="mean").only(*part)
        right, wrong = (solve(evidence, model, texts) for texts in (TEXTS, WRONG["another order of words"]))
        assert right is not None
        assert right.agreement.holds, right.agreement
        assert wrong is not None
        assert not wrong.agreement.holds_up_to_scale


def test_where_it_cannot_be_solved_there_is_no_answer(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS)
    inputs = [TextInput(tuple(TEXTS[0]))]
    assert replay_arrivals(evidence.only("q_proj"), tiny_llama, inputs, torch.tensor([(0, 0)])) is None
    assert replay_arrivals(evidence, tiny_llama, inputs, torch.zeros(0, 2, dtype=torch.long)) is None
    # The same row twice: what arrives at each of them is not determined.
    assert replay_arrivals(evidence, tiny_llama, inputs, torch.tensor([(0, 0), (0, 0)])) is None
    # More rows than the layer is wide, 96.
    many = torch.arange(500).reshape(10, 50).tolist()
    assert solve(evidence, tiny_llama, many) is None


def test_inputs_of_the_down_projection_are_rows_of_its_span(tiny_llama):
    evidence = observe_gradients(tiny_llama, TEXTS[:1])
    gradient = evidence.linear(tiny_llama, Role.MLP_OUT, 2)
    assert gradient is not None
    rows = down_inputs(tiny_llama, TextInput(tuple(TEXTS[0][:-1])), 2).detach().double()
    fitted = rows.T @ torch.linalg.lstsq(rows.T, gradient.double()).solution
    # Rounding of float32; nothing of the gradient lies outside of the four rows.
    assert float((fitted - gradient).norm() / gradient.norm()) < 1e-5


def test_model_and_evidence_are_left_alone(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    before = {name: gradient.clone() for name, gradient in evidence.gradients.items()}
    solve(evidence, tiny_gpt2, TEXTS)
    assert all(torch.equal(before[name], gradient) for name, gradient in evidence.gradients.items())
    assert all(p.requires_grad and p.grad is None for _, p in tiny_gpt2.named_parameters())
