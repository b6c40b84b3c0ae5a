"""A file is there with all of its content, or as it was before."""

from __future__ import annotations

import pytest

from unmask.whole_files import written_whole


def test_the_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with written_whole(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half() -> None:
        with written_whole(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
