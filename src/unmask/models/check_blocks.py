"""Whether the parts that were found make up the model: each block is computed again from them, and compared.

A block that comes out differently is run as it is from then on, and nothing is claimed that rests on its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unmask.models.blocks import Blocks
from unmask.models.inputs import no_cache, training_mode, usual_tokens
from unmask.models.layout import FAILURES, BlockPlace, ModelLayout
from unmask.models.record import first_tensor

_CLOSE_AT_LAST = 1e-3  # the same of a row behind all blocks
_CLOSE = 1e-4  # relative: float32 leaves 1e-6, another rule 1e-2 and more


@torch.no_grad()
def check_blocks(model: Blocks, passes: Sequence[tuple[Tensor, Tensor]]) -> ModelLayout:
    """The layout, with the problem of each block that does not put out what it put out in the recorded pass."""
    places = [
        replace(place, problem=_problem(model, index, place, *seen))
        for index, (place, seen) in enumerate(zip(model.layout.blocks, passes, strict=True))
    ]
    return replace(model.layout, blocks=tuple(places))


def _problem(model: Blocks, index: int, place: BlockPlace, entered: Tensor, left: Tensor) -> str:
    why = _missing(place)
    if not why:
        positions = torch.arange(entered.shape[1], device=entered.device).expand(entered.shape[:2])
        try:
            again = model.block_forward(index, entered, positions, torch.ones_like(positions, dtype=torch.bool))
            error = float((again - left).norm() / left.norm())
            if error <= max(_CLOSE, 8 * torch.finfo(left.dtype).eps):
                return ""
            why = f"what comes out differs by {error:.0e}"
        except FAILURES as failure:
            why = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    return f"block {index} cannot be computed from the parts that were found: {why}"


@torch.no_grad()
def check_text(model: Blocks, length: int) -> str:
    """What differs in a text of some length: a window or scaled positions may begin behind the first few tokens."""
    tokens = usual_tokens(model.hf, length)[None].to(model.device)
    last = model.body.get_submodule(model.layout.blocks[-1].name)
    seen: list[Tensor] = []
    hook = last.register_forward_hook(lambda _, __, made: seen.append(first_tensor(made)))  # type: ignore[arg-type]
    try:
        with training_mode(model.hf, False):
            model.body(input_ids=tokens, **no_cache(model.body))
            positions = torch.arange(length, device=model.device)[None]
            states = model.embed(tokens, positions)
            for block in range(model.num_blocks):
                states = model.block_forward(block, states, positions, torch.ones_like(tokens, dtype=torch.bool))
    except FAILURES as failure:
        return f"a text of {length} tokens could not be computed: {str(failure).partition(chr(10))[0]}"
    finally:
        hook.remove()
    error = float(((states - seen[-1]).norm(dim=-1) / seen[-1].norm(dim=-1)).max())
    if error <= max(_CLOSE_AT_LAST, 8 * torch.finfo(states.dtype).eps):
        return ""
    return f"in a text of {length} tokens its states differ by {error:.0e} from those that its parts give"


def _missing(place: BlockPlace) -> str:
    """What no rule was found for."""
    if place.layout.attention is None or place.layout.attention_input is None:
        return "no module makes queries, keys and values of the stream"
    if place.scores is None:
        return "its attention scores are more than scaled products of queries and keys"
    if place.layout.output is None:
        return "what leaves it is no sum of the stream, attention and MLP"
    return ""
