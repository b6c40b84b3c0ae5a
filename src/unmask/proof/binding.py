"""Do the rows of a text tell that they are of one text, in this order? Only if other contexts give them other states.

Rows of two texts, or rows in another order, agree where what a row takes from the tokens before it is less than what
rounding or noise leaves. So the text is run again with its beginning replaced up to a place, and with two neighbours
exchanged there, and the rows behind are compared with its own:

    margin = min over edits of  max over rows  ‖s' − s‖ / (limit·‖s‖),    bound  ⇔  margin > 1

Notation: s the row of a token in the text, s' that of the same token in the edited one; the limit is how far a row must
be off to be refused, by its norm: more than its tolerance.
Limits: of long texts some places are edited, above all at the end, where one token is the smallest part of a context.
Cost: 6 passes of the text where contexts are seen clearly, 64 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.models.adapter import Model

_CLEAR = 10.0  # margins of the first edits, from which on no others are tried
_MOST_PLACES = 32
_NUMBERS_AT_ONCE = 2**24

BEYOND = 1.25  # tolerances, from which on a row of another context is surely refused
UNBOUND = (
    "rows hardly depend on the tokens before them, by less than rounding or noise leaves: that they are of one text, "
    "in this order, is taken from the dump and is not proven"
)

RowsOf = Callable[[Int[Tensor, "k n"]], Float[Tensor, "k n m"]]  # what is seen of texts, as it is compared


def reach_of_rows(model: Model, num_blocks: int, length: int) -> int:
    """How many tokens of a text the row that depends on most of them does, behind so many blocks."""
    if num_blocks and length <= model.shortest_window:
        return length
    size = min(length, model.max_positions)
    depends = torch.eye(size, device=model.device)
    depends = depends[-1:] if model.causal else depends
    for block in reversed(range(num_blocks)):
        if model.layout.blocks[block].scores is None:
            return 1  # what such attention lets a row see is not known
        bias = model.score_bias(block, size)
        if bias is None:
            return length
        visible = (bias > torch.finfo(bias.dtype).min / 4).any(0)
        depends = (depends @ visible.to(depends) > 0).to(depends)
    return int(depends.sum(1).max())


def why_unbound(model: Model, num_blocks: int, length: int) -> str:
    """Say why no row depends on all of a text; empty where one does."""
    reach = reach_of_rows(model, num_blocks, length)
    if reach == length:
        return ""
    if reach == 1:
        return (
            "before the first block a row depends on its own token and position alone: that the rows are of one text "
            "is taken from the dump and is not proven, so no text is certain"
        )
    return (
        f"attention has windows, and no row depends on more than {reach} tokens: that the rows of a longer text are of "
        "one text is taken from the dump and is not proven, so no such text is certain"
    )


@torch.no_grad()
def are_bound(
    rows_of: RowsOf, tokens: Int[Tensor, " n"], limits: Float[Tensor, " n"], vocab_size: int, first: int = 0
) -> bool:
    """Tell whether rows from `first` on, where they are seen, are those of one text in this order.

    Tokens before these were given, and must be borne out: a row behind others than these must differ.
    """
    places = torch.arange(max(1, first), len(tokens))
    if not len(places):
        return True
    own = rows_of(tokens[None])[0]
    few = places[torch.tensor([0, len(places) // 2, len(places) - 1])].unique()
    margin = _least_margin(rows_of, own, tokens, limits, vocab_size, few, first)
    if margin <= 1 or margin >= _CLEAR or len(few) == len(places):
        return margin > 1
    spread = torch.linspace(0, len(places) - 1, min(len(places), _MOST_PLACES // 2)).long()
    chosen = torch.cat([places[spread], places[-_MOST_PLACES // 2 :]]).unique()
    return _least_margin(rows_of, own, tokens, limits, vocab_size, chosen, first) > 1


def _least_margin(
    rows_of: RowsOf,
    own: Float[Tensor, "n m"],
    tokens: Int[Tensor, " n"],
    limits: Float[Tensor, " n"],
    vocab_size: int,
    places: Int[Tensor, " p"],
    first: int,
) -> float:
    least = limits * own.norm(dim=1)
    edits = [edit for place in places.tolist() for edit in _edits(tokens, place, vocab_size, first)]
    margins = []
    for start in range(0, len(edits), step := max(1, _NUMBERS_AT_ONCE // own.numel())):
        part = edits[start : start + step]
        for rows, (_, order, begin) in zip(rows_of(torch.stack([edited for edited, _, _ in part])), part, strict=True):
            kept = order[begin:]
            off = (rows[begin:] - own[kept]).norm(dim=1)
            margins.append(float((off / least[kept].clamp_min(1e-30)).max()))
    return min(margins, default=float("inf"))


def _edits(
    tokens: Int[Tensor, " n"], place: int, vocab_size: int, first: int
) -> Iterator[tuple[Int[Tensor, " n"], Int[Tensor, " n"], int]]:
    """Texts that differ before a place or at it, whose rows theirs stand for, and from which on they are compared."""
    order = torch.arange(len(tokens), device=tokens.device)
    others = (tokens[:place] + 1 + vocab_size // 2) % vocab_size
    yield torch.cat([others, tokens[place:]]), order, place
    if tokens[place] != tokens[place - 1] and place > first:
        swapped = order.clone()
        swapped[[place - 1, place]] = order[[place, place - 1]]
        yield tokens[swapped], swapped, place - 1
