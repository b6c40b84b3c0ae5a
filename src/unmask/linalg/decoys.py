"""Decoys beside the rows of a dictionary: as near to a row as its nearest other row is, in a random direction.

    z = W·(x − mean),   decoy of x ← x + W⁻¹·‖z − z_nearest‖·r,   r a random unit vector

W whitens the dictionary's covariance, so that decoys have its shape. A search that mistakes a row for one near it
mistakes it for a decoy as readily, and shows it. Rows that (nearly) equal another one get a decoy at half the usual
distance: no search could tell it from them.

Notation: rows (v, d). Limits: the nearest row is that of 32 random projections, so at times the second nearest.
Cost: num·v·32 + v·d² multiplications, in parts of 2⁹ rows.
Source: decoys as in Elias, Gygi, Nature Methods 4 (2007); those beside each row were made for this project.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_AT_ONCE = 2**9  # rows compared with all others: a temporary of (2**9, v)
_NUM_PROJECTIONS = 32
_FLATTEST = 1e-6  # of the largest variance: directions below it are rounding
_CLOSEST = 0.5  # of the usual distance


def make_decoys(rows: Float[Tensor, "v d"], num: int, generator: torch.Generator) -> Float[Tensor, "k d"]:
    """Decoys beside up to `num` rows, drawn without repetition."""
    variances, axes = torch.linalg.eigh(torch.cov(rows.T).double())
    sizes = variances.clamp_min(_FLATTEST * float(variances.max())).sqrt()
    white = (rows - rows.mean(0)) @ (axes / sizes).to(rows)
    anchors = torch.randperm(len(rows), generator=generator)[:num]
    frame = torch.randn(rows.shape[1], _NUM_PROJECTIONS, generator=generator).to(rows)
    short = white @ frame
    norms = short.square().sum(1)
    nearest = []
    for some in anchors.split(_AT_ONCE):
        squares = norms - 2 * short[some] @ short.T
        squares[torch.arange(len(some)), some] = torch.inf
        nearest.append(squares.argmin(1))
    distances = (white[anchors] - white[torch.cat(nearest)]).norm(dim=1)
    distances = distances.clamp_min(_CLOSEST * float(distances.median()))
    directions = torch.nn.functional.normalize(torch.randn(len(anchors), rows.shape[1], generator=generator), dim=1)
    moved = (directions.to(rows) * distances[:, None]) @ (axes * sizes).T.to(rows)
    return rows[anchors] + moved
