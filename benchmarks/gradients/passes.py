"""What the client itself must do: one forward and one backward pass, by transformers in float32, to the inputs alone.

Whoever confirms texts by running the client again cannot be quicker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch


def run_both_ways(model, texts: Sequence[Sequence[int]]) -> None:
    """A forward and a backward pass over right-padded texts; the weights get no gradients."""
    rows = [torch.tensor(text) for text in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    mask = (torch.arange(tokens.shape[1], device=model.device) < lengths[:, None]).long()
    inputs = model.hf.get_input_embeddings()(tokens).detach().requires_grad_()
    trained = [p for p in model.hf.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    labels = tokens.masked_fill(mask == 0, -100)
    loss = model.hf(inputs_embeds=inputs, attention_mask=mask, labels=labels).loss
    torch.autograd.grad(loss, inputs)
    for parameter in trained:
        parameter.requires_grad_(True)


def least_seconds(model, texts: Sequence[Sequence[int]], repeats: int = 2) -> float:
    """CPU seconds of the passes, side by side or text by text, whichever takes less; of several runs the quickest."""
    ways: list[Callable[[], object]] = [
        lambda: run_both_ways(model, texts),
        lambda: [run_both_ways(model, [text]) for text in texts],
    ]
    seconds = []
    for work in ways * repeats:
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return min(seconds)
