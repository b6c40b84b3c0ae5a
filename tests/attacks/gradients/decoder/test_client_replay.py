"""The client, run again on endings: it finds the side of padding and the member of a class, and refuses wrong texts."""

from __future__ import annotations

import pytest
import torch

from unmask.attacks.gradients.decoder.attack import DecoderAttack
from unmask.attacks.gradients.decoder.client_replay import ClientReplay, replay_client
from unmask.attacks.gradients.decoder.endings import TextEnding
from unmask.defences import parse_defence
from unmask.models import Model
from unmask.protocols import observe_fedavg, observe_gradients
from unmask.recovery import Aim, Status

TEXTS = [(5, 17, 41, 250), (400, 3, 8)]
TWINS = (40, 41)


def endings_of(texts: list[tuple[int, ...]], counts: tuple[int, ...] = (1, 1)) -> list[TextEnding]:
    return [TextEnding((0, text), count, 0.0) for text, count in zip(texts, counts, strict=False)]


def run(model: Model, texts=TEXTS, seen=TEXTS, counts=(1, 1), equal=None, **options) -> ClientReplay:
    evidence = observe_gradients(model, [list(text) for text in seen], **options)
    return replay_client(evidence, model, endings_of(texts, counts), equal or {})


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_right_texts_hold_on_either_side(tiny_llama, side):
    done = run(tiny_llama, padding_side=side)
    assert done.holds
    assert [ending.node[1] for ending in done.endings] == TEXTS
    assert done.num_passes == (2 if side == "right" else 4)  # the right side is tried first


def test_counts_count(tiny_gpt2):
    seen = [*TEXTS, TEXTS[1]]
    assert run(tiny_gpt2, seen=seen, counts=(1, 2)).holds
    assert not run(tiny_gpt2, seen=seen, counts=(2, 1)).holds


def test_a_wrong_token_does_not_hold(tiny_gpt2):
    done = run(tiny_gpt2, texts=[(5, 17, 42, 250), TEXTS[1]])
    assert not done.holds
    assert done.agreement is not None


def test_nothing_to_run_is_no_agreement(tiny_gpt2):
    done = replay_client(observe_gradients(tiny_gpt2, [list(TEXTS[0])]), tiny_gpt2, [], {})
    assert (done.agreement, done.holds, done.num_passes) == (None, False, 0)


def test_the_update_tells_which_of_equal_tokens_was_seen(tiny_qwen2):
    """Equal embeddings, tied to the output layer: only the rows of their own gradients tell, and they do."""
    model = tiny_qwen2.to()
    with torch.no_grad():
        embedding = model.parameter(model.token_embedding)
        embedding[TWINS[1]] = embedding[TWINS[0]]
    wrong_member = [(5, 17, 40, 250), TEXTS[1]]
    done = run(model, texts=wrong_member, equal={40: TWINS})
    assert done.holds
    assert done.tells_equal_tokens
    assert [ending.node[1] for ending in done.endings] == TEXTS


@pytest.mark.parametrize("client", ["one step", "bf16"])
def test_a_client_that_memory_is_too_small_for_is_not_called_another_one(tiny_gpt2, monkeypatch, client):
    """It was not looked at, which the reason and the searches say."""
    evidence = observe_fedavg(tiny_gpt2, TEXTS, learning_rate=1e-3)
    if client == "bf16":
        evidence = parse_defence("bf16")(observe_gradients(tiny_gpt2, TEXTS), torch.Generator().manual_seed(1))
    control = DecoderAttack()(evidence, tiny_gpt2)
    assert control.status is Status.RECOVERED
    monkeypatch.setenv("UNMASK_MEMORY_GB", "1e-6")
    found = DecoderAttack()(evidence, tiny_gpt2)
    assert found.status is Status.PARTIAL
    assert "running this client again takes" in found.reason
    assert "as stated" not in found.reason
    assert Aim.TEXTS in control.looked_for
    assert Aim.TEXTS not in found.looked_for
