"""A first token that its own row hides, found together with the second one.

In deep blocks the row of a first token hardly depends on the token (it is an attention sink), so coarse rows leave many
tokens open there. The next row depends on both. Where nothing agrees behind the token that was taken:

    1. run every token of the vocabulary in the first place; keep those that rounding does not exclude
    2. run each of them before the likeliest tokens of the second place; take the pair whose second row agrees

Notation: as in position_search.py.
Limits: finds the pair if the second token is among the likeliest by the table, 4 to 256 by the number of first ones.
Cost: the vocabulary through l blocks, once a text, and only where reading stopped behind its first token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.prompts.position_search import CLEAR
from unmask.attacks.outputs.prompts.seen_text import ReadToken, TextProgress

_CHUNK = 1024  # tokens, or pairs, that are run at once
_MOST_FIRST = 4096
_MOST_SECOND = 256
_MOST_PAIRS = 2**14


@torch.no_grad()
def find_first_again(
    text: TextProgress, second_scores: Float[Tensor, " vocab"], equal: Mapping[int, tuple[int, ...]]
) -> bool:
    """Put the first token of the best pair in the place of the one that was taken; False if no pair agrees."""
    seen, start = text.seen, text.start
    everyone = torch.arange(len(second_scores), device=seen.states.device)
    rows = torch.cat([seen.distances_at(start.trial(part).states, 0) for part in everyone.split(_CHUNK)])
    text.num_candidates += len(everyone)
    gains = (rows.square() - rows.min().square()) * float(seen.states[0].square().sum())
    gains = gains / (2 * float(seen.noise.variances[0]) + 1e-300)
    first = (gains < 2 * CLEAR).nonzero()[:, 0]
    if not 0 < len(first) <= _MOST_FIRST:
        return False
    number = min(_MOST_SECOND, _MOST_PAIRS // len(first), len(second_scores))
    second = second_scores.topk(number).indices
    pairs = torch.cartesian_prod(first, second)
    off = torch.cat([seen.distances_at(_second_rows(text, part), 1) for part in pairs.split(_CHUNK)])
    text.num_candidates += len(pairs)
    best = int(off.argmin())
    if float(off[best]) > float(seen.noise.tolerances[1]):
        return False
    token = int(pairs[best, 0])
    rivals = tuple(other for other in first[gains[first] < CLEAR].tolist() if other not in equal.get(token, (token,)))
    trial = start.trial(torch.tensor([token], device=everyone.device))
    text.continuation = start.accept(trial, 0)
    distance, tolerance = float(rows[token]), float(seen.noise.tolerances[0])
    text.tokens, text.unpredicted = [], []
    text.add(ReadToken(token, True, distance, tolerance, equals=equal.get(token, ()), rivals=rivals))
    return True


def _second_rows(text: TextProgress, pairs: Int[Tensor, "k 2"]) -> Float[Tensor, "k m"]:
    """What is seen in the second place of texts of two tokens."""
    start = text.start
    positions = (start.position + torch.arange(2, device=pairs.device)).expand_as(pairs)
    layer = len(start.prefixes)
    streams = start.model.hidden_states(pairs, num_blocks=layer, positions=positions)[layer][:, 1]
    return start.readout(start.model, streams, positions[:, 1])
