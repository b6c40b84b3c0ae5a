"""What is said of prompts that were read: status, certificate, cost."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.attacks.claims import claim_nothing
from unmask.attacks.outputs.prompts.equal_tokens import equal_tokens_ambiguity
from unmask.attacks.outputs.prompts.position_search import LOUDEST
from unmask.attacks.outputs.prompts.seen_text import BeginningStatus, ReadText
from unmask.attacks.run import Run
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models.adapter import Model
from unmask.recovery import (
    Aim,
    Ambiguity,
    AmbiguityKind,
    Certificate,
    RecoveredText,
    RecoveredTexts,
    Recovery,
    Search,
    Status,
)
from unmask.wording import count_noun

_CLAIM = (
    "The state of every certain token, recomputed from the recovered tokens alone, equals the observed one. The "
    "smallest rejected error is that of the closest other token tested."
)
_CLAIM_OF_ORDER = "Their order and positions are taken from the dump and are not proven."
_CLAIM_OF_FACTOR = "All states were divided by one number before, which the first reading told."
_CLAIM_OF_ONE_TEXT = "That they are of one text is taken from the dump and is not proven."
_COUNTLESS = 100.0  # times its norm
_ANOTHER = "the position, the layer or the model may be wrong"


def claim_prompts(texts: Sequence[ReadText], model: Model, used: tuple[str, ...], run: Run) -> Recovery[RecoveredTexts]:
    """The recovery of a batch, certain texts first. Tokens that were given are part of texts, and not recovered."""
    recovered = sorted(
        (_as_recovered_text(text, model) for text in texts if text.tokens), key=lambda text: not text.certain
    )
    certain_tokens = [token for text in texts for token in text.tokens if token.certain]
    proven_tokens = [token for text in texts for token in text.tokens if token.proven]
    classes = tuple(dict.fromkeys(token.equals for token in proven_tokens if token.equals))
    status = _status(texts)
    nothing = Certificate.none("no token is the only one with its state")
    return Recovery(
        value=RecoveredTexts(tuple(recovered), frozenset(token.token for token in certain_tokens), classes),
        status=status,
        reason=_reason(texts),
        certificate=_certificate(texts) if status.conclusive else nothing,
        cost=run.cost(candidates=sum(text.num_candidates for text in texts)),
        used=used,
        searches=tuple(search for text in texts for search in _searches(text)),
    )


def _searches(text: ReadText) -> tuple[Search, ...]:
    drowned = text.nearest is not None and text.nearest.is_drowned
    return searches_of_rows(text.proven, text.is_bound or (text.is_exact and not text.is_open), drowned)


def searches_of_rows(proven: bool, listed: bool, drowned: bool) -> tuple[Search, ...]:
    """How far one text was looked for: to its end if it is known, or if nothing in it is nearer than chance.

    Of a proven text whose rows may be of any texts, what is open is not `listed`.
    """
    return (
        Search(Aim.TOKENS, unconfirmed=not (proven or drowned)),
        Search(Aim.TEXTS, unconfirmed=not ((proven and listed) or drowned)),
    )


def refuse_states(run: Run, evidence: HiddenEvidence, model: Model, needed: str) -> Recovery[RecoveredTexts]:
    """States that an attack does not apply to."""
    seen = f"'{evidence.site.value}' of a {'causal' if model.causal else 'bidirectional'} model"
    needs = f"the stream of a {needed} model ('{Site.STREAM.value}' or '{Site.FINAL_NORM.value}')"
    return claim_nothing(run, Status.NOT_APPLICABLE, f"this attack needs {needs}; it got states at {seen}", ("states",))


def _as_recovered_text(text: ReadText, model: Model) -> RecoveredText:
    known = (*text.before, *text.given)
    tokens = (*known, *(token.token for token in text.tokens))
    worst = max(token.distance for token in text.tokens)
    ambiguities = tuple(
        equal_tokens_ambiguity(model, position, token.equals, are_equal=not (token.rivals or token.is_crowded))
        for position, token in enumerate(text.tokens, start=len(known))
        if token.equals and text.proven and text.is_bound
    )
    if text.is_open and text.proven and text.is_bound:
        ambiguities = (Ambiguity(AmbiguityKind.OPEN_BEGINNING, _what_is_open(text)), *ambiguities)
    decoded, given = model.decode(tokens), len(known)
    return RecoveredText(tokens, decoded, text.certain, worst, ambiguities=ambiguities, num_given=given)


def _what_is_open(text: ReadText) -> str:
    """What is said of a text that is seen from a later position on."""
    why = f"it is seen from position {text.first_position} on, and not what comes before"
    known = "; the known beginning could not be tested, because nothing that is seen depends on it"
    return why + known if text.before else why


def _status(texts: Sequence[ReadText]) -> Status:
    if not any(token.certain for text in texts for token in text.tokens):
        is_open = any(text.proven and text.tokens for text in texts)
        return Status.NOT_IDENTIFIABLE if is_open else Status.NOTHING_FOUND
    return Status.RECOVERED if all(text.certain for text in texts) else Status.PARTIAL


def _certificate(texts: Sequence[ReadText]) -> Certificate:
    certain = [token for text in texts for token in text.tokens if token.certain]
    worst = max(certain, key=lambda token: token.distance / token.tolerance)
    refused = [token.runner_up for token in certain if token.runner_up is not None]
    details = {
        "noise": max(text.noise for text in texts),
        "jacobians": float(sum(text.num_jacobians for text in texts)),
        "candidates_a_token": sum(text.num_candidates for text in texts) / len(certain),
    }
    claims = [_CLAIM]
    claims += [] if all(text.is_placed for text in texts) else [_CLAIM_OF_ORDER]
    claims += [] if all(text.is_bound for text in texts) else [_CLAIM_OF_ONE_TEXT]
    claims += [_CLAIM_OF_FACTOR] if any(text.factor != 1 for text in texts) else []
    return Certificate(" ".join(claims), worst.distance, worst.tolerance, min(refused, default=None), details)


def _reason(texts: Sequence[ReadText]) -> str:
    num_exact = sum(text.is_exact and bool(text.tokens) for text in texts)
    noise = max((text.noise for text in texts), default=0.0)
    proven = ", every token proven by its own state" if num_exact == len(texts) else ""
    parts = [f"texts read to the end: {num_exact} of {len(texts)}{proven}"]
    parts += _about_positions(texts)
    parts += _about_beginnings(texts)
    if factor := next((text.factor for text in texts if text.factor != 1), None):
        parts.append(f"everything that was seen is multiplied by {factor:.3g}, one factor, which was taken out")
    parts += _about_stops(texts)
    open_texts = sum(text.proven and not text.is_exact for text in texts)
    if open_texts:
        coarse = any(token.rivals or token.is_crowded for text in texts for token in text.tokens)
        why = "the evidence is too coarse" if coarse else "they have equal embeddings"
        parts.append(f"texts proven except for tokens that no state tells apart: {open_texts}, because {why}")
    guessed = sum(token.is_guess for text in texts for token in text.tokens)
    if guessed:
        parts.append(
            f"tokens that are guesses from single states: {guessed}; states also depend on the tokens before this "
            "page, which are not known, so nothing could be recomputed (a known beginning up to the page would help)"
        )
    if different := sum(text.is_mismatch for text in texts):
        parts.append(
            f"in {count_noun(different, 'text')} the errors of the closest tokens are not noise, so none is proven: "
            f"{_ANOTHER}"
        )
    doubtful = sum(
        not (token.proven or token.is_guess or token.is_nearest)
        for text in texts
        if not text.is_mismatch
        for token in text.tokens
    )
    if doubtful:
        parts.append(f"for {count_noun(doubtful, 'token')} the closest one tested is shown, but the noise leaves doubt")
    if noise >= _COUNTLESS:  # a row of zeros has no norm
        parts.append("the states are zero, or next to nothing beside their noise, so nothing can be claimed")
    elif noise > LOUDEST:
        parts.append(f"the states hold noise of {noise:.0%} of their norm, beyond which nothing can be claimed")
    elif noise > 0 and not different:
        parts.append(f"the states are rounded or noisy, by {noise:.1%} of their norm")
    return "; ".join(parts) + "."


def _about_stops(texts: Sequence[ReadText]) -> list[str]:
    """Where reading stopped, and what the directions of states say behind that."""
    sentences = []
    stopped = [(number, text, text.stopped) for number, text in enumerate(texts, 1) if text.stopped is not None]
    if stopped:
        number, text, after = stopped[0]
        sentences.append(
            f"reading stopped after {after} of {count_noun(text.length, 'token')} of text {number}: none of the tested "
            f"tokens agrees with the next state{'' if after else f'; {_ANOTHER}'}"
        )
    if nearest := sum(token.is_nearest for text in texts for token in text.tokens):
        shown = count_noun(nearest, "token")
        sentences.append(f"for {shown} the one whose state points nearest to that seen is shown, without a proof")
    if drowned := sum(text.nearest is not None and text.nearest.is_drowned for text in texts):
        sentences.append(
            f"in {count_noun(drowned, 'text')} no token's state is nearer than chance has it: noise, or what is left "
            "out, hides all of them"
        )
    return sentences


def _about_positions(texts: Sequence[ReadText]) -> list[str]:
    """Where texts are seen from, and whether that is proven."""
    opened = [text for text in texts if text.is_open and text.tokens]
    sentences = [f"for {count_noun(len(opened), 'text')}: {_what_is_open(opened[0])}"] if opened else []
    if any(text.tokens and not text.is_placed for text in texts):
        sentences.append(
            "the order and positions of the tokens are taken from the dump and are not proven: a token looks the "
            "same at every position, so rows may be missing or in another order, and no text is certain"
        )
    else:
        sentences += dict.fromkeys(text.why_unbound for text in texts if text.tokens and text.why_unbound)
    return sentences


def _about_beginnings(texts: Sequence[ReadText]) -> list[str]:
    """What became of the known beginning."""
    given = sum(len(text.given) for text in texts)
    sentences = [f"tokens that were given, agree with their states and are not counted: {given}"] if given else []
    bad = (BeginningStatus.WRONG, BeginningStatus.DOUBTED, BeginningStatus.TOO_SHORT, BeginningStatus.UNSEEN)
    for status in bad:
        if number := sum(text.beginning is status for text in texts):
            sentences.append(f"for {count_noun(number, 'text')}: {status.value[0].lower()}{status.value[1:-1]}")
    return sentences
