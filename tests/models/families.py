"""Tiny random models of many families, by the name of their class; what transformers cannot build here is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

VOCAB, WIDTH, POSITIONS = 500, 64, 64
_USUAL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": POSITIONS,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {"num_key_value_heads": 2}
_OLD = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}


def _usual(name: str, head: str = "ForCausalLM", config: str = "", **changes: Any) -> Callable[[], Any]:
    """A family whose configuration has the usual names."""

    def build() -> Any:
        kind = getattr(transformers, config or f"{name}Config")
        return getattr(transformers, f"{name}{head}")(kind(**{**_USUAL, **_TOKENS, **changes}))

    return build


def _own(name: str, head: str, **settings: Any) -> Callable[[], Any]:
    """A family whose configuration has names of its own."""
    return lambda: getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**settings))


DECODERS: Mapping[str, Callable[[], Any]] = {
    "GPT2": _own("GPT2", "LMHeadModel", n_embd=WIDTH, n_positions=POSITIONS, **_OLD),
    "Llama": _usual("Llama", **_GROUPED),
    "Mistral": _usual("Mistral", **_GROUPED),
    "Qwen2": _usual("Qwen2", **_GROUPED),
    "Qwen3": _usual("Qwen3", head_dim=16, **_GROUPED),
    "Gemma": _usual("Gemma", head_dim=16, **_GROUPED),
    "Gemma2": _usual("Gemma2", head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **_GROUPED),
    "Gemma3": _usual("Gemma3", config="Gemma3TextConfig", head_dim=16, **_GROUPED),
    "Gemma3 with a window": _usual(
        "Gemma3", config="Gemma3TextConfig", head_dim=16, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], **_GROUPED,
    ),
    "Phi": _usual("Phi"),
    "Phi3": _usual("Phi3"),
    "OPT": _own(
        "OPT", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=128, max_position_embeddings=POSITIONS, word_embed_proj_dim=WIDTH, **_TOKENS,
    ),
    "OPT with projections": _own(
        "OPT", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=128, max_position_embeddings=POSITIONS, word_embed_proj_dim=32, do_layer_norm_before=False, **_TOKENS,
    ),
    "GPTNeoX": _usual("GPTNeoX"),
    "GPTNeoX in sequence": _usual("GPTNeoX", use_parallel_residual=False),
    "GPTNeo": _own(
        "GPTNeo", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2, num_heads=4,
        attention_types=[[["global"], 2]], max_position_embeddings=POSITIONS, bos_token_id=1, eos_token_id=2,
    ),
    "GPTNeo with a window": _own(
        "GPTNeo", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_layers=2, num_heads=4, window_size=4,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=POSITIONS, bos_token_id=1, eos_token_id=2,
    ),
    "GPTJ": _own("GPTJ", "ForCausalLM", n_embd=WIDTH, n_positions=POSITIONS, rotary_dim=8, **_OLD),
    "Bloom": _own("Bloom", "ForCausalLM", hidden_size=WIDTH, **_OLD),
    "Falcon": _own(
        "Falcon", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2,
    ),
    "Falcon with ALiBi": _own(
        "Falcon", "ForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        alibi=True, parallel_attn=False, bos_token_id=1, eos_token_id=2,
    ),
    "StableLm": _usual("StableLm", num_key_value_heads=4),
    "Olmo2": _usual("Olmo2"),
    "Granite": _usual(
        "Granite", residual_multiplier=0.22, embedding_multiplier=12.0, attention_multiplier=0.1, logits_scaling=8.0,
        **_GROUPED,
    ),
    "Cohere": _usual("Cohere", **_GROUPED),
    "Mixtral": _usual("Mixtral", num_local_experts=4, **_GROUPED),
    "SmolLM3": _usual("SmolLM3", **_GROUPED),
    "Starcoder2": _usual("Starcoder2", **_GROUPED),
    "GptOss": _usual("GptOss", num_local_experts=4, head_dim=16, sliding_window=4, **_GROUPED),
    "DeepseekV3": _usual(
        "DeepseekV3", num_key_value_heads=4, n_routed_experts=4, moe_intermediate_size=32, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "Qwen3Moe": _usual(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, **_GROUPED
    ),
    "Qwen3Next": _usual(
        "Qwen3Next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"], **_GROUPED,
    ),
    "Llama4": _usual(
        "Llama4", config="Llama4TextConfig", head_dim=16, num_local_experts=4, intermediate_size_mlp=128, **_GROUPED
    ),
    "MiniCPM3": _usual(
        "MiniCPM3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "BitNet": _usual("BitNet", **_GROUPED),
    "Glm4": _usual("Glm4", head_dim=16, **_GROUPED),
    "Mpt": _own("Mpt", "ForCausalLM", vocab_size=VOCAB, d_model=WIDTH, n_layers=2, n_heads=4, max_seq_len=POSITIONS),
    "BioGpt": _usual("BioGpt"),
    "XGLM": _own(
        "XGLM", "ForCausalLM", vocab_size=VOCAB, d_model=WIDTH, num_layers=2, attention_heads=4, ffn_dim=128,
        max_position_embeddings=POSITIONS, **_TOKENS,
    ),
    "CodeGen": _own("CodeGen", "ForCausalLM", n_embd=WIDTH, n_positions=POSITIONS, rotary_dim=8, **_OLD),
}  # fmt: skip
ENCODERS: Mapping[str, Callable[[], Any]] = {
    "Bert": _usual("Bert", "ForMaskedLM"),
    "Roberta": _usual("Roberta", "ForMaskedLM", max_position_embeddings=POSITIONS + 2),
    "XLMRoberta": _usual("XLMRoberta", "ForMaskedLM", max_position_embeddings=POSITIONS + 2),
    "DistilBert": _own(
        "DistilBert", "ForMaskedLM", vocab_size=VOCAB, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=128,
        max_position_embeddings=POSITIONS,
    ),
    "Electra": _usual("Electra", "ForMaskedLM", embedding_size=WIDTH),
    "Electra with a projection": _usual("Electra", "ForMaskedLM", embedding_size=32),
    "Albert": _usual("Albert", "ForMaskedLM", embedding_size=32),
    "MPNet": _usual("MPNet", "ForMaskedLM", max_position_embeddings=POSITIONS + 2),
    "DebertaV2": _usual("DebertaV2", "ForMaskedLM"),
    "DebertaV2 with relative positions": _usual(
        "DebertaV2", "ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32,
        position_biased_input=False, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "RoFormer": _usual("RoFormer", "ForMaskedLM", embedding_size=WIDTH),
    "ModernBert": _usual("ModernBert", "ForMaskedLM", cls_token_id=1, sep_token_id=2),
    "ModernBert with a window": _usual(
        "ModernBert", "ForMaskedLM", cls_token_id=1, sep_token_id=2, local_attention=8, num_hidden_layers=4
    ),
}  # fmt: skip
_WRITERS = {"vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2}
_WRITER_HEADS = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_WRITER_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
ENCODER_DECODERS: Mapping[str, Callable[[], Any]] = {
    "Bart": _own(
        "Bart", "ForConditionalGeneration", max_position_embeddings=POSITIONS, **_WRITERS, **_WRITER_HEADS,
        **_WRITER_TOKENS,
    ),
    "MBart": _own(
        "MBart", "ForConditionalGeneration", max_position_embeddings=POSITIONS, **_WRITERS, **_WRITER_HEADS,
        **_WRITER_TOKENS,
    ),
    "T5": _own(
        "T5", "ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> Any:
    """A model with noise on every parameter: no bias is zero, no norm the identity, and attention is not uniform."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        hf = {**DECODERS, **ENCODERS, **ENCODER_DECODERS}[name]()
        for parameter in hf.parameters():
            parameter += 0.8 / WIDTH**0.5 * torch.randn(parameter.shape)
    return hf.eval()
