"""The tables of attacks and defences: every line of the code's own tables, for people and for machines."""

from __future__ import annotations

import json

from unmask.attacks.table import ATTACKS
from unmask.defences.oracles import ORACLE_DEFENCES
from unmask.defences.table import DEFENCES
from unmask.terminal.tables import print_attacks, print_defences


def test_every_attack_for_machines(capsys):
    print_attacks(as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ATTACKS)
    for name, kind in ATTACKS.items():
        assert (rows[name]["claims"], rows[name]["limits"]) == (kind.claims, kind.limits)
        assert rows[name]["settings"] == {setting.name: setting.expected for setting in kind.settings}


def test_every_defence_for_machines(capsys):
    print_defences(as_json=True)
    rows = [(row["name"], row["protects"]) for row in json.loads(capsys.readouterr().out)]
    expected = [(name, "updates, states and caches") for name in DEFENCES]
    expected += [(name, "vectors") for name in ("signs", "cut", "rotate", "private")]
    expected += [(name, "services") for name in ORACLE_DEFENCES]
    assert rows == expected


def test_names_are_whole_for_people_on_narrow_terminals(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for print_table, names in ((print_attacks, ATTACKS), (print_defences, {**DEFENCES, **ORACLE_DEFENCES})):
        print_table(as_json=False)
        out = capsys.readouterr().out
        assert all(any(line.startswith(name) for line in out.splitlines()) for name in names)
        assert "--json" in out or "docs/defences.md" in out
