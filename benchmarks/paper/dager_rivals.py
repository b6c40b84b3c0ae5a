"""TAG and LAMP on the batches of the tables, with the budget that a device allows.

Both are told labels, lengths and the frame. DAGER's paper runs both for 2,500 steps. On a GPU TAG has these, LAMP the
2,000 steps and 200 moves of its own authors' code; on a processor core they have 300 and 500 steps and 50 moves. LAMP's
prior is SmolLM2-135M where its weights are, and else bigrams of the same set without the batch (no language model of
its own size fits where packages cannot be installed).
"""

from __future__ import annotations

from baselines.gradient_matching import Client, client_update
from baselines.lamp import Lamp
from baselines.lamp_priors import BigramPrior, ModelPrior, Prior
from baselines.tag import Tag
from gradients.paper_clients import draw_head
from machine import machine
from paper.dager_batches import Workshop, compare, stopwatch
from paper.dager_cells import Cell
from paper.dager_models import Subject, Tokens
from result_lines import Result
from text_sets import draw_batch
from torch import Tensor, tensor

from unmask.errors import UnmaskError

HEAD_SCALE = 0.02  # what transformers draws, as in the rivals' own experiments; neither depends on it much
GPU_TAG, GPU_LAMP = Tag(), Lamp(batch_size=200)
CPU_TAG = Tag(num_steps=300, starts=((0.1, 0.01), (0.03, 0.01)))
CPU_LAMP = Lamp(num_steps=500, num_moves=50, num_candidates=100, move_every=40)
PRIOR = "smollm2-135m"


def rival(cell: Cell, device: str) -> Tag | Lamp:
    """The attack with the device's budget."""
    if cell.attack == "tag":
        return CPU_TAG if device == "cpu" else GPU_TAG
    return CPU_LAMP if device == "cpu" else GPU_LAMP


def rival_settings(cell: Cell, device: str) -> str:
    """What is written down of the budget."""
    return repr(rival(cell, device))


def measure_rival(workshop: Workshop, cell: Cell, batch: int, seed: int) -> Result:
    """The client's update, the rival on it, and the comparison afterwards; nothing is ever claimed certain."""
    subject = workshop.subject(cell.model, cell.data)
    examples = workshop.examples(cell.model, cell.data)
    drawn = draw_batch(examples, cell.data, cell.texts, batch, seed)
    texts, labels = [tokens for tokens, _ in drawn], [label for _, label in drawn]
    client = Client.of_batch(subject.model, draw_head(subject.model, 2, HEAD_SCALE, seed), texts, labels)
    update = client_update(client, _padded(texts))
    attack = rival(cell, workshop.place.device)
    prior = None
    if isinstance(attack, Lamp):
        held = {tuple(text) for text in texts}
        prior = choose_prior(workshop, subject, [tokens for tokens, _ in examples if tuple(tokens) not in held])
    with stopwatch() as times:
        found = attack(client, update) if prior is None else attack(client, update, prior)
    told = {"certain": 0, "false_certain": 0, "status": "BEST EFFORT", "reason": "", "machine": machine()}
    return {**compare(found, subject, texts), **times, **told, "prior": "" if prior is None else prior.name}


def choose_prior(workshop: Workshop, subject: Subject, others: list[Tokens]) -> Prior:
    """SmolLM2 if its weights are here, else bigrams."""
    try:
        model = workshop.prior(PRIOR)
    except (UnmaskError, OSError, ImportError):
        return BigramPrior(others, subject.model.vocab_size)
    shares_tokens = model.tokenizer.get_vocab() == subject.tokenizer.get_vocab()
    return ModelPrior(model, None if shares_tokens else subject.decode, name="SmolLM2-135M")


def _padded(texts: list[Tokens]) -> Tensor:
    longest = max(map(len, texts))
    return tensor([[*text, *[0] * (longest - len(text))] for text in texts])
