"""How often each of some texts is in a batch: an update is the sum of its texts' own updates.

    G = Σ_i c_i·g_i / N + noise,   g_i the gradient of text i summed over its labels, N the number of all labels

Least squares with c ≥ 0 over a few matrices gives 0 to a text that is not there, and whole numbers to the others.

Limits: gradients at the weights that the server sent; after several local steps they do not add up.
Cost: a pass for each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from scipy.optimize import nnls

from unmask.attacks.gradients.decoder.endings import TextEnding, unit_weight
from unmask.evidence.gradients import GradientEvidence
from unmask.models.adapter import Model
from unmask.proof.near_tokens import matrices_of
from unmask.proof.replay import replay

_MOST_TEXTS = 128
_STANDS_OUT = 0.1  # of the largest weight
_PRESENT = 0.5  # of one occurrence


def weigh_texts(evidence: GradientEvidence, model: Model, endings: Sequence[TextEnding]) -> list[TextEnding]:
    """The texts that the update needs, as often as it needs them; as they are if nothing can be told."""
    names = matrices_of(evidence, model)
    if not names or not 0 < len(endings) <= _MOST_TEXTS:
        return list(endings)
    part = evidence.only(*names)
    seen = torch.cat([part.gradients[name].double().flatten() for name in names])
    own = []
    for ending in endings:
        again = replay(part, model, [ending.node[1]])
        whole = torch.cat([again[name].flatten() for name in names])
        own.append(whole.double() * (len(ending.node[1]) - 1))
    columns = torch.stack(own)
    gram, mixed = (columns @ columns.T).cpu(), (columns @ seen).cpu()
    root = torch.linalg.cholesky(gram + 1e-10 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype))
    weights, _ = nnls(root.T.numpy(), torch.linalg.solve_triangular(root, mixed[:, None], upper=False)[:, 0].numpy())
    return _count(endings, weights.tolist())


def _count(endings: Sequence[TextEnding], weights: Sequence[float]) -> list[TextEnding]:
    """Weights in units of one occurrence: what all weights that stand out are multiples of, or else their median."""
    large = sorted(weight for weight in weights if weight > _STANDS_OUT * max(weights))
    unit = (unit_weight(large) or large[len(large) // 2]) if large else 0.0
    if unit <= 0:
        return list(endings)
    counts = [round(weight / unit) if weight > _PRESENT * unit else 0 for weight in weights]
    return [replace(ending, count=count) for ending, count in zip(endings, counts, strict=True) if count]
