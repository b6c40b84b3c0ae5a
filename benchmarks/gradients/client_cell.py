"""One client of a federation: what it sends, what is read of it, and the scores that only an auditor can give."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from machine import machine

import unmask
from unmask.defences import measure_distortion, parse_defence, secure_aggregate
from unmask.evidence import GradientEvidence
from unmask.models import Model
from unmask.protocols.dpsgd import PrivateUpdate
from unmask.protocols.table import parse_protocol
from unmask.scores import score_texts

AGGREGATE = "aggregate:clients="
NUM_EARLIER = 4  # texts of earlier rounds
TASKS = {"smollm2-135m": "next_token", "minilm-l6": "classification"}
EMBEDDINGS = {"smollm2-135m": "embed_tokens", "minilm-l6": "embeddings."}
FIRST_BLOCKS = {
    "smollm2-135m": "embed_tokens+layers.0.+layers.1.",
    "minilm-l6": "embeddings.+encoder.layer.0.+encoder.layer.1.",
}


@dataclass(frozen=True)
class ClientCell:
    """A model, what its client does, how many texts it holds, and which draw of texts they are.

    In `defence`, {embeddings} and {first} are names of the model's own parameters.
    """

    model: str
    protocol: str
    defence: str = ""
    texts: int = 8
    draw: int = 0

    @property
    def num_clients(self) -> int:
        """Clients whose updates are summed."""
        return int(self.defence.removeprefix(AGGREGATE)) if self.defence.startswith(AGGREGATE) else 1

    @property
    def num_drawn(self) -> int:
        """Texts of all its clients, and of earlier rounds."""
        return self.num_clients * self.texts + NUM_EARLIER


def draw_texts(texts: Sequence[str], count: int, draw: int) -> list[str]:
    """Texts of one draw, no two draws alike, the same in every run."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(draw)).tolist()
    return [texts[place] for place in order[:count]]


def measure_cell(model: Model, cell: ClientCell, drawn: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Attack one client; `drawn` are its texts and those of earlier rounds, `others` a batch that it has not seen."""
    task = TASKS[cell.model]
    *batches, earlier = _split(drawn, [cell.texts] * cell.num_clients)
    options: dict[str, Any] = {"earlier_texts": earlier} if ",steps=" in cell.protocol else {}
    options |= {"train_mode": True} if "dropout=" in cell.protocol else {}
    update = parse_protocol(cell.protocol)(model, batches[0], task=task, **options)
    evidence = defend(model, cell, update, batches[1:])
    distortion = measure_distortion(update.evidence, evidence)
    started = time.perf_counter()
    recovery = unmask.recover_text(evidence, model)
    seconds = time.perf_counter() - started
    sequences = [tuple(model.encode(text)) for batch in batches for text in batch]
    everyone = {token for tokens in sequences for token in tokens}
    # The last token of a next-token text is only a label: it reaches no adapter.
    inputs = {token for tokens in sequences for token in (tokens[:-1] if task == "next_token" else tokens)}
    held = inputs if cell.protocol.startswith("lora") else everyone
    found = recovery.value.token_set
    certain = [text.tokens for text in recovery.value.certain]
    unseen = {token for text in others for token in model.encode(text)} - everyone
    score = score_texts(recovery.value.expand(), sequences)
    return asdict(cell) | {
        "status": recovery.status.name,
        "reason": recovery.reason,
        "tokens": len(held),
        "recall": len(found & held) / len(held),
        "false": len(found - everyone),
        "chance": len(found & unseen) / max(1, len(unseen)),
        "certain": len(certain),
        "false_certain": sum(tokens not in sequences for tokens in certain),
        "exact": sum(tokens in certain for tokens in sequences),
        "guessed": sum(tokens in {text.tokens for text in recovery.value.texts} for tokens in sequences),
        "rouge1": score.rouge1,
        "rouge2": score.rouge2,
        "cosine": distortion.cosine,
        "epsilon": update.epsilon if update.epsilon < float("inf") else None,
        "seconds": seconds,
        "machine": machine(),
    }


def defend(model: Model, cell: ClientCell, update: PrivateUpdate, others: Sequence[Sequence[str]]) -> GradientEvidence:
    """What the server sees: the update after a defence, or the sum with the updates of other clients."""
    if not cell.defence:
        return update.evidence
    if others:
        return secure_aggregate(
            [
                update.evidence,
                *(unmask.observe_gradients(model, list(texts), task=TASKS[cell.model]) for texts in others),
            ]
        )
    text = cell.defence.format(embeddings=EMBEDDINGS[cell.model], first=FIRST_BLOCKS[cell.model])
    return parse_defence(text)(update.evidence, torch.Generator().manual_seed(cell.draw))


def _split(texts: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """Parts of these sizes, and what is left."""
    parts, start = [], 0
    for size in (*sizes, len(texts)):
        parts.append(list(texts[start : start + size]))
        start += size
    return parts
