"""Figures: they show what was measured, and say what is missing."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest
from tests.report.findings import audit_of, realistic

import unmask
from unmask import observe_gradients, plot
from unmask.errors import InputError

TEXTS = [[5, 17, 99, 17, 250], [400, 3, 8]]


def test_the_spectrum_falls_at_the_rank(tiny_gpt2, tmp_path):
    pytest.importorskip("matplotlib")
    figure = plot.plot_spectrum(observe_gradients(tiny_gpt2, TEXTS), tiny_gpt2)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "attention input of block 0: rank 6" in labels
    figure.savefig(tmp_path / "spectrum.svg")
    assert (tmp_path / "spectrum.svg").stat().st_size > 1000


def test_an_update_without_the_first_block_has_no_spectrum(tiny_gpt2):
    evidence = observe_gradients(tiny_gpt2, TEXTS)
    with pytest.raises(InputError, match="no gradient of the first block"):
        plot.plot_spectrum(replace(evidence, gradients={"wte.weight": evidence.gradients["wte.weight"]}), tiny_gpt2)


def test_curves_are_those_of_the_report(tmp_path):
    pytest.importorskip("matplotlib")
    figure = unmask.plot.plot_curves(audit_of(realistic(), []))
    assert figure.axes
    assert all(axes.get_title() and axes.get_xlabel() for axes in figure.axes)
    figure.savefig(tmp_path / "curves.png")


def test_an_audit_without_an_axis_says_what_to_vary():
    audit = audit_of(realistic(), [])
    with pytest.raises(InputError, match="vary batch_sizes"):
        plot.plot_curves(replace(audit, findings=audit.findings[:1]))


def test_signs_of_formulas_are_plain():
    assert plot._plain("a $x$ \x1b", 40) == r"a \$x\$ \x1b"


def test_without_matplotlib_the_extra_is_named(tiny_gpt2, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install 'unmask\[plots\]'"):
        plot.plot_spectrum(observe_gradients(tiny_gpt2, TEXTS), tiny_gpt2)
