"""What each kind of evidence gives, and why not more, of models that differ in one thing."""

from __future__ import annotations

import pytest
import transformers
from tests.models.families import build
from tests.tiny_models import gpt2_config, random_model

from unmask.attacks.reach import NO_ATTACK, TOKENS, WEIGHTS, WHOLE_TEXTS, Reach, find_reach
from unmask.models import Model, adapt

EVIDENCE = ("gradients", "hidden states", "attention outputs of block 0", "logits", "answers of an attention layer")
LAYER = "hidden size and output layer"
# In the order of EVIDENCE.
BY_HAND = {
    "Llama": (WHOLE_TEXTS, WHOLE_TEXTS, WHOLE_TEXTS, LAYER, WEIGHTS),
    "Bert": (WHOLE_TEXTS, WHOLE_TEXTS, WHOLE_TEXTS, LAYER, NO_ATTACK),
    "Mixtral": (WHOLE_TEXTS, WHOLE_TEXTS, WHOLE_TEXTS, LAYER, WEIGHTS),
    "Albert": (TOKENS, WHOLE_TEXTS, WHOLE_TEXTS, LAYER, NO_ATTACK),
    "Qwen3Next": (TOKENS, NO_ATTACK, NO_ATTACK, LAYER, NO_ATTACK),
    "BitNet": (WHOLE_TEXTS, WHOLE_TEXTS, NO_ATTACK, LAYER, NO_ATTACK),
}
WHY = {
    ("Bert", "answers of an attention layer"): "layer 0 has biases",
    ("Albert", "gradients"): "the blocks share their weights",
    ("Qwen3Next", "gradients"): "block 0 cannot be computed from the parts that were found",
    ("Qwen3Next", "hidden states"): "block 0 cannot be computed from the parts that were found",
    ("BitNet", "attention outputs of block 0"): "no output projection that is given the mixed values as they are",
    ("ModernBert", "gradients"): "read off learned positions",
    ("ModernBert", "attention outputs of block 0"): "told apart by learned positions",
    ("OPT with projections", "hidden states"): "but not from the last ones",
}


def reach(model: Model) -> dict[str, Reach]:
    return {line.evidence: line for line in find_reach(model)}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_given_is_that_of_the_table(name):
    found = reach(adapt(build(name)))
    assert tuple(found) == EVIDENCE
    assert tuple(line.gives for line in found.values()) == BY_HAND[name]
    everything = (WHOLE_TEXTS, WEIGHTS, LAYER)
    assert all(bool(line.why) == (line.gives not in everything) for line in found.values())


@pytest.mark.parametrize(("name", "evidence"), WHY)
def test_the_reason_is_named(name, evidence):
    assert WHY[name, evidence] in reach(adapt(build(name)))[evidence].why


@pytest.mark.parametrize("kind", [transformers.GPT2ForSequenceClassification, transformers.GPT2Model])
def test_a_model_without_a_language_head(kind, tiny_gpt2):
    found = reach(adapt(random_model(kind, gpt2_config())))
    assert (found["gradients"].gives, found["logits"].gives) == (WHOLE_TEXTS, NO_ATTACK)
    assert found["logits"].why == "the model has no head that predicts tokens"
    assert reach(tiny_gpt2)["gradients"] == Reach("gradients", WHOLE_TEXTS)
