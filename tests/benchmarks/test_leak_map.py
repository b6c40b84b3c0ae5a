"""The map of the leak: one small client, its draws, its table and its page."""

import json
import re

import pytest
from gradients import leak_map, leak_map_page, leak_map_show
from gradients.client_cell import ClientCell, draw_texts, measure_cell
from gradients.leak_map_clients import clients_of, wilson

TEXTS = [
    "The meeting was moved to Thursday.",
    "Please send forty litres of paint.",
    "Her brother sold two goats.",
    "Nobody told the driver.",
]
CELL = {
    "model": "minilm-l6",
    "protocol": "lora:rank=8,steps=2",
    "defence": "",
    "texts": 8,
    "draw": 0,
    "data": "some",
    "status": "PARTIAL",
    "reason": "<b>why</b>",
    "tokens": 40,
    "recall": 1.0,
    "false": 0,
    "chance": 0.0,
    "certain": 0,
    "false_certain": 0,
    "exact": 0,
    "guessed": 3,
    "rouge1": 0.5,
    "rouge2": 0.4,
    "cosine": 1.0,
    "epsilon": None,
    "seconds": 3.0,
    "machine": "a machine",
}
STOPPED = {key: CELL[key] for key in ("model", "protocol", "defence", "texts", "data", "machine")} | {
    "draw": 1,
    "status": leak_map.STOPPED,
    "reason": "stopped after 60 s",
    "seconds": 60.0,
}


def test_a_cell_is_scored_by_what_reaches_adapters(minilm):
    cell = ClientCell("minilm-l6", "lora:rank=4,steps=2", texts=2)
    measured = measure_cell(minilm, cell, TEXTS, ["Two cats sleep."])
    assert measured["recall"] == 1.0
    assert measured["false"] == measured["false_certain"] == measured["chance"] == 0
    assert measured["tokens"] == len({token for text in TEXTS[:2] for token in minilm.encode(text)})


def test_draws_differ_and_repeat():
    first, again, other = (draw_texts(TEXTS, 3, draw) for draw in (0, 0, 1))
    assert first == again != other


def test_the_table_has_a_line_for_each_client():
    lines = leak_map_show.leak_table(clients_of([CELL, CELL | {"draw": 1}]))
    assert "| `lora:rank=8,steps=2` | none | 8 of some |  | no text, 6 guessed; 100 % of tokens; 3 s |" in lines


def test_texts_of_another_source_are_another_line():
    assert len(clients_of([CELL, CELL | {"draw": 1}, CELL | {"data": "others"}])) == 2


@pytest.mark.parametrize("cells", [[STOPPED], [CELL, STOPPED]])
def test_what_was_stopped_is_said(cells):
    (client,) = clients_of(cells)
    assert "stopped" in leak_map_show.leak(client)
    assert all("stopped" in leak_map_page.shown(client, key)["label"] for key, _ in leak_map_page.MEASURES)


def test_cells_are_shown_in_the_order_of_the_table():
    others = [
        CELL | {"draw": 1},
        CELL,
        CELL | {"protocol": "fedsgd", "defence": "bf16"},
        CELL | {"protocol": "no more"},
    ]
    assert [cell["protocol"] for cell in leak_map.in_order(others)] == ["fedsgd", *2 * [CELL["protocol"]], "no more"]
    assert [cell["draw"] for cell in leak_map.in_order(others)][1:3] == [0, 1]


def test_a_cell_without_texts_says_which_tokens_were_read():
    (client,) = clients_of([CELL | {"guessed": 0}])
    assert leak_map_page.shown(client, "certain")["label"] == "no text; 100% of tokens"


def test_budgets_are_those_of_every_draw():
    private = [
        CELL | {"epsilon": epsilon, "recall": recall} for epsilon, recall in ((1.0, 0.0), (9.0, 0.0), (9.5, 0.2))
    ]
    assert leak_map_show.budgets(clients_of(private)) == ["- minilm-l6: chance up to ε = 9, more from ε = 9.5"]


def test_the_interval_of_a_share():
    assert wilson(0, 24) == (0.0, pytest.approx(0.138, abs=1e-3))
    assert wilson(12, 24)[0] == pytest.approx(1 - wilson(12, 24)[1])


def test_the_page_escapes_what_it_shows(tmp_path):
    leak_map_page.write_page(clients_of([CELL, STOPPED]), tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text()
    assert "<b>why" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["cells"][0]["draws"][0][-1] == "<b>why</b>"
    assert len(data["cells"][0]["draws"][0]) == len(data["columns"]) == len(data["cells"][0]["draws"][1])


def test_every_cell_is_a_client_that_can_be_made():
    from unmask.defences import parse_defence
    from unmask.protocols.table import parse_protocol

    for cell in leak_map.CELLS:
        parse_protocol(cell.protocol)
        if cell.defence and cell.num_clients == 1:
            parse_defence(cell.defence.format(embeddings="e", first="f"))
    assert len(set(leak_map.CELLS)) == len(leak_map.CELLS)
