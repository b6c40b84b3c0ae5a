"""A client's gradient, tensor by tensor: each is handed over when it is computed, and then dropped.

    forward    blocks keep only what enters them
    backward   from the last block to the first: the block is run again, each of its gradients is visited and dropped

A plain gradient holds every tensor at once, as many bytes as the model. Here it is one tensor, one block's activations
and the rows that enter the blocks.

Limits: next-token training. Cost: a client's work and one forward pass more. Source: activation checkpointing,
arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.models.adapter import Model
from unmask.models.inputs import training_mode
from unmask.models.mapped import is_released, release_weight
from unmask.protocols.batch import TokenIds, make_batch
from unmask.protocols.fedsgd import next_token_loss

Visit = Callable[[str, Tensor], None]


def visit_gradients(
    model: Model,
    texts: Sequence[TokenIds],
    names: Collection[str],
    visit: Visit,
    *,
    padding_side: Literal["left", "right"] = "right",
) -> None:
    """Call `visit(name, gradient)` for each of the named parameters, in the order of a backward pass."""
    batch = make_batch(model, texts, padding_side=padding_side)
    blocks = [model.block_module(index) for index in range(model.num_blocks)]
    mapped = {id(weight) for block in blocks if is_released(block) for weight in block.parameters()}

    def hand_over(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        visit(name, gradient)
        if id(parameter) in mapped:
            release_weight(parameter)

    with ExitStack() as stack:
        stack.enter_context(only_trainable(model, names))
        stack.enter_context(training_mode(model.hf, False))
        stack.enter_context(_without_gradients(model.hf))
        stack.enter_context(_run_again_in_backward(blocks))
        for name, parameter in model.named_parameters():
            if name in names:
                hook = parameter.register_post_accumulate_grad_hook(partial(hand_over, name))
                stack.callback(hook.remove)
        with torch.enable_grad():
            next_token_loss(model, batch).backward()


@contextmanager
def only_trainable(model: Model, names: Collection[str]) -> Iterator[None]:
    """Gradients for the parameters that an update holds, and for no others; afterwards as it was."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


@contextmanager
def _run_again_in_backward(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Blocks keep what enters them, and are run again when their gradients are computed."""
    for block in dict.fromkeys(blocks):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in dict.fromkeys(blocks):
            del block.forward


@contextmanager
def _without_gradients(hf: nn.Module) -> Iterator[None]:
    """No `grad` at any parameter; afterwards those that were there."""
    before = {parameter: parameter.grad for parameter in hf.parameters()}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
