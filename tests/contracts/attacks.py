"""The one table of all attacks: what each is run on in the contracts. A new attack gets a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unmask.attacks.baselines.dager import Dager
from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.attacks.outputs.first_attention.attack import FirstAttentionAttack
from unmask.attacks.outputs.layer_inputs.stack import StackAttack
from unmask.attacks.outputs.prompts.attack import PromptAttack
from unmask.attacks.outputs.prompts.encoder_attack import EncoderPromptAttack
from unmask.attacks.outputs.vectors.pooled import PooledAttack
from unmask.evidence import GradientEvidence, HiddenEvidence
from unmask.models import Model
from unmask.protocols import observe_gradients, observe_hidden
from unmask.recovery import Status

Texts = tuple[tuple[int, ...], ...] | tuple[str, ...]
Evidence = GradientEvidence | HiddenEvidence

# Different lengths, a repeated token, two texts with a common beginning.
BATCH = ((5, 17, 99, 17, 250), (400, 3, 8, 21), (44, 45, 46, 47, 48, 49, 50, 51), (400, 3, 8, 9, 11))
START, END = 1, 2
STARTED = tuple((START, *text) for text in BATCH)
FRAMED = ((START, 17, 99, 250, END), (START, 400, 3, 8, 21, END))
SENTENCES = ("The spare key lies under the pot.", "The biopsy was positive.")

# Real updates are large; these parts are what an attack on a decoder can use, and 18 MB instead of 540.
ENDS_OF_SMOLLM2 = ("layers.0.", "layers.29.mlp.down_proj")


def tensors_of(evidence: Evidence) -> Mapping[str, Tensor]:
    """What an adversary reads, by name."""
    return evidence.gradients if isinstance(evidence, GradientEvidence) else {"states": evidence.states}


def with_tensors(evidence: Evidence, tensors: Mapping[str, Tensor]) -> Evidence:
    """The same evidence with other tensors in it."""
    if isinstance(evidence, GradientEvidence):
        return replace(evidence, gradients=tensors)
    return replace(evidence, states=tensors["states"])


@dataclass(frozen=True)
class Row:
    """An attack with the model and the batch it is run on, and how it must end there.

    `seen` is the task whose gradients are seen, or the site and the layer whose states are. `keep`: parts of parameter
    names; all others are left out of the update.
    """

    name: str
    attack: Any
    recipe: str
    seen: str | tuple[str, int]
    texts: Texts
    status: Status
    keep: tuple[str, ...] | None = None

    @property
    def sees_gradients(self) -> bool:
        """Whether the evidence is an update."""
        return isinstance(self.seen, str)

    def observe(self, model: Model) -> Evidence:
        """What the adversary sees of a client that starts from `model`, or of a service that runs it."""
        if isinstance(self.seen, tuple):
            return observe_hidden(model, list(self.texts), site=self.seen[0], layer=self.seen[1])
        keep = None if self.keep is None else list(self.keep)
        return observe_gradients(model, list(self.texts), task=self.seen, parameters=keep)

    def secret(self, model: Model) -> list[tuple[int, ...]]:
        """The batch as tokens."""
        return [tuple(model.encode(text) if isinstance(text, str) else text) for text in self.texts]


WHOLE, PART = Status.RECOVERED, Status.PARTIAL
NEXT, CLASS = "next_token", "classification"
STREAM = "stream"
# Block 0 without the embeddings, so that tokens must come from a span.
SPAN_OF_GPT2, SPAN_OF_BERT = ("h.0.",), ("encoder.layer.0.attention.self",)
BLOCK_0_OF_BERT = ("encoder.layer.0.",)
FRAME = (START, END)

ROWS = (
    Row("decoder, gpt2, next token", DecoderAttack(), "tiny_gpt2", NEXT, BATCH, WHOLE),
    Row("decoder, gpt2, classification", DecoderAttack(), "tiny_gpt2", CLASS, BATCH, WHOLE),
    Row("decoder, gpt2, block 0 alone", DecoderAttack(), "tiny_gpt2", NEXT, BATCH, PART, SPAN_OF_GPT2),
    Row("decoder, llama, next token", DecoderAttack(), "tiny_llama", NEXT, BATCH, WHOLE),
    Row("decoder, llama, classification", DecoderAttack(), "tiny_llama", CLASS, BATCH, WHOLE),
    Row("decoder, smollm2", DecoderAttack(), "smollm2", NEXT, SENTENCES, WHOLE, ENDS_OF_SMOLLM2),
    Row("encoder, bert, classification", EncoderAttack(frame=FRAME), "tiny_bert", CLASS, FRAMED, WHOLE),
    Row("encoder, bert, block 0 alone", EncoderAttack(frame=FRAME), "tiny_bert", CLASS, FRAMED, WHOLE, BLOCK_0_OF_BERT),
    Row("encoder, bert, span", EncoderAttack(frame=FRAME), "tiny_bert", CLASS, FRAMED, PART, SPAN_OF_BERT),
    Row("encoder, minilm", EncoderAttack(), "minilm", CLASS, SENTENCES, WHOLE, BLOCK_0_OF_BERT),
    Row("bag of words, gpt2, span", BagOfWordsAttack(), "tiny_gpt2", NEXT, BATCH, PART, SPAN_OF_GPT2),
    Row("bag of words, bert, rows", BagOfWordsAttack(), "tiny_bert", CLASS, BATCH, PART),
    Row("bag of words, bert, span", BagOfWordsAttack(), "tiny_bert", CLASS, BATCH, PART, SPAN_OF_BERT),
    Row("bag of words, minilm, rows", BagOfWordsAttack(), "minilm", CLASS, SENTENCES, PART, ("word_embeddings",)),
    Row("bag of words, minilm, span", BagOfWordsAttack(), "minilm", CLASS, SENTENCES, PART, SPAN_OF_BERT),
    Row("dager, gpt2, next token", Dager(), "tiny_gpt2", NEXT, BATCH, PART),
    Row("dager, gpt2, classification", Dager(), "tiny_gpt2", CLASS, BATCH, WHOLE),
    Row("dager, llama", Dager(start_token=START), "tiny_llama", CLASS, STARTED, WHOLE),
    Row("dager, bert", Dager(start_token=START, end_tokens=(END,)), "tiny_bert", CLASS, FRAMED, WHOLE),
    Row("prompt, gpt2, embeddings", PromptAttack(), "tiny_gpt2", (STREAM, 0), BATCH, WHOLE),
    Row("prompt, gpt2, last layer", PromptAttack(), "tiny_gpt2", (STREAM, 3), BATCH, WHOLE),
    Row("prompt, llama", PromptAttack(), "tiny_llama", (STREAM, 2), BATCH, WHOLE),
    Row("prompt, llama, final norm", PromptAttack(), "tiny_llama", ("final_norm", 3), BATCH, WHOLE),
    Row("prompt, smollm2", PromptAttack(max_candidates=512), "smollm2", (STREAM, 4), SENTENCES, WHOLE),
    Row("encoder prompt, bert", EncoderPromptAttack(), "tiny_bert", (STREAM, 1), FRAMED, WHOLE),
    Row("encoder prompt, minilm", EncoderPromptAttack(), "minilm", (STREAM, 3), SENTENCES, WHOLE),
    Row("pooled, llama", PooledAttack(), "tiny_llama", ("mean", 0), BATCH[:1], PART),
    Row("stack, gpt2", StackAttack(), "tiny_gpt2", (STREAM, 1), FRAMED, WHOLE),
    Row("first attention, gpt2", FirstAttentionAttack(), "tiny_gpt2", ("attention", 0), BATCH, WHOLE),
    Row("first attention, llama", FirstAttentionAttack(), "tiny_llama", ("attention", 0), BATCH, WHOLE),
    Row("first attention, bert", FirstAttentionAttack(), "tiny_bert", ("attention", 0), BATCH, WHOLE),
)
