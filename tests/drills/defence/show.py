"""The defence 'halve' is listed, parsed, planned, and changes updates and states."""

from __future__ import annotations

import torch
from tests.drills.shown import dry_run, group, named, texts, tiny_model

import unmask

assert "halve" in named("defences")
assert str(unmask.parse_defence("halve")) == "halve"
for channel in ("gradients", "outputs"):
    assert any("halve" in case for case in dry_run(group(channel, 'defences = ["none", "halve"]')))

model, defence = tiny_model(), unmask.parse_defence("halve")
for evidence in (unmask.observe_gradients(model, texts()), unmask.observe_hidden(model, texts(), layer=1)):
    changed = defence(evidence, torch.Generator())
    assert type(changed) is type(evidence)
    for name, tensor in evidence.named_tensors().items():
        torch.testing.assert_close(changed.named_tensors()[name], tensor / 2)
