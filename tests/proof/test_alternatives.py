"""Every line of the table of alternatives: without it, a text that is not in the batch would be certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from tests.tiny_models import gpt2_config, llama_sizes, random_model

from unmask.evidence import GradientEvidence
from unmask.models import Model, adapt
from unmask.proof import alternatives
from unmask.proof.alternatives import (
    UPDATES,
    counts_by_means,
    equal_inputs,
    equal_token,
    leading_run,
    may_be_fewer,
    open_count,
    open_end,
    other_text,
    with_token,
)
from unmask.proof.label_flow import Prefix
from unmask.proof.updates import UpdateProof
from unmask.proof.verdicts import Decision, Ground, ProposedText, TextVerdict, Verdict
from unmask.protocols import observe_gradients
from unmask.recovery import AmbiguityKind, RecoveredText

B = (400, 3, 8)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An update of a batch, and proposed texts that explain it as well; `true` is what the first of them really is."""

    evidence: GradientEvidence
    model: Model
    proposed: Sequence[Tokens]
    true: Tokens
    beside: Sequence[Prefix] = ()

    def judge(self) -> Verdict:
        proof = UpdateProof(self.evidence, self.model)
        return proof.judge([ProposedText(tokens) for tokens in self.proposed], beside=self.beside)


def covers(text: TextVerdict, tokens: Tokens) -> bool:
    """Whether the class of a text holds another one."""
    certain = text.decision is Decision.CERTAIN
    return RecoveredText(text.text.tokens, "", certain, text.misfit, text.count, text.points).covers(tokens)


def masked(model: Model, tokens: Tokens, labels: Sequence[int]) -> GradientEvidence:
    """Next-token training on one text, of which only the labels at some places count."""
    places = torch.full((1, len(tokens)), -100)
    places[0, list(labels)] = torch.tensor([tokens[place] for place in labels])
    loss = model.hf(input_ids=torch.tensor([tokens]), labels=places).loss
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    sent = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return GradientEvidence.of(model, sent, task="next_token", num_texts=1, num_clients=1)


def bare(model: Model, evidence: GradientEvidence, **known: object) -> tuple[GradientEvidence, Model]:
    """The same for an adversary who has the model without its output layer, and says what is `known`."""
    body = transformers.LlamaModel(model.hf.config).eval()
    body.load_state_dict(model.body.state_dict())
    inner = adapt(body)
    sent = {name: g for name, g in evidence.gradients.items() if name != model.unembedding_name}
    head = torch.zeros(2, model.width)
    return GradientEvidence.of(inner, sent, num_texts=1, num_clients=1, head=head, **known), inner


def without(evidence: GradientEvidence, *names: str | None) -> GradientEvidence:
    return evidence.with_tensors({name: g for name, g in evidence.gradients.items() if name not in names})


def twins(model: Model, name: str | None, token: int, other: int) -> Model:
    """A copy of a model in which two tokens have the same row of a matrix."""
    copied = model.to()
    assert name is not None
    with torch.no_grad():
        rows = copied.parameter(name)
        rows[other] = rows[token]
    return copied


def sure_model() -> Model:
    """A head so sharp that the model is sure of nearly every next token."""
    config = gpt2_config(n_embd=48, n_layer=2, vocab_size=60, bos_token_id=59, eos_token_id=59, pad_token_id=59)
    hf = random_model(transformers.GPT2LMHeadModel, config, seed=3)
    with torch.no_grad():
        hf.transformer.ln_f.weight *= 40
    return adapt(hf)


def with_sure_token(model: Model) -> Tokens:
    """A text, and behind it a token that the model is sure of."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        text = tuple(torch.randint(3, 58, (5,), generator=generator).tolist())
        with torch.no_grad():
            likely = model.hf(torch.tensor([text])).logits[0, -1].double().softmax(-1)
        if float(likely.max()) > 1 - 1e-7:
            return (*text, int(likely.argmax()))
    raise AssertionError("the model is sure of nothing")


def judge(evidence: GradientEvidence, model: Model, texts: Sequence[Tokens]) -> Verdict:
    return UpdateProof(evidence, model).judge([ProposedText(text) for text in texts])


# ---- one batch for each way to be wrong


def classified_run(model: Model) -> Case:
    """'4 4 4' has no row but that of '4'."""
    evidence = observe_gradients(model, [(4, 4, 4), B], task="classification")
    return Case(evidence, model, [(4, 4), B], (4, 4, 4))


def traded_run(model: Model) -> Case:
    """'4 4 9' and '4 10' send what '4 9' and '4 4 10' do."""
    evidence = observe_gradients(model, [(4, 4, 9), (4, 10)])
    return Case(evidence, model, [(4, 9), (4, 4, 10)], (4, 4, 9))


def masked_run(model: Model) -> Case:
    """Only the last token of '4 4 9' is a label."""
    return Case(masked(model, (4, 4, 9), [2]), model, [(4, 9)], (4, 4, 9))


def masked_end(model: Model) -> Case:
    """Nothing of the last token was a label."""
    return Case(masked(model, (5, 17, 99, 250), [1, 2]), model, [(5, 17, 99)], (5, 17, 99, 250))


def unstated_task(model: Model) -> Case:
    """A label of a token, read as a classification."""
    evidence, inner = bare(model, masked(model, (5, 17, 99, 250), [3]), pooling="last")
    return Case(evidence, inner, [(5, 17, 99)], (5, 17, 99, 250))


def unstated_pooling(model: Model) -> Case:
    """Labels of all tokens, read as a classification of a mean."""
    evidence, inner = bare(model, masked(model, (5, 17, 99, 250), [1, 2, 3]), task="classification")
    return Case(evidence, inner, [(5, 17, 99)], (5, 17, 99, 250))


def padding_at_the_end(_: Model) -> Case:
    """A classifier of transformers does not read the token that is also padding."""
    config = transformers.LlamaConfig(**llama_sizes())
    model = adapt(random_model(transformers.LlamaForSequenceClassification, config, 3))
    padding = model.unread_end
    assert padding is not None
    true = (5, 6, 7, padding)
    evidence = observe_gradients(model, [true, B], task="classification", labels=[0, 1])
    return Case(evidence, model, [true[:-1], B], true)


def label_not_read(model: Model) -> Case:
    """The row of '99' is there, and the tensors that would show its label are not."""
    whole = observe_gradients(model, [(5, 17, 99, 250)])
    evidence = whole.with_tensors({n: g for n, g in whole.gradients.items() if "layers.0." in n or "layers.1." in n})
    return Case(evidence, model, [(5, 17, 99)], (5, 17, 99, 250), beside=[(0, (5, 17, 99))])


def masked_inside(model: Model) -> Case:
    """A label inside and the last one were masked, though it was stated that none is."""
    true = (5, 17, 99, 250, 60)
    evidence = replace(masked(model, true, [1, 3]), all_tokens_predicted=True)
    return Case(evidence, model, [true[:-1]], true)


def sure_of_the_next(_: Model) -> Case:
    """One label more that leaves no trace makes the mean smaller by a factor."""
    model = sure_model()
    true = with_sure_token(model)
    return Case(observe_gradients(model, [true]), model, [true[:-1]], true)


def sure_of_the_last(_: Model) -> Case:
    """One label less that leaves no trace."""
    model = sure_model()
    longer = with_sure_token(model)
    return Case(observe_gradients(model, [longer[:-1]]), model, [longer], longer[:-1])


def equal_as_inputs(model: Model) -> Case:
    """Two tokens with one embedding, whose gradient was not sent."""
    model = twins(model, model.token_embedding, 17, 18)
    evidence = without(observe_gradients(model, [(18, 99, 250), B]), model.token_embedding)
    return Case(evidence, model, [(17, 99, 250), B], (18, 99, 250))


def equal_in_rows(model: Model) -> Case:
    """The same where only rows prove the texts."""
    model = twins(model, model.token_embedding, 17, 18)
    whole = observe_gradients(model, [(5, 18, 250), B], task="classification")
    return Case(without(whole, model.token_embedding), model, [(5, 17, 250), B], (5, 18, 250))


def equal_as_labels(model: Model) -> Case:
    """Two last tokens with one row of the output layer, whose gradient was not sent."""
    model = twins(model, model.unembedding_name, 30, 31)
    evidence = without(observe_gradients(model, [(5, 6, 31), B]), model.unembedding_name)
    return Case(evidence, model, [(5, 6, 30), B], (5, 6, 31))


CASES: list[tuple[str, Callable[[Model], Case]]] = [
    ("open_runs", classified_run),
    ("open_runs", traded_run),
    ("masked_runs", masked_run),
    ("open_labels", masked_end),
    ("open_tasks", unstated_task),
    ("open_losses", unstated_pooling),
    ("skipped_padding", padding_at_the_end),
    ("unread_labels", label_not_read),
    ("masked_labels", masked_inside),
    ("sure_labels", sure_of_the_next),
    ("sure_labels", sure_of_the_last),
    ("equal_tokens", equal_as_inputs),
    ("equal_tokens", equal_in_rows),
    ("equal_tokens", equal_as_labels),
]


def test_every_line_has_a_case():
    assert {line.__name__ for line in UPDATES} == {name for name, _ in CASES}


@pytest.mark.parametrize(("line", "make"), CASES, ids=[make.__name__ for _, make in CASES])
def test_without_its_line_a_false_text_would_be_certain(tiny_llama, monkeypatch, line, make):
    case = make(tiny_llama)
    told = case.judge().texts[0]
    assert told.text.tokens != case.true
    assert told.decision is Decision.ONE_OF_THESE
    assert told.points
    assert covers(told, case.true)
    monkeypatch.setattr(alternatives, "UPDATES", tuple(each for each in UPDATES if each.__name__ != line))
    wrong = case.judge().texts[0]
    assert not covers(wrong, case.true)
    if line != "masked_runs":  # a label that may be masked leaves the end open as well
        assert wrong.decision is Decision.CERTAIN


# ---- ways to be wrong that have no line yet


def greedy(model: Model, tokens: Tokens, number: int) -> Tokens:
    """A text, and tokens that the model is sure of."""
    for _ in range(number):
        with torch.no_grad():
            likely = model.hf(torch.tensor([tokens])).logits[0, -1].double().softmax(-1)
        if float(likely.max()) < 1 - 1e-6:
            return ()
        tokens = (*tokens, int(likely.argmax()))
    return tokens


def test_a_label_that_leaves_no_trace_may_be_another_texts():
    """'a y' and 'b' send what 'a' and 'b z' do, where the model is sure of y and of z: as many labels, one trace."""
    model = sure_model()
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(torch.randint(3, 58, (5,), generator=generator).tolist()) for _ in range(20)]
    first, second = [longer for text in drawn if (longer := greedy(model, text, 1))][:2]
    evidence = observe_gradients(model, [first, second[:-1]])
    assert judge(evidence, model, [first, second[:-1]]).ground is Ground.CLIENT  # also of what is right
    verdict = judge(evidence, model, [first[:-1], second])
    assert verdict.ground is Ground.CLIENT
    assert not verdict.certain


def test_a_text_that_leaves_no_trace_may_be_another_one():
    """The model is sure of every label of it: any other such text of its length sends the same."""
    model = sure_model()
    silent = [text for token in range(3, 58) if (text := greedy(model, (token,), 2))]
    seen = (49, 17, 44, 17, 37)
    verdict = judge(observe_gradients(model, [seen, silent[0]]), model, [seen, silent[1]])
    assert verdict.ground is Ground.CLIENT
    assert silent[1] not in {text.text.tokens for text in verdict.certain}


# ---- where a line has nothing to say, texts are certain


def assert_certain(evidence: GradientEvidence, model: Model, texts: Sequence[Tokens]) -> None:
    verdict = judge(evidence, model, texts)
    assert verdict.is_whole, verdict
    assert {text.text.tokens for text in verdict.certain} == set(texts)


def test_positions_that_are_learned_tell_how_long_a_run_is(tiny_gpt2):
    for texts in ([(4, 4), B], [(4, 4, 9), (4, 10)]):
        for task in ("next_token", "classification"):
            assert_certain(observe_gradients(tiny_gpt2, texts, task=task), tiny_gpt2, texts)


def test_labels_leave_a_run_open_only_if_texts_can_trade_it(tiny_llama):
    for texts in ([(4, 4, 9), (5, 6, 7)], [(4, 4, 9, 10, 11), (5, 6, 7)]):
        assert_certain(observe_gradients(tiny_llama, texts), tiny_llama, texts)
    traded = [(4, 4, 9), (4, 4, 4)]
    verdict = judge(observe_gradients(tiny_llama, traded), tiny_llama, traded)
    assert not verdict.is_whole
    assert (4, 4, 4) not in {text.text.tokens for text in verdict.certain}


def test_a_run_that_later_rows_show_is_not_open(tiny_llama):
    """The random model's rows behind a run of two and of three differ by more than a tenth."""
    texts = [(4, 4, 9, 10, 11), B]
    assert_certain(observe_gradients(tiny_llama, texts, task="classification"), tiny_llama, texts)


def test_labels_that_were_all_predicted_close_the_end(tiny_llama):
    text = (5, 17, 99)
    evidence = observe_gradients(tiny_llama, [text])
    assert_certain(evidence, tiny_llama, [text])
    (open_text,) = judge(replace(evidence, all_tokens_predicted=None), tiny_llama, [text]).texts
    assert open_text.decision is Decision.ONE_OF_THESE
    assert {point.kind for point in open_text.points} == {AmbiguityKind.OPEN_END}


def test_of_open_ends_a_text_has_one(tiny_llama):
    evidence = replace(masked(tiny_llama, (5, 17, 99, 250), [1, 3]), all_tokens_predicted=None)
    (text,) = judge(evidence, tiny_llama, [(5, 17, 99, 250)]).texts
    assert [point.kind for point in text.points] == [AmbiguityKind.OPEN_END]


def test_a_model_that_is_not_sure_closes_the_end_of_a_scaled_update(tiny_gpt2):
    texts = [(5, 17, 99), B]
    evidence = observe_gradients(tiny_gpt2, texts)
    scaled = evidence.with_tensors({name: 0.3 * g for name, g in evidence.gradients.items()})
    assert_certain(scaled, tiny_gpt2, texts)


def test_the_client_counts_a_label_that_it_is_sure_of():
    """Not a multiple of it: one label more or less would show in the mean."""
    model = sure_model()
    text = with_sure_token(model)
    assert_certain(observe_gradients(model, [text]), model, [text])


def test_rows_of_their_own_tell_equal_tokens_apart(tiny_llama):
    for name, pair, texts in (
        (tiny_llama.token_embedding, (17, 18), [(18, 99, 250), B]),
        (tiny_llama.unembedding_name, (30, 31), [(5, 6, 31), B]),
    ):
        model = twins(tiny_llama, name, *pair)
        assert_certain(observe_gradients(model, texts), model, texts)


def test_a_label_tells_which_of_two_equal_embeddings_it_is(tiny_llama):
    model = twins(tiny_llama, tiny_llama.token_embedding, 20, 21)
    text = (5, 21, 99, 7)
    evidence = without(observe_gradients(model, [text]), model.token_embedding)
    assert_certain(evidence, model, [text])
    (wrong,) = judge(evidence, model, [(5, 20, 99, 7)]).texts
    assert wrong.decision is not Decision.CERTAIN


# ---- what lines ask


def test_rows_that_did_not_move_are_of_no_class(tiny_llama):
    model = twins(tiny_llama, tiny_llama.token_embedding, 17, 18)
    assert equal_inputs(model, {17, 3}) == {17: (17, 18)}
    assert equal_inputs(model, {3}) == {}
    assert equal_inputs(model, {17}, observe_gradients(model, [(5, 17, 3)])) == {}
    assert equal_inputs(model, {17}, observe_gradients(model, [(5, 17, 18, 3)])) == {17: (17, 18)}


def test_one_token_of_one_copy_is_replaced():
    texts = [ProposedText((1, 2, 3), 2), ProposedText((4, 5))]
    changed = with_token(texts, texts[0], 1, 9)
    assert changed == [ProposedText((1, 2, 3), 1), ProposedText((1, 9, 3), 1), texts[1]]
    assert with_token(texts, texts[1], 0, 9) == [texts[0], ProposedText((9, 5))]


def test_counts_of_a_mean_of_means():
    assert counts_by_means([1, 1], [2, 2], 2) == [1, 1]
    assert counts_by_means([3, 1], [1, 3], 4) == [2, 2]
    assert counts_by_means([1, 1], [1, 2], 2) is None
    assert counts_by_means([1], [0], 1) is None


def test_counts_with_a_common_factor_may_be_fewer():
    assert may_be_fewer([2, 4], labelled=True)
    assert not may_be_fewer([2, 3], labelled=True)
    assert not may_be_fewer([2, 4], labelled=False)


def test_every_sentence_says_what_is_open(tiny_gpt2):
    points = [
        leading_run(4),
        open_end("why"),
        open_count("why"),
        other_text((1, 2), "why"),
        equal_token(tiny_gpt2, 1, (20, 21)),
    ]
    assert [point.kind for point in points] == [
        AmbiguityKind.LEADING_RUN,
        AmbiguityKind.OPEN_END,
        AmbiguityKind.COUNT,
        AmbiguityKind.OTHER_TEXT,
        AmbiguityKind.EQUAL_TOKENS,
    ]
    assert all(point.reason.strip() for point in points)
    assert (points[-1].position, points[-1].tokens) == (1, (20, 21))
