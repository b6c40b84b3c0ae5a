"""A job for NVFlare's own simulator: two clients of a small classifier, one round, all of it in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tests.tiny_models import bert_config, random_model, word_tokenizer

TEXTS = {
    "site-1": ["w17 w99 w17 w250", "w400 w30 w8", "w44 w45 w46 w47"],
    "site-2": ["w300 w301 w99", "w77 w8 w410", "w6 w7"],
}
FRAME = {"[CLS]", "[SEP]"}

# What the clients run, and the network that the server holds. NVFlare puts the folder on the path of both.
CLIENT = """
import json

import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.executor import Executor
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Net(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.net = AutoModelForSequenceClassification.from_pretrained(folder)


class Client(Executor):
    def __init__(self, folder, texts, kind):
        super().__init__()
        self.folder, self.texts, self.kind = folder, texts, kind

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        texts = json.loads(open(self.texts).read())[fl_ctx.get_identity_name()]
        sent = from_shareable(shareable).data
        model = Net(self.folder).eval()
        model.load_state_dict({name: torch.as_tensor(value) for name, value in sent.items()})
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        batch = AutoTokenizer.from_pretrained(self.folder)(texts, padding=True, return_tensors="pt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.net(**batch, labels=torch.arange(len(texts)) % 2).loss.backward()
        optimizer.step()
        after = model.state_dict()
        if self.kind == "WEIGHT_DIFF":
            after = {name: after[name] - before[name] for name in after}
        dxo = DXO(getattr(DataKind, self.kind), {name: tensor.numpy() for name, tensor in after.items()})
        dxo.set_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)
        return dxo.to_shareable()
"""


def words(client: str) -> set[str]:
    """What a client's update gives away: its words, and the frame."""
    return FRAME | {word for text in TEXTS[client] for word in text.split()}


def save_model(folder: Path) -> Path:
    """The classifier that the federation trains, as a folder."""
    random_model(transformers.BertForSequenceClassification, bert_config(num_labels=2)).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def write_job(
    folder: Path,
    model: Path,
    *,
    client: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    kind: str = "WEIGHT_DIFF",
) -> Path:
    """A job as NVFlare reads it; `client` and `server` are further lines of the two configurations."""
    texts = folder / "texts.json"
    workflow = {"min_clients": 2, "num_rounds": 1, "wait_time_after_min_received": 0, "persistor_id": "persistor"}
    parts = {"aggregator_id": "aggregator", "shareable_generator_id": "generator", "train_task_name": "train"}
    common, net = "nvflare.app_common", {"path": "tiny_client.Net", "args": {"folder": str(model)}}
    aggregators = f"{common}.aggregators.intime_accumulate_model_aggregator"
    configs = {
        "config_fed_server.json": {
            "format_version": 2,
            "workflows": [
                {
                    "id": "scatter",
                    "path": f"{common}.workflows.scatter_and_gather.ScatterAndGather",
                    "args": workflow | parts,
                }
            ],
            "components": [
                {
                    "id": "persistor",
                    "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
                    "args": {"model": net},
                },
                {
                    "id": "generator",
                    "path": f"{common}.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
                },
                {
                    "id": "aggregator",
                    "path": f"{aggregators}.InTimeAccumulateWeightedAggregator",
                    "args": {"expected_data_kind": kind},
                },
            ],
            **(server or {}),
        },
        "config_fed_client.json": {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["train"],
                    "executor": {
                        "path": "tiny_client.Client",
                        "args": {"folder": str(model), "texts": str(texts), "kind": kind},
                    },
                }
            ],
            "components": [],
            **(client or {}),
        },
    }
    for name in ("config", "custom"):
        (folder / "app" / name).mkdir(parents=True)
    texts.write_text(json.dumps(TEXTS))
    for name, config in configs.items():
        (folder / "app" / "config" / name).write_text(json.dumps(config))
    (folder / "app" / "custom" / "tiny_client.py").write_text(CLIENT)
    meta = {"name": "tiny", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": ["@ALL"]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def simulate(job: Path, workspace: Path) -> str:
    """Run the simulator; what it says."""
    command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(workspace), "-n", "2", "-t", "1"]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    return said
