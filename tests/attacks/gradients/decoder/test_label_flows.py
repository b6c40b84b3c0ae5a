"""From labels to ends of texts: pure bookkeeping, with silent prefixes, ghosts, masked labels and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unmask.attacks.gradients.decoder.label_flows import Ends, Labelled, ends_of

Prefix = tuple[int, ...]
A, B = (5, 6, 7, 8), (5, 6, 9)


def flows_of(texts: Sequence[Prefix]) -> dict[Prefix, dict[int, float]]:
    """How often each token follows each prefix."""
    follow: dict[Prefix, dict[int, float]] = {}
    for text in texts:
        for end in range(1, len(text)):
            labels = follow.setdefault(text[:end], {})
            labels[text[end]] = labels.get(text[end], 0.0) + 1.0
    return follow


def read(
    follow: Mapping[Prefix, Mapping[int, float]],
    silent: Mapping[Prefix, int | None] | None = None,
    nodes: Sequence[Prefix] = (),
    rotary: bool = False,
) -> Ends:
    """`silent` prefixes have no labels of their own."""
    read = {(0, prefix): dict(labels) for prefix, labels in follow.items()}
    quiet = {(0, prefix): sure for prefix, sure in (silent or {}).items()}
    read |= {node: {} for node in quiet}
    return ends_of(Labelled(read, dict.fromkeys(read, 1e-6), quiet), {*read, *((0, node) for node in nodes)}, rotary)


def texts_of(ends: Ends) -> dict[Prefix, float]:
    return {end.node[1]: end.flow for end in ends.ends}


def test_texts_end_where_less_goes_on_than_comes_in():
    for texts in ([A], [A, B], [A, A[:3]], [A, A, B], [A, A[:2], A[:2], B]):
        ends = read(flows_of(texts))
        assert texts_of(ends) == {text: texts.count(text) for text in texts}
        assert not ends.has_masked_labels
        assert all(end.residual == 1e-6 and not end.is_traceless and not end.has_open_run for end in ends.ends)


def test_a_silent_prefix_that_goes_on_does_not_end_a_text():
    """The model is sure of 7 behind '5 6': no gradient, but the prefix '5 6 7' was seen to go on."""
    follow = flows_of([A])
    del follow[5, 6]
    ends = read(follow, silent={(5, 6): 7})
    assert texts_of(ends) == {A: 1.0}
    assert not ends.has_masked_labels
    assert not ends.ends[0].is_traceless


def test_two_silent_prefixes_in_a_row():
    long = (5, 6, 7, 8, 9)
    follow = flows_of([long])
    for prefix in (long[:2], long[:3]):
        del follow[prefix]
    assert texts_of(read(follow, silent={long[:2]: 7, long[:3]: 8})) == {long: 1.0}


def test_a_last_label_that_the_model_is_sure_of_is_taken_and_marked():
    follow = flows_of([A])
    del follow[5, 6, 7]
    ends = read(follow, silent={(5, 6, 7): 8})
    assert texts_of(ends) == {A: 1.0}
    assert [end.is_traceless for end in ends.ends] == [True]


def test_a_silent_prefix_keeps_how_often_it_is_reached():
    texts = [A, A, A]
    follow = flows_of(texts)
    del follow[5, 6, 7]
    assert texts_of(read(follow, silent={(5, 6, 7): 8})) == {A: 3.0}


def test_a_silent_prefix_of_which_the_model_is_not_sure_has_a_masked_label():
    follow = flows_of([A])
    del follow[5, 6]
    ends = read(follow, silent={(5, 6): None})
    assert ends.has_masked_labels
    assert texts_of(ends) == {A: 1.0}
    # Sure of another token than the one that follows: masked too.
    assert read(follow, silent={(5, 6): 99}).has_masked_labels


def test_one_masked_label_among_several_is_seen():
    """Two texts share '5 6'; the label 9 of one of them is masked, and the text goes on behind it."""
    follow = flows_of([A, (5, 6, 9, 10)])
    del follow[5, 6][9]
    ends = read(follow)
    assert ends.has_masked_labels
    assert set(texts_of(ends)) == {A, (5, 6, 9, 10)}


def test_more_out_than_in_is_a_masked_label():
    follow = flows_of([A, A])
    follow[5, 6][7] = 1.0
    assert read(follow).has_masked_labels


def test_a_run_is_shared_out_by_what_follows_it():
    """'t', 't t' and 't t t' have one row, so their labels are read together."""
    follow = {(4,): {4: 2.0, 7: 1.0}, (4, 4, 4, 7): {8: 1.0}}
    ends = read(follow, nodes=[(4, 4), (4, 4, 4)], rotary=True)
    assert texts_of(ends) == {(4, 4, 4, 7, 8): 1.0}
    assert not any(end.has_open_run for end in ends.ends)


def test_runs_that_can_be_shared_out_in_more_than_one_way_are_open():
    # 't t t': how many texts of what length cannot be told.
    ends = read({(4,): {4: 2.0}}, rotary=True)
    assert ends.ends
    assert all(end.has_open_run for end in ends.ends)
    # A last label, read at 't' or at 't t'.
    ends = read({(4,): {4: 1.0, 7: 1.0, 9: 1.0}, (4, 4, 7): {8: 1.0}}, nodes=[(4, 4)], rotary=True)
    assert all(end.has_open_run for end in ends.ends)
    # Of a model with absolute positions, every prefix has labels of its own.
    assert not any(end.has_open_run for end in read(flows_of([(4, 4, 4)])).ends)
    assert texts_of(read(flows_of([(4, 4, 4)]))) == {(4, 4, 4): 1.0}


def test_a_text_of_two_equal_tokens_is_open_only_in_its_run():
    ends = read({(4,): {4: 1.0}, (5,): {6: 1.0}}, rotary=True)
    assert {end.node[1]: end.has_open_run for end in ends.ends} == {(4, 4): True, (5, 6): False}


def test_no_labels_are_no_texts():
    assert read({}) == Ends([], False)
    assert not read({}, silent={(5,): None}).ends
