"""Evidence that says nothing, on real weights: a vocabulary of tens of thousands has more tokens to be wrong about."""

from __future__ import annotations

import pytest
from tests.contracts.recipes import BLOCK_0_OF_BERT, CLASS, NEXT, PART, SPAN_OF_BERT, STREAM, texts

from unmask.recovery import Status

SENTENCES = ("The spare key lies under the pot.", "The biopsy was positive.")
SMOLLM2, MINILM = "smollm2", "minilm"
# Real updates are large; these parts are what an attack on a decoder can use, and 18 MB instead of 540.
ENDS_OF_SMOLLM2 = ("layers.0.", "layers.29.mlp.down_proj")

RECIPES = (
    texts("decoder", "smollm2", SMOLLM2, NEXT, SENTENCES, keep=ENDS_OF_SMOLLM2),
    texts("encoder", "minilm", MINILM, CLASS, SENTENCES, keep=BLOCK_0_OF_BERT),
    texts("bag-of-words", "minilm, rows", MINILM, CLASS, SENTENCES, status=PART, keep=("word_embeddings",)),
    texts("bag-of-words", "minilm, span", MINILM, CLASS, SENTENCES, status=PART, keep=SPAN_OF_BERT),
    texts("prompt", "smollm2", SMOLLM2, (STREAM, 4), SENTENCES, max_candidates=512),
    texts("encoder-prompt", "minilm", MINILM, (STREAM, 3), SENTENCES),
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_evidence_that_says_nothing_yields_nothing(recipe, request, one_thread):
    request.getfixturevalue(recipe.model_name)  # skips where the weights are not installed
    for control, evidence in recipe.controls():
        recovery = recipe.run(evidence)
        assert recovery.status is not Status.RECOVERED, (control, recovery.reason)
        assert recipe.is_silent(recovery, control), (control, recovery.reason)
        assert not list(recipe.faults(recovery)), control
        assert recovery.reason.strip(), control
