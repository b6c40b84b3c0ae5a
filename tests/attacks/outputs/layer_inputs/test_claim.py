"""The ending that pre-images deserve: one reason a doubt, and RECOVERED only where none is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attacks.outputs.attention_layers import gaussian, random_layer

from unmask.attacks.outputs.layer_inputs.claim import FEWEST_STARTS, claim_preimages, refuse
from unmask.attacks.outputs.layer_inputs.preimages import Preimage, Preimages, certify
from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.attacks.run import Run
from unmask.evidence.outputs import AttentionEvidence
from unmask.recovery import Recovery, Status

TOLERANCE, POWER = 1e-8, 0.5
SEARCHED = {"num_starts": FEWEST_STARTS, "num_converged": FEWEST_STARTS, "definite": True}


@pytest.fixture(scope="module")
def layer():
    evidence, X = random_layer("pd", 3, 6, e=8)  # V is wide: noise would show
    posed = pose(evidence)
    problem = posed.problem()
    return posed, problem, certify(posed, problem, problem.flat(X), dense_limit=100)


def claim(layer, preimages: tuple[Preimage, ...] | None = None, **found: Any) -> Recovery[Preimages]:
    posed, problem, root = layer
    listed = Preimages((root,) if preimages is None else preimages, **{**SEARCHED, **found})
    return claim_preimages(posed, problem, listed, TOLERANCE, POWER, Run())


def test_one_certified_preimage_that_was_well_searched_is_recovered(layer):
    recovery = claim(layer)
    assert recovery.status is Status.RECOVERED
    assert recovery.certificate.holds
    assert recovery.certificate.details["num_certified"] == 1
    assert "searched, not proved" in recovery.reason
    assert "a wrong W" in recovery.reason
    assert "proved by enumeration" in claim(layer, proved_complete=True, num_starts=0).reason


@pytest.mark.parametrize(
    ("found", "part"),
    [
        ({"num_starts": FEWEST_STARTS - 1, "num_converged": FEWEST_STARTS - 1}, "too few"),
        ({"num_converged": 2}, "too few"),
        ({"definite": False}, "indefinite"),
        ({"budget_ended": True}, "budget"),
        ({"unseen": True}, "earlier token"),
    ],
)
def test_every_doubt_is_partial_and_named(layer, found, part):
    recovery = claim(layer, **found)
    assert recovery.status is Status.PARTIAL
    assert part in recovery.reason


@pytest.mark.parametrize(
    ("found", "part"),
    [
        ({"symmetric": True}, "symmetry"),
        ({"budget_ended": True}, "budget"),
        ({"num_starts": FEWEST_STARTS - 1}, "too few"),
    ],
)
def test_known_norms_skip_no_doubt(layer, found, part):
    posed, problem, root = layer
    normed = (replace(posed, norms=root.X.norm(dim=1)), problem, root)
    about = {"normed": True, "definite": False}
    assert claim(normed, **about).status is Status.RECOVERED
    recovery = claim(normed, **about, **found)
    assert recovery.status is Status.PARTIAL
    assert part in recovery.reason


def test_two_preimages_or_one_without_a_proof_are_partial(layer):
    root = layer[2]
    other = replace(root, X=root.X + 1, orientation=-1)
    assert "2 distinct" in claim(layer, (root, other)).reason
    assert "ill-conditioned" in claim(layer, (replace(root, radius=float("inf")),)).reason
    assert "orientation" in claim(layer, (replace(root, orientation=-1),)).reason


def test_nothing_found_says_whether_there_must_be_something(layer):
    assert claim(layer, ()).status is Status.NOTHING_FOUND
    assert "one exists" in claim(layer, ()).reason
    assert "may be none" in claim(layer, (), definite=False).reason
    assert claim(layer, (), budget_ended=True).status is Status.BUDGET_EXHAUSTED


def test_what_shows_before_any_search():
    evidence, _ = random_layer("pd", 3, 6, e=8)
    assert refuse(pose(evidence), TOLERANCE, Run()) is None
    flat = replace(evidence, V=torch.cat([evidence.V[:5], evidence.V[:1]]))
    lost = AttentionEvidence(flat.W, flat.V, evidence.output)
    assert refuse(pose(lost), TOLERANCE, Run()).status is Status.NOT_IDENTIFIABLE
    noisy = replace(evidence, output=evidence.output + 0.1 * gaussian(7, *evidence.output.shape))
    assert "outside the row space" in refuse(pose(noisy), TOLERANCE, Run()).reason
    silent = replace(evidence, output=torch.zeros_like(evidence.output))
    assert refuse(pose(silent), TOLERANCE, Run()).status is Status.NOTHING_FOUND
