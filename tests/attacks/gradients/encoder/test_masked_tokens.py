"""What masked tokens had been, given the right masked texts; and with some missing, wrong, or of other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attacks.gradients.encoder_batches import FRAME, as_places, classified, pair_kinds, problem_of, with_noise
from tests.contracts.models import stranger
from tests.tiny_models import VOCAB, bert_config, random_model, word_tokenizer
from torch import Tensor

from unmask.attacks.gradients.decoder.labels import EXPLAINED
from unmask.attacks.gradients.encoder.masked_tokens import Original, find_originals, read_originals
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.evidence import GradientEvidence, Task
from unmask.models import Model, adapt
from unmask.protocols.batch import Batch
from unmask.protocols.masking import masked_token_loss

CLS, SEP = FRAME
MASK = 3
Tokens = tuple[int, ...]
LAST = "encoder.layer.2.output.dense.weight"
# Each fate once: 99 was hidden, 44 stands where 8 was, 61 was predicted and left as it is. 17 occurs in all texts.
ORIGINALS = [(CLS, 5, 17, 99, 250, SEP), (CLS, 400, 8, 17, SEP), (CLS, 60, 61, 17, 63, 64, SEP)]
SEEN = [(CLS, 5, 17, MASK, 250, SEP), (CLS, 400, 44, 17, SEP), (CLS, 60, 61, 17, 63, 64, SEP)]
DRAWN = [(3,), (2,), (2,)]


@pytest.fixture(scope="module")
def model(tiny_bert: Model) -> Model:
    """In float64, with a masked-language head of its own and a tokenizer."""
    return adapt(tiny_bert.to(dtype=torch.float64).hf, word_tokenizer())


@pytest.fixture(scope="module")
def headless() -> Model:
    """Its token embeddings predict."""
    return adapt(random_model(transformers.BertModel, bert_config()).double(), word_tokenizer())


def padded(rows: Sequence[Sequence[int]], filling: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (length - len(row))] for row in rows])


def trained(
    model: Model,
    originals: Sequence[Tokens] = ORIGINALS,
    seen: Sequence[Tokens] = SEEN,
    drawn: Sequence[Sequence[int]] = DRAWN,
    kinds: Sequence[Sequence[int]] | None = None,
) -> GradientEvidence:
    """An update of masked-token training in which the model sees `seen` and predicts what was drawn."""
    labels = [
        [token if p in own else -100 for p, token in enumerate(t)] for t, own in zip(originals, drawn, strict=True)
    ]
    types = None if kinds is None else padded(kinds, 0)
    batch = Batch(padded(seen, 0), padded([[1] * len(text) for text in seen], 0).bool(), types)
    parameters = dict(model.named_parameters())
    with torch.enable_grad():
        loss = masked_token_loss(model, batch, padded(labels, -100))
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    shared = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return GradientEvidence(shared, model.fingerprint(), Task.MASKED_TOKEN, len(seen), compute_dtype=model.dtype)


def read(
    evidence: GradientEvidence, problem: Problem, seen: Sequence[Tokens], kinds: Sequence[Sequence[int]] | None = None
) -> list[Original] | str:
    """As `read_originals`, text by text."""
    rows = zip(seen, kinds or [None] * len(seen), strict=True)
    texts = [as_places(problem.places, tokens, types) for tokens, types in rows]
    found = read_originals(evidence, problem, texts)
    return found if isinstance(found, str) else [found[text] for text in texts]


def found_in(evidence: GradientEvidence, problem: Problem, seen: Sequence[Tokens] = SEEN) -> object:
    texts = [as_places(problem.places, tokens) for tokens in seen]
    return find_originals(evidence, problem, texts)


def explained(found: list[Original] | str) -> list[Tokens]:
    return [] if isinstance(found, str) else [original.tokens for original in found if original.is_explained]


# What was hidden, replaced or kept


@pytest.mark.parametrize("name", ["model", "headless"])
def test_every_fate_is_seen_and_every_word_is_named(request, name):
    model = request.getfixturevalue(name)
    evidence = trained(model)
    found = read(evidence, problem_of(model, evidence), SEEN)
    assert explained(found) == ORIGINALS
    assert [original.count for original in found] == [1, 1, 1]
    assert max(original.residual for original in found) < 1e-8  # float64, two solves


def test_float32_is_precise_enough(tiny_bert):
    model = adapt(tiny_bert.hf, word_tokenizer())
    evidence = trained(model)
    assert explained(read(evidence, problem_of(model, evidence), SEEN)) == ORIGINALS


def test_words_of_pairs_are_named(model):
    originals = [(CLS, 17, 99, SEP, 250, 251, SEP), (CLS, 400, 30, SEP, 21, 33, SEP)]
    seen = [(CLS, 17, MASK, SEP, 250, MASK, SEP), (CLS, 400, 30, SEP, 21, MASK, SEP)]
    kinds = [pair_kinds(text) for text in originals]
    evidence = trained(model, originals, seen, [(2, 5), (5,)], kinds)
    assert explained(read(evidence, problem_of(model, evidence), seen, kinds)) == originals


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_was_drawn_is_named(model, data):
    """Any texts, any positions, whatever the model sees there: its own mask, the word itself or another."""
    words = st.lists(st.integers(5, VOCAB - 1), min_size=1, max_size=6)
    originals = [(CLS, *inner, SEP) for inner in data.draw(st.lists(words, min_size=1, max_size=3))]
    seen, drawn = [], []
    for index, text in enumerate(originals):
        own = data.draw(st.sets(st.integers(1, len(text) - 2), min_size=1))
        fates = {p: data.draw(st.sampled_from([MASK, text[p], 70 + index])) for p in own}
        seen.append(tuple(fates.get(p, token) for p, token in enumerate(text)))
        drawn.append(own)
    if len(set(seen)) < len(seen):
        return  # texts that masking made equal: below
    evidence = trained(model, originals, seen, drawn)
    assert explained(read(evidence, problem_of(model, evidence), seen)) == originals


# Batches in which texts meet


def test_a_text_that_repeats_is_counted(model):
    order = [0, 0, 1, 2]
    parts = ([part[row] for row in order] for part in (ORIGINALS, SEEN, DRAWN))
    evidence = trained(model, *parts)
    found = read(evidence, problem_of(model, evidence), SEEN)
    assert explained(found) == ORIGINALS
    assert [original.count for original in found] == [2, 1, 1]


def test_texts_that_masking_made_equal_are_not_claimed(model):
    """Two labels meet at one row: which of them stood in which text with what else cannot be told."""
    originals, seen = [(CLS, 5, 17, SEP), (CLS, 5, 99, SEP), ORIGINALS[0]], [(CLS, 5, MASK, SEP)] * 2 + [SEEN[0]]
    evidence = trained(model, originals, seen, [(2,), (2,), DRAWN[0]])
    found = read(evidence, problem_of(model, evidence), seen[1:])
    assert explained(found) == [ORIGINALS[0]]


def test_a_text_that_was_missed_leaves_the_others_exact(model):
    """What is left of the gradient spans the missing rows' part, and labels are read beside it."""
    evidence = trained(model)
    found = read(evidence, problem_of(model, evidence), SEEN[:2])
    assert explained(found) == ORIGINALS[:2]


def test_a_text_of_which_nothing_was_predicted_is_not_claimed(model):
    evidence = trained(model)
    problem = problem_of(model, evidence)
    silent = (CLS, 250, 17, 400, SEP)
    found = read(evidence, problem, [*SEEN, silent])
    assert explained(found) == ORIGINALS
    assert found[-1].tokens == silent


def test_a_mask_that_no_label_replaced_is_not_claimed(model):
    """The client's text holds the mask itself, and it was not drawn."""
    originals = [(CLS, 5, MASK, 99, SEP), ORIGINALS[1]]
    seen = [(CLS, 5, MASK, 44, SEP), SEEN[1]]
    evidence = trained(model, originals, seen, [(3,), DRAWN[1]])
    found = read(evidence, problem_of(model, evidence), seen)
    assert explained(found) == [ORIGINALS[1]]


# When there is nothing to read


def test_without_the_last_down_projection_the_reason_names_it(model):
    evidence = trained(model)
    rest = {name: gradient for name, gradient in evidence.gradients.items() if name != LAST}
    reason = read(replace(evidence, gradients=rest), problem_of(model, evidence), SEEN)
    assert isinstance(reason, str)
    assert LAST in reason


def test_more_rows_than_the_layer_has_are_refused_with_both_numbers(model):
    """The small model's down projection has 96 inputs."""
    evidence = trained(model)
    problem = problem_of(model, evidence)
    words = [token for token in problem.places.tokens.tolist() if token > MASK]
    reason = read(evidence, problem, [(CLS, word, other, 17, 17, SEP) for word in words for other in words[:2]])
    assert isinstance(reason, str)
    assert f"{12 * len(words)} tokens" in reason
    assert "96 rows" in reason


def test_no_texts_no_originals(model):
    evidence = trained(model)
    assert found_in(evidence, problem_of(model, evidence), []) is None


def test_a_client_that_classifies_has_no_originals(model):
    evidence = classified(model, SEEN, pooling="mean")
    problem = problem_of(model, evidence)
    assert found_in(evidence, problem) is None
    unmasked = classified(model, ORIGINALS, pooling="mean")
    unknown = replace(unmasked, task=None)
    assert found_in(unknown, problem_of(model, unmasked), ORIGINALS) is None


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_task_that_is_not_known_is_seen_in_the_gradient(model, pooling):
    evidence = replace(trained(model), task=None)
    found = found_in(evidence, problem_of(model, evidence))
    assert isinstance(found, dict)
    assert [original.tokens for original in found.values()] == ORIGINALS
    other = replace(classified(model, SEEN, pooling=pooling), task=None)  # a mask is in the bag: told, and refused
    assert isinstance(found_in(other, problem_of(model, other)), str)


# Negative controls: what is read is said to be explained only where it is


def test_noise_in_the_gradients_place_explains_nothing(model):
    evidence = trained(model)
    gradient = evidence.gradients[LAST]
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=gradient.dtype)
    noisy = replace(evidence, gradients={**evidence.gradients, LAST: noise * gradient.norm() / noise.norm()})
    assert explained(read(noisy, problem_of(model, evidence), SEEN)) == []


@pytest.mark.parametrize("relative", [0.1, 1.0])
def test_noise_on_the_gradient_explains_nothing_false(model, relative):
    evidence = trained(model)
    found = read(with_noise(evidence, relative), problem_of(model, evidence), SEEN)
    assert set(explained(found)) <= set(ORIGINALS)


def test_gradients_of_other_weights_explain_nothing(model):
    other = adapt(stranger(model, 1).hf, word_tokenizer())
    evidence = trained(model)
    assert explained(read(trained(other), problem_of(model, evidence), SEEN)) == []


def test_wrong_texts_explain_nothing(model):
    evidence = trained(model)
    wrong = [(CLS, 17, 5, MASK, 250, SEP), (CLS, 44, 400, 17, SEP), (CLS, 60, 63, 17, 61, 64, SEP)]
    assert explained(read(evidence, problem_of(model, evidence), wrong)) == []


def test_a_residual_decides_what_is_explained():
    assert Original((CLS, SEP), 1, EXPLAINED).is_explained
    assert not Original((CLS, SEP), 1, 2 * EXPLAINED).is_explained


def test_the_evidence_is_left_as_it_is(model):
    evidence = trained(model)
    before = {name: gradient.clone() for name, gradient in evidence.gradients.items()}
    problem = problem_of(model, evidence)
    first, second = (read(evidence, problem, SEEN) for _ in range(2))
    assert first == second
    assert all(torch.equal(gradient, before[name]) for name, gradient in evidence.gradients.items())
