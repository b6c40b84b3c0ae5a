"""The client, run again on texts with their labels: on which side it pads, and which of equal tokens it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.proof.agreement import Agreement
from unmask.proof.replay import can_replay, replay_and_agree, why_stopped
from unmask.proof.sketched_replay import SketchedClient

_MOST_MEMBERS = 16  # of a class of equal tokens that are tried one by one
_MOST_SWAPS = 32  # single tokens of a class that are tried in another member's place


@dataclass(frozen=True)
class ClientReplay:
    """Texts that the client was run on, and how well that fits."""

    endings: list[TextEnding]
    agreement: Agreement | None = None
    num_passes: int = 0
    tells_equal_tokens: bool = False
    stopped: str = ""  # why it was not run, or not to the end, where memory is short

    @property
    def holds(self) -> bool:
        """Whether the client sends the same update."""
        return self.agreement is not None and self.agreement.holds


def replay_client(
    evidence: GradientEvidence,
    model: Model,
    endings: list[TextEnding],
    equal: Mapping[int, tuple[int, ...]],
    client: SketchedClient | None = None,
) -> ClientReplay:
    """The best agreement over the sides that batches are padded on; then which member of a class is meant.

    `client`: one that has run its forward passes.
    """
    total = sum(ending.count for ending in endings)
    is_stated = bool(endings) and can_replay(evidence, total, by_tensor=True)
    if not is_stated or max(len(e.node[1]) for e in endings) > model.max_positions:
        return ClientReplay(endings)
    sides: list[Literal["left", "right"]] = ["left"] if any(e.node[0] for e in endings) else ["right", "left"]
    if len({len(ending.node[1]) for ending in endings}) == 1:
        sides = sides[:1]
    by_token = [name for name in (model.token_embedding, model.unembedding_name) if name is not None]
    used = [token for token in equal if any(token in ending.node[1] for ending in endings)]

    def run(chosen: list[TextEnding], side: Literal["left", "right"], classes: Sequence[tuple[int, ...]]) -> Agreement:
        texts = [ending.node[1] for ending in chosen for _ in range(ending.count)]
        return replay_and_agree(
            evidence, model, texts, padding_side=side, by_token=by_token, equal=classes, client=client
        )

    done = ClientReplay(endings)
    try:
        found = [(run(endings, side, [equal[token] for token in used]), side) for side in sides[:1]]
        if not found[0][0].holds:
            found += [(run(endings, side, [equal[token] for token in used]), side) for side in sides[1:]]
        best, side = min(found, key=lambda pair: pair[0].misfit_as_is)
        done = ClientReplay(endings, best, total * len(found))
        if not best.holds or len(used) != 1 or len(equal[used[0]]) > _MOST_MEMBERS:
            return done
        swapped = [_with_member(endings, used[0], member) for member in equal[used[0]]]
        right = [(chosen, agreement) for chosen in swapped if (agreement := run(chosen, side, ())).holds]
        passes = done.num_passes + total * len(swapped)
        if len(right) != 1:
            return replace(done, num_passes=passes)
        others = _with_another_member(right[0][0], equal[used[0]])
        is_open = len(others) > _MOST_SWAPS or any(run(other, side, ()).holds for other in others)
        passes += total * min(len(others), _MOST_SWAPS)
        return replace(done, num_passes=passes) if is_open else ClientReplay(*right[0], passes, True)
    except InputError as error:
        return replace(done, stopped=why_stopped(error))


def _with_another_member(endings: list[TextEnding], members: tuple[int, ...]) -> list[list[TextEnding]]:
    """Texts with one token of a class replaced by another one of it, in every way."""
    changed = []
    for index, ending in enumerate(endings):
        start, tokens = ending.node
        for place, token in enumerate(tokens):
            for member in members if token in members else ():
                if member != token:
                    swapped = replace(ending, node=(start, (*tokens[:place], member, *tokens[place + 1 :])))
                    changed.append([*endings[:index], swapped, *endings[index + 1 :]])
    return changed


def _with_member(endings: list[TextEnding], token: int, member: int) -> list[TextEnding]:
    """Texts with another member of a class in all of its places."""
    return [replace(e, node=(e.node[0], tuple(member if t == token else t for t in e.node[1]))) for e in endings]
