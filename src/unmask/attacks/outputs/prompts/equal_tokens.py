"""Tokens that no state tells apart: rows that enter the model equal, or so nearly that nothing behind them differs.

A vocabulary may hold tokens that were never trained on, with bit-equal embeddings (SmolLM2: 15 in 4 groups). A state
then proves the class and not the token; whichever of them is taken, all other states come out the same.

Notation: distance = ‖h(v) − h‖/‖h‖, h the state seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from unmask.attacks.outputs.prompts.continuation import Continuation
from unmask.attacks.outputs.prompts.position_search import LARGEST_BATCH, FoundToken, Observation
from unmask.attacks.outputs.prompts.side_by_side import Reading, RowPass
from unmask.linalg.near_rows import near_rows
from unmask.models.adapter import Model
from unmask.models.model_cache import compute_once
from unmask.recovery import Ambiguity, AmbiguityKind

Classes = Mapping[int, tuple[int, ...]]

NEAR = 1e-3  # rows that are this near may give states within the tolerance of float32, 1e-4; they are tested
_NAMED = 8  # tokens of a class that a sentence names


def equal_tokens(model: Model, rows: Literal["embeddings", "inputs"] = "embeddings") -> Classes:
    """For each token that has others like it, all of them in order, itself included; measured once a model.

    The stream holds the embeddings; an attention module sees the inputs behind the first norm, and less differs there.
    """

    @torch.no_grad()
    def measure() -> dict[int, tuple[int, ...]]:
        everyone = torch.arange(model.vocab_size, device=model.device)
        read = model.embed if rows == "embeddings" else model.first_input
        near = near_rows(read(everyone, torch.zeros_like(everyone)), everyone, NEAR)
        return {token: members for token, members in near.items() if len(members) > 1}

    return compute_once(model, ("equal tokens", rows), measure)


def settle_class(
    seen: Observation, text: Continuation, found: FoundToken, members: Sequence[int]
) -> Reading[tuple[FoundToken, tuple[int, ...]]]:
    """The closest token of a class in the place of the one that was found, and all that the state leaves open.

    Without noise a token is told from the closest one by a distance ten times as large; with noise by likelihood.
    """
    parts, closest, least = list[torch.Tensor](), None, float("inf")
    for part in torch.tensor(members, device=seen.state.device).split(LARGEST_BATCH):
        trial = yield RowPass(text, part)
        parts.append(seen.distances(trial.states))
        if closest is None or float(parts[-1].min()) < least:
            closest, least = trial.only(int(parts[-1].argmin())), float(parts[-1].min())
    assert closest is not None
    distances = torch.cat(parts)
    best = int(distances.argmin())
    is_open = seen.leaves_open(least, distances, found.noise)
    is_open[best] = True
    classes = tuple(sorted(token for token, kept in zip(members, is_open.tolist(), strict=True) if kept))
    chosen = replace(
        found,
        token=int(members[best]),
        distance=least,
        continuation=text.accept(closest, 0),
        num_candidates=found.num_candidates + len(members),
        rivals=tuple(set(found.rivals).difference(members)),
    )
    return chosen, classes if len(classes) > 1 else ()


def equal_tokens_ambiguity(model: Model, position: int, tokens: Sequence[int], are_equal: bool = True) -> Ambiguity:
    """What is said of a position at which one of several tokens stands; `are_equal`: whatever is seen of them."""
    names = ", ".join(repr(model.decode([token])) for token in tokens[:_NAMED])
    more = f" and {len(tokens) - _NAMED} more" if len(tokens) > _NAMED else ""
    why = "their embeddings are equal, and no state tells which"
    why = why if are_equal else "they agree equally well with what is seen, which is too narrow or too coarse to tell"
    reason = f"token {position + 1} is one of {names}{more}: {why}"
    return Ambiguity(AmbiguityKind.EQUAL_TOKENS, reason, position, tuple(tokens))
