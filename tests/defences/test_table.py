"""The table of defences: as text there and back, the function behind it, and a sentence for each mistake."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.defences.updates import check_contract, quick, random_update, same, seeded

import unmask.defences as defences
from unmask.defences import DEFENCES, Defence, parse_defence
from unmask.errors import InputError

levels = st.floats(0, allow_infinity=False)
shares = st.floats(0, 1)
noise = st.fixed_dictionaries({"sigma": levels}, optional={"relative": st.booleans()})
names = st.text(min_size=1).filter(lambda text: text == text.strip() and not set(text) & set(",+"))
SETTINGS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "noise": noise,
    "laplace": noise,
    "clip": st.fixed_dictionaries({"norm": st.floats(0, exclude_min=True, allow_infinity=False)}),
    "topk": st.fixed_dictionaries({"share": shares}),
    "random": st.fixed_dictionaries({"share": shares}),
    "int8": st.fixed_dictionaries({}, optional={"stochastic": st.booleans()}),
    "fp8": st.just({}),
    "fp16": st.just({}),
    "bf16": st.just({}),
    "withhold": st.fixed_dictionaries({"pattern": st.lists(names, min_size=1)}),
    "cloak": st.just({}),
}
every_defence = st.sampled_from(sorted(SETTINGS)).flatmap(
    lambda name: SETTINGS[name].map(lambda settings: Defence(name, settings))
)


# There and back


def test_every_defence_is_tried_here():
    assert set(SETTINGS) == set(DEFENCES)


@quick
@given(every_defence)
def test_the_text_gives_the_defence_back(defence):
    again = parse_defence(str(defence))
    assert again == defence
    assert hash(again) == hash(defence)
    assert str(again) == str(defence)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("noise:sigma=1e-4", "noise:sigma=0.0001"),
        ("noise:sigma=1e-4,relative=false", "noise:sigma=0.0001"),
        ("noise:relative=TRUE,sigma=2", "noise:sigma=2,relative=true"),
        (" laplace : sigma = 1e-9 ", "laplace:sigma=1e-09"),
        ("clip:norm=1.0", "clip:norm=1"),
        ("topk:share=.01", "topk:share=0.01"),
        ("random:share=1", "random:share=1"),
        ("int8", "int8"),
        ("int8:stochastic=false", "int8"),
        ("int8:stochastic=true", "int8:stochastic=true"),
        ("fp8", "fp8"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("withhold:pattern=embeddings", "withhold:pattern=embeddings"),
        ("withhold:pattern=wte+wpe", "withhold:pattern=wte+wpe"),
    ],
)
def test_canonical_texts(text, canonical):
    assert str(parse_defence(text)) == canonical


def test_settings_are_values_with_their_defaults():
    assert parse_defence("noise:sigma=1e-4").settings == {"sigma": 1e-4, "relative": False}
    assert parse_defence("withhold:pattern=wte+wpe").settings == {"pattern": ("wte", "wpe")}


@pytest.mark.parametrize("sigma", ["1e-4", 1e-4])
def test_settings_of_a_plan_may_be_texts_or_values(sigma):
    """YAML reads 1e-4 as a text."""
    assert Defence("noise", {"sigma": sigma, "relative": "true"}) == parse_defence("noise:sigma=1e-4,relative=true")
    assert Defence("withhold", {"pattern": ["wte", "wpe"]}) == parse_defence("withhold:pattern=wte+wpe")
    assert Defence("clip", {"norm": 1}) == parse_defence("clip:norm=1")
    assert Defence("fp8") == parse_defence("fp8")


def test_a_defence_can_be_copied_and_sent_to_another_process():
    defence = parse_defence("noise:sigma=1e-4,relative=true")
    assert copy.deepcopy(defence) == pickle.loads(pickle.dumps(defence)) == defence


def test_settings_are_a_copy():
    settings = {"sigma": 1.0}
    defence = Defence("noise", settings)
    settings["sigma"] = 2.0
    assert defence.settings["sigma"] == 1.0


# The function behind it


@pytest.mark.parametrize(
    ("text", "direct"),
    [
        ("noise:sigma=0.1", lambda e: defences.add_gaussian_noise(e, 0.1, seeded())),
        ("noise:sigma=0.1,relative=true", lambda e: defences.add_gaussian_noise(e, 0.1, seeded(), relative=True)),
        ("laplace:sigma=0.1", lambda e: defences.add_laplace_noise(e, 0.1, seeded())),
        ("laplace:sigma=0.1,relative=true", lambda e: defences.add_laplace_noise(e, 0.1, seeded(), relative=True)),
        ("clip:norm=0.5", lambda e: defences.clip_norm(e, 0.5)),
        ("topk:share=0.2", lambda e: defences.keep_largest(e, 0.2)),
        ("random:share=0.2", lambda e: defences.keep_random(e, 0.2, seeded())),
        ("int8", lambda e: defences.quantise_int8(e)),
        ("int8:stochastic=true", lambda e: defences.quantise_int8(e, seeded())),
        ("fp8", lambda e: defences.quantise_fp8(e)),
        ("fp16", lambda e: defences.quantise_fp16(e)),
        ("bf16", lambda e: defences.quantise_bf16(e)),
        ("withhold:pattern=wte+ln_f", lambda e: defences.withhold(e, ["wte", "ln_f"])),
    ],
)
def test_the_text_calls_the_function(text, direct):
    evidence = random_update()
    assert same(parse_defence(text)(evidence, seeded()), direct(evidence))


def test_a_defence_without_chance_leaves_the_generator_alone():
    for text in ("clip:norm=0.5", "topk:share=0.2", "int8", "fp8", "fp16", "bf16", "withhold:pattern=wte"):
        generator = seeded()
        parse_defence(text)(random_update(), generator)
        assert generator.get_state().equal(seeded().get_state()), text


@pytest.mark.parametrize(("name", "kind"), DEFENCES.items(), ids=DEFENCES)
def test_every_example_defends_and_keeps_the_contract(name, kind):
    assert kind.summary
    assert "\n" not in kind.summary
    evidence, defence = random_update(), parse_defence(kind.example)
    assert defence.name == name
    if name == "cloak":  # of caches alone: tests/defences/test_cloak.py
        return
    after = defence(evidence, seeded())
    assert not same(after, evidence)
    assert same(after, defence(evidence, seeded()))
    if name != "withhold":
        check_contract(lambda e: defence(e, seeded()), evidence)


# Mistakes


@pytest.mark.parametrize("text", ["", "nose:sigma=1", ":sigma=1", "Noise:sigma=1", "aggregate:k=4"])
def test_an_unknown_name_is_answered_with_the_known_ones(text):
    with pytest.raises(InputError) as error:
        parse_defence(text)
    for name, kind in DEFENCES.items():
        assert name in str(error.value)
        assert kind.example in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise", "'noise' needs 'sigma'; its settings are sigma (a finite number from 0 on), relative (true or false"),
        ("noise:relative=true", "needs 'sigma'"),
        ("noise:sigm=1", "has no setting 'sigm'. Did you mean 'sigma'? Usage: its settings are sigma"),
        ("noise:sigma", "expected key=value, got 'sigma'"),
        ("noise:", "expected key=value, got ''"),
        ("noise:sigma=1,", "expected key=value, got ''"),
        ("noise:sigma=1,sigma=2", "'sigma' is given twice"),
        ("noise:sigma=", "'sigma' must be a finite number from 0 on, got ''"),
        ("noise:sigma=much", "'sigma' must be a finite number from 0 on, got 'much'"),
        ("noise:sigma=-1", "got '-1'; its settings are"),
        ("noise:sigma=inf", "got 'inf'"),
        ("noise:sigma=nan", "got 'nan'"),
        ("noise:sigma=1,relative=yes", "'relative' must be true or false, got 'yes'"),
        ("clip:norm=0", "'norm' must be a finite number above 0, got '0'"),
        ("topk:share=1.5", "'share' must be a number from 0 to 1, got '1.5'"),
        ("random:share=-0.5", "'share' must be a number from 0 to 1, got '-0.5'"),
        ("int8:stochastic=2", "'stochastic' must be true or false, got '2'"),
        ("fp8:scale=2", "has no setting 'scale'. Usage: it has no settings"),
        ("withhold", "needs 'pattern'"),
        ("withhold:pattern=wte++wpe", "'pattern' must be parts of names, joined by +, got 'wte++wpe'"),
    ],
)
def test_a_mistake_is_answered_with_the_settings_and_an_example(text, message):
    with pytest.raises(InputError) as error:
        parse_defence(text)
    assert message in str(error.value)
    kind = DEFENCES[text.split(":")[0]]
    assert not kind.settings or f"for example {kind.example}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("noise", {"sigma": True}),
        ("noise", {"sigma": None}),
        ("noise", {"sigma": 10**400}),
        ("noise", {"sigma": 1, "relative": 1}),
        ("withhold", {"pattern": 3}),
        ("withhold", {"pattern": []}),
        ("withhold", {"pattern": [3]}),
        ("withhold", {"pattern": ["a+b"]}),
        ("withhold", {"pattern": [" a"]}),
    ],
)
def test_values_of_a_wrong_kind_are_refused(name, settings):
    with pytest.raises(InputError, match=f"defence '{name}': '.*' must be .* for example"):
        Defence(name, settings)
