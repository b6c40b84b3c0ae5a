import pytest
import torch

import unmask
from unmask.errors import EvidenceError


def test_samples_are_kept_in_a_file(tmp_path):
    X, answers = torch.randn(6, 3, 4), torch.randn(6)
    evidence = unmask.SampleEvidence(X, answers)
    loaded = unmask.load_evidence(evidence.save(tmp_path / "samples.safetensors"))
    assert isinstance(loaded, unmask.SampleEvidence)
    assert torch.equal(loaded.sequences, X)
    assert torch.equal(loaded.answers, answers)
    assert (len(loaded), loaded.width) == (6, 4)
    assert loaded.to("cpu").answers.device.type == "cpu"


@pytest.mark.parametrize(
    ("X", "answers", "part"),
    [
        (torch.randn(6, 4), torch.randn(6), "must be \\(samples, length, width\\)"),
        (torch.randn(6, 3, 4), torch.randn(5), "one number for each of 6"),
        (torch.full((6, 3, 4), torch.nan), torch.randn(6), "finite"),
    ],
)
def test_what_does_not_fit_is_refused(X, answers, part):
    with pytest.raises(EvidenceError, match=part):
        unmask.SampleEvidence(X, answers)
