"""Does what is seen of a text tell where its tokens stand, and that they are of one text, or only which they are?

Before the first block a row is a function of its token and its position. Where positions are learned they are added to
it; rotary ones turn keys, and leave values and the stream as they are. Then a row agrees at every position, and the
order of the tokens is the order of the rows that were handed out, which nothing proves. It is measured, and no family
is named: the tokens that were read are put one position further on,

    ‖s(v, p + 1) − s(v, p)‖ > 2·tolerance·‖s(v, p)‖   for every token v   ⇔   positions show

Behind a block whose attention sees the whole text a row depends on all tokens before it. Where that shows beyond
rounding and noise (proof/binding.py), neither another order agrees nor rows of two texts do. Before the first block
rows that show their positions may still be of several texts: nothing binds them to each other. Where attention has
windows of w tokens, the last row behind l blocks depends on 1 + l·(w − 1) tokens: rows of two texts that share so many
agree as well, so that a longer text is not bound to be one.
How far rows depend is followed through what each block lets a query see.

Notation: s(v, p) what is seen of token v at position p.
Limits: the next position stands for all others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.outputs.prompts.seen_text import ReadText, ReadToken
from unmask.models.adapter import Model
from unmask.models.readouts import Readout
from unmask.proof.binding import BEYOND, UNBOUND, are_bound, why_unbound

_IN_NOISE = 2.0  # tolerances


def place(text: ReadText, model: Model, readout: Readout, layer: int, position: int) -> ReadText:
    """The text with what its rows tell of their positions and of each other."""
    is_placed = shows_positions(text, model, readout, layer, position)
    length = len(text.before) + text.length
    why = why_unbound(model, layer, length)
    if not why and text.proven and text.tokens and not _are_bound(text, model, readout, layer, position):
        why = UNBOUND
    return replace(text, is_placed=is_placed, why_unbound=why)


def _are_bound(text: ReadText, model: Model, readout: Readout, layer: int, position: int) -> bool:
    read = [token.token for token in text.tokens]
    tokens = torch.tensor([*text.before, *text.given, *read], device=model.device)
    places = position - len(text.before) + torch.arange(len(tokens), device=model.device)
    own = [_limit(token) for token in text.tokens]
    limits = torch.tensor([max(own)] * (len(tokens) - len(own)) + own, device=model.device)

    def rows_of(texts: Int[Tensor, "k n"]) -> Float[Tensor, "k n m"]:
        where = places.expand_as(texts)
        seen = readout(model, model.hidden_states(texts, num_blocks=layer, positions=where)[layer], where)
        return (seen.flatten(0, 1) * readout.weights(model, seen.flatten(0, 1))).unflatten(0, texts.shape)

    return are_bound(rows_of, tokens, limits, model.vocab_size, len(text.before))


def _limit(token: ReadToken) -> float:
    """How far a row of another context would have to be off to be refused: of noise that was measured it is a part."""
    return (_IN_NOISE if token.distance >= token.tolerance else BEYOND) * token.tolerance


@torch.no_grad()
def shows_positions(text: ReadText, model: Model, readout: Readout, layer: int, position: int) -> bool:
    """Whether every row that was read would be another one at the next position, by more than rounding or noise."""
    if layer > 0 or not text.tokens:
        return True
    tokens = torch.tensor([*text.given, *(token.token for token in text.tokens)], device=model.device)
    where = position + torch.arange(len(tokens), device=model.device)
    beside = torch.where(where + 1 < model.max_positions, where + 1, where - 1).clamp_min(0)
    here, there = (readout(model, model.embed(tokens, each), each) for each in (where, beside))
    weights = readout.weights(model, here)
    apart = ((there - here) * weights).norm(dim=1) / (here * weights).norm(dim=1)
    return bool((apart > 2 * max(token.tolerance for token in text.tokens)).all())
