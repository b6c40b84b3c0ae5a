"""What the clients of DAGER's experiments share: the head that they train, and the part of the update that is read."""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.models import Model, Role

PAPERS_HEAD_SCALE = 1e-3  # deviation of the paper's classification heads; transformers draws them with 0.02


def draw_head(model: Model, num_labels: int, scale: float, seed: int) -> Tensor:
    """A classification head of Gaussian weights (labels, d)."""
    return scale * torch.randn(num_labels, model.width, generator=torch.Generator().manual_seed(seed))


def parameters_that_are_read(model: Model) -> list[str]:
    """The first block, the last down projection and the embeddings: the whole update of GPT-2 large is 3 GB."""
    layers = [model.linear(role, 0) for role in Role] + [model.linear(Role.MLP_OUT, model.num_blocks - 1)]
    names = [layer.parameter for layer in layers if layer is not None]
    names += [name for name in (model.token_embedding, model.position_embedding) if name is not None]
    return list(dict.fromkeys(names))
