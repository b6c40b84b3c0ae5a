"""A list of expected texts is compared with vectors: what is on it is found, and nothing else."""

from __future__ import annotations

import pytest
import torch
from tests.sampling import sample

from unmask.attacks.outputs.vectors.known_texts import KnownTextsAttack, likeness_of
from unmask.attacks.recover import recover_text
from unmask.errors import InputError
from unmask.evidence import VectorEvidence
from unmask.protocols import observe_next_token, observe_vectors
from unmask.recovery import Status

CODES = tuple(f"The alarm code is {number}." for number in range(2570, 2590))


def test_a_template_with_every_value(minilm, tmp_path):
    path = tmp_path / "codes.txt"
    path.write_text("\n".join((*CODES, "", CODES[0])), encoding="utf-8")
    seen = observe_vectors(minilm, [CODES[10], "It is somewhere else."])
    recovery = recover_text(seen, minilm, attack=f"known-texts:file={path}")
    assert recovery.status is Status.PARTIAL
    (text,) = recovery.value.texts
    assert (text.row, text.certain) == (0, True)
    assert "2580" in text.text
    assert "says nothing of other texts" in recovery.reason


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_few_digits_still_tell_texts_apart(minilm, dtype):
    recovery = recover_text(
        observe_vectors(minilm, CODES[:2], dtype=dtype), minilm, attack=KnownTextsAttack(texts=CODES)
    )
    assert recovery.status is Status.RECOVERED
    assert [text.text[-15:-7] for text in sorted(recovery.value.texts, key=lambda text: text.row)]


def test_prefixes_stand_in_front(minilm):
    seen = observe_vectors(minilm, CODES[:2], prefix="query: ")
    assert recover_text(seen, minilm, attack=KnownTextsAttack(texts=CODES)).status is Status.RECOVERED


@sample("log_probabilities", [False, True], [True])
def test_a_row_of_logits_tells_which_prompt(low_smollm2, log_probabilities):
    prompts = tuple(f"Customer {name} asks:" for name in ("Ada", "Bo", "Cy", "Dee"))
    seen = observe_next_token(low_smollm2, [prompts[2]], log_probabilities=log_probabilities)
    recovery = recover_text(seen, low_smollm2, attack=KnownTextsAttack(texts=prompts))
    assert [(text.text, text.certain) for text in recovery.value.texts] == [(prompts[2], True)]


def test_vectors_of_no_text_give_nothing(minilm):
    noise = torch.randn(4, 384, generator=torch.Generator().manual_seed(0))
    evidence = VectorEvidence.of(minilm, torch.nn.functional.normalize(noise, dim=1))
    recovery = recover_text(evidence, minilm, attack=KnownTextsAttack(texts=CODES))
    assert recovery.status is Status.NOTHING_FOUND
    assert not recovery.value.texts


def test_what_is_missing_is_said(minilm, tmp_path):
    seen = observe_vectors(minilm, CODES[:1])
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    for attack, message in (
        ("known-texts", "one a line"),
        (f"known-texts:file={tmp_path / 'none.txt'}", "cannot be read"),
        (f"known-texts:file={tmp_path / 'empty.txt'}", "no text in it"),
        (f"known-texts:file={tmp_path / 'bytes.txt'}", "not UTF-8"),
        (KnownTextsAttack(texts=("\u200b", (101, 102))), "a token of its own"),
    ):
        with pytest.raises(InputError, match=message):
            recover_text(seen, minilm, attack=attack)


def test_frequent_tokens_are_known(minilm):
    likeness = likeness_of(minilm)
    (the,) = minilm.encode("the")[1:-1]
    assert int(likeness.log_prior.argmax()) in {the, *minilm.encode(".")[1:-1]}
    assert likeness.rows.shape[0] == minilm.vocab_size
