"""Models of DAGER's tables: true shapes with random weights where no pretrained ones are at hand, and real ones beside.

No weights of GPT-2, BERT or Llama-2 install from a package registry, so their shapes are drawn at random. Tokens are
those of SmolLM2 (49,152, which GPT-2's 50,257 rows hold) and of MiniLM (30,522: BERT's own vocabulary, and with a start
token in front of every text they fit into Llama-2's 32,000 rows). SmolLM2-135M and MiniLM-L6 are real weights.

'Fine-tuned': the GPT-2 shape after `FINETUNE_STEPS` steps of AdamW on next tokens of the set's last texts; batches to
attack are drawn from the others. The paper trains the pretrained model for two epochs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from synthetic import bert_shape, gpt2_shape, llama_2_7b_shape
from transformers import AutoTokenizer

from unmask.models import Model, adapt, load_model
from unmask.models.catalog import resolve
from unmask.protocols.batch import make_batch
from unmask.protocols.fedsgd import next_token_loss

FINETUNE_STEPS = 200
FINETUNE_SHARE = 0.3  # of the set, its end: texts to train on
FINETUNE_RATE = 5e-5
FINETUNE_BATCH = 16
START_TOKEN = 1  # of Llama-2

Tokens = list[int]


@dataclass(frozen=True)
class Subject:
    """A model to attack, how sentences become its tokens, and how tokens are read."""

    model: Model
    tokenizer: Any
    start: int | None = None  # put in front of every text, where the tokenizer has no frame

    def encode(self, sentence: str) -> Tokens:
        """Tokens as the client has them."""
        if self.start is None:
            return list(self.tokenizer(sentence)["input_ids"])
        return [self.start, *self.tokenizer(sentence, add_special_tokens=False)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Words, without the frame."""
        inner = [token for token in tokens if self.start is None or token != self.start]
        return str(self.tokenizer.decode(inner, skip_special_tokens=True))


@dataclass(frozen=True)
class Entry:
    """How a model of the tables is made: what it is called, its weights, its task, and on which device it fits."""

    label: str
    weights: str
    load: Callable[[Place], Subject]
    task: str = "classification"
    needs_gpu: bool = False
    trained: bool = False  # on the set, before it is attacked


@dataclass(frozen=True)
class Place:
    """Where models run, and a folder with copies of the packaged ones for machines that cannot install them."""

    device: str = "cpu"
    folder: Path | None = None

    def source(self, name: str) -> str:
        """A folder that transformers can load from: the copy if there is one, else the installed package."""
        copied = None if self.folder is None else self.folder / name
        return str(copied) if copied is not None and copied.is_dir() else str(resolve(name))

    def tokenizer(self, name: str) -> Any:
        """The tokenizer of a packaged model."""
        return AutoTokenizer.from_pretrained(self.source(name), local_files_only=True)


def export_models(folder: Path) -> None:
    """What a machine without packages needs: both tokenizers, and MiniLM in float16 (45 MB)."""
    for name in ("smollm2-135m", "minilm-l6"):
        Place().tokenizer(name).save_pretrained(folder / name)
    load_model("minilm-l6").hf.half().save_pretrained(folder / "minilm-l6")


def _gpt2(place: Place, num_blocks: int = 12, **changes: int) -> Subject:
    tokenizer = place.tokenizer("smollm2-135m")
    return Subject(adapt(gpt2_shape(num_blocks, **changes).hf.to(place.device), tokenizer), tokenizer)


def _bert(place: Place) -> Subject:
    tokenizer = place.tokenizer("minilm-l6")
    return Subject(adapt(bert_shape().hf.to(place.device), tokenizer), tokenizer)


def _llama(place: Place, num_blocks: int) -> Subject:
    return Subject(llama_2_7b_shape(num_blocks, device=place.device), place.tokenizer("minilm-l6"), START_TOKEN)


def _real(name: str, place: Place) -> Subject:
    is_copied = place.folder is not None and (place.folder / name / "config.json").is_file()
    model = load_model(place.source(name) if is_copied else name, device=place.device)
    return Subject(model, model.tokenizer)


RANDOM = "random weights"
ENTRIES = {
    "gpt2": Entry("GPT-2 base shape", RANDOM, _gpt2),
    "gpt2-nexttoken": Entry("GPT-2 base shape, next token", RANDOM, _gpt2, task="next_token"),
    "gpt2-finetuned": Entry(
        "GPT-2 base shape, trained", f"{FINETUNE_STEPS} steps from random ones", _gpt2, needs_gpu=True, trained=True
    ),
    "gpt2-large": Entry(
        "GPT-2 large shape", RANDOM, lambda place: _gpt2(place, 36, n_embd=1280, n_head=20), needs_gpu=True
    ),
    "bert": Entry("BERT-base shape", RANDOM, _bert),
    "llama2-7b": Entry("Llama-2-7B shape, 2 of 32 blocks", RANDOM, lambda place: _llama(place, 2), needs_gpu=True),
    "llama2-7b-deep": Entry("Llama-2-7B shape, all 32 blocks", RANDOM, lambda place: _llama(place, 32), needs_gpu=True),
    "minilm": Entry("MiniLM-L6", "real weights", lambda place: _real("minilm-l6", place)),
    "smollm2": Entry(
        "SmolLM2-135M, next token", "real weights", lambda place: _real("smollm2-135m", place), task="next_token"
    ),
}


def load_subject(name: str, place: Place, texts_to_train_on: Sequence[str] = ()) -> Subject:
    """The model, trained first where its entry says so."""
    entry = ENTRIES[name]
    subject = entry.load(place)
    if entry.trained:
        fine_tune(subject, texts_to_train_on)
    return subject


def fine_tune(
    subject: Subject, sentences: Sequence[str], num_steps: int = FINETUNE_STEPS, seed: int = 0
) -> list[float]:
    """Train the model in place on next tokens; the losses, step by step."""
    model = subject.model
    texts = [tokens for tokens in map(subject.encode, sentences) if len(tokens) > 1]
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.hf.parameters(), lr=FINETUNE_RATE)
    losses = []
    for _ in range(num_steps):
        drawn = torch.randint(len(texts), (FINETUNE_BATCH,), generator=generator).tolist()
        loss = next_token_loss(model, make_batch(model, [texts[index] for index in drawn]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


def split_for_training(sentences: Sequence[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[str]]:
    """Sentences to attack, and those that a model is trained on before."""
    kept = round(len(sentences) * (1 - FINETUNE_SHARE))
    return list(sentences[:kept]), [sentence for sentence, _ in sentences[kept:]]
