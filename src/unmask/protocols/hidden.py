"""A service hands out hidden states instead of text: split inference, embeddings APIs, activation logs."""

from __future__ import annotations

from typing import Literal

import torch

from unmask.arguments import require_count, require_member
from unmask.errors import InputError
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.models.linear import Role
from unmask.models.load import require_model
from unmask.models.output_projection import OutputProjection
from unmask.protocols.batch import Batch, Texts, make_batch, require_memory
from unmask.shapes import States


@torch.no_grad()
def observe_hidden(
    model: Model,
    texts: Texts,
    *,
    layer: int | None = None,
    site: Site | str = Site.STREAM,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
) -> HiddenEvidence:
    """States at a site of the model; padding is zeroed.

    `layer` counts the blocks that the stream has passed (0: embeddings; None: all); for `Site.ATTENTION` it is the
    block whose attention module is read, the first one by default. Texts are cut to `max_length` tokens.
    """
    require_model(model)
    site = require_member(Site, "site", site)
    require_count("layer", layer, least=0)
    last = model.num_blocks - (site is Site.ATTENTION)
    if layer is None:
        layer = 0 if site is Site.ATTENTION else last
    if not 0 <= layer <= last or (site is Site.FINAL_NORM and layer != last):
        allowed = f"be {last}" if site is Site.FINAL_NORM else f"lie in 0…{last}"
        raise InputError(f"layer must {allowed}, got {layer}")
    batch = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
    require_memory(model, *batch.tokens.shape, backward=False)
    states, mask = _states(model, batch, layer, site), batch.mask
    if site is Site.MEAN:
        states, mask = states.sum(1, keepdim=True) / mask.sum(1)[:, None, None], mask.any(1, keepdim=True)
    return HiddenEvidence(states, mask, layer, model.fingerprint(), site, model.dtype)


def _states(model: Model, batch: Batch, layer: int, site: Site) -> States:
    stream = model.hidden_states(batch.tokens, batch.mask, num_blocks=layer, types=batch.types)[layer]
    if site is Site.FINAL_NORM:
        stream = model.final_norm(stream)
    if site is Site.ATTENTION:
        if model.linear(Role.ATTENTION_OUT, layer) is None:
            raise InputError(
                f"block {layer} of this model has no output projection that is given the mixed values as they are, so "
                f"there is nothing to see at site '{site.value}'; choose '{Site.STREAM.value}'"
            )
        positions = torch.arange(stream.shape[1], device=stream.device).expand(stream.shape[:2])
        mixed = model.mixed_values(layer, stream, positions, batch.mask)
        stream = OutputProjection.of(model, layer)(mixed)
    return stream * batch.mask[..., None]
