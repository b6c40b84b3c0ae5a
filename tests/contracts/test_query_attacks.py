"""What attacks by queries keep to: one table of them, each with a small layer that it learns."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.attacks.queries.random_heads import added, random_head, rounded
from tests.attacks.queries.random_networks import random_layers, random_transformer
from tests.contracts import replay_answers
from tests.contracts.replay_answers import ABOUT, document, job_of
from torch import Tensor

from unmask.attacks.baselines.query_papers import NuclearNormAttack, PaperSingleHeadAttack
from unmask.attacks.queries.many_heads.multi_head import MultiHeadAttack
from unmask.attacks.queries.many_heads.orthogonal_heads import OrthogonalHeadsAttack
from unmask.attacks.queries.many_heads.repetition import RepetitionAttack
from unmask.attacks.queries.many_heads.vector_heads import VectorHeadsAttack
from unmask.attacks.queries.networks.relu_network import ReluNetworkAttack
from unmask.attacks.queries.networks.transformer import TransformerAttack
from unmask.attacks.queries.one_head.low_rank import LowRankAttack
from unmask.attacks.queries.one_head.noisy_head import NoisyAttack
from unmask.attacks.queries.one_head.signs import MembershipAttack
from unmask.attacks.queries.one_head.single_head import SingleHeadAttack
from unmask.evidence.ledger import Ledger
from unmask.evidence.oracles import OracleEvidence, question_keys
from unmask.linalg.heads import HeadWeights
from unmask.recovery import Status
from unmask.scores.weights import score_heads

Answering = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Row:
    """An attack, a layer that it learns, and what its oracle does to the layer's answers before it hands them out."""

    attack: Any
    layer: Answering
    width: int
    after: Answering = field(default=lambda answers: answers)
    max_norm: float | None = None

    @property
    def name(self) -> str:
        settings = [entry for entry in dataclasses.fields(self.attack) if getattr(self.attack, entry.name) is True]
        return "-".join([type(self.attack).__name__, *(entry.name for entry in settings)])

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.after(self.layer(sequences))


def row(attack: Any, heads: HeadWeights, **settings: Any) -> Row:
    return Row(attack, heads, heads.v.shape[1], **settings)


def vector_heads() -> HeadWeights:
    v = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return HeadWeights(W=random_head(6, num_heads=2).W, v=v)


def orthogonal_heads() -> HeadWeights:
    """Two heads of three coordinates each, as in Assumption C.1."""
    heads = random_head(6, num_heads=2)
    mask = torch.zeros(2, 6, dtype=torch.float64)
    mask[0, :3] = mask[1, 3:] = 1
    return HeadWeights(W=heads.W * mask[:, :, None] * mask[:, None], v=heads.v * mask)


ROWS = (
    row(MultiHeadAttack(), random_head(6, num_heads=3)),
    row(VectorHeadsAttack(), vector_heads()),
    row(SingleHeadAttack(), random_head(6)),
    row(LowRankAttack(), random_head(8, rank=2)),
    row(NoisyAttack(passes=4), random_head(6), after=rounded(4), max_norm=7.0),
    row(MembershipAttack(bits=30), random_head(5), after=torch.sign),
    row(RepetitionAttack(), random_head(4, num_heads=2), max_norm=10.0),
    row(OrthogonalHeadsAttack(), orthogonal_heads()),
    row(PaperSingleHeadAttack(), random_head(6)),
    row(NuclearNormAttack(num_measurements=40), random_head(8, rank=1)),
    Row(ReluNetworkAttack(), lambda X: random_layers(5, 6)(X[:, 0]), 5),
    Row(TransformerAttack(), random_transformer(1, 5, random_layers(5, 4)), 5),
    Row(TransformerAttack(many_heads=True), random_transformer(2, 5, random_layers(5, 4)), 5),
)


@pytest.fixture(scope="module", autouse=True)
def as_in_the_other_process(one_thread: None) -> None:
    """Sums in another order have other last digits."""


@pytest.fixture(params=ROWS, ids=lambda each: each.name)
def case(request: pytest.FixtureRequest) -> Row:
    return request.param


class Watched:
    """An oracle that notes what else than its name and its answers somebody looks at."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._touched: list[str] = []

    @property
    def name(self) -> str:
        return ABOUT

    def pieces(self, sequences: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        yield list(range(len(sequences))), object.__getattribute__(self, "_answer")(sequences)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("name", "pieces"):
            object.__getattribute__(self, "_touched").append(name)
        return object.__getattribute__(self, name)


def touched(oracle: Watched) -> list[str]:
    return object.__getattribute__(oracle, "_touched")


@dataclass(frozen=True, eq=False)
class WatchedEvidence(OracleEvidence):
    """Evidence that keeps every tensor that it was asked with, and what was in it."""

    asked: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def ask(self, sequences: Tensor, repetition: int = 0) -> Tensor:
        self.asked.append((sequences, sequences.clone()))
        return super().ask(sequences, repetition)


def evidence_of(case: Row, answer: Answering | None = None, **ledger: Any) -> WatchedEvidence:
    book = Ledger(ledger.pop("path", None), about=ABOUT, **ledger)
    return WatchedEvidence(Watched(answer or case), case.width, book, case.max_norm)  # type: ignore[arg-type]


def is_empty(value: Any) -> bool:
    """Whether a value claims no head and no neuron."""
    W, network = getattr(value, "W", ()), getattr(value, "network", None)
    return len(W) == 0 and not network and (hasattr(value, "W") or len(value) == 0)


# ---- contracts


def test_it_is_a_frozen_dataclass_whose_repr_prints_the_settings(case):
    attack = case.attack
    assert dataclasses.is_dataclass(attack)
    assert type(attack).__dataclass_params__.frozen
    assert all(f"{entry.name}=" in repr(attack) for entry in dataclasses.fields(attack))


def test_it_learns_its_layer_twice_the_same_and_touches_nothing(case):
    state = torch.random.get_rng_state()
    first, second = evidence_of(case), evidence_of(case)
    recovery = case.attack(first)
    assert recovery.status is Status.RECOVERED, recovery.reason
    assert recovery.certificate.holds
    assert recovery.reason.strip()
    assert recovery.cost.queries == first.ledger.num_asked
    assert recovery.cost.seconds > 0
    assert document(recovery) == document(case.attack(second))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert touched(first.oracle) == []
    assert all(torch.equal(tensor, kept) for tensor, kept in first.asked)


def test_another_seed_asks_other_questions(case):
    """Else the seed would be a setting that does nothing."""
    other = dataclasses.replace(case.attack, seed=1)
    here, there = evidence_of(case), evidence_of(case)
    case.attack(here)
    assert other(there).status is Status.RECOVERED
    assert set(question_keys(here.asked[0][0])) != set(question_keys(there.asked[0][0]))


@pytest.fixture(scope="module")
def here_and_there(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every attack makes of its oracle, and what it makes of the ledger in one process that never saw a layer."""
    here, jobs, folder = {}, {}, tmp_path_factory.mktemp("ledgers")
    for case in ROWS:
        evidence = evidence_of(case, path=folder / case.name)
        with closing(evidence.ledger):
            here[case.name] = document(case.attack(evidence))
        jobs[case.name] = job_of(case.attack, case.width, case.max_norm, folder / case.name)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, replay_answers.__file__, str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return here, json.loads(done.stdout)


def test_a_fresh_process_with_the_ledger_alone_recovers_the_same(case, here_and_there):
    here, there = here_and_there
    assert there[case.name] == here[case.name]


def assert_known_entries_are_right(case: Row, value: Any) -> None:
    """Of one head: what is not known is NaN, and what is not NaN is the layer's."""
    if isinstance(case.layer, HeadWeights) and len(case.layer) == len(value) == 1:
        known = value.W.isfinite()
        # The noisiest row, four decimals and tokens of bounded norm, is off by 1e-3.
        assert torch.allclose(value.W[known], case.layer.W[known], atol=1e-2)


def test_no_more_is_paid_than_allowed(case):
    whole = evidence_of(case)
    expected = document(case.attack(whole))
    needed = len(whole.ledger)
    for budget in (0, 1, 30, needed // 3, 2 * needed // 3, needed - 1):
        evidence = evidence_of(case, budget=budget)
        recovery = case.attack(evidence)
        assert recovery.status is Status.BUDGET_EXHAUSTED, (budget, recovery.reason)
        assert len(evidence.ledger) <= budget
        # A part may be certain before the budget ends, as W is before the network behind it.
        assert not recovery.certificate.holds or not is_empty(recovery.value)
        assert recovery.reason.strip()
        assert_known_entries_are_right(case, recovery.value)
    assert document(case.attack(evidence_of(case, budget=needed))) == expected


def test_noise_with_bounded_tokens_is_not_taken_for_weights(case):
    """Noise of three tenths of an answer, and tokens too short to drown it: claim what is right, or nothing."""
    if not isinstance(case.layer, HeadWeights):
        pytest.skip("networks are scored by tests of their own")
    noisy = dataclasses.replace(case, after=added(0.3 * float(size_of(case).mean())), max_norm=7.0)
    recovery = case.attack(evidence_of(noisy))
    if recovery.status.conclusive:
        assert score_heads(recovery.value, case.layer).W_error < 0.3, recovery.certificate


# ---- negative controls: answers whose signal was destroyed


def size_of(case: Row) -> Tensor:
    """The root mean square of answers to random tokens, with as many numbers as an answer has."""
    X = torch.randn(64, 2, case.width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return case.layer(X).square().mean(0).sqrt()


def random_oracle(case: Row) -> Answering:
    generator, size = torch.Generator().manual_seed(3), size_of(case)
    return lambda X: case.after(size * torch.randn(len(X), *size.shape, generator=generator, dtype=torch.float64))


def hash_oracle(case: Row) -> Answering:
    """The same answer to the same question, and no law."""
    size = size_of(case)

    def answer(X: Tensor) -> Tensor:
        seeds = [int.from_bytes(key[:7]) for key in question_keys(X)]
        drawn = [
            torch.randn(size.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in seeds
        ]
        return case.after(size * torch.stack(drawn))

    return answer


def shuffled_oracle(case: Row) -> Answering:
    generator = torch.Generator().manual_seed(4)
    return lambda X: case(X)[torch.randperm(len(X), generator=generator)]


@pytest.mark.parametrize("control", [random_oracle, hash_oracle, shuffled_oracle], ids=lambda each: each.__name__)
@pytest.mark.parametrize("seed", [0, 1])
def test_answers_without_a_law_are_not_learned(case, control, seed):
    recovery = dataclasses.replace(case.attack, seed=seed)(evidence_of(case, control(case)))
    assert not recovery.status.conclusive, recovery.reason
    assert recovery.status is not Status.BUDGET_EXHAUSTED
    assert not recovery.certificate.holds
    assert recovery.reason.strip()
    assert is_empty(recovery.value)
