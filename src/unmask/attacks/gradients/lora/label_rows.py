"""Where adapters of the last block tell labels: ∂A = Σ_u arrived(u) ⊗ x_u, with a known row x_u for every prefix u.

An adapter's hidden row z = A·x (r numbers) takes part in the prediction at its own position alone, if it stands in the
last block at the queries, the output projection or the down projection. So the gradient that arrives at z_u depends on
the labels behind u and on nothing else, and `labels.py` reads it as it reads that of a whole layer:

    arrived(u) = ∂L/∂z_u, by least squares over prefixes;  the stream that leaves the block, as a function of z_u

Few numbers tell a label: r of them, known to 1e-3 or better, against a vocabulary.

Limits: queries of a first token move nothing, as it sees itself alone, so that the label behind a first token is not
told by them. At most d prefixes. Projections that keys and values share with queries tell nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.attacks.gradients.decoder.last_block_rows import LastBlockRows, gather_rows, last_block_rows
from unmask.attacks.gradients.decoder.prefix_search import Forest
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.models.attention import attend
from unmask.models.linear import Role
from unmask.models.peft_adapters import scale_at

_TELLING = (Role.MLP_OUT, Role.ATTENTION_OUT, Role.QUERY)


@dataclass(frozen=True)
class LabelAdapter:
    """An adapter of the last block that tells labels: its factors, and the gradient of A as (d, r)."""

    role: Role
    name: str
    down: Float[Tensor, "r d"]
    up: Float[Tensor, "o r"]  # times the scale
    gradient: Float[Tensor, "d r"]


def find_label_adapter(evidence: GradientEvidence, model: Model) -> LabelAdapter | None:
    """The adapter that tells labels best; None where the update has none."""
    last = model.num_blocks - 1
    for role in _TELLING:
        layer = model.linear(role, last)
        if layer is None or (role is Role.QUERY and layer.columns is not None):
            continue
        down, up = (f"{layer.module}.lora_{factor}.weight" for factor in "AB")
        gradient = evidence.gradients.get(down)
        if gradient is not None and down in evidence.adapters and bool(gradient.any()):
            A, B = (evidence.adapters[name].to(model.dtype) for name in (down, up))
            scale = scale_at(evidence.adapter_scale, layer.module)
            return LabelAdapter(role, down, A, B * scale, gradient.T)
    return None


@torch.no_grad()
def label_rows(model: Model, forest: Forest, adapter: LabelAdapter, memory_budget_bytes: int) -> LastBlockRows:
    """For every prefix the adapter's input and hidden row, and what leaves the block as a function of the latter."""
    if adapter.role is Role.QUERY:
        return _query_rows(model, forest, adapter, memory_budget_bytes)
    whole = last_block_rows(model, forest, memory_budget_bytes, adapter.role)
    hidden = whole.hidden @ adapter.down.T

    def leave(rows: Any, added: Tensor) -> Tensor:
        return whole.leave(rows, whole.added[rows] + (added - hidden[rows]) @ adapter.up.T)

    return LastBlockRows(whole.nodes, whole.hidden, hidden, leave)


def _query_rows(model: Model, forest: Forest, adapter: LabelAdapter, memory_budget_bytes: int) -> LastBlockRows:
    last = model.num_blocks - 1
    longest = max(len(tokens) for _, tokens in forest.leaves)

    def forward(model: Model, tokens: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        stream = model.hidden_states(tokens, mask, num_blocks=last, positions=positions)[-1]
        rows = model.attention_input(last, stream)
        _, keys, values = model.queries_keys_values(last, rows, positions)
        length = tokens.shape[1]
        room = (0, 0, 0, 0, 0, longest - length)
        every = (torch.nn.functional.pad(part, room)[:, None].expand(-1, length, *[-1] * 3) for part in (keys, values))
        place = torch.arange(length, device=tokens.device).expand_as(tokens)
        return rows, stream, positions, place, *every

    nodes, parts = gather_rows(model, forest.leaves, memory_budget_bytes, forward)
    rows, stream, positions, place, keys, values = parts
    queries, slopes = _query_slopes(model, adapter, rows, positions)
    visible = torch.arange(longest, device=rows.device) <= place[:, None]
    bias = model.score_bias(last, longest)
    hidden = rows @ adapter.down.T

    def leave(chosen: Any, added: Tensor) -> Tensor:
        moved = queries[chosen] + torch.einsum("nrhe,nr->nhe", slopes[chosen], added - hidden[chosen])
        own_bias = None if bias is None else bias[:, place[chosen]].transpose(0, 1)[:, :, None]
        mixed = attend(
            moved[:, None], keys[chosen], values[chosen], visible[chosen][:, None], model.scores(last), own_bias
        )
        return model.after_mlp(last, model.after_attention(last, stream[chosen], mixed[:, 0]))

    return LastBlockRows(nodes, rows, hidden, leave)


def _query_slopes(
    model: Model, adapter: LabelAdapter, rows: Float[Tensor, "n d"], positions: Tensor
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "n r h e"]]:
    """Heads of queries, and how they move with the adapter's hidden row."""
    last = model.num_blocks - 1
    layer = model.linear(Role.QUERY, last)
    assert layer is not None
    projection = model.body.get_submodule(layer.module)

    def queries(hidden: Tensor) -> Tensor:
        def add(module: Any, given: Any, output: Tensor) -> Tensor:
            return output + (hidden @ adapter.up.T).reshape(output.shape)

        hook = projection.register_forward_hook(add)
        try:
            return model.queries_keys_values(last, rows, positions)[0]
        finally:
            hook.remove()

    nothing = rows.new_zeros(len(rows), adapter.up.shape[1])
    moved: list[Tensor] = []
    base = rows.new_zeros(0)
    for unit in torch.eye(adapter.up.shape[1]).to(rows):
        base, slope = torch.func.jvp(queries, (nothing,), (unit.expand_as(nothing),))  # type: ignore[misc]
        moved.append(slope)
    return base, torch.stack(moved, dim=1)
