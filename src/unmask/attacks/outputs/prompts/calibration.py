"""Text to calibrate with, made by the model itself: no data set is needed, and none is assumed.

Some sequences are drawn from the model's own distribution, token by token, so that they look like what it reads; the
others are tokens at random, so that nothing that is written comes as a surprise. A model that cannot write gets random
tokens alone, in the frame ([CLS], [SEP]) that its tokenizer puts around every text.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from unmask.models.adapter import Model
from unmask.shapes import TokenBatch

_NUM_WRITTEN = 40
_LENGTH = 40
_TOKENS_A_WIDTH = 8  # as many tokens in all, in units of the width: a regression has that many unknowns a coordinate


def calibration_tokens(model: Model, seed: int = 0) -> TokenBatch:
    """Sequences of one length; the same for the same model and seed."""
    generator = torch.Generator().manual_seed(seed)
    length = min(_LENGTH, model.max_positions)
    writes = model.causal and model.unembedding is not None
    num_sequences = max(_TOKENS_A_WIDTH * model.width // length, 2 * _NUM_WRITTEN)
    random = _random_tokens(model, (num_sequences - (_NUM_WRITTEN if writes else 0), length), generator)
    if not writes:
        return random
    starts = _random_tokens(model, (_NUM_WRITTEN, 1), generator)
    return torch.cat([_write_texts(model, starts, length, seed), random])


def _random_tokens(model: Model, shape: tuple[int, int], generator: torch.Generator) -> TokenBatch:
    tokens = torch.randint(0, model.vocab_size, shape, generator=generator)
    frame = model.frame_tokens
    if frame is not None and not model.causal and shape[1] > 2:
        tokens[:, 0], tokens[:, -1] = frame
    return tokens.to(model.device)


@torch.no_grad()
def _write_texts(model: Model, starts: Int[Tensor, "batch 1"], length: int, seed: int) -> TokenBatch:
    """What the model writes behind each start, drawn from its own distribution."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return model.hf.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            max_new_tokens=length - 1,
            min_new_tokens=length - 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=model.pad_token,
        )
