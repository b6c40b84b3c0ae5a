"""Tokens that one position leaves open, told apart by all positions behind it.

Rounding may leave several tokens open at a position, above all at the first one, where states hardly depend on the
token. But every later state depends on it too, each with a rounding of its own. So the text is run again with a rival
in that place, and the likelihoods of all rows behind it are multiplied:

    gain = Σ_rows (‖s_rival − s‖² − ‖s_best − s‖²) / (2σ²)  ≥  12

The token is proven if every rival loses so, and open with those that do not. Where only some tokens were tested at its
position, others may agree there as well: then nothing is proven of an open one.

Notation: s a row as it is compared, σ² the variance of its rounding (state_noise.py).
Limits: needs rounding whose size is known, and a text of which every other token agrees up to there.
Cost: a rival is one pass of the text through l blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.outputs.prompts.position_search import CLEAR
from unmask.attacks.outputs.prompts.seen_text import ReadToken, TextProgress

_MOST = 64  # rivals of a position; where there are more, it stays open


def settle_rivals(text: TextProgress) -> None:
    """Decide what can be decided; then tokens behind a settled one are proven if their own states agree.

    A row behind an open token counts only if its own token is not open, since two wrong tokens may agree together.
    Where reading stopped, a token may be wrong, so no row counts but the open token's own.
    """
    if not any(token.rivals for token in text.tokens):
        return
    chosen = [token.token for token in text.tokens]
    is_whole = text.done == len(text.seen)
    tells = torch.tensor([is_whole and not token.rivals for token in text.tokens])
    squares = _squares(text, chosen)
    settled, behind = [], True
    for index, token in enumerate(text.tokens):
        left = _left_open(text, chosen, squares, tells, index, token.rivals) if token.rivals else ()
        proven = behind and token.stands and (not left or (token.proven and token.are_all_rivals))
        equals = _open_class(token, left)
        settled.append(replace(token, proven=proven, equals=equals, rivals=left))
        behind = proven
    text.tokens = settled


def _open_class(token: ReadToken, left: Sequence[int]) -> tuple[int, ...]:
    """A token's class without the rivals that lost; a token alone is no class."""
    kept = {token.token, *left, *(set(token.equals) - set(token.rivals))}
    return tuple(sorted(kept)) if len(kept) > 1 else ()


def _left_open(
    text: TextProgress,
    chosen: Sequence[int],
    squares: Float[Tensor, " n"],
    tells: Bool[Tensor, " n"],
    index: int,
    rivals: Sequence[int],
) -> tuple[int, ...]:
    """Rivals that neither their own row nor rows behind it that tell exclude."""
    if len(rivals) > _MOST:
        return tuple(rivals)
    louder = (2 * squares / text.seen.states.shape[1]).clamp_min(1)  # than rounding to the nearest number
    left = []
    for rival in rivals:
        text.num_candidates += len(chosen) - index
        gain = (_squares(text, [*chosen[:index], rival, *chosen[index + 1 :]]) - squares)[index:]
        counted = tells[index:].to(gain) / louder[index:]
        counted[0] = 1.0 / louder[index]
        if not float((counted * gain).sum()) >= CLEAR:
            left.append(rival)
    return tuple(left)


def _squares(text: TextProgress, tokens: Sequence[int]) -> Float[Tensor, " n"]:
    """‖s(tokens) − s‖²/(2σ²) of every row; infinite rows of no rounding stay out, as they tell nothing here."""
    first = len(text.given)
    rows = text.start.run(torch.tensor(tokens, device=text.seen.states.device)).states
    part = slice(first, first + len(tokens))
    off = (text.seen.distances(rows, first) * text.seen.states[part].norm(dim=1)).double().square()
    variances = (text.seen.noise.variances * text.seen.noise.unevenness)[part].double()
    return torch.where(variances > 0, off / (2 * variances).clamp_min(1e-300), 0.0)
