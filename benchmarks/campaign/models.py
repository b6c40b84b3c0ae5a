"""Tiny models of every family, some of them with traps: equal rows, a head that is sure, texts learned by heart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from campaign.outcome import ShortRepr
from unmask.models import Model, adapt, load_model

DECODERS = ("gpt2", "llama", "mistral", "qwen2")
NUM_POSITIONS = 64
PAD, CLS, SEP, MASK, UNK = range(5)  # of the encoders' tokenizer
_CLASSES = {
    ("gpt2", "words"): "GPT2LMHeadModel",
    ("gpt2", "none"): "GPT2Model",
    ("gpt2", "labels"): "GPT2ForSequenceClassification",
    ("llama", "words"): "LlamaForCausalLM",
    ("llama", "none"): "LlamaModel",
    ("llama", "labels"): "LlamaForSequenceClassification",
    ("mistral", "words"): "MistralForCausalLM",
    ("mistral", "none"): "MistralModel",
    ("mistral", "labels"): "MistralForSequenceClassification",
    ("qwen2", "words"): "Qwen2ForCausalLM",
    ("qwen2", "none"): "Qwen2Model",
    ("qwen2", "labels"): "Qwen2ForSequenceClassification",
    ("bert", "words"): "BertForMaskedLM",
    ("bert", "none"): "BertModel",
    ("bert", "labels"): "BertForSequenceClassification",
}
_CONFIGS = {
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "bert": "BertConfig",
}
_WRITERS = ("mlp.c_proj", "mlp.down_proj")  # the last layers of decoders' blocks
_ATTENTION_WRITERS = ("attn.c_proj", "self_attn.o_proj")


@dataclass(frozen=True, repr=False)
class ModelRecipe(ShortRepr):
    """A small random model, or real weights by the name of the catalogue (`family`).

    `head`: words, labels or none. `equal`: groups of tokens whose embeddings are made equal; `near`: (token, other,
    distance), the other's row is put that close. `sharp` multiplies the last norm, so that the head is sure; `fitted`
    texts are learned by heart. `sink` makes one number of what each block of a decoder writes so much larger; what its
    attention writes is multiplied by `attention`.
    """

    family: str = "gpt2"
    width: int = 32
    blocks: int = 1
    vocab: int = 60
    heads: int = 2
    groups: int = 2
    tied: bool = False
    head: str = "words"
    seed: int = 0
    equal: tuple[tuple[int, ...], ...] = ()
    near: tuple[tuple[int, int, float], ...] = ()
    sharp: float = 1.0
    fitted: tuple[tuple[int, ...], ...] = ()
    sink: float = 1.0
    attention: float = 1.0

    @property
    def pad(self) -> int:
        """The token that shorter texts are filled up with."""
        return self.vocab - 1 if self.family == "gpt2" else 0


@lru_cache(maxsize=12)
def build(recipe: ModelRecipe) -> Model:
    """The model of a recipe."""
    if recipe.family not in _CONFIGS:
        return load_model(recipe.family)
    config = getattr(transformers, _CONFIGS[recipe.family])(**_sizes(recipe))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(recipe.seed)
        hf = getattr(transformers, _CLASSES[recipe.family, recipe.head])(config).eval()
        for parameter in hf.parameters():  # so that biases are not zero and attention is not uniform
            parameter += 0.8 / recipe.width**0.5 * torch.randn(parameter.shape)
        rows = hf.get_input_embeddings().weight
        for group in recipe.equal:
            rows[list(group[1:])] = rows[group[0]].clone()
        for token, other, distance in recipe.near:
            rows[other] = rows[token] + distance * torch.randn(recipe.width)
        _last_norm(hf).mul_(recipe.sharp)
        for name, layer in hf.named_modules():
            if name.endswith(_WRITERS):
                (layer.weight[3] if getattr(layer, "bias", None) is None else layer.bias[3]).mul_(recipe.sink)
            if name.endswith(_ATTENTION_WRITERS):
                layer.weight.mul_(recipe.attention)
    if recipe.fitted:
        _fit(hf, recipe)
    return adapt(hf, word_tokenizer(recipe.vocab) if recipe.family == "bert" else None)


def draw_decoder(rng: random.Random) -> ModelRecipe:
    """A decoder, with a trap now and then."""
    family = rng.choice(DECODERS)
    vocab = rng.choice((60, 100, 200, 500))
    heads = rng.choice((2, 4))
    recipe = ModelRecipe(
        family=family,
        width=rng.choice((32, 48, 64, 96, 128)),
        blocks=rng.randint(1, 3),
        vocab=vocab,
        heads=heads,
        groups=heads if family == "gpt2" else rng.choice((1, 2, heads)),
        tied=rng.random() < 0.4,
        head=rng.choices(("words", "none", "labels"), (8, 1, 1))[0],
        seed=rng.randrange(1000),
    )
    return add_trap(rng, recipe, range(1, vocab - 1))


def add_trap(rng: random.Random, recipe: ModelRecipe, words: Sequence[int]) -> ModelRecipe:
    """The same model with equal or near rows, a head that is sure, or texts that it knows by heart; often as it is."""
    trap = rng.choices(("none", "equal", "near", "sharp", "fitted"), (6, 1.5, 1, 1, 1))[0]
    if trap == "equal":
        tokens = rng.sample(words, rng.randint(2, 5))
        return replace(recipe, equal=(tuple(tokens[:2]), tuple(tokens[2:])) if len(tokens) > 3 else (tuple(tokens),))
    if trap == "near":
        pairs = [rng.sample(words, 2) for _ in range(rng.randint(1, 2))]
        return replace(recipe, near=tuple((a, b, rng.choice((1e-7, 1e-5, 1e-3))) for a, b in pairs))
    if trap == "sharp":
        return replace(recipe, sharp=rng.choice((3.0, 10.0, 40.0)))
    if trap == "fitted" and recipe.head == "words" and recipe.family in DECODERS:
        texts = [tuple(rng.choices(words, k=rng.randint(4, 8))) for _ in range(rng.randint(1, 3))]
        return replace(recipe, fitted=tuple(texts))
    return recipe


def add_sink(rng: random.Random, recipe: ModelRecipe) -> ModelRecipe:
    """The same decoder with one large number in all states, beside which groups of tokens lie close; seldom."""
    if rng.random() > 0.12 or recipe.family not in DECODERS:
        return recipe
    apart = rng.choice((1e-4, 1e-3, 1e-2))
    first, *others = rng.sample(range(1, recipe.vocab - 1), min(24, recipe.vocab // 3))
    return replace(recipe, sink=rng.choice((1e2, 1e4, 1e5)), near=tuple((first, other, apart) for other in others))


def simpler_models(recipe: ModelRecipe) -> list[ModelRecipe]:
    """Smaller models and models without traps."""
    changes: list[dict[str, Any]] = [
        *({name: getattr(ModelRecipe, name)} for name in ("equal", "near", "sharp", "fitted", "tied", "sink")),
        *({"fitted": recipe.fitted[:at] + recipe.fitted[at + 1 :]} for at in range(len(recipe.fitted))),
        *({"equal": recipe.equal[:at] + recipe.equal[at + 1 :]} for at in range(len(recipe.equal))),
        {"blocks": recipe.blocks - 1 or 1},
        {"width": 32},
        {"heads": 2, "groups": 2},
        {"head": "words"},
        {"seed": 0},
    ]
    if recipe.family not in _CONFIGS:
        return []
    return [other for change in changes if (other := replace(recipe, **change)) != recipe]


def _sizes(recipe: ModelRecipe) -> dict[str, Any]:
    sizes: dict[str, Any] = {"vocab_size": recipe.vocab, "pad_token_id": recipe.pad, "attn_implementation": "eager"}
    sizes |= {"tie_word_embeddings": recipe.tied, "num_labels": 3} if recipe.family != "bert" else {"num_labels": 3}
    if recipe.family == "gpt2":
        sizes |= {
            "n_embd": recipe.width,
            "n_layer": recipe.blocks,
            "n_head": recipe.heads,
            "n_positions": NUM_POSITIONS,
        }
        return sizes | {"bos_token_id": recipe.vocab - 1, "eos_token_id": recipe.vocab - 1}
    sizes |= {
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.blocks,
        "num_attention_heads": recipe.heads,
        "intermediate_size": recipe.width * 3 // 2,
        "max_position_embeddings": NUM_POSITIONS,
    }
    if recipe.family == "bert":
        return sizes
    return sizes | {"num_key_value_heads": recipe.groups, "bos_token_id": 1, "eos_token_id": 2}


def _last_norm(hf: Any) -> torch.Tensor:
    """The weights of the norm that the head reads from."""
    body = getattr(hf, hf.base_model_prefix, hf)
    for name in ("ln_f", "norm"):
        if hasattr(body, name):
            return getattr(body, name).weight
    return body.encoder.layer[-1].output.LayerNorm.weight


def _fit(hf: Any, recipe: ModelRecipe) -> None:
    """Some steps of Adam on the texts, one after the other, so that the model knows how they go on."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(recipe.seed)
        descent = torch.optim.Adam(hf.parameters(), 1e-2)
        for step in range(25 * len(recipe.fitted)):
            tokens = torch.tensor([recipe.fitted[step % len(recipe.fitted)]])
            descent.zero_grad()
            hf(input_ids=tokens, labels=tokens).loss.backward()
            descent.step()
        descent.zero_grad()


@lru_cache(maxsize=8)
def word_tokenizer(vocab: int) -> transformers.PreTrainedTokenizerFast:
    """Words 'w5', 'w6' … are the tokens 5, 6 …; texts are framed as BERT's."""
    special = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
    words = [*special, *(f"w{number}" for number in range(len(special), vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
