"""Tokens behind several AdamW steps of adapters: all of a synthetic vocabulary's, none of what was destroyed."""

from dataclasses import dataclass, replace

import pytest
import torch
from tests.linalg.adam_problems import NUM_ATOMS, NUM_COLUMNS, WIDTH, make_atoms, make_problem
from tests.sampling import sample

from unmask import recover_text
from unmask.attacks.gradients.bag_of_words.adamw_steps import _judge, find_adamw_tokens
from unmask.attacks.gradients.bag_of_words.delta_tokens import find_delta_tokens
from unmask.attacks.gradients.bag_of_words.weight_changes import WeightChange
from unmask.audit.cases.data import INVENTED_TEXTS
from unmask.evidence.gradients import GradientEvidence, Update
from unmask.linalg.support_growth import GrownSupport
from unmask.progress import watched_by
from unmask.proof.conclusions import MOST_FALSE_SHARE
from unmask.protocols import observe_lora

RATE = 5e-5
TEXTS = [[5, 17, 99, 250, 8, 11, 30, 31], [400, 3, 9, 21, 77, 78]]


@dataclass
class Vocabulary:
    """What the attack asks of a model."""

    words: torch.Tensor
    num_positions: int = 0
    vocab_size: int = NUM_ATOMS
    device: str = "cpu"

    def first_input_parts(self, tokens, num_positions):
        return self.words[tokens], torch.zeros(self.num_positions, WIDTH), torch.zeros(WIDTH)


def make_changes(problem, num_steps, begins_at_zero=False, destroy=lambda steps: steps):
    """Two factors whose weights took these steps in float32."""
    draw = torch.Generator().manual_seed(0)
    before = 0.1 * torch.randn(NUM_COLUMNS, WIDTH, generator=draw)
    delta = (before.double() - RATE * destroy(problem.measured).T).float() - before
    halves = (slice(0, NUM_COLUMNS // 2), slice(NUM_COLUMNS // 2, NUM_COLUMNS))
    return [
        WeightChange(f"{half}", delta[half], before[half], num_steps, begins_at_zero, is_factor=True) for half in halves
    ]


def find(problem, changes, **known):
    evidence = GradientEvidence({}, "", update=Update.DELTA, optimizer="adamw", **({"learning_rate": RATE} | known))
    return find_adamw_tokens(evidence, Vocabulary(problem.dictionary[:NUM_ATOMS]), changes)


@sample("num_steps, begins_at_zero", [(2, False), (4, False), (3, True)], [(3, True)])
def test_tokens_of_several_steps(num_steps, begins_at_zero):
    problem, seen = make_problem(num_steps, begins_at_zero=begins_at_zero), []
    with watched_by(lambda *stage: seen.append(stage)):
        found = find(problem, make_changes(problem, num_steps, begins_at_zero))
    assert set(found.tokens.tolist()) == problem.used, found.reason
    assert 0 < found.expected_false <= MOST_FALSE_SHARE * len(found.tokens)
    assert len(found.used) == 2
    assert len(seen) > 2
    assert all("AdamW" in stage and 0 <= done < most for stage, done, most in seen)


DESTROYED = {
    "rows": lambda steps, draw: steps[torch.randperm(len(steps), generator=draw)],
    "columns": lambda steps, draw: torch.stack([c[torch.randperm(len(c), generator=draw)] for c in steps.T], 1),
    "signs": lambda steps, draw: steps.abs() * torch.randn(steps.shape, generator=draw).sign(),
}


@pytest.mark.parametrize("num_seeds", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("control", DESTROYED)
def test_destroyed_steps_claim_nothing(control, num_seeds):
    for seed in range(num_seeds):
        problem, draw = make_problem(2 + seed % 3, seed=seed), torch.Generator().manual_seed(seed)
        changes = make_changes(problem, 2 + seed % 3, destroy=lambda steps, draw=draw: DESTROYED[control](steps, draw))
        found = find(problem, changes)
        assert not len(found.tokens)
        assert "several steps" in found.reason


@pytest.mark.parametrize("num_seeds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_a_little_noise_gives_no_false_token(num_seeds):
    for seed in range(num_seeds):
        problem, draw = make_problem(2 + seed % 3, seed=seed), torch.Generator().manual_seed(seed)
        size = 10.0 ** (-4 + seed % 4)
        changes = make_changes(
            problem,
            2 + seed % 3,
            destroy=lambda steps, draw=draw, size=size: steps + size * torch.randn(steps.shape, generator=draw),
        )
        assert set(find(problem, changes).tokens.tolist()) <= problem.used


def test_steps_far_from_what_tokens_explain_claim_nothing():
    scores = torch.full((9,), 100.0)
    right = GrownSupport(tuple(range(9)), scores, 100 * scores, 0.04, 800.0, is_settled=True, is_sharp=True)
    assert _judge(right, NUM_ATOMS)[0] == list(range(9))
    assert not _judge(replace(right, misfit=50_000.0), NUM_ATOMS)[0]
    assert not _judge(replace(right, unexplained=0.2), NUM_ATOMS)[0]
    assert not _judge(replace(right, is_settled=False), NUM_ATOMS)[0]


@pytest.mark.parametrize("num_seeds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_another_vocabulary_claims_nothing(num_seeds):
    for seed in range(num_seeds):
        problem = make_problem(2 + seed % 3, seed=seed)
        other = replace(problem, dictionary=make_atoms(torch.Generator().manual_seed(99 + seed)))
        assert not len(find(other, make_changes(problem, 2 + seed % 3)).tokens)


def test_what_is_not_known_is_not_guessed():
    problem = make_problem(2)
    changes = make_changes(problem, 2)
    assert not len(find(problem, changes, learning_rate=None).tokens)
    layers = [replace(change, is_factor=False) for change in changes]
    assert not len(find(problem, layers).tokens)
    evidence = GradientEvidence({}, "", update=Update.DELTA, learning_rate=RATE)
    learned = Vocabulary(problem.dictionary[:NUM_ATOMS], num_positions=4)
    assert not len(find_adamw_tokens(evidence, learned, changes).tokens)


@pytest.mark.parametrize("rate", [1e-4, 1e-2])
def test_tiny_models_give_no_false_token(tiny_llama, rate):
    """Their gradients are so large that steps show little more than signs."""
    evidence = observe_lora(tiny_llama, TEXTS, local_steps=3, steps=2, local_learning_rate=rate)
    assert set(find_delta_tokens(evidence, tiny_llama).tokens.tolist()) <= {token for text in TEXTS for token in text}


TEMPLATE = {"rank": 32, "alpha": 64, "local_steps": 10, "max_grad_norm": 1.0}
CLIENTS = {
    "two steps of a later round": {"rank": 8, "steps": 2, "local_steps": 2},
    "three steps of a later round": {"rank": 8, "steps": 2, "local_steps": 3},
    "four steps of the first round": {"rank": 8, "local_steps": 4},
    "ten steps of the first round, as in Flower's template": TEMPLATE,
}


def observe_client(model, client, num_texts=4):
    """What a client sends, and the tokens that reach its adapters."""
    texts, earlier = list(INVENTED_TEXTS[:num_texts]), list(INVENTED_TEXTS[num_texts : num_texts + 8])
    evidence = observe_lora(model, texts, earlier_texts=earlier if "steps" in client else None, **client)
    return evidence, {token for text in texts for token in model.encode(text)[:-1]}


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_several_steps_of_real_weights(smollm2, client):
    evidence, held = observe_client(smollm2, CLIENTS[client])
    recovery = recover_text(evidence, smollm2, attack="bag-of-words")
    assert recovery.value.token_set <= held
    assert len(recovery.value.token_set) >= 0.8 * len(held), recovery.reason
    assert recovery.certificate.residual <= 0.01 * len(recovery.value.token_set)


@pytest.mark.slow
def test_dropout_of_real_weights_gives_no_false_token(smollm2):
    evidence, held = observe_client(smollm2, TEMPLATE | {"dropout": 0.075, "train_mode": True})
    assert recover_text(evidence, smollm2, attack="bag-of-words").value.token_set <= held


@pytest.mark.slow
@pytest.mark.parametrize("control", DESTROYED)
def test_destroyed_updates_of_real_weights_claim_nothing(smollm2, control):
    """Steps are (d, m) above, and factors (m, d)."""
    evidence, _ = observe_client(smollm2, TEMPLATE)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        destroyed = {
            name: DESTROYED[control](tensor.T, draw).T.contiguous() if ".lora_A." in name else tensor
            for name, tensor in evidence.gradients.items()
        }
        recovery = recover_text(replace(evidence, gradients=destroyed), smollm2, attack="bag-of-words")
        assert not recovery.value.token_set
