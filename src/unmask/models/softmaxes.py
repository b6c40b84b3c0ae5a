"""What the softmaxes of a block are given: queries, keys and values, and the rule from them to scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.models.attention import Scores
from unmask.models.record import Call, Kind, Operation, Record
from unmask.models.wiring import plain_number

_MASKED = 2e3  # below the largest score: no score of a sane model, and less than any mask
_CLOSE = 1e-3  # relative: what a right rule leaves in float32, and a wrong one never


@dataclass(frozen=True)
class Heads:
    """The operands of one softmax: queries (batch, h, n, e), keys and values (batch, g, n, e), and the mixed values.

    `scores` (batch, h, n, m) are what the softmax is given, m = n + 1 where every query may also read nothing (a sink);
    `softcap` is the largest score where a tanh bounds them.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    mixed: Tensor
    scores: Tensor
    softcap: float | None
    start: int
    end: int


def find_heads(record: Record, block: Call) -> list[Heads]:
    """The operands of every softmax in a block, in order."""
    rows = block.input
    assert rows is not None
    operations = [each for each in record.operations if block.holds(each)]
    found = []
    for index, operation in enumerate(operations):
        if operation.kind is Kind.ATTENTION:
            found.append(_of_one_call(operation))
        elif operation.kind is Kind.SOFTMAX and operation.operands[0].dim() >= 3:
            heads = _around(operation, operations[:index], operations[index + 1 :], len(rows))
            found += [] if heads is None else [heads]
    return found


def _around(softmax: Operation, before: Sequence[Operation], after: Sequence[Operation], batch: int) -> Heads | None:
    """The products before and behind a softmax over keys."""
    num_queries, num_scores = softmax.operands[0].shape[-2:]
    shapes = (num_queries, num_scores), (num_queries, num_scores - 1)
    products = [each for each in before if each.kind is Kind.PRODUCT]
    first = next((each for each in reversed(products) if each.output.shape[-2:] in shapes), None)
    last = next((each for each in after if each.kind is Kind.PRODUCT), None)
    if first is None or last is None:
        return None

    def heads(part: Tensor) -> Tensor:
        return part if part.dim() == 4 else part.unflatten(0, (batch, -1))

    q, k = (heads(part) for part in first.operands[-2:])
    v = heads(last.operands[-1])
    mixed = heads(last.output).transpose(1, 2)
    k, v = _merge_groups(k.transpose(-1, -2), v)
    scores = heads(softmax.operands[0])
    between = (each for each in before if each.kind is Kind.TANH and first.start < each.start)
    bounded = next((heads(each.output) for each in between if each.output.numel() == scores.numel()), None)
    softcap = None if bounded is None else find_bound(scores, bounded)
    return Heads(q, k, v, mixed, scores, softcap, first.start, last.start)


def _of_one_call(attention: Operation) -> Heads:
    """All of attention in one call: its scores are made again."""
    q, k, v = attention.operands[:3]
    k, v = _merge_groups(k, v)
    scale = attention.options.get("scale") or q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) * scale
    mask = attention.options.get("attn_mask")
    mask = attention.operands[3] if mask is None and len(attention.operands) > 3 else mask
    if attention.options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype is torch.bool else scores + mask
    return Heads(q, k, v, attention.output.transpose(1, 2), scores, None, attention.start, attention.start)


def _merge_groups(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each group of heads that share them."""
    for groups in range(1, k.shape[1]):
        repeats, rest = divmod(k.shape[1], groups)
        if not rest and all(torch.equal(part, part[:, ::repeats].repeat_interleave(repeats, dim=1)) for part in (k, v)):
            return k[:, ::repeats], v[:, ::repeats]
    return k, v


def find_bound(bounded: Tensor, tangents: Tensor) -> float:
    """c in c·tanh(·), given some of its values (others are masked)."""
    return plain_number(float((bounded.detach().double() / tangents.detach().double())[tangents != 0].median()))


def is_causal(heads: Heads) -> bool:
    """Whether no query reads a later key."""
    length = heads.queries.shape[2]
    later = _later(length, causal=True).to(heads.scores.device)
    return not bool(visible_scores(heads.scores)[0, 0, :, :length][later].any())


def visible_scores(scores: Tensor) -> Tensor:
    """Which scores are not masked: a mask may put any number below the others, but a large one."""
    scores = scores.detach().float()
    return scores > scores.amax(-1, keepdim=True) - _MASKED


def find_scores(heads: Heads) -> Scores | None:
    """The rule from queries and keys to scores: a scale, a bound, what is added by position; None if there is none.

    What is added does not depend on the text, so it cancels between two texts, and leaves the scale. What is added to
    all scores of a query changes no weight, and models do so against overflow: scores are taken relative to the query's
    own key, which it always sees.
    """
    q, k = heads.queries.detach().double(), heads.keys.detach().double()
    close = max(_CLOSE, 8 * torch.finfo(heads.queries.dtype).eps)
    products = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
    length = products.shape[-1]
    visible = visible_scores(heads.scores)[..., :length].all(0)
    scores = heads.scores.detach().double()
    raw = scores[..., :length]
    if heads.softcap is not None:
        raw = heads.softcap * torch.atanh((raw / heads.softcap).clamp(-1 + 1e-12, 1 - 1e-12))
    relative = [each - own_key(each) for each in (products, raw)]
    moved, wanted = ((each[0] - each[1])[visible] for each in relative)
    scale = float((moved @ wanted) / (moved @ moved).clamp_min(1e-300))
    if float((scale * moved - wanted).norm()) > close * max(float(wanted.norm()), 1e-12):
        return None
    scale = plain_number(scale / q.shape[-1] ** -0.5, close / 1000) * q.shape[-1] ** -0.5
    added = relative[1][0] - scale * relative[0][0]
    has_bias = float(added[visible].abs().max()) > close * max(1.0, float(raw[0][visible].abs().max()))
    has_window = not bool((visible | _later(length, causal=is_causal(heads)).to(visible.device)).all())
    if scores.shape[-1] == length:
        return Scores(scale, heads.softcap, has_bias or has_window)
    sinks = scores[..., -1] - own_key(raw - scale * products)[..., 0]
    if has_bias or heads.softcap is not None or float((sinks - sinks[:1, :, :1]).abs().max()) > close:
        return None
    return Scores(scale, has_bias=has_window, sinks=tuple(sinks[0, :, 0].tolist()))


def own_key(scores: Tensor) -> Tensor:
    """The score of every query (…, n, n) with the key at its own position."""
    return scores.diagonal(dim1=-2, dim2=-1)[..., None]


def _later(length: int, causal: bool) -> Tensor:
    """Keys that a causal model hides."""
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return later if causal else torch.zeros_like(later)
