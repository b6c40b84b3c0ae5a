"""One pass, written down: what modules were given, what changed in place, and where a run is stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unmask.models.record import Kind, first_tensor, input_of, record_pass


class Doubling(nn.Module):
    """Changes its child's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor]:
        made = self.inner(rows)
        made += rows
        return ((made @ made.transpose(-1, -2)).softmax(-1),)


def test_calls_keep_what_they_were_given_and_made():
    model, rows = Doubling(), torch.randn(2, 4, 3)
    record = record_pass(model, rows=rows)
    outer, inner = record.calls
    assert (outer.name, inner.name) == ("", "inner")
    assert outer.holds(inner)
    assert not inner.holds(outer)
    assert list(record.inside(outer)) == [inner]
    assert torch.equal(inner.input, rows)
    torch.testing.assert_close(inner.output, model.inner(rows))  # not what was added to it later
    assert [each.kind for each in record.operations] == [Kind.PRODUCT, Kind.SOFTMAX]


def test_frozen_weights_start_a_graph_all_the_same():
    model = Doubling().requires_grad_(False)
    with torch.no_grad():
        record = record_pass(model, rows=torch.randn(1, 2, 3))
    assert record.operations[0].output.requires_grad


def test_no_hook_stays_behind_even_after_an_error():
    model = Doubling()
    with pytest.raises(RuntimeError):
        record_pass(model, rows=torch.randn(2, 4, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_run_is_stopped_where_its_input_is_known():
    model, rows = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 7), nn.Linear(1, 1)), torch.randn(2, 3)
    torch.testing.assert_close(input_of(model[1], lambda: model(rows)), model[0](rows))
    with pytest.raises(RuntimeError, match="Linear was not reached"):
        input_of(nn.Linear(1, 1), lambda: model[0](rows))


def test_the_first_tensor_of_anything():
    tensor = torch.zeros(2)
    assert first_tensor({"x": (None, [1, {"y": tensor}])}) is tensor
    assert first_tensor(("text", 3)) is None
