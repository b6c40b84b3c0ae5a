"""What a defence leaves of a vector database's use: the share of nearest neighbours that stay.

    recall@k = mean over texts i of |N_k(i) ∩ N'_k(i)| / k

Notation: N_k(i) are the k texts nearest to i by cosine among all others, in the plain vectors; N'_k(i) in the defended.
Limits: every text is a query, defended as the stored ones are; of a service that searches with plain queries nothing
is said. Ties go by order.
Cost: n² products.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.errors import InputError


def neighbour_recall(plain: Float[Tensor, "n k"], defended: Float[Tensor, "n j"], num_neighbours: int = 10) -> float:
    """The share of each text's nearest neighbours that are so among the defended vectors too, 0 to 1."""
    if len(plain) != len(defended) or not 1 <= num_neighbours < len(plain):
        raise InputError(
            f"recall needs as many defended vectors as plain ones, and more than {num_neighbours} of them, got "
            f"{len(plain)} and {len(defended)}"
        )
    before, after = (_neighbours(vectors, num_neighbours) for vectors in (plain, defended))
    shared = (before[:, :, None] == after[:, None, :]).any(2)
    return float(shared.double().mean())


def _neighbours(vectors: Float[Tensor, "n k"], count: int) -> Tensor:
    units = torch.nn.functional.normalize(vectors.double(), dim=1)
    likeness = units @ units.T
    likeness.fill_diagonal_(-torch.inf)
    return likeness.argsort(dim=1, descending=True, stable=True)[:, :count]
