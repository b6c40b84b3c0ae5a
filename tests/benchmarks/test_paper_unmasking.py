"""The benchmark of Unmasking Transformers: every part runs, the page is what the stored results say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_layer

from unmask.attacks.outputs.layer_inputs.problem import pose
from unmask.scores.inputs import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("paper.unmasking")


@pytest.mark.slow
def test_every_part_runs_and_is_on_the_page(benchmark, tmp_path, capsys):
    out = ["--out", str(tmp_path / "results.json"), "--docs", str(tmp_path)]
    benchmark.main(["--small", *out])
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert set(parts) == set(benchmark.PARTS)
    assert all(parts.values())
    page = (tmp_path / "paper-unmasking.md").read_text()
    assert "Not measured yet" not in page
    for title in ("Stacks of layers", "Gradient descent", "Wrong weights", "lemmas' constants", "Indefinite W"):
        assert title in page
    assert all(row["R"] > 1 and row["paper_lipschitz"] > row["hessian_change"] for row in parts["bounds"])
    assert not [row for row in parts["stacks"] if row["wrong"] or "RECOVERED" in row["noise"]]
    assert not [row for row in parts["indefinite"] if row["wrong"]]


def test_the_page_in_the_docs_is_that_of_the_stored_results(benchmark, tmp_path, capsys):
    benchmark.main(["--only-page", "--docs", str(tmp_path)])
    page = "paper-unmasking.md"
    assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    stored = json.loads((ROOT / "benchmarks" / "results" / "paper_unmasking.json").read_text())["parts"]
    assert not [row for row in (*stored["stacks"], *stored["indefinite"]) if row["wrong"]]
    assert all(row["inside_radius"] == row["problems"] for row in stored["stacks"])


def test_a_page_of_nothing_names_what_is_missing(benchmark, tmp_path, capsys):
    (tmp_path / "none.json").write_text('{"parts": {}}')
    benchmark.main(["--only-page", "--out", str(tmp_path / "none.json"), "--docs", str(tmp_path)])
    assert (tmp_path / "paper-unmasking.md").read_text().count("Not measured yet") == len(benchmark.PARTS)


def test_the_gradient_of_descent_is_autograds(benchmark):
    descent = importlib.import_module("paper.descent")
    problem = pose(random_layer("gauss", 3, 5)[0]).problem()
    points = torch.randn(4, problem.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses, gradient = descent.loss_and_gradient(problem, points)
    points.requires_grad_()
    expected = problem.residuals(points).square().sum()
    expected.backward()
    assert float(losses.sum()) == pytest.approx(float(expected))
    assert torch.allclose(gradient, points.grad)


@pytest.mark.parametrize("kind", ["Shift", "Dilation"])
def test_homotopies_end_at_the_layer_and_have_its_derivatives(benchmark, kind):
    homotopies = importlib.import_module("paper.homotopies")
    problem = pose(random_layer("gauss", 3, 5)[0]).problem()
    family = getattr(homotopies, kind)(problem)
    x = torch.randn(problem.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(family.value(x, 1.0), problem.residuals(x[None])[0])
    for tau in (0.0, 0.4):
        expected = torch.func.jacrev(lambda x, tau=tau: family.value(x, tau))(x)
        assert torch.allclose(family.jacobian(x, tau), expected, atol=1e-10)
    start = family.start()
    assert start is None or float(family.value(start, 0.0).norm()) < 1e-6 * float(problem.Y.norm())


def test_the_curve_from_the_first_order_reaches_a_preimage(benchmark):
    homotopies = importlib.import_module("paper.homotopies")
    found = []
    for seed in range(4):
        evidence, X = random_layer("gauss", 4, 8, 0.3, seed)
        problem = pose(evidence).problem()
        for root in homotopies.follow(homotopies.Dilation(problem), num_roots=1):
            assert float(problem.residuals(root[None]).norm()) <= 1e-10 * float(problem.Y.norm())
            found.append(relative_error(problem.lift(root), X))
    assert min(found) < 1e-6
