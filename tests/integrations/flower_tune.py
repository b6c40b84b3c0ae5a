"""Flower's template for LLMs (FlowerTune), by the settings that its wheel holds, on a model and texts that are here.

The template itself cannot run here: it fetches a 7B model and a data set from a hub, and its versions of trl, peft and
transformers are older than ours. What a server sees depends on its settings alone: they are read from the wheel, the
adapters are PEFT's, the training is the Trainer's that trl's is made of, and messages are Flower's own.
"""

from __future__ import annotations

import math
import re
import string
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tests.integrations.flower_grid import answer, client_app
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

_FOLDER = "flwr/cli/new/templates/app"


def template_settings(wheel: Path) -> dict[str, Any]:
    """The template's own settings: its run configuration, and the dropout, which is in its code."""
    with zipfile.ZipFile(wheel) as held:
        project = held.read(f"{_FOLDER}/pyproject.flowertune.toml.tpl").decode()
        models = held.read(f"{_FOLDER}/code/flwr_tune/models.py.tpl").decode()
    names = {"fraction_train": "1.0", "num_clients": "1"}
    config = tomllib.loads(string.Template(project).safe_substitute(names))["tool"]["flwr"]["app"]["config"]
    config["dropout"] = float(re.search(r"lora_dropout=([\d.]+)", models)[1])
    return config


def learning_rate(config: Mapping[str, Any], server_round: int) -> float:
    """The template's cosine over rounds."""
    train, angle = config["train"], math.pi * server_round / config["num-server-rounds"]
    least, most = train["learning-rate-min"], train["learning-rate-max"]
    return least + 0.5 * (most - least) * (1 + math.cos(angle))


def make_adapters(base: str, config: Mapping[str, Any]) -> Any:
    """The base in bfloat16's digits, as the template loads it, and PEFT's adapters where PEFT puts them."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    lora = config["model"]["lora"]
    torch.manual_seed(0)
    return get_peft_model(
        model,
        LoraConfig(
            r=lora["peft-lora-r"],
            lora_alpha=lora["peft-lora-alpha"],
            lora_dropout=config["dropout"],
            task_type="CAUSAL_LM",
        ),
    )


def tuning_app(base: str, config: Mapping[str, Any], texts: Sequence[str], folder: Path) -> ClientApp:
    """A client that trains as the template's does."""

    def train(message: Message, context: Context) -> Message:
        model = make_adapters(base, config)
        set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
        given = {key.replace("-", "_"): value for key, value in config["train"]["training-arguments"].items()}
        given |= {"output_dir": str(folder), "learning_rate": learning_rate(config, 1), "gradient_checkpointing": False}
        arguments = TrainingArguments(**given, report_to="none", disable_tqdm=True, use_cpu=True)
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="right")
        tokenizer.pad_token = tokenizer.eos_token
        rows = [tokenizer(text)["input_ids"][: config["train"]["seq-length"]] for text in texts]
        data = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]
        Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
        return answer(message, get_peft_model_state_dict(model))

    return client_app(train)


def initial_adapters(base: str, config: Mapping[str, Any]) -> ArrayRecord:
    """What the server sends in the first round."""
    return ArrayRecord(get_peft_model_state_dict(make_adapters(base, config)))
