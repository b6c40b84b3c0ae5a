"""SmolLM2 reads MiniLM's tokens: spelling, likelihood, and what comes next."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.outputs.vectors import language_prior
from unmask.attacks.outputs.vectors.edits import TextBatch
from unmask.attacks.outputs.vectors.language_prior import LanguagePrior, load_language
from unmask.errors import UnmaskError


@pytest.fixture(scope="module")
def prior(smollm2, minilm):
    return LanguagePrior.of(smollm2, minilm)


def tokens(minilm, *texts):
    return TextBatch.of([tuple(minilm.encode(text)[1:-1]) for text in texts])


def test_words_are_spelled_as_people_write_them(prior, minilm, smollm2):
    written, _ = prior.spell(tokens(minilm, "it's easy to play sonatas, isn't it?", "a well-known (old) man"))
    texts = [smollm2.decode([t for t in row if t >= 0][1:]) for row in written.tokens.tolist()]
    assert texts == [" it's easy to play sonatas, isn't it?", " a well-known (old) man"]


def test_sentences_are_likelier_than_shuffled_ones(prior, minilm):
    sentence = tokens(minilm, "the children built a small boat behind the school.")
    generator = torch.Generator().manual_seed(0)
    shuffled = [sentence.tokens[0, torch.randperm(sentence.tokens.shape[1], generator=generator)] for _ in range(4)]
    losses = prior.log_losses(TextBatch(torch.stack([sentence.tokens[0], *shuffled])))
    assert float(losses[0]) + 10 < float(losses[1:].min())


def test_losses_do_not_depend_on_padding(prior, minilm):
    both = tokens(minilm, "the door is open.", "nobody knew where the old key of the house was.")
    alone = tokens(minilm, "the door is open.")
    assert torch.allclose(prior.log_losses(both)[:1], prior.log_losses(alone), atol=1e-3)


def test_losses_of_tokens_add_up_and_show_the_odd_one(prior, minilm):
    texts = tokens(minilm, "the children lawyer built a small boat.", "she left.")
    losses = prior.token_losses(texts)
    assert losses.shape == texts.tokens.shape
    assert torch.allclose(losses.sum(1), prior.log_losses(texts))
    assert int(losses[0].argmax()) == 2
    assert not losses[1, 3:].any()


def test_what_comes_next_is_expected_in_its_gap(prior, minilm):
    text = tokens(minilm, "the children go to bed")
    chances = prior.next_tokens(text)
    (bed,) = minilm.encode("bed")[1:-1]
    ranks = (chances[0] > chances[0, :, bed, None]).sum(1)
    assert chances.shape == (1, 6, minilm.vocab_size)
    assert int(ranks[4]) < 50
    assert int(ranks.argmin()) == 4


def test_no_language_model_is_no_error_but_a_wrong_one_is(minilm, tiny_bert, monkeypatch):
    assert load_language("none", minilm) is None
    assert load_language("smollm2-135m", tiny_bert) is None  # without a tokenizer there is nothing to spell
    with pytest.raises(UnmaskError, match="no-such-model"):
        load_language("no-such-model", minilm)
    with pytest.raises(UnmaskError, match="choose a decoder"):
        load_language("minilm-l6", minilm)
    monkeypatch.setattr(language_prior, "USUAL_LANGUAGE", "no-such-model")
    assert load_language("no-such-model", minilm) is None
