"""The benchmark of federations, on one small cell."""

from gradients import federations

from unmask.defences import parse_defence
from unmask.protocols.table import parse_protocol

TEXTS = [
    "The meeting was moved to Thursday.",
    "Please send forty litres of paint.",
    "Her brother sold two goats.",
    "Nobody told the driver.",
]


def test_a_cell_is_scored_by_what_reaches_adapters(minilm):
    cell = federations.measure_cell(minilm, "classification", "lora:rank=4,steps=2", TEXTS, 2)
    assert cell["recall"] == 1.0
    assert cell["false"] == cell["false_certain"] == 0
    assert cell["tokens"] == len({token for text in TEXTS[:2] for token in minilm.encode(text)})


def test_every_cell_is_a_client():
    for _, protocol, count in federations.CELLS:
        name, _, defence = protocol.partition(" + ")
        assert str(parse_protocol(name)).startswith(name.split(":")[0])
        assert not defence or parse_defence(defence)
        assert count > 0
    assert len(set(federations.CELLS)) == len(federations.CELLS)


def test_clients_with_dropout_train_with_it(tiny_llama, monkeypatch):
    texts = [[5, 17, 99, 250, 8], [400, 3, 9, 21], [7, 8, 9]]
    monkeypatch.setattr(tiny_llama, "encode", list, raising=False)  # texts are given as tokens
    cells = [
        federations.measure_cell(tiny_llama, "next_token", f"lora:rank=4{dropout},local_steps=2", texts, 2)
        for dropout in ("", ",dropout=0.3")
    ]
    assert [cell["false"] for cell in cells] == [0, 0]
    assert cells[1]["recall"] <= cells[0]["recall"]


def test_draws_differ_and_repeat():
    first, again, other = (federations.draw_texts(TEXTS, 3, draw) for draw in (0, 0, 1))
    assert first == again != other


def test_the_table_has_a_line_for_each_client(capsys):
    cell = {"model": "minilm-l6", "protocol": "lora:rank=8,steps=2", "texts": 8, "recall": 1.0, "false": 0}
    federations.show([cell | {"exact": 0, "guessed": 0, "seconds": 3.0}] * 2)
    line = "| minilm-l6 | `lora:rank=8,steps=2` | 8 | 2 | 1.00 (1.00–1.00) | 0 | 0, 0 of 8 | 0, 0 of 8 | 3–3 |"
    assert line in capsys.readouterr().out
