"""Evidence of a stack of attention layers: it comes back from a file, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.attacks.outputs.attention_layers import random_stack

from unmask.errors import EvidenceError
from unmask.evidence import AttentionLayer, AttentionStackEvidence, load_evidence


@pytest.mark.parametrize("with_norms", [False, True])
def test_a_stack_comes_back(tmp_path, with_norms):
    before, X = random_stack("pd", 3, 4, 2, e=6)
    before = replace(before, layers=(before.layers[0], replace(before.layers[1], causal=True, scale=0.5)))
    before = replace(before, row_norms=X.norm(dim=1) if with_norms else None)
    after = load_evidence(before.save(tmp_path / "stack.safetensors"))
    assert type(after) is AttentionStackEvidence
    assert torch.equal(after.output, before.output)
    assert [(layer.causal, layer.scale) for layer in after.layers] == [(False, 1.0), (True, 0.5)]
    assert all(
        torch.equal(a.W, b.W) and torch.equal(a.V, b.V) for a, b in zip(after.layers, before.layers, strict=True)
    )
    assert (after.row_norms is not None) == with_norms


def test_layers_that_do_not_fit_each_other_are_refused():
    evidence, X = random_stack("pd", 3, 4, 2)
    wide = AttentionLayer(torch.eye(5), torch.eye(5))
    with pytest.raises(EvidenceError, match="layer 0 does not fit"):
        replace(evidence, layers=(wide, evidence.layers[1]))
    with pytest.raises(EvidenceError, match="layer 1 does not fit"):
        replace(evidence, output=evidence.output[:, :3])
    with pytest.raises(EvidenceError, match="at least one layer"):
        replace(evidence, layers=())
    with pytest.raises(EvidenceError, match="row_norms"):
        replace(evidence, row_norms=X.norm(dim=1)[1:])
    with pytest.raises(EvidenceError, match="output"):
        replace(evidence, output=evidence.output * torch.nan)
