"""`unmask recover output-layer` against a server on this machine."""

from __future__ import annotations

import json

import pytest
import typer
from safetensors.torch import load_file
from tests.integrations.openai_server import serving, small_model
from tests.tiny_models import WIDTH
from typer.testing import CliRunner

from unmask.cli.options import EXIT_INCONCLUSIVE
from unmask.cli.output_layer import recover_output_layer_command

app = typer.Typer()
app.command("output-layer")(recover_output_layer_command)


@pytest.fixture(scope="module")
def small():
    return small_model()


def run(client, *options):
    return CliRunner().invoke(app, ["--server", client.url, "--model", "m", *options])


def test_the_size_is_printed_and_the_matrix_is_written(small, tmp_path):
    out = tmp_path / "layer.safetensors"
    with serving(small, full_logits=True) as (client, _):
        done = run(client, "--json", "--out", str(out), "--ledger", str(tmp_path / "answers.sqlite"))
    document = json.loads(done.stdout)
    assert (done.exit_code, document["status"], document["hidden_size"]) == (0, "RECOVERED", WIDTH)
    assert document["support"]["full logits (extension)"] == "yes"
    assert load_file(out)["W"].shape == (document["tokens"], WIDTH)


def test_people_see_the_support_and_the_reason(small):
    with serving(small, bias_after=True) as (client, _):
        done = run(client)
    assert done.exit_code == EXIT_INCONCLUSIVE
    assert "What the server supports" in done.stdout
    assert "NOT_APPLICABLE" in done.stdout
