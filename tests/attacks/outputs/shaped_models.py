"""Random stacks that are close to the identity, as initialised models are: what continuous inversion is exact on."""

from __future__ import annotations

import torch
import transformers
from tests.tiny_models import gpt2_config, llama_sizes

from unmask.models import Model, adapt


def gpt2(width: int, num_blocks: int, num_heads: int) -> Model:
    torch.manual_seed(0)
    sizes = gpt2_config(n_embd=width, n_layer=num_blocks, n_head=num_heads)
    return _shaped(transformers.GPT2LMHeadModel(sizes))


def llama(width: int, num_blocks: int) -> Model:
    torch.manual_seed(0)
    sizes = llama_sizes(hidden_size=width, num_hidden_layers=num_blocks, intermediate_size=2 * width)
    return _shaped(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def _shaped(hf: torch.nn.Module) -> Model:
    """Weights as they are initialised, embeddings ×5, and biases and norms that are not trivial; in float64."""
    generator = torch.Generator().manual_seed(1)
    model = adapt(hf.eval())
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name in (model.token_embedding, model.position_embedding):
                weights.mul_(5)
            elif weights.ndim == 1:
                weights.add_((0.02 if name.endswith("bias") else 0.1) * torch.randn(weights.shape, generator=generator))
    return model.to(dtype=torch.float64)
