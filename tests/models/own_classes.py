"""A decoder and an encoder of nobody's family: modules with names of their own, and norms in another order."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class OwnConfig(transformers.PreTrainedConfig):
    """Sizes, and whether tokens see later ones."""

    model_type = "own"

    def __init__(self, hidden_size: int = 64, num_hidden_layers: int = 2, both_ways: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self.hidden_size, self.num_hidden_layers, self.both_ways = hidden_size, num_hidden_layers, both_ways
        self.vocab_size = 500


class Mixer(nn.Module):
    """Four heads; keys before queries, values last."""

    def __init__(self, width: int, both_ways: bool) -> None:
        super().__init__()
        self.keys_and_queries, self.contents = nn.Linear(width, 2 * width), nn.Linear(width, width, bias=False)
        self.both_ways, self.tempering = both_ways, nn.LayerNorm(width // 4)

    def forward(self, rows: Tensor, hidden: Tensor | None) -> Tensor:
        """Mixed values; their output projection is elsewhere."""
        keys, queries = self.keys_and_queries(rows).chunk(2, dim=-1)
        keys, queries, contents = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (keys, queries, self.contents(rows))
        )
        scores = self.tempering(queries) @ keys.transpose(-1, -2) / 3
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ contents).transpose(1, 2).flatten(2)


class Stage(nn.Module):
    """Norms behind each part and before none; what is added is scaled; the MLP reads the stream twice."""

    def __init__(self, width: int, both_ways: bool) -> None:
        super().__init__()
        self.mixer, self.leave = Mixer(width, both_ways), nn.Linear(width, width)
        self.calm_a, self.calm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.bend, self.narrow = nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)

    def forward(self, rows: Tensor, hidden: Tensor | None) -> tuple[Tensor, None]:
        """The stream, and nothing beside it."""
        rows = rows + 0.5 * self.calm_a(self.leave(self.mixer(rows, hidden)))
        return self.calm_b(rows + self.narrow(self.bend(self.widen(rows)))), None


class OwnBody(transformers.PreTrainedModel):
    """Embeddings with learned positions, a norm, and the stages."""

    config_class, base_model_prefix = OwnConfig, "core"

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.words, self.places, self.entry = nn.Embedding(500, width), nn.Embedding(64, width), nn.LayerNorm(width)
        self.stages = nn.ModuleList(Stage(width, config.both_ways) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.words

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """The last hidden states."""
        length = input_ids.shape[1]
        rows = self.entry(self.words(input_ids) + self.places(torch.arange(length, device=input_ids.device)))
        later = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        hidden = torch.zeros_like(later) if self.config.both_ways else later
        hidden = (
            hidden[None, None] if attention_mask is None else hidden[None, None] | ~attention_mask[:, None, None].bool()
        )
        states = [rows]
        for stage in self.stages:
            rows, _ = stage(rows, hidden)
            states.append(rows)
        return BaseModelOutput(last_hidden_state=rows, hidden_states=tuple(states))


class OwnForCausalLM(transformers.PreTrainedModel):
    """The body and an output layer."""

    config_class, base_model_prefix = OwnConfig, "core"

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.core, self.voice = OwnBody(config), nn.Linear(config.hidden_size, 500, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.voice

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Logits, and the loss of the next tokens."""
        body = self.core(input_ids, attention_mask)
        logits = self.voice(body.last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=body.hidden_states)
