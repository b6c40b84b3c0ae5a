"""Flower's own Hugging Face quick-start, out of Flower's wheel, run as a simulation in a process of its own.

Nothing of it is kept in this repository: the templates are read from the package, and rendered into a folder. The
names that the app asks a hub for ('stanfordnlp/imdb', 'accuracy') are found as folders beside it. As a script it runs
the simulation: the app's folder is the working directory, the first argument the run's configuration.
"""

from __future__ import annotations

import copy
import csv
import importlib
import json
import os
import signal
import string
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

PACKAGE = "flwr==1.24.0"  # the last version whose wheel holds the templates of `flwr new`
WHEEL = "flwr-1.24.0-py3-none-any.whl"
NUM_CLIENTS = 2
APP = "quickstart"
_MARK = "UNMASK_FLOWER_APP"  # in the environment of every process that a simulation starts

# What `evaluate.load("accuracy")` would fetch.
_ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features({"predictions": number, "references": number})
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""
_WHO = ("Anna", "Bruno", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
_WHAT = (
    "was told on {day} that the biopsy is positive",
    "owes the bank {sum} euros and hides it from the family",
    "asked for leave after the operation in {town}",
    "moved to {town} and pays {sum} euros of rent",
    "met the lawyer on {day} about the divorce",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_TOWNS = ("Graz", "Lisbon", "Oslo", "Turin", "Bergen", "Porto", "Ghent", "Basel")


def find_wheel() -> Path:
    """Flower's wheel: from `$UNMASK_FLOWER_WHEEL`, from the cache, or from the package registry (once)."""
    if given := os.environ.get("UNMASK_FLOWER_WHEEL"):
        return Path(given)
    folder = Path(os.environ.get("UNMASK_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "unmask"))
    folder = folder.expanduser() / "wheels"
    if not (folder / WHEEL).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / WHEEL


def invented_texts(number: int = 100) -> list[str]:
    """Texts that nobody wrote, each with something that nobody else should read."""
    texts = []
    for place in range(number):
        parts = {"day": _DAYS[place % 5], "town": _TOWNS[place % 8], "sum": 100 + 37 * place}
        texts.append(f"{_WHO[place // 7 % 10]} {_WHAT[place % 5].format(**parts)}, case {place}.")
    return texts


def render(wheel: Path, folder: Path) -> Path:
    """The app as `flwr new` makes it, and beside it what it would fetch from a hub; the path of its server app."""
    names = {"import_name": APP, "package_name": APP, "project_name": APP, "framework_str": "HuggingFace"}
    templates = {"server_app": "server.huggingface", "client_app": "client.huggingface", "task": "task.huggingface"}
    (folder / APP).mkdir(parents=True)
    with zipfile.ZipFile(wheel) as held:
        for module, template in {"__init__": "__init__", **templates}.items():
            text = held.read(f"flwr/cli/new/templates/app/code/{template}.py.tpl").decode()
            (folder / APP / f"{module}.py").write_text(string.Template(text).substitute(names))
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(_ACCURACY)
    data = folder / "stanfordnlp" / "imdb"
    data.mkdir(parents=True)
    with open(data / "train.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([text, place % 2] for place, text in enumerate(invented_texts()))
    return folder / APP / "server_app.py"


def training_texts(folder: Path) -> list[list[str]]:
    """What each client trains on: the same partitions and the same split as in the app's `load_data`."""
    import datasets
    from flwr_datasets.partitioner import IidPartitioner

    held = datasets.load_dataset(str(folder / "stanfordnlp" / "imdb"), cache_dir=str(folder / "again"), split="train")
    partitioner = IidPartitioner(num_partitions=NUM_CLIENTS)
    partitioner.dataset = held.shuffle(seed=42)  # FederatedDataset's own default
    parts = (partitioner.load_partition(number) for number in range(NUM_CLIENTS))
    return [part.train_test_split(test_size=0.2, seed=42)["train"]["text"] for part in parts]


def environment(folder: Path) -> dict[str, str]:
    """No network, no telemetry, nothing outside the folder; paths of Ray's sockets must be short."""
    return {
        **os.environ,
        _MARK: str(folder),
        "PYTHONPATH": str(folder),
        "HOME": str(folder),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


def simulate(folder: Path, config: dict[str, object], limit_s: float) -> str:
    """Run the app to its end; its output. Whatever it started is ended with it."""
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(config)]
    output = folder / "output.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit_s)
        finally:
            end_all(folder)
            process.wait()
    text = output.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text


def end_all(folder: Path) -> None:
    """End every process that carries the simulation's mark; Ray's daemons are not children of it."""
    wanted = f"{_MARK}={folder}".encode()
    for attempt in range(2):
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGTERM if attempt == 0 else signal.SIGKILL)
        time.sleep(1 - attempt)


def main(config: dict[str, object], folder: Path) -> None:
    """Both apps of the folder, with a run configuration that `run_simulation` has no argument for."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, client = (importlib.import_module(f"{APP}.{name}").app for name in ("server_app", "client_app"))
    configured = ServerApp()

    def with_config(context):
        twin = copy.copy(context)  # Flower refuses a context whose configuration was changed
        twin.run_config = config
        return twin

    @configured.main()
    def run(grid, context):
        server(grid, with_config(context))

    class Configured(ClientApp):
        def __call__(self, message, context):
            return client(message, with_config(context))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    ray = {"num_cpus": NUM_CLIENTS, "include_dashboard": False, "object_store_memory": 400_000_000}
    ray["_temp_dir"] = str(folder / "ray")
    run_simulation(configured, Configured(), NUM_CLIENTS, backend_config={**resources, "init_args": ray})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path.cwd())
