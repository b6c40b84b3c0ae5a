"""Texts that are read side by side give what each of them gives by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.attacks.outputs.prompts import side_by_side
from unmask.attacks.outputs.prompts.attack import PromptAttack
from unmask.attacks.outputs.prompts.continuation import Continuation, Trial
from unmask.attacks.outputs.prompts.side_by_side import RowPass, SharedProgress, read_side_by_side, run_passes
from unmask.models import Model
from unmask.models.readouts import FINAL_NORM
from unmask.protocols import observe_hidden
from unmask.recovery import Status

LAYER, MIDDLE = 3, 1
TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8], [7], [44, 45, 46, 47, 48, 49]]
PARITY = 1e-5  # float32, other orders of sums


@pytest.fixture(params=["tiny_gpt2", "tiny_llama", "tiny_qwen2"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def begun(model: Model, tokens: list[int]) -> Continuation:
    text = Continuation.start(model, LAYER, middle_layer=MIDDLE)
    return text.advance(text.run(torch.tensor(tokens)), len(tokens)) if tokens else text


def parts(trial: Trial) -> list[Tensor]:
    return [trial.middle, trial.states, *trial.keys, *trial.values]


def assert_same(ours: list[Trial], passes: list[RowPass]) -> None:
    for trial, each in zip(ours, passes, strict=True):
        alone = each.run()
        assert torch.equal(trial.tokens, alone.tokens)
        for got, expected in zip(parts(trial), parts(alone), strict=True):
            torch.testing.assert_close(got, expected, rtol=PARITY, atol=PARITY)


def mixed_passes(model: Model) -> list[RowPass]:
    """Candidates and guesses, few and many, behind nothing and behind texts of different lengths."""
    start, short, long = (begun(model, tokens) for tokens in ([], TEXTS[1], TEXTS[3]))
    return [
        RowPass(long, torch.tensor([1, 2, 3])),
        RowPass(start, torch.tensor([9, 8])),
        RowPass(short, torch.tensor([5, 6, 7, 8]), in_order=True),
        RowPass(short, torch.arange(40)),
        RowPass(long, torch.tensor([77]), in_order=True),
        RowPass(start, torch.arange(20), in_order=True),
    ]


def test_passes_of_different_kinds_and_lengths_share_the_blocks(model):
    passes = mixed_passes(model)
    assert_same(run_passes(passes), passes)


def test_more_rows_than_go_together_are_run_in_turns(model, monkeypatch):
    monkeypatch.setattr(side_by_side, "_MOST_ROWS", 5)
    passes = mixed_passes(model)
    assert_same(run_passes(passes), passes)


def test_other_layers_and_readouts_are_not_mixed(tiny_llama):
    behind = Continuation.start(tiny_llama, tiny_llama.num_blocks, readout=FINAL_NORM)
    passes = [RowPass(begun(tiny_llama, TEXTS[1]), torch.tensor([1, 2])), RowPass(behind, torch.tensor([4]))]
    passes += [RowPass(Continuation.start(tiny_llama, 0), torch.tensor(tokens)) for tokens in ([3], [4, 5])]
    assert_same(run_passes(passes), passes)


def test_where_positions_are_added_to_scores_nothing_is_padded(tiny_llama, monkeypatch):
    """The bias itself is that of a text by itself; here it only forbids padding."""
    passes = mixed_passes(tiny_llama)
    expected = [each.run() for each in passes]
    monkeypatch.setattr(side_by_side._Padding, "__call__", lambda *_: pytest.fail("padded"))
    rows, where = torch.zeros(1, tiny_llama.width), torch.zeros(1, dtype=torch.long)
    num_heads = tiny_llama.queries_keys_values(0, rows, where)[0].shape[1]
    monkeypatch.setattr(Model, "score_bias", lambda self, block, length: torch.zeros(num_heads, length, length))
    for trial, alone in zip(run_passes(passes), expected, strict=True):
        torch.testing.assert_close(trial.states, alone.states, rtol=PARITY, atol=PARITY)


def test_readings_go_on_in_turns_and_end_in_order(tiny_llama, monkeypatch):
    monkeypatch.setattr(side_by_side, "_MOST_TEXTS", 2)
    turns = []

    def reading(name: str, num_passes: int):
        for _ in range(num_passes):
            turns.append(name)
            yield RowPass(Continuation.start(tiny_llama, 1), torch.tensor([1]))
        return name

    assert read_side_by_side([reading("a", 3), reading("b", 1), reading("c", 0), reading("d", 2)]) == list("abcd")
    assert "".join(turns) == "abadad"
    assert read_side_by_side([]) == []


def test_a_batch_is_what_its_texts_are_one_by_one(model):
    together = PromptAttack()(observe_hidden(model, TEXTS, layer=LAYER), model)
    alone = [PromptAttack()(observe_hidden(model, [text], layer=LAYER), model) for text in TEXTS]
    assert [text.tokens for text in together.value.texts] == [each.value.texts[0].tokens for each in alone]
    assert [text.tokens for text in together.value.texts] == [tuple(text) for text in TEXTS]
    assert together.status is Status.RECOVERED
    assert together.cost.candidates == sum(each.cost.candidates for each in alone)


def test_a_text_that_fails_takes_no_other_with_it(model):
    evidence = observe_hidden(model, TEXTS, layer=LAYER)
    evidence.states[0, 2] = torch.randn(model.width, generator=torch.Generator().manual_seed(0))
    found = PromptAttack()(evidence, model)
    assert found.status is not Status.RECOVERED
    assert {text.tokens for text in found.value.certain} == {tuple(text) for text in TEXTS[1:]}


def test_a_budget_that_ends_in_the_middle_keeps_what_is_certain(model):
    evidence = observe_hidden(model, TEXTS, layer=LAYER)
    for budget in (1, 8):
        small = PromptAttack(max_candidates=budget, max_linearisations=0)
        found = small(evidence, model)
        alone = [small(observe_hidden(model, [text], layer=LAYER), model) for text in TEXTS]
        assert {text.tokens for text in found.value.certain} <= {tuple(text) for text in TEXTS}
        assert {text.tokens for text in found.value.certain} == {
            text.tokens for each in alone for text in each.value.certain
        }


def test_progress_is_that_of_all_texts():
    told = []
    shared = SharedProgress(lambda stage, done, total: told.append((stage, done, total)), total=9)
    first, second = shared.add_text(), shared.add_text()
    first(2)
    second(3)
    first(4)
    assert told == [("reading texts", 2, 9), ("reading texts", 5, 9), ("reading texts", 7, 9)]
