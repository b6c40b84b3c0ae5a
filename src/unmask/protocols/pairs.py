"""A client that fine-tunes an encoder–decoder: one step on pairs of texts, one read and one written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.errors import InputError
from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.inputs import training_mode
from unmask.protocols.batch import Pair, make_batch
from unmask.protocols.client import trainable

_NO_LABEL = -100  # what transformers leaves out of the loss


def observe_pairs(model: EncoderDecoder, pairs: Sequence[Pair]) -> GradientEvidence:
    """What a server sees of one step on pairs (text read, text written); the loss is transformers' own mean.

    Token ids are taken as they are. What the decoder is given is the text written, one place to the right behind the
    start token, as transformers makes it of labels.
    """
    loss = pair_loss(model, pairs)
    wanted = trainable(model, None)
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return GradientEvidence(
        gradients={name: g.detach() for name, g in zip(wanted, gradients, strict=True) if g is not None},
        model_fingerprint=model.fingerprint(),
        task=Task.NEXT_TOKEN,
        num_texts=len(pairs),
        num_clients=1,
        compute_dtype=model.dtype,
    )


def pair_loss(model: EncoderDecoder, pairs: Sequence[Pair]) -> Tensor:
    """Mean cross-entropy over all tokens that are written."""
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InputError("an encoder–decoder is trained on pairs: a list of (text read, text written)")
    read = make_batch(model.encoder, [pair[0] for pair in pairs])
    written = make_batch(model.decoder, [pair[1] for pair in pairs])
    labels = written.tokens.masked_fill(~written.mask, _NO_LABEL)
    with training_mode(model.hf, False):
        return model.hf(input_ids=read.tokens, attention_mask=read.mask.long(), labels=labels).loss
