"""The front door of outputs → inputs for one attention layer: default choices, one call."""

from __future__ import annotations

from unmask.attacks.outputs.attention import AttentionAttack
from unmask.attacks.outputs.preimages import Preimages
from unmask.attacks.progress import Progress, silent
from unmask.evidence.outputs import AttentionEvidence
from unmask.recovery import Recovery


def recover_inputs(evidence: AttentionEvidence, *, progress: Progress = silent, seed: int = 0) -> Recovery[Preimages]:
    """All inputs X that the layer may have had: softmax(scale·X W Xᵀ)·X·V = output.

    `recovery.value.X` is the first pre-image, `recovery.value.preimages` all that were found; the status is RECOVERED
    only if there is one, and no sign of another. `seed` is that of the search's starts.
    """
    return AttentionAttack(seed=seed)(evidence, progress)
