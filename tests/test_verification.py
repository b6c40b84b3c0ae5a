"""`unmask.verify`: right texts are certain, wrong ones are not, of every kind of evidence; proofs survive a journey."""

from __future__ import annotations

import json

import pytest
import torch
from tests.attacks.gradients.encoder_batches import BATCH, classified
from tests.audit.made import WORDS, save_llama
from typer.testing import CliRunner

import unmask
from unmask.cli import app
from unmask.defences import parse_defence
from unmask.errors import InputError
from unmask.proof.verdicts import Decision, Ground, ProposedText
from unmask.verification import ProofError, ProofFile

A, B, C = (5, 17, 99, 17, 250), (400, 3, 8), (44, 45, 46, 47, 48, 49)
WRONG = (400, 9, 8)


def decisions(verdict):
    return {text.text.tokens: text.decision for text in verdict.texts}


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"])
def decoder(request):
    return request.getfixturevalue(request.param)


def test_the_texts_of_an_update_are_certain_whoever_found_them(decoder):
    evidence = unmask.observe_gradients(decoder, [A, B, B])
    verdict = unmask.verify(evidence, decoder, [B, A, B])
    assert verdict.is_whole
    assert verdict.ground is Ground.CLIENT
    assert {text.text.tokens: text.count for text in verdict.texts} == {A: 1, B: 2}


def test_a_wrong_text_beside_right_ones_is_refuted(decoder):
    found = decisions(unmask.verify(unmask.observe_gradients(decoder, [A, B, C]), decoder, [A, C, WRONG]))
    assert found[WRONG] is Decision.REFUTED
    assert found[A] is found[C] is Decision.CERTAIN


def test_texts_of_nothing_are_never_certain(decoder):
    found = decisions(unmask.verify(unmask.observe_gradients(decoder, [A]), decoder, [WRONG, (9, 10)]))
    assert set(found.values()) <= {Decision.REFUTED, Decision.UNDECIDED}


@pytest.mark.parametrize("defence", ["bf16", "noise:sigma=1e-5"])
def test_an_update_with_few_digits_or_noise(tiny_llama, defence):
    evidence = parse_defence(defence)(unmask.observe_gradients(tiny_llama, [A, C]), torch.Generator().manual_seed(1))
    assert set(decisions(unmask.verify(evidence, tiny_llama, [A, C])).values()) == {Decision.CERTAIN}
    wrong = (*C[:-1], 60)
    assert decisions(unmask.verify(evidence, tiny_llama, [A, wrong]))[wrong] is not Decision.CERTAIN


def test_an_encoders_update(tiny_bert):
    evidence = classified(tiny_bert)
    assert unmask.verify(evidence, tiny_bert, BATCH).is_whole
    wrong = (BATCH[0][0], 300, 301, BATCH[0][-1])
    found = decisions(unmask.verify(evidence, tiny_bert, [*BATCH, wrong]))
    assert found[wrong] is not Decision.CERTAIN


@pytest.mark.parametrize("layer", [1, 2])
def test_states_and_a_cache(decoder, layer):
    states = unmask.observe_hidden(decoder, [A, B], layer=layer)
    cache = unmask.observe_cache(decoder, [A, B], layer=1)
    for evidence in (states, cache):
        assert decisions(unmask.verify(evidence, decoder, [A, B])) == {A: Decision.CERTAIN, B: Decision.CERTAIN}
        assert decisions(unmask.verify(evidence, decoder, [A, WRONG]))[WRONG] is Decision.REFUTED
        assert decisions(unmask.verify(evidence, decoder, [A, (400, 3)]))[400, 3] is Decision.REFUTED
        swapped = unmask.verify(evidence, decoder, [(17, 5, *A[2:]), B])
        assert decisions(swapped)[17, 5, *A[2:]] is Decision.UNDECIDED  # no row agrees: it may be another model


def test_noise_refutes_nothing_and_a_text_may_occur_twice(tiny_llama):
    generator = torch.Generator().manual_seed(1)
    evidence = unmask.observe_hidden(tiny_llama, [A, B, A], layer=2)
    assert set(decisions(unmask.verify(evidence, tiny_llama, [A, B, A])).values()) == {Decision.CERTAIN}
    for defence in ("noise:sigma=1e-3", "noise:sigma=1e-1", "fp8"):
        noisy = parse_defence(defence)(evidence, generator)
        assert Decision.REFUTED not in decisions(unmask.verify(noisy, tiny_llama, [A, B, A])).values()


def test_the_beginning_of_a_text_is_not_certain_where_the_client_does_not_agree(decoder):
    longer = (127, 27, 465, 30, 31)
    evidence = unmask.observe_gradients(decoder, [A, longer, longer])
    assert decisions(unmask.verify(evidence, decoder, [A, longer, longer[:3]]))[longer[:3]] is not Decision.CERTAIN


def test_rows_that_explain_any_gradient_prove_nothing(tiny_llama):
    options = {"task": "classification", "labels": [0, 1], "pooling": "mean"}
    evidence = unmask.observe_gradients(tiny_llama, [A, C], **options).only("layers.2.mlp.down_proj")
    made_up = [tuple(range(start, start + 8)) for start in range(100, 196, 8)]  # as many rows as the layer is wide
    assert Decision.CERTAIN not in decisions(unmask.verify(evidence, tiny_llama, made_up)).values()


def test_equal_tokens_are_one_of_a_class(tiny_llama):
    model = tiny_llama.to()
    with torch.no_grad():
        model.parameter(model.token_embedding)[18] = model.parameter(model.token_embedding)[17].clone()
    (text,) = unmask.verify(unmask.observe_hidden(model, [A], layer=2), model, [A]).texts
    assert text.decision is Decision.ONE_OF_THESE
    assert {point.position for point in text.points} == {1, 3}
    assert all(point.tokens == (17, 18) for point in text.points)


def test_embeddings_of_a_text_are_no_proof_of_it(tiny_llama):
    (text,) = unmask.verify(unmask.observe_hidden(tiny_llama, [A], layer=0), tiny_llama, [A]).texts
    assert text.decision is Decision.UNDECIDED  # a row depends on its own token alone


def test_vectors(tiny_bert):
    evidence = unmask.observe_vectors(tiny_bert, [BATCH[0], BATCH[1]])
    found = unmask.verify(evidence, tiny_bert, [BATCH[0], BATCH[2]])
    assert decisions(found) == {BATCH[0]: Decision.CERTAIN, BATCH[2]: Decision.UNDECIDED}
    assert not found.is_whole  # a vector is of neither
    assert decisions(unmask.verify(evidence, tiny_bert, BATCH))[BATCH[2]] is Decision.REFUTED  # all have their texts


BAD = [[], "a text", [()], [(10**9,)], [(-1,)], [(10**30,)], 5, [ProposedText(())], [ProposedText((-3, 5))]]
BAD += [[ProposedText((5, 6), count)] for count in (0, -1, 10**12, True)]


@pytest.mark.parametrize("texts", BAD)
def test_what_is_no_list_of_texts_is_refused(tiny_llama, texts):
    with pytest.raises(InputError):
        unmask.verify(unmask.observe_gradients(tiny_llama, [A]), tiny_llama, texts)


def test_a_count_of_its_own(tiny_gpt2):
    evidence = unmask.observe_gradients(tiny_gpt2, [A, B, B, B])
    assert unmask.verify(evidence, tiny_gpt2, [ProposedText(A), ProposedText(B, count=3)]).is_whole
    assert not unmask.verify(evidence, tiny_gpt2, [ProposedText(A, count=3), ProposedText(B)]).is_whole


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def update(folder, tmp_path):
    path = tmp_path / "update.safetensors"
    unmask.observe_gradients(unmask.load_model(str(folder)), list(WORDS[:2])).save(path)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("lines", "code"), [(WORDS[:2], 0), ((WORDS[0], WORDS[2]), 1), (WORDS[2:4], 3)])
def test_the_exit_code_says_what_is_decided(folder, update, tmp_path, lines, code):
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = run("verify", update, "--texts", tmp_path / "texts.txt", "-m", folder, "--json")
    assert done.exit_code == code, done.output
    assert len(json.loads(done.stdout)["texts"]) == 2


def test_a_proof_is_checked_elsewhere(folder, update, tmp_path):
    proof = tmp_path / "proof.json"
    assert run("recover", "text", update, "-m", folder, "--proof", proof).exit_code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    update.rename(elsewhere / update.name)
    proof.rename(elsewhere / "proof.json")
    done = run("verify", elsewhere / "proof.json", "-m", folder)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("certain") >= 2


def test_a_proof_of_something_else_is_refused(folder, update, tmp_path):
    proof = tmp_path / "proof.json"
    run("recover", "text", update, "-m", folder, "--proof", proof)
    document = json.loads(proof.read_text())
    counts = [{"claims": [{**document["claims"][0], "count": count}]} for count in (0, True, 10**12, "2")]
    for changed in ({"format": "other"}, {"version": 99}, {"claims": [{"tokens": [-1]}]}, {"claims": 3}, *counts):
        (tmp_path / "changed.json").write_text(json.dumps(document | changed))
        with pytest.raises(ProofError):
            ProofFile.read(tmp_path / "changed.json")
    twice = document | {"claims": [{**document["claims"][0], "count": 2}, *document["claims"][1:]]}
    (tmp_path / "twice.json").write_text(json.dumps(twice))
    assert run("verify", tmp_path / "twice.json", "-m", folder).exit_code == 3
    forged = document | {"claims": [{**document["claims"][0], "tokens": [5, 6, 7]}]}
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    assert run("verify", tmp_path / "forged.json", "-m", folder).exit_code in (1, 3)
    unmask.observe_gradients(unmask.load_model(str(folder)), [WORDS[2]]).save(update)
    done = run("verify", proof, "-m", folder)
    assert isinstance(done.exception, ProofError)
    assert "SHA-256" in str(done.exception)


def test_a_call_that_lacks_something_says_what(update, tmp_path):
    done = run("verify", update)
    assert "--texts" in str(done.exception)
    assert isinstance(run("verify", tmp_path).exception, InputError)
