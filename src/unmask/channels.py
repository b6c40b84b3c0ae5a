"""The channels by which a model leaks: what an attack may look for on each, and its threat model in words.

A new channel is an entry here, a file of its name in `audit/channels`, its evidence, and its attack with a line in the
table of attacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unmask.recovery import Aim


@dataclass(frozen=True)
class Threat:
    """The adversary of a channel, and the limits of our attack on it."""

    title: str
    who: str
    sees: str
    wants: str
    limits: tuple[str, ...]
    page: str


@dataclass(frozen=True)
class Channel:
    """What an attack on a channel may look for, and the threat model."""

    aims: frozenset[Aim]
    threat: Threat


_NEVER_SAFE = "An attack that finds nothing is no proof: a stronger one, or more rounds of evidence, may find more."
_TEXTS = frozenset({Aim.TOKENS, Aim.TEXTS})

CHANNELS: Mapping[str, Channel] = {
    "gradients": Channel(
        _TEXTS,
        Threat(
            "Gradients to text",
            "A federated-learning server that is honest but curious, or anyone who reads its traffic or its logs.",
            "One client's update, and the weights that the client started from. It changes nothing.",
            "The texts that the client trained on.",
            (
                "Exact texts need clean float32 or float64 updates of plain SGD, of one step or of a few; noise, Adam "
                "and low precision leave the bag of words or a part of it.",
                "The span's bag of words needs fewer distinct tokens than the model is wide; rows of an embedding "
                "that is not tied have no such limit.",
                _NEVER_SAFE,
            ),
            "docs/gradients.md",
        ),
    ),
    "outputs": Channel(
        _TEXTS,
        Threat(
            "Outputs to inputs",
            "Whoever is handed what a layer computes: the other side of split inference, a caller of an embedding "
            "service, a reader of activation logs.",
            "Hidden states, and the model's weights.",
            "The texts that were sent in.",
            (
                "All positions of a text must be seen; one vector for a text is the channel of vectors.",
                "A first token that noise hides ends the reading.",
                "The weights must be known.",
                _NEVER_SAFE,
            ),
            "docs/outputs.md",
        ),
    ),
    "caches": Channel(
        _TEXTS,
        Threat(
            "Caches to texts",
            "Whoever reads a serving stack's cache of keys and values: a store that servers share or offload to, a "
            "debug dump, another tenant of the GPU's memory.",
            "Keys and values of one block, of all heads or some, as they are stored, and the model's weights.",
            "The prompts that were read, and the answers behind them.",
            (
                "A page of a deeper block can be proven only if the tokens before it are known; of block 0 any page is "
                "read.",
                "Compressed caches and caches mixed by a secret matrix are not read.",
                "The weights must be known.",
                _NEVER_SAFE,
            ),
            "docs/caches.md",
        ),
    ),
    "vectors": Channel(
        _TEXTS,
        Threat(
            "Vectors to text",
            "Whoever reads a vector database, its backups, or an embedding API's responses (OWASP LLM08:2025, Vector "
            "and Embedding Weaknesses).",
            "One vector a text, as it is stored, and the embedding model's weights.",
            "The texts that were embedded.",
            (
                "The embedding model must be known, and how it pools.",
                "The longer a text, the longer the search: what it does not find may still be in the vector.",
                _NEVER_SAFE,
            ),
            "docs/vectors.md",
        ),
    ),
    "inputs": Channel(
        frozenset({Aim.INPUTS}),
        Threat(
            "One layer's output to its input",
            "Whoever is handed the output of one attention layer, as in split computation, and has its weights.",
            "The output and the weights of a bare attention layer: softmax(X W Xᵀ) X V, without norms or positions.",
            "The numbers that were sent in, one row a token.",
            (
                "The layers of an audit are drawn at random; layers of real models, with norms and positions, are the "
                "channel of outputs.",
                "An indefinite W has several inputs for one output; beyond 8 tokens the search finds none.",
                "Where the output has noise, another input gives it exactly.",
                _NEVER_SAFE,
            ),
            "docs/outputs-paper.md",
        ),
    ),
    "queries": Channel(
        frozenset({Aim.WEIGHTS}),
        Threat(
            "Queries to weights",
            "A caller of a service that answers with a layer's output or with log-probabilities.",
            "Answers to questions of its own choice; nothing of the inside.",
            "The weights, or the hidden size and the output layer.",
            (
                "Tokens are vectors that the caller chooses; a service that embeds or normalises them itself is "
                "outside.",
                "Weights are known up to what no question can tell: the order of heads, heads with equal scores "
                "merged.",
                _NEVER_SAFE,
            ),
            "docs/queries.md",
        ),
    ),
}
LIVE_FEDERATION = Threat(
    "A live federation (Flower, NVFlare)",
    "The server of the federation, or anyone who reads its traffic or its logs.",
    "Each client's reply, and the weights that were sent to the client.",
    "The texts that the client trained on.",
    (
        "The auditor does not know the texts either, so there is no score: what is claimed rests on the certificate "
        "alone.",
        "Clients train several steps, often by AdamW and with dropout: then tokens are read, seldom whole texts.",
        _NEVER_SAFE,
    ),
    "docs/flower.md",
)
UNKNOWN_THREAT = Threat(
    "A channel that this version does not know", "Not known.", "Not known.", "Not known.", (_NEVER_SAFE,), "docs"
)
_LIVE = "federation"
LIVE_SOURCES = frozenset({"flower", "nvflare"})  # frameworks of federations that are audited as they run


def threat_key(case: Mapping[str, Any]) -> str:
    """The threat model of a case, by name."""
    if case.get("source") in LIVE_SOURCES:
        return _LIVE
    return str(case.get("channel", ""))


def threat_of(key: str) -> Threat:
    """The threat model of that name; a channel of a newer version gets one that claims nothing."""
    if key == _LIVE:
        return LIVE_FEDERATION
    return CHANNELS[key].threat if key in CHANNELS else UNKNOWN_THREAT
