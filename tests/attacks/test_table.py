"""The table of attacks: complete, true to the classes, and reachable from the API."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer
from tests.attacks.queries.random_heads import random_head

import unmask
from unmask.attacks.gradients.bag_of_words.attack import BagOfWordsAttack
from unmask.attacks.table import ATTACKS, Attack, Secret, attacks_of, parse_attack
from unmask.errors import InputError
from unmask.evidence.oracles import FunctionOracle
from unmask.recovery import Status

ROOM = Path(unmask.__file__).parent / "attacks"
TEXTS = [(5, 17, 99, 17, 250), (400, 3, 8, 21)]


def attack_classes() -> set[str]:
    """Every class below attacks/ that is called with evidence, as module:class."""
    found = set()
    for path in ROOM.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            calls = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__call__"]
            if any("evidence" in [argument.arg for argument in call.args.args] for call in calls):
                module = ".".join(path.relative_to(ROOM).with_suffix("").parts)
                found.add(f"{module}:{node.name}")
    return found


def test_every_attack_has_one_line():
    assert attack_classes() == {kind.path for kind in ATTACKS.values()}
    assert len({kind.path for kind in ATTACKS.values()}) == len(ATTACKS)


@pytest.mark.parametrize("name", ATTACKS)
def test_every_line_is_true(name):
    kind = ATTACKS[name]
    spec = Attack.parse(kind.example)
    assert spec.name == name
    assert Attack.parse(str(spec)) == spec
    made = spec.make(seed=7)
    assert type(made).__name__ == kind.path.partition(":")[2]
    assert getattr(made, "seed", 7) == 7
    assert all([kind.needs, kind.works_on, kind.claims, kind.limits, kind.source])


def test_a_setting_in_the_text_comes_before_the_usual_one():
    assert Attack.parse("decoder:seed=3").make(seed=7).seed == 3
    assert Attack.parse("decoder").make(seed=7, effort=2).seed == 7
    assert Attack.parse("encoder").make(effort=2).effort == 2


@pytest.mark.parametrize("text", ["dragger", "decoder:speed=1", "nuclear-norm", "unit-probes:probes=straight"])
def test_a_mistake_names_what_there_is(text):
    with pytest.raises(InputError, match="attack"):
        Attack.parse(text)


@pytest.mark.parametrize("name", attacks_of("gradients", Secret.TEXTS, Secret.TOKENS))
def test_attacks_on_updates_are_chosen_by_name(tiny_gpt2, name):
    evidence = unmask.observe_gradients(tiny_gpt2, TEXTS, task="classification")
    if name in ("encoder", "pairs"):
        with pytest.raises(InputError, match=f"'{name}' is for .*, and the model is a decoder"):
            unmask.recover_text(evidence, tiny_gpt2, attack=name)
        return
    recovery = unmask.recover_text(evidence, tiny_gpt2, attack=name)
    right = {token for text in TEXTS for token in text}
    assert recovery.status is not Status.RECOVERED or {text.tokens for text in recovery.value.texts} == set(TEXTS)
    assert recovery.value.token_set == right


def test_the_default_attack_has_a_name(tiny_gpt2):
    evidence = unmask.observe_gradients(tiny_gpt2, TEXTS)
    assert unmask.recover_text(evidence, tiny_gpt2, attack="default").value.texts
    assert parse_attack("default", "gradients", Secret.TEXTS) is None
    choice = "default, decoder, noisy, encoder, lora, pairs, dager"
    with pytest.raises(InputError, match=f"no attack 'dragger'\\. Did you mean 'dager'\\? Choose one of {choice}$"):
        parse_attack("dragger", "gradients", Secret.TEXTS)


def test_an_empty_name_is_no_default(tiny_gpt2):
    with pytest.raises(InputError, match=r"there is no attack ''\. Choose one of default"):
        unmask.recover_text(unmask.observe_gradients(tiny_gpt2, TEXTS), tiny_gpt2, attack="")


def test_settings_that_an_attack_refuses_are_refused_as_text():
    with pytest.raises(InputError, match="attack 'repeated-tokens': max_heads must be 1 to"):
        Attack.parse("repeated-tokens:max_heads=50")


def test_an_attack_object_is_run_as_it_is(tiny_gpt2):
    evidence = unmask.observe_gradients(tiny_gpt2, TEXTS)
    seen = []

    def attack(*arguments):
        seen.append(len(arguments))
        return BagOfWordsAttack()(*arguments)

    unmask.recover_text(evidence, tiny_gpt2, attack=attack)
    assert seen == [3]


def test_the_papers_newton_never_claims():
    evidence, _ = random_layer("pd", 3, 6)
    assert unmask.recover_inputs(evidence, attack="attention").status is Status.RECOVERED
    assert unmask.recover_inputs(evidence, attack="attention-newton:gamma=0.1").status is not Status.RECOVERED


@pytest.mark.parametrize("name", ["single-head", "low-rank:rank=1", "unit-probes", "nuclear-norm:num_measurements=34"])
def test_attacks_by_queries_are_chosen_by_name(name):
    heads = random_head(6, rank=1)
    recovery = unmask.recover_weights(FunctionOracle(heads), width=6, attack=name)
    assert recovery.status is Status.RECOVERED
    assert float((recovery.value.W - heads.W).norm() / heads.W.norm()) < 1e-3
    assert torch.isfinite(recovery.value.v).all()


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (lambda model: unmask.recover_text(unmask.observe_gradients(model, TEXTS), model, attack="prompt"), "decoder"),
        (lambda model: unmask.recover_inputs(random_layer("pd", 3, 6)[0], attack="dager"), "attention-newton"),
        (
            lambda model: unmask.recover_weights(FunctionOracle(random_head(4)), width=4, attack="output-layer"),
            "single-head",
        ),
    ],
)
def test_an_attack_on_something_else_is_refused_with_those_that_fit(tiny_gpt2, run, part):
    with pytest.raises(InputError, match=f"Choose one of .*{part}"):
        run(tiny_gpt2)


def test_the_page_of_attacks_is_the_table():
    page = (Path(__file__).parents[2] / "docs" / "attacks.md").read_text()
    for name, kind in ATTACKS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:] == [kind.secret.value, kind.needs, kind.works_on, kind.claims, kind.limits, kind.source]
        assert ("(baseline)" in cells[0]) == kind.is_baseline


def test_a_setting_that_is_written_stays_even_where_it_is_the_default():
    assert Attack.parse("decoder:seed=0").make(seed=7).seed == 0
    assert Attack.parse("decoder").make(seed=7).seed == 7
    assert Attack.parse("decoder:seed=0") == Attack.parse("decoder")


@pytest.mark.parametrize(
    "text",
    [
        *("dager:batch_size=0", "encoder:max_steps=0", "prompt:first=0", "many-heads:max_planes=0"),
        *("decoder:num_probes=0", "encoder:effort=0", "decoder:min_gap_decades=-1", f"decoder:seed={10**23}"),
    ],
)
def test_settings_that_an_attack_cannot_take_are_refused(text):
    with pytest.raises(InputError, match="must be"):
        Attack.parse(text)
