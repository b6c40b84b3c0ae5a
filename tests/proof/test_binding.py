"""Rows of several texts, or in another order: no text is certain where their contexts hardly show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unmask import parse_defence, recover_text
from unmask.evidence import Site
from unmask.models import Model
from unmask.proof.binding import are_bound
from unmask.protocols import observe_cache, observe_hidden
from unmask.recovery import Aim, Status

TEXTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]]
WRITERS = ("attn.c_proj", "self_attn.o_proj", "attention.output.dense")


def with_attention(model: Model, strength: float) -> Model:
    """A copy whose attention writes less."""
    weak = model.to()
    with torch.no_grad():
        for name, part in weak.named_parameters():
            if any(writer in name for writer in WRITERS):
                part.mul_(strength)
    return weak


def spliced(model: Model, site: str):
    """The first text's rows with the end of the second one's."""
    if site == "cache":
        evidence = observe_cache(model, TEXTS, layer=1)
    elif site == "norm":
        evidence = observe_hidden(model, TEXTS, site=Site.FINAL_NORM)
    else:
        evidence = observe_hidden(model, TEXTS, layer=2)
    parts = evidence.parts if site == "cache" else {"states": evidence.states}
    return replace(
        evidence,
        **{name: torch.cat([part[:1, :3], part[1:, 3:]], 1) for name, part in parts.items()},
        mask=evidence.mask[:1],
    )


@pytest.mark.parametrize("site", ["stream", "norm", "cache"])
@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama", "tiny_bert"])
def test_a_spliced_text_is_never_certain(name, site, request, one_thread):
    if (name, site) == ("tiny_bert", "cache"):
        return  # encoders keep none
    for strength in (0.0, 1e-5, 1.0):
        model = with_attention(request.getfixturevalue(name), strength)
        recovery = recover_text(spliced(model, site), model)
        assert not recovery.value.certain, recovery.reason
        if not strength:
            assert [text.tokens for text in recovery.value.texts] == [(5, 6, 7, 23, 24, 25)]
            assert recovery.value.token_set == {5, 6, 7, 23, 24, 25}
            assert "taken from the dump and is not proven" in recovery.reason
        elif strength == 1:
            assert Aim.TEXTS not in recovery.looked_for


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_noise_that_hides_contexts_leaves_the_order_open(tiny_gpt2, one_thread, sigma):
    """Attention is weak but seen clearly: only behind the noise rows of two texts agree."""
    model = with_attention(tiny_gpt2, 0.05)
    defend = parse_defence(f"noise:sigma={sigma},relative=true")
    for seed in range(4):
        hidden = defend(spliced(model, "stream"), torch.Generator().manual_seed(seed))
        assert not recover_text(hidden, model).value.certain
    whole = observe_hidden(model, TEXTS, layer=2)
    assert recover_text(whole, model).status is Status.RECOVERED


def test_edits_at_every_place_decide():
    """Rows that sum up what stands before them are bound; one place without a memory is enough to unbind them."""
    tokens = torch.arange(3, 43)

    def sums(texts: torch.Tensor, forgets: int = 99) -> torch.Tensor:
        seen = texts.double().cumsum(1)
        seen[:, forgets:] -= texts[:, :forgets].sum(1, keepdim=True).double() if forgets < texts.shape[1] else 0
        return torch.stack([seen, torch.full_like(seen, 1000.0)], 2)

    tolerances = torch.full((40,), 1e-4, dtype=torch.float64)
    assert are_bound(sums, tokens, tolerances, 500)
    assert not are_bound(lambda texts: sums(texts, forgets=39), tokens, tolerances, 500)
    assert not are_bound(sums, tokens, tolerances + 1, 500)
    assert are_bound(sums, tokens[:1], tolerances[:1], 500)


@pytest.mark.parametrize("length", [1, 2])
def test_a_beginning_that_the_page_does_not_bear_out_is_not_believed(tiny_llama, one_thread, length):
    """Where contexts do not show, rows behind a false beginning agree; a page of one row was certain."""
    false = [90, 91, 92]
    for strength in (0.0, 1e-6):
        model = with_attention(tiny_llama, strength)
        page = observe_cache(model, [TEXTS[0][: 3 + length]], layer=1, first_position=3)
        assert not recover_text(page, model, known_beginning=false).value.certain
    page = observe_cache(tiny_llama, [TEXTS[0][: 3 + length]], layer=1, first_position=3)
    (text,) = recover_text(page, tiny_llama, known_beginning=TEXTS[0][:3]).value.certain
    assert text.tokens == tuple(TEXTS[0][: 3 + length])
