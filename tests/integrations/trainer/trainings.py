"""Small trainings by the real Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.tiny_models import VOCAB, bert_config, llama_sizes, random_model, word_tokenizer
from transformers import Trainer, TrainingArguments

_generator = torch.Generator().manual_seed(0)
_LENGTHS = (4, 7, 3, 8, 5, 6, 4, 5, 7, 3, 6, 4)
ROWS = [[1, *torch.randint(5, VOCAB, (length,), generator=_generator).tolist(), 2] for length in _LENGTHS]


def causal() -> Any:
    config = transformers.LlamaConfig(**llama_sizes(attention_dropout=0.1))
    return random_model(transformers.LlamaForCausalLM, config)


def without_dropout() -> Any:
    return random_model(transformers.LlamaForCausalLM, transformers.LlamaConfig(**llama_sizes()))


def classifier(dropout: float = 0.1) -> Any:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return random_model(transformers.BertForSequenceClassification, bert_config(num_labels=2, **rates))


def lora(rank: int = 32, dropout: float = 0.0) -> Any:
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=rank, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(without_dropout(), config)


def train(net: Any, folder: Path, callbacks: Sequence[Any] = (), **changes: Any) -> Trainer:
    """Three steps of two texts each, or what `changes` says; the seed is always the same."""
    is_causal = any(name.endswith("lm_head") for name, _ in net.named_modules())
    labels: list[Any] = ROWS if is_causal else [place % 2 for place in range(len(ROWS))]
    data = [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": label}
        for row, label in zip(ROWS, labels, strict=True)
    ]
    tokenizer = word_tokenizer()
    collator = transformers.DataCollatorForSeq2Seq if is_causal else transformers.DataCollatorWithPadding
    given = {"per_device_train_batch_size": 2, "max_steps": 3, "lr_scheduler_type": "constant", "save_strategy": "no"}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), **(given | quiet | changes))
    trainer = Trainer(
        net,
        arguments,
        train_dataset=data,
        data_collator=collator(tokenizer),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer
