"""What attacks need of a model, and nothing else: its parts, found by asking it (`layout.py`), as functions of rows.

Rows are tokens; leading axes are free, so `(n, d)` and `(batch, length, d)` both work. No family is known here: modules
are the model's own, and so are the sums between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unmask.errors import InputError
from unmask.models.attention import Scores, attend, attend_behind
from unmask.models.attention_calls import Arguments, block_arguments, module_arguments, read_heads, replace_rows
from unmask.models.fingerprint import copy_module, fingerprint_of
from unmask.models.layernorm_sum import LayerNormOfSum
from unmask.models.layout import POSITION, TOKEN, TYPE, BlockPlace, ModelLayout, ask_bias, ask_model, no_cache
from unmask.models.linear import LinearLayer, Role, TokenHead
from unmask.models.peft_adapters import Adapters
from unmask.models.record import first_tensor, input_of
from unmask.models.roles import ATTENTION, MLP, STREAM
from unmask.models.vocabulary import Vocabulary
from unmask.models.wiring import Sum
from unmask.shapes import MaskBatch, States, TokenBatch

_NO_LIMIT = 2048  # positions of models that name no limit
_ROWS_AT_ONCE = 16384  # of a vocabulary
_KEPT = 16  # sets of positions whose arguments are kept


@dataclass(frozen=True)
class Attended:
    """A block's rows behind attention: the stream that entered the block, and what attention adds to it."""

    stream: Float[Tensor, "*n d"]
    added: Float[Tensor, "*n d"]

    def __getitem__(self, index: Any) -> Attended:
        return Attended(self.stream[index], self.added[index])


class Model(Vocabulary):
    """A transformer with the parts that attacks use.

    Names of parameters are those of the bare transformer, without the prefix that a task's head adds
    ('transformer.h.0…' → 'h.0…'), so evidence from a classifier fits a language model of the same body.
    """

    def __init__(
        self, hf: Any, tokenizer: Any = None, adapters: Adapters | None = None, layout: ModelLayout | None = None
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.adapters = adapters  # LoRA factors of a PEFT model; no part of the weights here
        self.body: Any = hf.base_model
        self.config: Any = hf.config
        self.layout = ask_model(hf, self.body) if layout is None else layout
        self._arguments: dict[tuple[int, ...], list[Arguments]] = {}
        self._biases: dict[int, Tensor] = {}

    # ---- what it is

    @property
    def family(self) -> str:
        """Its kind, as transformers calls it."""
        return str(self.config.model_type)

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one."""
        return self.layout.causal

    @property
    def learned_positions(self) -> bool:
        """Whether positions are rows of a table that are added to tokens."""
        return self.layout.embedding.position is not None

    @property
    def token_embedding(self) -> str:
        """Name of the token embedding's parameter."""
        return f"{self.layout.embedding.token}.weight"

    @property
    def position_embedding(self) -> str | None:
        """Name of the position embedding's parameter, where positions are learned."""
        name = self.layout.embedding.position
        return None if name is None else f"{name}.weight"

    def _place(self, block: int) -> BlockPlace:
        return self.layout.blocks[block]

    def _block(self, block: int) -> Any:
        return self.body.get_submodule(self._place(block).name)

    def _module(self, block: int, name: str) -> nn.Module:
        return self._block(block).get_submodule(name)

    # ---- sizes

    @property
    def width(self) -> int:
        """Width d of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def num_blocks(self) -> int:
        """Number of transformer blocks."""
        return len(self.layout.blocks)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self._place(0).layout.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads; fewer than query heads under grouped-query attention."""
        return self._place(0).layout.num_key_value_heads

    @property
    def _head_counts(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_key_value_heads, self.num_key_value_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self._place(0).layout.head_width

    @property
    def max_positions(self) -> int:
        """The longest text that the model takes; of a sliding window, the longest that fits into it."""
        if self.learned_positions:
            rows = self.parameter(self.position_embedding or "").shape[0]
            return int(rows) - self.layout.embedding.offset
        limits = (getattr(self.config, name, None) for name in ("max_position_embeddings", "n_positions", "seq_length"))
        longest = next((int(limit) for limit in limits if isinstance(limit, int)), _NO_LIMIT)
        slides = getattr(self.config, "use_sliding_window", True)
        window = getattr(self.config, "sliding_window", None) if slides else None
        local = getattr(self.config, "local_attention", None)
        windows = [window, None if local is None else local // 2]
        return min([longest, *(int(each) for each in windows if each)])

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.parameter(self.token_embedding).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        return self.parameter(self.token_embedding).dtype

    @property
    def num_token_types(self) -> int:
        """How many token types a pair of texts may use; 1 where the family has none."""
        kind = self.layout.embedding.type
        return 1 if kind is None else int(self.body.get_submodule(kind).weight.shape[0])

    @property
    def token_type_differences(self) -> Float[Tensor, "k d"]:
        """What token types but 0 add to a first input, up to the norm's scale; no row where there is one type."""
        kind, norm = self.layout.embedding.type, self._first_norm
        if kind is None or norm is None:
            return self.parameter(self.token_embedding).new_zeros(0, self.width)
        kinds = self.body.get_submodule(kind).weight
        rows = kinds[1:] - kinds[0]
        return norm.weight * (rows - rows.mean(1, keepdim=True))

    @property
    def token_type_directions(self) -> Float[Tensor, "k d"]:
        """All that first inputs of other types than 0 hold beyond those of type 0, as rows."""
        norm = self._first_norm
        if self.num_token_types < 2 or norm is None:
            return torch.zeros(0, self.width, dtype=self.dtype, device=self.device)
        return torch.cat([self.token_type_differences, norm.bias[None]]).detach()

    # ---- parameters

    def canonical_name(self, name: str) -> str:
        """A parameter's name without the prefix of the task's model around the body."""
        prefix = f"{self.hf.base_model_prefix}."
        return name[len(prefix) :] if self.body is not self.hf and name.startswith(prefix) else name

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by canonical name; tied ones once."""
        for name, parameter in self.hf.named_parameters():
            yield self.canonical_name(name), parameter

    def parameter(self, name: str) -> Tensor:
        """A parameter by canonical name."""
        owner = self.body if self.body is not self.hf and not name.startswith(self._head_names) else self.hf
        return owner.get_parameter(name)

    @property
    def _head_names(self) -> tuple[str, ...]:
        prefix = self.hf.base_model_prefix
        return tuple(f"{name}." for name, _ in self.hf.named_children() if name != prefix)

    def weight(self, role: Role, block: int) -> Float[Tensor, "d_in d_out"] | None:
        """A linear layer's weight as (d_in, d_out)."""
        layer = self.linear(role, block)
        return None if layer is None else layer.orient(self.parameter(layer.parameter))

    def linear(self, role: Role, block: int) -> LinearLayer | None:
        """Where a linear layer lives; None where the model has none (a gate), shares it, or none was found."""
        place = self._place(block)
        layer = place.layout.linear.get(role)
        if layer is None or self._is_shared(block):
            return None
        return replace(layer, parameter=f"{place.name}.{layer.parameter}")

    def _is_shared(self, block: int) -> bool:
        """Whether other blocks have the same weights: their gradients come in one sum."""
        return sum(place.name == self._place(block).name for place in self.layout.blocks) > 1

    @property
    def unembedding(self) -> Float[Tensor, "vocab d"] | None:
        """Weights of the output layer over the vocabulary; None where the model has no language head."""
        head = self.hf.get_output_embeddings()
        return None if head is None else head.weight

    @property
    def unembedding_name(self) -> str | None:
        """Canonical name of the output layer's parameter; the token embedding's when they are tied."""
        weight = self.unembedding
        if weight is None:
            return None
        return next(name for name, parameter in self.named_parameters() if parameter is weight)

    @property
    def token_head(self) -> TokenHead | None:
        """What predicts tokens from the stream that leaves the last block, where the model has a language head."""
        head, layer = self.layout.head, self.hf.get_output_embeddings()
        if head is None or layer is None:
            return None if self.causal else TokenHead(self.final_norm, self.parameter(self.token_embedding))

        def features(states: Tensor) -> Tensor:
            rows = self.final_norm(states)
            if head.input is not None:
                return head.flow.evaluate(head.input, {STREAM: rows}, self.hf.get_submodule)
            return input_of(layer, lambda: self.hf.get_submodule(head.module)(rows))

        return TokenHead(features, layer.weight, getattr(layer, "bias", None), head.scale, head.softcap)

    def fingerprint(self) -> str:
        """A hash of the body's shapes and of a sample of its weights, the same in every float type."""
        named = self.body.named_parameters()
        return fingerprint_of(self.family, (pair for pair in named if not pair[0].startswith(self.layout.beside)))

    # ---- the forward pass, in parts

    def embed(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The residual stream that enters block 0; `types` where the family tells two texts of a pair apart."""
        layout, find = self.layout.embedding, self.body.get_submodule
        rows = {TOKEN: find(layout.token)(tokens)}
        if layout.position is not None:
            rows[POSITION] = nn.functional.embedding(positions + layout.offset, find(layout.position).weight)
        if layout.type is not None:
            kinds = torch.zeros_like(tokens) if types is None else types
            rows[TYPE] = nn.functional.embedding(kinds, find(layout.type).weight)
        return layout.flow.evaluate(layout.output, rows, find)

    def first_input(
        self, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"], types: Int[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The attention input of block 0: a function of token, position and type alone."""
        return self.attention_input(0, self.embed(tokens, positions, types))

    @cached_property
    def _first_norm(self) -> nn.LayerNorm | None:
        """The LayerNorm of token + position (+ type) that first inputs are, where they are that and nothing else."""
        embedding, block = self.layout.embedding, self._place(0).layout
        summed = {TOKEN, POSITION} | ({TYPE} if embedding.type is not None else set())
        if block.attention_input == Sum({STREAM: 1.0}):
            flow, output, find = embedding.flow, embedding.output, self.body.get_submodule
            inner = {name for name in output.factors}
            (name,) = inner if len(inner) == 1 else ("",)
            given = flow.steps.get(name)
        elif block.attention_input is not None and set(embedding.output.factors) == summed:
            (name,) = block.attention_input.factors if len(block.attention_input.factors) == 1 else ("",)
            find = self._block(0).get_submodule
            given = embedding.output if block.flow.steps.get(name) == Sum({STREAM: 1.0}) else None
        else:
            return None
        if given is None or set(given.factors) != summed or set(given.factors.values()) != {1.0}:
            return None
        norm = find(name)
        return norm if isinstance(norm, nn.LayerNorm) and norm.bias is not None else None

    def first_input_sum(self, tokens: Int[Tensor, " t"] | None = None) -> LayerNormOfSum | None:
        """First inputs of type 0 as the norm of a sum, of all tokens or of some; None where they are not that."""
        norm, layout = self._first_norm, self.layout.embedding
        if norm is None or layout.position is None:
            return None
        words = self.body.get_submodule(layout.token)
        rows = words.weight if tokens is None else words.weight[tokens]
        if layout.type is not None:
            rows = rows + self.body.get_submodule(layout.type).weight[0]
        return LayerNormOfSum(rows, self.body.get_submodule(layout.position).weight[layout.offset :], norm)

    def first_input_parts(
        self, tokens: Int[Tensor, " t"], num_positions: int
    ) -> tuple[Float[Tensor, "t d"], Float[Tensor, "p d"], Float[Tensor, " d"]]:
        """What every first input is a combination of: rows of tokens, of learned positions, and the norm's shift."""
        summed = self.first_input_sum(tokens)
        if summed is not None:
            return summed.parts(num_positions)
        words = self.first_input(tokens, torch.zeros_like(tokens))
        return words, words.new_zeros(0, words.shape[1]), words.new_zeros(words.shape[1])

    def project_first_inputs(
        self, matrix: Float[Tensor, "d k"], positions: Sequence[int]
    ) -> Iterator[Float[Tensor, "vocab k"]]:
        """x(t, p)·M of every token t, one position after the other."""
        summed = self.first_input_sum()
        if summed is not None:
            yield from summed.project_positions(matrix, positions)
            return
        everyone = torch.arange(self.vocab_size, device=self.device)
        for position in positions:
            parts = []
            for some in everyone.split(_ROWS_AT_ONCE):
                rows = self.first_input(some, torch.full_like(some, position))
                parts.append(rows @ matrix.to(rows))
            yield torch.cat(parts)

    def attention_input(self, block: int, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the query, key and value projections of a block see."""
        return self._rows(block, self._place(block).layout.attention_input, {STREAM: states})

    def queries_keys_values(
        self, block: int, rows: Float[Tensor, "*n d"], positions: Int[Tensor, "*n"]
    ) -> tuple[Float[Tensor, "*n h e"], Float[Tensor, "*n g e"], Float[Tensor, "*n g e"]]:
        """Heads of queries, keys and values, with whatever the model does to them before its softmax."""
        place = self._place(block)
        assert place.layout.attention is not None
        name, where = place.layout.attention
        if not rows.numel():
            return tuple(rows.new_zeros(*rows.shape[:-1], n, self.head_width) for n in self._head_counts)  # type: ignore[return-value]
        asked = positions.flatten()
        if not self.scores(block).has_bias and bool((asked == asked[0]).all()):
            asked = asked[:1]  # one text's arguments fit all of them
        arguments = self._attention_arguments(block, asked)
        q, k, v = read_heads(self._module(block, name), where, arguments, rows.flatten(0, -2))
        repeats = k.shape[1] // place.layout.num_key_value_heads
        return tuple(part.unflatten(0, rows.shape[:-1]) for part in (q, k[:, ::repeats], v[:, ::repeats]))  # type: ignore[return-value]

    def _attention_arguments(self, block: int, positions: Int[Tensor, " n"]) -> Arguments:
        """What a block's attention module is given at some positions, each in a text of its own."""
        key = tuple(positions.tolist())
        if key not in self._arguments:
            if len(self._arguments) >= _KEPT:
                self._arguments.clear()
            inputs: dict[str, Any] = {"input_ids": torch.zeros_like(positions)[:, None], **no_cache(self.body)}
            if self.layout.takes_positions:
                inputs["position_ids"] = positions[:, None]
            blocks, returned = [self._block(i) for i in range(self.num_blocks)], [p.returned for p in self.layout.blocks]
            with torch.no_grad():
                self._arguments[key] = block_arguments(self.body, blocks, returned, lambda: self.body(**inputs))
        place = self._place(block)
        given = self._arguments[key][block]
        nothing = torch.zeros(len(positions), 1, self.width, dtype=self.dtype, device=self.device)
        module = self._module(block, place.layout.attention[0])  # type: ignore[index]
        with torch.no_grad():
            return module_arguments(self._block(block), module, replace_rows(given, place.rows, nothing))

    def scores(self, block: int) -> Scores:
        """How scores of a block are made."""
        found = self._place(block).scores
        assert found is not None
        return found

    def scores_scale(self, block: int) -> float:
        """The factor on query·key before the softmax."""
        return self.scores(block).scale

    def mix(
        self,
        block: int,
        queries: Float[Tensor, "*batch q h e"],
        keys: Float[Tensor, "*batch j g e"],
        values: Float[Tensor, "*batch j g e"],
        allowed: Bool[Tensor, "*batch q j"],
    ) -> Float[Tensor, "*batch q o"]:
        """Attention output before the output projection, heads side by side; the queries are those of the last keys."""
        bias = self.score_bias(block, keys.shape[-3])
        bias = None if bias is None else bias[:, keys.shape[-3] - queries.shape[-3] :]
        return attend(queries, keys, values, allowed, self.scores(block), bias)

    def mix_behind(
        self,
        block: int,
        queries: Float[Tensor, "c h e"],
        own_keys: Float[Tensor, "c g e"],
        own_values: Float[Tensor, "c g e"],
        keys: Float[Tensor, "s j g e"],
        values: Float[Tensor, "s j g e"],
    ) -> Float[Tensor, "s c o"]:
        """What each of c candidates reads behind each of s prefixes: the prefix, and itself."""
        bias = self.score_bias(block, keys.shape[1] + 1)
        bias = None if bias is None else bias[:, -1]
        return attend_behind(queries, own_keys, own_values, keys, values, self.scores(block), bias)

    def score_bias(self, block: int, length: int) -> Float[Tensor, "h length length"] | None:
        """What positions add to the scores of a block (ALiBi, relative positions); None where they add nothing."""
        if not self.scores(block).has_bias:
            return None
        known = self._biases.get(block)
        if known is None or known.shape[-1] < length:
            known = self._biases[block] = ask_bias(self.body, self._block(block), self.layout, block, 2 * length)
        return known[:, :length, :length]

    def mixed_values(
        self, block: int, states: States, positions: TokenBatch, mask: MaskBatch
    ) -> Float[Tensor, "batch length o"]:
        """The rows that enter a block's output projection."""
        rows = self.attention_input(block, states)
        queries, keys, values = self.queries_keys_values(block, rows, positions)
        return self.mix(block, queries, keys, values, self.visible_keys(mask))

    def after_attention(self, block: int, states: Float[Tensor, "*n d"], mixed: Float[Tensor, "*n o"]) -> Attended:
        """The block's rows behind its output projection, given the mixed values that enter it."""
        return Attended(states, self._apply(block, Role.ATTENTION_OUT, mixed))

    def carries_all(self, role: Role, block: int) -> bool:
        """Whether all that later rows depend on is the sum that a layer's output is added to."""
        layout = self._place(block).layout
        return (layout.attention_sum if role is Role.ATTENTION_OUT else layout.mlp_sum) is not None

    def attention_sum(self, block: int, attended: Attended) -> Float[Tensor, "*n d"]:
        """All that later rows depend on, behind attention, with what attention adds in it once."""
        found = self._place(block).layout.attention_sum
        assert found is not None
        return self._rows(block, found, {STREAM: attended.stream, ATTENTION: attended.added})

    def mlp_input(self, block: int, attended: Attended) -> Float[Tensor, "*n d"]:
        """What the MLP's first projections see."""
        wanted = self._place(block).layout.mlp_input
        return self._rows(block, wanted, {STREAM: attended.stream, ATTENTION: attended.added})

    def mlp_hidden(self, block: int, attended: Attended) -> Float[Tensor, "*n f"]:
        """The input of the MLP's down projection."""
        layout, rows = self._place(block).layout, self.mlp_input(block, attended)
        assert layout.mlp is not None
        if layout.mlp.module is None:
            for name in layout.mlp.chain:
                rows = self._module(block, name)(rows)
            return rows
        mlp, down = self._module(block, layout.mlp.module), layout.linear[Role.MLP_OUT]
        flat = rows.flatten(0, -2)[None] if rows.dim() != 3 else rows
        # A module may ask for rows that it adds behind the down projection, where it is stopped.
        needed = sum(each.default is each.empty for each in inspect.signature(mlp.forward).parameters.values())
        hidden = input_of(self._module(block, down.module), lambda: mlp(*[flat] * max(1, needed)))
        return hidden.reshape(*rows.shape[:-1], hidden.shape[-1])

    def mlp_sum(
        self, block: int, attended: Attended, hidden: Float[Tensor, "*n f"]
    ) -> Float[Tensor, "*n d"]:
        """All that later rows depend on, behind the MLP, with what the down projection adds in it once."""
        layout = self._place(block).layout
        assert layout.mlp_sum is not None
        given = {STREAM: attended.stream, ATTENTION: attended.added, MLP: self._apply(block, Role.MLP_OUT, hidden)}
        return self._rows(block, layout.mlp_sum.input, given)

    def after_mlp(
        self, block: int, attended: Attended, hidden: Float[Tensor, "*n f"] | None = None
    ) -> Float[Tensor, "*n d"]:
        """The stream that leaves a block; `hidden` if it is known already."""
        layout = self._place(block).layout
        if Role.MLP_OUT in layout.linear:
            added = self.mlp_output(block, self.mlp_hidden(block, attended) if hidden is None else hidden)
        else:  # a mixture of experts: run as it is
            assert layout.mlp is not None
            rows = self.mlp_input(block, attended)
            flat = rows.flatten(0, -2)[None] if rows.dim() != 3 else rows
            added = first_tensor(self._module(block, layout.mlp.module or "")(flat)).reshape(rows.shape)  # type: ignore[union-attr]
        return self.leave_block(block, attended, added)

    def mlp_output(self, block: int, hidden: Float[Tensor, "*n f"]) -> Float[Tensor, "*n d"]:
        """What the down projection puts out."""
        return self._apply(block, Role.MLP_OUT, hidden)

    def leave_block(
        self, block: int, attended: Attended, added: Float[Tensor, "*n d"]
    ) -> Float[Tensor, "*n d"]:
        """The stream that leaves a block, given what its MLP puts out."""
        given = {STREAM: attended.stream, ATTENTION: attended.added, MLP: added}
        return self._rows(block, self._place(block).layout.output, given)

    def after_last_sum(self, sums: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the `mlp_sum` of the last block."""
        last = self.num_blocks - 1
        found = self._place(last).layout.mlp_sum
        assert found is not None
        rows = sums * found.factor if found.factor != 1 else sums
        for name in found.behind:
            rows = self._module(last, name)(rows)
        return self.final_norm(rows)

    def final_norm(self, states: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """What the head sees, given the stream that leaves the last block."""
        return self.layout.final_flow.evaluate(self.layout.final, {STREAM: states}, self.body.get_submodule)

    def _rows(self, block: int, wanted: Sum | None, given: dict[str, Tensor]) -> Tensor:
        assert wanted is not None
        return self._place(block).layout.flow.evaluate(wanted, given, self._block(block).get_submodule)

    def _apply(self, block: int, role: Role, rows: Tensor) -> Tensor:
        """A linear layer's output."""
        return self._module(block, self._place(block).layout.linear[role].module)(rows)

    def block_forward(self, block: int, states: States, positions: TokenBatch, mask: MaskBatch) -> States:
        """One block of the residual stream."""
        return self.after_mlp(block, self.after_attention(block, states, self.mixed_values(block, states, positions, mask)))

    def visible_keys(self, mask: MaskBatch) -> Bool[Tensor, "batch length length"]:
        """Which key each query may see: real tokens, and under a causal mask no later ones."""
        length = mask.shape[1]
        allowed = mask[:, None, :].expand(-1, length, -1)
        if self.causal:
            allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        return allowed

    def hidden_states(
        self,
        tokens: TokenBatch,
        mask: MaskBatch | None = None,
        num_blocks: int | None = None,
        positions: TokenBatch | None = None,
        types: TokenBatch | None = None,
    ) -> list[States]:
        """The stream before block 0, after block 0, and so on, without the final norm."""
        if tokens.shape[1] > self.max_positions:
            raise InputError(f"the texts have {tokens.shape[1]} tokens, this model takes {self.max_positions} at most")
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = [self.embed(tokens, positions, types)]
        for block in range(self.num_blocks if num_blocks is None else num_blocks):
            states.append(self.block_forward(block, states[-1], positions, mask))
        return states

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None, num_blocks: int | None = None
    ) -> Model:
        """A copy on another device or in another precision; with `num_blocks`, later blocks cannot be used."""
        left_out = [self._block(block) for block in range(num_blocks or self.num_blocks, self.num_blocks)]
        copied = copy_module(self.hf, torch.device(device or self.device), dtype or self.dtype, left_out)
        return Model(copied, self.tokenizer, self.adapters, self.layout)
