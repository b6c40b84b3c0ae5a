"""One batch of a table: sentences → the client's update → an attack on it → what it found, scored afterwards.

The client trains on whole sentences with the paper's head (weights of deviation 1e-3) or on next tokens; float32,
dropout off. Attacks know the model, the task and the number of texts; rivals also the labels and the lengths.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from baselines.dager_sweep import DagerSweep, authors_settings
from gradients.paper_clients import PAPERS_HEAD_SCALE, draw_head, parameters_that_are_read
from machine import machine
from paper.dager_cells import Cell
from paper.dager_models import ENTRIES, Place, Subject, Tokens, load_subject, split_for_training
from result_lines import Result
from text_sets import draw_batch, read_set

from unmask.attacks.baselines.dager import Dager
from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.evidence.gradients import GradientEvidence
from unmask.models import Model, Role, load_model
from unmask.protocols import observe_gradients
from unmask.recovery import RecoveredTexts, Recovery
from unmask.scores import score_texts

MIN_TOKENS = 2  # a text of one token has nothing to predict
MAX_ANCHORS = 100  # of the encoder attack: sentences of 50 tokens take seconds an anchor on a core
MAX_PRODUCTS = 2_000_000  # sequences that DAGER checks at most; its authors' code has 10,000,000
RANK_BLOCKS = 10  # blocks whose query gradients DAGER reads the rank from

Attack = Callable[[GradientEvidence, Model], Recovery[RecoveredTexts]]
Example = tuple[Tokens, int]


@dataclass
class Workshop:
    """Models and encoded sets, loaded when they are first needed and kept."""

    place: Place
    data: Path
    subjects: dict[str, Subject] = field(default_factory=dict)
    encoded: dict[tuple[str, str], list[Example]] = field(default_factory=dict)
    priors: dict[str, Model] = field(default_factory=dict)

    def subject(self, model: str, data: str) -> Subject:
        """A model; one that is trained on a set is another one for each set."""
        name = f"{model}, {data}" if ENTRIES[model].trained else model
        if name not in self.subjects:
            _, to_train_on = split_for_training(read_set(self.data / f"{data}.tsv"))
            self.subjects[name] = load_subject(model, self.place, to_train_on)
        return self.subjects[name]

    def prior(self, name: str) -> Model:
        """A packaged language model; an error of unmask's where its weights are not here."""
        if name not in self.priors:
            self.priors[name] = load_model(name, device=self.place.device)
        return self.priors[name]

    def examples(self, model: str, data: str) -> list[Example]:
        """Tokens and labels of the sentences that may be attacked."""
        if (model, data) not in self.encoded:
            sentences = read_set(self.data / f"{data}.tsv")
            if ENTRIES[model].trained:
                sentences, _ = split_for_training(sentences)
            subject = self.subject(model, data)
            pairs = [(subject.encode(sentence), label) for sentence, label in sentences]
            self.encoded[model, data] = [pair for pair in pairs if len(pair[0]) >= MIN_TOKENS]
        return self.encoded[model, data]


def settings_of(cell: Cell) -> str:
    """Budgets of a cell's attack that change what it finds."""
    if cell.attack == "dager":
        return f"max_products={MAX_PRODUCTS}"
    return f"max_anchors={MAX_ANCHORS}" if cell.attack == "ours" and cell.model in ("bert", "minilm") else ""


def measure(workshop: Workshop, cell: Cell, batch: int, seed: int) -> Result:
    """Observe, attack what was observed, and only then compare with the texts."""
    subject = workshop.subject(cell.model, cell.data)
    examples = workshop.examples(cell.model, cell.data)
    drawn = draw_batch(examples, cell.data, cell.texts, batch, seed)
    texts, labels = [tokens for tokens, _ in drawn], [label for _, label in drawn]
    model, task = subject.model, ENTRIES[cell.model].task
    read = dager_parameters(model) if cell.attack == "dager" else parameters_that_are_read(model)
    evidence = observe(model, texts, task, labels, read if model.causal or cell.attack == "dager" else None, seed)
    attack = make_attack(cell, model)
    return attack_and_compare(attack, evidence, subject, texts)


def observe(
    model: Model, texts: Sequence[Tokens], task: str, labels: Sequence[int], parameters: list[str] | None, seed: int
) -> GradientEvidence:
    """What the server sees of the client's step."""
    if task == "next_token":
        return observe_gradients(model, texts, task=task, parameters=parameters, seed=seed)
    head = draw_head(model, 2, PAPERS_HEAD_SCALE, seed)
    return observe_gradients(model, texts, task=task, labels=labels, head=head, parameters=parameters, seed=seed)


def make_attack(cell: Cell, model: Model) -> Attack:
    """The attack of a cell with its budget."""
    if cell.attack == "dager":
        theirs = Dager(**authors_settings(cell.texts), max_products=MAX_PRODUCTS)
        return DagerSweep(theirs, rank_tolerances=(None, theirs.rank_tolerance), rank_margins=(theirs.rank_margin,))
    if not model.causal:
        return EncoderAttack(max_anchors=MAX_ANCHORS)
    return DecoderAttack(memory_budget_bytes=(8 if model.device.type == "cuda" else 1) * 2**30)


def dager_parameters(model: Model) -> list[str]:
    """Query parameters of the first blocks: all that DAGER reads."""
    layers = [model.linear(Role.QUERY, block) for block in range(min(RANK_BLOCKS, model.num_blocks))]
    return [layer.parameter for layer in layers if layer is not None]


def attack_and_compare(attack: Attack, evidence: GradientEvidence, subject: Subject, texts: Sequence[Tokens]) -> Result:
    """Seconds of the attack alone; then exact texts, ROUGE, and whether a certain text is false."""
    with stopwatch() as times:
        recovery = attack(evidence, subject.model)
    certain = Counter(text.tokens for text in recovery.value.certain for _ in range(text.count))
    return {
        **compare(recovery.value.expand(), subject, texts),
        "certain": certain.total(),
        "false_certain": (certain - Counter(map(tuple, texts))).total(),
        **times,
        "status": recovery.status.name,
        "reason": recovery.reason,
        "machine": machine(),
    }


def compare(found: Sequence[Sequence[int]], subject: Subject, texts: Sequence[Tokens]) -> Result:
    """ROUGE over words and texts that are exact."""
    score = score_texts(found, texts, subject.decode)
    return {
        "num_texts": len(texts),
        "tokens": sum(map(len, texts)),
        "width": subject.model.width,
        "device": subject.model.device.type,
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
        "exact": round(score.exact_rate * len(texts)),
    }


class stopwatch:  # noqa: N801 (used like a function)
    """Elapsed and CPU seconds of what happens meanwhile, the GPU's work included."""

    def __enter__(self) -> Result:
        self.times: Result = {}
        _wait()
        self.started = time.perf_counter(), time.process_time()
        return self.times

    def __exit__(self, *_: object) -> None:
        _wait()
        self.times["seconds"] = time.perf_counter() - self.started[0]
        self.times["cpu_seconds"] = time.process_time() - self.started[1]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
