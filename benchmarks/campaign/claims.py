"""Whether what an attack claims about a batch of texts is true. The only place that compares with the secret."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from scipy.stats import poisson

from campaign.outcome import FALSE_COUNT, FALSE_TEXT, FALSE_TOKEN, FALSELY_RECOVERED, UNCOVERED_CLASS, Fault
from unmask.recovery import AmbiguityKind, RecoveredText, RecoveredTexts, Recovery, Status

_BY_CHANCE = 1e-4  # so many false tokens, or more, would be found this often if the expected number were right

Tokens = tuple[int, ...]


def false_claims(
    recovery: Recovery[RecoveredTexts],
    batch: Sequence[Tokens],
    seen_tokens: Collection[int] = (),
    equal_tokens: Sequence[Collection[int]] = (),
) -> list[Fault]:
    """Every claim of a recovery that the batch contradicts.

    `seen_tokens` are those that the model saw besides the batch's (padding, masks); `equal_tokens` are classes with
    equal embeddings: where one of a class occurs, naming another one is right.
    """
    faults = []
    held = Counter(batch)
    if recovery.status is Status.RECOVERED and Counter(recovery.value.expand()) != held:
        faults.append(Fault(FALSELY_RECOVERED, f"RECOVERED {recovery.value.expand()}, the batch is {list(batch)}"))
    faults += _false_texts(recovery.value, held)
    faults += _false_classes(recovery.value.texts, held)
    faults += _false_tokens(recovery, batch, seen_tokens, equal_tokens)
    return faults


def num_found(recovery: Recovery[RecoveredTexts], batch: Sequence[Tokens]) -> int:
    """How many texts of the batch are certain."""
    return (_certain(recovery.value) & Counter(batch)).total()


def _certain(value: RecoveredTexts) -> Counter[Tokens]:
    """Certain texts with how often they are claimed; one may be listed several times."""
    return Counter(tokens for text in value.certain for tokens in [text.tokens] * text.count)


def _false_texts(value: RecoveredTexts, held: Counter[Tokens]) -> list[Fault]:
    """Certain texts that the batch lacks or holds another number of times; more of them than there are texts."""
    faults = []
    open_counts = {text.tokens for text in value.texts if _leaves_count_open(text)}
    for tokens, count in _certain(value).items():
        if tokens not in held:
            faults.append(Fault(FALSE_TEXT, f"certain {tokens} ×{count} is not in the batch {_list(held)}"))
        elif count > held[tokens] or (count < held[tokens] and tokens not in open_counts):
            said = "at least " if tokens in open_counts else ""
            faults.append(Fault(FALSE_COUNT, f"certain {tokens} {said}×{count} occurs ×{held[tokens]}"))
    claimed = sum(text.count for text in value.texts if text.certain or is_class(text))
    if claimed > held.total():
        faults.append(Fault(FALSE_COUNT, f"{claimed} texts are claimed, the batch holds {held.total()}"))
    return faults


def _false_classes(texts: Sequence[RecoveredText], held: Counter[Tokens]) -> list[Fault]:
    """Texts with alternatives of which none is in the batch, or fewer than are claimed."""
    faults = []
    for text in filter(is_class, texts):
        covered = sum(number for tokens, number in held.items() if text.covers(tokens))
        what = f"{text.tokens} ×{text.count} or {_names(text)}"
        if not covered:
            faults.append(Fault(UNCOVERED_CLASS, f"{what}: no text of the batch {_list(held)} is covered"))
        elif text.count > covered:
            faults.append(Fault(FALSE_COUNT, f"{what}: {covered} texts of the batch {_list(held)} are covered"))
    return faults


def is_class(text: RecoveredText) -> bool:
    """Whether a text claims that the batch holds it or an alternative; a guess with an open count claims nothing."""
    return not text.certain and any(ambiguity.kind is not AmbiguityKind.COUNT for ambiguity in text.ambiguities)


def _false_tokens(
    recovery: Recovery[RecoveredTexts],
    batch: Sequence[Tokens],
    seen_tokens: Collection[int],
    equal_tokens: Sequence[Collection[int]],
) -> list[Fault]:
    """Tokens of a certified bag that don't occur, and more of a statistical one than the number that it expects."""
    if not recovery.certificate.holds:
        return []
    occurs = {token for text in batch for token in text} | set(seen_tokens)
    for equal in equal_tokens:
        if occurs & set(equal):
            occurs |= set(equal)
    false = sorted(recovery.value.token_set - occurs)
    faults = []
    expected = recovery.certificate.details.get("expected_false", 0.0)
    if false and poisson.sf(len(false) - 1, expected) < _BY_CHANCE:
        shown = f"{false[:8]}{' …' if len(false) > 8 else ''}"
        said = f"{len(false)} of {len(recovery.value.token_set)} certified tokens are false: {shown}"
        faults.append(Fault(FALSE_TOKEN, said))
    if empty := [tokens for tokens in recovery.value.token_classes if not occurs & set(tokens)]:
        faults.append(Fault(FALSE_TOKEN, f"none of the tokens {empty[0]} occurs, and one of them should"))
    return faults


def _leaves_count_open(text: RecoveredText) -> bool:
    return any(ambiguity.kind is AmbiguityKind.COUNT for ambiguity in text.ambiguities)


def _names(text: RecoveredText) -> str:
    return ", ".join(sorted({ambiguity.kind.value for ambiguity in text.ambiguities}))


def _list(held: Counter[Tokens]) -> list[Tokens]:
    return list(held.elements())
