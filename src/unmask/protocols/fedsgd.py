"""FedSGD: the client computes one gradient on its batch and sends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from unmask.evidence.gradients import GradientEvidence, Task
from unmask.models.adapter import Model
from unmask.models.encoder_decoder import EncoderDecoder
from unmask.models.inputs import no_cache, training_mode
from unmask.models.load import require_model
from unmask.protocols.batch import Batch, Texts, make_batch, require_memory
from unmask.protocols.client import (
    Pooling,
    choose_pooling,
    choose_task,
    class_logits,
    fix_seed,
    labels_and_head,
    require_next_token,
    task_knowledge,
    trainable,
)
from unmask.protocols.masking import mask_tokens, masked_token_loss
from unmask.protocols.pairs import observe_pairs


def observe_gradients(
    model: Model | EncoderDecoder,
    texts: Texts,
    *,
    task: Task | str | None = None,
    labels: Sequence[int] | None = None,
    num_labels: int = 2,
    head: Tensor | None = None,
    pooling: Pooling | None = None,
    mask_share: float = 0.15,
    padding_side: Literal["left", "right"] = "right",
    max_length: int | None = None,
    train_mode: bool = False,
    parameters: Sequence[str] | None = None,
    seed: int = 0,
) -> GradientEvidence:
    """What an honest-but-curious server sees of one client step on `texts`.

    Without a `task`, decoders with a language head are trained for the next token, all others for classification. The
    loss is the mean over targets (next-token, masked-token) or over texts (classification), as transformers
    computes it. A text may be a pair, a tuple of two texts, where the model has token types.
    Classification uses the model's own head if it has one, else a linear `head` (labels, d), drawn for `num_labels`
    outputs where none is given, on the `pooling` of the last states (decoders: last token; encoders: first, that is
    [CLS]). The server has sent the head, so the evidence states it. `labels` are drawn at random when not given.
    Masked-token training hides `mask_share` of the tokens (`masking.py`) and predicts them with the model's own head
    if it has one, else with its token embeddings on the last states, a tied output layer.
    An encoder–decoder takes pairs (text read, text written), and none of the settings.
    `train_mode` keeps dropout on. `parameters` keeps only gradients whose names contain one of them.
    """
    if isinstance(model, EncoderDecoder):
        return observe_pairs(model, texts)  # type: ignore[arg-type]
    require_model(model)
    task, pooling = choose_task(model, task), choose_pooling(model, pooling)
    wanted = trainable(model, parameters)
    generator = torch.Generator().manual_seed(seed)
    known_head = None
    batch = make_batch(model, texts, padding_side=padding_side, max_length=max_length)
    require_memory(model, *batch.tokens.shape, backward=True)
    with fix_seed(seed), training_mode(model.hf, train_mode):
        if task is Task.NEXT_TOKEN:
            loss = next_token_loss(model, batch)
        elif task is Task.MASKED_TOKEN:
            loss = masked_token_loss(model, *mask_tokens(model, batch, mask_share, generator))
        else:
            classes, fresh_head = labels_and_head(model, labels, len(batch.tokens), num_labels, generator, head)
            known_head = None if fresh_head is None else fresh_head.weight.detach()
            loss = functional.cross_entropy(class_logits(model, batch.inputs, batch, pooling, fresh_head), classes)
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return GradientEvidence(
        gradients={name: g.detach() for name, g in zip(wanted, gradients, strict=True) if g is not None},
        model_fingerprint=model.fingerprint(),
        task=task,
        num_texts=len(batch.tokens),
        num_clients=1,
        compute_dtype=model.dtype,
        **task_knowledge(task, pooling, known_head),
    )


def next_token_loss(model: Model, batch: Batch) -> Tensor:
    """Mean cross-entropy of each real token given the ones before it, as transformers computes it from labels.

    Under left padding the last padding position predicts the first token, as for every client that only masks the
    labels of padding.
    """
    require_next_token(model, batch)
    labels = batch.tokens.masked_fill(~batch.mask, -100)
    inputs = {"input_ids": batch.tokens, "attention_mask": batch.mask.long(), "labels": labels}
    return model.hf(**inputs, **no_cache(model.hf)).loss
