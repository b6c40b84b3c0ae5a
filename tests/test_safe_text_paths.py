from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.safe_text import (
    command_without_folders,
    is_absolute,
    last_name,
    value_without_folders,
    without_folders,
)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("the model /srv/ann/mine has no head", "the model …/mine has no head"),
        ("'/srv/ann/texts.txt' and ~/notes/b.txt", "'…/texts.txt' and …/b.txt"),
        (r"C:\Users\ann\plan.toml is damaged", "…/plan.toml is damaged"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("runs/release/x, 1/2/3 and n / d", "runs/release/x, 1/2/3 and n / d"),
        ("~3 % of tokens", "~3 % of tokens"),
    ],
)
def test_prose_keeps_its_words_and_loses_its_folders(text, cut):
    assert without_folders(text) == cut


def test_a_value_may_hold_spaces():
    assert value_without_folders("/home/ann lee/my plan.toml") == "…/my plan.toml"
    assert value_without_folders("plan.toml") == "plan.toml"
    assert last_name("/home/ann/runs/") == "runs"
    assert last_name("runs/x") == "runs/x"


def test_a_command_is_cut_word_by_word():
    command = "unmask audit '/home/ann lee/plan.toml' --out=/srv/ann/runs"
    assert command_without_folders(command) == "unmask audit …/plan.toml --out=…/runs"
    assert command_without_folders("it's /srv/ann/x") == "it's …/x"
    assert command_without_folders("unmask audit '/home/ann/my plan.toml'") == "unmask audit '…/my plan.toml'"


@given(st.lists(st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True), min_size=2, max_size=5))
def test_no_folder_is_left(parts):
    path = "/" + "/".join(parts)
    assert is_absolute(path)
    for cut in (value_without_folders(path), without_folders(f"in {path}"), command_without_folders(path)):
        assert cut.removeprefix("in ") == f"…/{parts[-1]}"
