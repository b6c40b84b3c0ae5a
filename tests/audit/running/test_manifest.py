"""The manifest: everything that a run rests on, by version and by hash."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from datetime import datetime

from tests.audit.made import WORDS, make_plan, random_group

import unmask
from unmask.audit.running.manifest import describe_machine, hash_model, make_manifest, sha256_of


def test_everything_is_in_it(tmp_path, bert_folder):
    group = f'[[gradients]]\nmodels = ["{bert_folder}"]\ndata = ["notes"]\ngates = ["no token"]\n'
    plan = make_plan(tmp_path, group, random_group(), top='title = "Ours"')
    manifest = make_manifest(plan, engine="local", threads=2, command="unmask audit plan.toml --out x")
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest
    assert manifest["plan"] == {"path": str(plan.path), "sha256": sha256_of(plan.path), "title": "Ours"}
    assert manifest["models"] == {str(bert_folder): {"files": hash_model(str(bert_folder))}}
    assert manifest["data"]["notes"] == {
        "sha256": plan.data["notes"].sha256,
        "num_texts": len(WORDS),
        "path": "notes.txt",
    }
    assert [case["id"] for case in manifest["cases"]] == [case.id for case in plan.cases]
    assert manifest["cases"][0] == {
        "id": plan.cases[0].id,
        "gates": ["no token"],
        "line": 4,
        "case": dict(plan.cases[0].spec),
    }
    assert (manifest["engine"], manifest["threads"]) == ("local", 2)
    assert not any(word in json.dumps(manifest) for word in " ".join(WORDS).split())  # no text of the data


def test_the_machine():
    machine = describe_machine()
    assert machine["schema"] == 1
    assert machine["unmask"] == unmask.__version__
    assert machine["versions"]["python"] == platform.python_version()
    assert machine["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine["hardware"]["cores"] >= 1
    assert machine["hardware"]["memory_gib"] > 0
    assert datetime.fromisoformat(machine["created"]).tzinfo is not None


def test_the_hashes_of_a_model(bert_folder):
    files = hash_model(str(bert_folder))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    content = (bert_folder / "model.safetensors").read_bytes()
    assert files["model.safetensors"] == hashlib.sha256(content).hexdigest()


def test_a_name_of_a_hub_has_no_files_here():
    assert hash_model("organisation/name") == {}


def test_a_long_file_is_read_in_pieces(tmp_path):
    content = bytes(range(256)) * (3 * 2**22 // 256 + 1)
    (tmp_path / "long").write_bytes(content)
    sizes: list[int] = []
    assert sha256_of(tmp_path / "long", sizes.append) == hashlib.sha256(content).hexdigest()
    assert sum(sizes) == len(content)
    assert len(sizes) == 4
