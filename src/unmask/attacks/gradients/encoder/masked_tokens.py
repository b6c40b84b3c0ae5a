"""Masked-token training: which tokens were predicted, and what they had been.

Once the masked texts are known, the last block's down projection has the gradient G = AᵀΔ with a known row of A for
every token, and least squares gives Δ. After this layer nothing mixes tokens, so δ_i comes from the head alone:

    δ_i = c·Jᵢᵀ(μ_i − e_y) where token y was predicted at i, and 0 elsewhere

So δ tells which tokens were hidden, replaced or kept to be predicted, and names each of them, whatever is seen there.
What arrives at the tokens that frame a text, which are never predicted, is rounding: more than that is a prediction.

Notation: A (n, f) inputs of the down projection, Δ (n, d) what arrives at its outputs; J Jacobian of the block's norm
and the head's features φ; e_y output embedding of y, μ_i = Σ_v p_i(v)·e_v; c = 1/number of predictions.
Limits: a text of which nothing was predicted leaves no trace at all. Two texts that masking made equal share their
rows; where they differed, two labels meet, and neither text is certain.
Cost: a forward pass for each text, then vocab·d·32 for each prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.attacks.gradients.decoder.endings import last_down_projection, unit_weight
from unmask.attacks.gradients.decoder.labels import EXPLAINED, LabelReader, Labels, arriving_gradients
from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows
from unmask.attacks.gradients.decoder.prefix_search import Node
from unmask.attacks.gradients.encoder.position_candidates import PositionCandidates, Text
from unmask.attacks.gradients.encoder.problem import Problem
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import Model

_LOUD = 10.0  # roundings: a row at which more arrives was predicted
_FAR_FROM_WRONG = 0.1  # of δ: a wrong label leaves 0.3 and more
_MEMORY_BUDGET_BYTES = 2**28


@dataclass(frozen=True)
class Original:
    """A text before masking, how often it occurs, and the largest share of a δ that its labels leave unexplained.

    Its count is told by how much each of its labels weighs, in a mean over all of them.
    """

    tokens: tuple[int, ...]
    count: int
    residual: float
    num_labels: int = 0

    @property
    def is_explained(self) -> bool:
        """Whether the labels explain what arrives at the text."""
        return self.residual <= EXPLAINED


def find_originals(
    evidence: GradientEvidence, problem: Problem, texts: Sequence[Text]
) -> dict[Text, Original] | str | None:
    """As `read_originals`; None where nothing says that the client trained for masked tokens."""
    if not texts or evidence.task not in (None, Task.MASKED_TOKEN):
        return None
    found = read_originals(evidence, problem, texts)
    told = evidence.task is Task.MASKED_TOKEN or problem.model.mask_token in problem.places.tokens.tolist()
    seen = isinstance(found, dict) and any(original.is_explained for original in found.values())
    return found if told or seen else None


@torch.no_grad()
def read_originals(evidence: GradientEvidence, problem: Problem, texts: Sequence[Text]) -> dict[Text, Original] | str:
    """The original of every masked text, or why none can be read."""
    gradient, name = last_down_projection(evidence, problem.model)
    if gradient is None:
        return f"the update does not hold '{name}', which tells the predicted tokens"
    model = problem.model.to(dtype=torch.float64)  # all blocks of it; the problem's own copy has the first alone
    rows, hidden = _rows(model, problem.places, texts)
    if len(hidden) > hidden.shape[1]:
        return f"the texts have {len(hidden)} tokens, more than the {hidden.shape[1]} rows of '{name}'"
    arrived, foreign = arriving_gradients(hidden, gradient)
    arrived = arrived - (arrived @ foreign) @ foreign.T
    places = torch.tensor([place for text in texts for place in text], device=hidden.device)
    in_frame = problem.places.is_frame[places]
    roundings = _in_roundings(hidden, arrived, in_frame)
    loud = roundings > _LOUD
    if not bool(loud.any()) or bool(loud[in_frame].any()):
        return "the gradient that arrives at the last block is not that of predicted tokens"
    chosen = loud.nonzero()[:, 0]
    head = model.token_head
    assert head is not None  # every encoder has one: its own, or its embeddings
    nodes: list[Node] = [(int(i), (0,)) for i in chosen]  # rows by themselves: none continues another
    known = LastBlockRows(nodes, hidden[chosen], rows[chosen], lambda _, sums: model.after_sum(sums))
    labels = LabelReader(head, known, arrived[chosen], foreign, _MEMORY_BUDGET_BYTES).labels()
    read = {i: _lenient(found, float(roundings[i])) for i, found in zip(chosen.tolist(), labels, strict=True)}
    return _originals(problem, texts, read)


def _rows(
    model: Model, table: PositionCandidates, texts: Sequence[Text]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n f"]]:
    """What the last block's norm and its down projection see at every token, text by text."""
    last = model.num_blocks - 1
    sums, hidden = [], []
    for text in texts:
        places = torch.tensor(text, device=model.device)
        tokens, positions, types = (row[places][None] for row in (table.token, table.position, table.kind))
        stream = model.hidden_states(tokens, num_blocks=last, positions=positions, types=types)[-1]
        everyone = torch.ones_like(tokens, dtype=torch.bool)
        attended = model.after_attention(last, stream, model.mixed_values(last, stream, positions, everyone))
        hidden.append(model.mlp_hidden(last, attended)[0])
        sums.append(model.mlp_sum(last, attended[0], hidden[-1]))
    return torch.cat(sums), torch.cat(hidden)


def _in_roundings(
    hidden: Float[Tensor, "n f"], arrived: Float[Tensor, "n d"], in_frame: Bool[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Sizes of δ in units of their rounding: least squares spreads it as √diag((AAᵀ)⁻¹), frame rows give the scale."""
    _, r = torch.linalg.qr(hidden.T)
    spread = torch.linalg.solve_triangular(r, torch.eye(len(r)).to(r), upper=True).norm(dim=1)
    sizes = arrived.norm(dim=1) / spread
    smallest = torch.finfo(arrived.dtype).eps * float(sizes.max())
    return sizes / sizes[in_frame].max().clamp_min(max(smallest, 1e-300))


def _lenient(found: Labels, roundings: float) -> Labels:
    """Labels whose rest is mere rounding explain all there is to explain, however little arrived."""
    is_rounding = found.residual * roundings <= _LOUD and found.residual < _FAR_FROM_WRONG
    return Labels(found.weights, min(found.residual, EXPLAINED)) if is_rounding else found


def _originals(problem: Problem, texts: Sequence[Text], read: Mapping[int, Labels]) -> dict[Text, Original]:
    """Every text with its labels, one for each prediction; all predictions weigh the same, or a multiple of it."""
    single = [next(iter(f.weights.values())) for f in read.values() if len(f.weights) == 1 and f.residual <= EXPLAINED]
    unit = unit_weight(single) if single else None
    originals: dict[Text, Original] = {}
    start = 0
    for text in texts:
        own = {i - start: read[i] for i in range(start, start + len(text)) if i in read}
        original = _original(problem.places.tokens_of(text), own, unit)
        masked = problem.model.mask_token in original.tokens  # a mask that no label replaced
        originals[text] = replace(original, residual=float("inf")) if masked else original
        start += len(text)
    return originals


def _original(tokens: Sequence[int], labels: Mapping[int, Labels], unit: float | None) -> Original:
    """A text with a label at each position where something was predicted."""
    if unit is None or not labels or any(len(found.weights) != 1 for found in labels.values()):
        return Original(tuple(tokens), 1, float("inf"))
    restored = {position: next(iter(found.weights)) for position, found in labels.items()}
    count = max(round(weight / unit) for found in labels.values() for weight in found.weights.values())
    residual = max(found.residual for found in labels.values())
    original = tuple(restored.get(p, token) for p, token in enumerate(tokens))
    return Original(original, max(count, 1), residual, len(labels))
