"""How the small random models of the tests are made."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB, WIDTH, NUM_BLOCKS, NUM_HEADS, NUM_POSITIONS = 500, 64, 3, 4, 64
# Fixtures of conftest.py, one for each family.
TINY = ("tiny_gpt2", "tiny_llama", "tiny_qwen2", "tiny_mistral", "tiny_bert")


def random_model(hf_class: Any, config: Any, seed: int = 0) -> Any:
    """A model with noise on every parameter, so that biases are not zero and attention is not uniform.

    Noise of 0.8/√d gives projections of order 1 whatever the width.
    """
    size = 0.8 / config.hidden_size**0.5
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        hf = hf_class(config)
        for parameter in hf.parameters():
            parameter += size * torch.randn(parameter.shape)
    return hf.eval()


def gpt2_config(**changes: Any) -> transformers.GPT2Config:
    sizes = {"n_embd": WIDTH, "n_layer": NUM_BLOCKS, "n_head": NUM_HEADS, "n_positions": NUM_POSITIONS}
    tokens = {"bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 1}
    return transformers.GPT2Config(**({"vocab_size": VOCAB} | sizes | tokens | changes))


def llama_sizes(**changes: Any) -> dict[str, Any]:
    """Sizes under the names that Llama, Mistral and Qwen2 share; two query heads on each key/value head."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2,
        "intermediate_size": 96,
        "max_position_embeddings": NUM_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return sizes | changes


def bert_config(**changes: Any) -> transformers.BertConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": NUM_HEADS,
        "intermediate_size": 96,
        "max_position_embeddings": NUM_POSITIONS,
        "pad_token_id": 0,
    }
    return transformers.BertConfig(**(sizes | changes))


def bart_config() -> transformers.BartConfig:
    """Reads one text and writes another."""
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return transformers.BartConfig(max_position_embeddings=NUM_POSITIONS, **sizes, **layers, **tokens)


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words 'w5' … 'w499' are the tokens 5 … 499 of the small models; texts and pairs are framed as BERT's."""
    special = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
    words = [*special, *(f"w{number}" for number in range(len(special), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))],
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token", "unk_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
