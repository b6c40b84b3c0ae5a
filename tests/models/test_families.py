"""Models of many families, asked and never named: their own states, and the texts of a batch from its gradients."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.models.families import DECODERS, ENCODERS, build
from tests.models.own_classes import OwnBody, OwnConfig, OwnForCausalLM

import unmask
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.attacks.outputs.prompts import templates
from unmask.attacks.reach import NO_ATTACK, TOKENS, WHOLE_TEXTS, Reach, find_reach
from unmask.models import Model, adapt
from unmask.models.linear import Role
from unmask.recovery import Recovery, Status

START, END = 101, 102
TEXTS = [(11, 12, 13, 14, 15), (21, 22, 23), (41, 42)]  # longer than any window
FRAMED = [(START, *text, END) for text in TEXTS]
FLOAT32_PARITY = 1e-5
# What a family does not give, written by hand; everything else gives whole texts.
RECURRENT = ("Qwen3Next",)
FROM_GRADIENTS = {
    **dict.fromkeys(RECURRENT, TOKENS),
    **dict.fromkeys(("Albert", "DebertaV2 with relative positions", "RoFormer"), TOKENS),
    **dict.fromkeys(("ModernBert", "ModernBert with a window"), TOKENS),
}
FROM_STATES = {"Qwen3Next": NO_ATTACK, "OPT with projections": NO_ATTACK}


@cache
def built(name: str) -> Model:
    return adapt(build(name))


@pytest.fixture(params=[*DECODERS, *ENCODERS])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Model]:
    monkeypatch.setattr(templates, "_LENGTH", 12)  # of the texts that a model writes to calibrate with
    return request.param, built(request.param)


@torch.no_grad()
def test_states_and_logits_are_the_models_own(family):
    _, model = family
    tokens = torch.randint(5, 400, (3, 9), generator=torch.Generator().manual_seed(0))
    theirs = model.hf(input_ids=tokens, output_hidden_states=True)
    ours = model.hidden_states(tokens)
    assert len(ours) == model.num_blocks + 1
    for one, other in zip(ours[:-1], theirs.hidden_states[:-1], strict=True):
        assert float((one - other).norm() / other.norm()) < FLOAT32_PARITY
    assert float((model.token_head.logits(ours[-1]) - theirs.logits).norm() / theirs.logits.norm()) < FLOAT32_PARITY


def recovered(recovery: Recovery) -> Counter:
    return Counter({text.tokens: text.count for text in recovery.value.texts if text.certain})


def test_a_batch_is_recovered_from_its_gradients(family):
    name, model = family
    texts = TEXTS if model.causal else FRAMED
    evidence = unmask.observe_gradients(model, texts, task="next_token" if model.causal else "classification")
    attack = None if model.causal else EncoderAttack(frame=(START, END))
    recovery = unmask.recover_text(evidence, model, attack=attack)
    gives = FROM_GRADIENTS.get(name, WHOLE_TEXTS)
    are_inputs = model.causal and gives is not WHOLE_TEXTS  # what is only a label is read with its text
    assert recovery.value.token_set == {token for text in texts for token in (text[:-1] if are_inputs else text)}
    assert reach(model)["gradients"].gives == gives
    if gives is WHOLE_TEXTS:
        assert recovery.status is Status.RECOVERED, recovery.reason
        assert recovered(recovery) == Counter(texts)
    else:
        assert not recovered(recovery)
        assert reach(model)["gradients"].why in recovery.reason


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_without_the_layers_that_tell_ends_prefixes_are_left(name):
    model = built(name)
    last = tuple(f"layers.1.{part}" for part in ("mlp", "block_sparse_moe", "self_attn.o_proj"))
    seen = unmask.observe_gradients(model, TEXTS)
    seen = seen.with_tensors({each: g for each, g in seen.gradients.items() if not each.startswith(last)})
    recovery = unmask.recover_text(seen, model)
    assert not recovered(recovery)
    assert sorted(text.tokens for text in recovery.value.texts) == sorted(text[:-1] for text in TEXTS)


def test_prompts_are_recovered_from_the_last_hidden_states(family):
    name, model = family
    recovery = unmask.recover_text(unmask.observe_hidden(model, TEXTS, site="final_norm"), model)
    if name in FROM_STATES:
        assert recovery.status is Status.NOT_APPLICABLE
        return
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(TEXTS)


def test_texts_from_the_attention_outputs_of_block_0(family):
    _, model = family
    if reach(model)["attention outputs of block 0"].gives == NO_ATTACK:
        pytest.skip(reach(model)["attention outputs of block 0"].why)
    recovery = unmask.recover_text(unmask.observe_hidden(model, TEXTS, site="attention"), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(TEXTS)


def reach(model: Model) -> dict[str, Reach]:
    return {line.evidence: line for line in find_reach(model)}


def test_the_table_of_the_documentation_is_what_models_answer():
    """Each family is asked again, and its line compared."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    lines = table_lines()
    missing = [line for line in lines if line not in page.splitlines()]
    assert not missing, "docs/models.md lacks:\n" + "\n".join(lines)


def table_lines() -> list[str]:
    """Families × evidence, as Markdown."""
    evidence = ("gradients", "hidden states", "attention outputs of block 0", "logits", "answers of an attention layer")
    lines = [f"| family | {' | '.join(evidence)} |", f"|{' --- |' * (len(evidence) + 1)}"]
    for name in (*DECODERS, *ENCODERS):
        found = reach(built(name))
        lines.append(f"| {name} | {' | '.join(found[each].gives for each in evidence)} |")
    return lines


def own(kind: type, both_ways: bool) -> Model:
    """A class that nobody knows, with noise on every parameter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        hf = kind(OwnConfig(both_ways=both_ways))
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return adapt(hf.eval())


def test_a_decoder_of_nobodys_family():
    model = own(OwnForCausalLM, both_ways=False)
    assert (model.causal, model.num_blocks, model.num_heads) == (True, 2, 4)
    roles = {role: model.linear(role, 1).module for role in Role if model.linear(role, 1) is not None}
    assert roles == {
        Role.QUERY: "stages.1.mixer.keys_and_queries",
        Role.KEY: "stages.1.mixer.keys_and_queries",
        Role.VALUE: "stages.1.mixer.contents",
        Role.ATTENTION_OUT: "stages.1.leave",
        Role.MLP_IN: "stages.1.widen",
        Role.MLP_OUT: "stages.1.narrow",
    }
    assert model.linear(Role.KEY, 0).columns == range(64)
    assert model.linear(Role.QUERY, 0).columns == range(64, 128)
    recovery = unmask.recover_text(unmask.observe_gradients(model, TEXTS), model)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(TEXTS)


def test_an_encoder_of_nobodys_family():
    model = own(OwnBody, both_ways=True)
    assert not model.causal
    evidence = unmask.observe_gradients(model, FRAMED, task="classification")
    recovery = unmask.recover_text(evidence, model, attack=EncoderAttack(frame=(START, END)))
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovered(recovery) == Counter(FRAMED)
