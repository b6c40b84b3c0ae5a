"""The texts behind vectors: fitted effects propose edits, forward passes decide; best first, many vectors at once.

    from the empty text:  take the most promising text that was not expanded yet
      1. test it without each of its tokens, and with the likeliest tokens exchanged and put in (proposals.py)
      2. test sets of these edits whose measured effects add up to what is missing (combinations.py)
      3. where it is close, test its words in other orders and forms (orders.py, respellings.py)
      in vain: the closest text again, four times as wide; then another attempt, which begins with the text that this
      one ended with, without its doubtful tokens (restarts.py)
    until the distance is at rounding

Limits: a search; it ends with the closest text that was found.
Cost: some 7,000 texts for 5 to 16 tokens, a million for 17 to 32 (means; docs/vectors.md).
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.attacks.outputs.vectors.attempts import Attempt, AttemptSettings
from unmask.attacks.outputs.vectors.candidate_edits import Edits, deletions, moves
from unmask.attacks.outputs.vectors.combinations import CombinationSettings, combine_edits
from unmask.attacks.outputs.vectors.edits import TextBatch, TextHash, concatenate, first_of_each
from unmask.attacks.outputs.vectors.embedder import Embedder
from unmask.attacks.outputs.vectors.language_prior import LanguagePrior
from unmask.attacks.outputs.vectors.orders import reorder
from unmask.attacks.outputs.vectors.proposals import Proposer
from unmask.attacks.outputs.vectors.respellings import Respeller
from unmask.attacks.outputs.vectors.restarts import Ends, drop_doubtful

_USUAL_TEXTS = 7_000  # that a search tests (see Cost)
_NUM_CLOSE = 64  # texts that are compared with the one that was found
_SALT = 0x1E3779B97F4A7C15  # an odd number: attempts number equal texts differently
_NUM_EXACT = 4  # closest texts of an expansion that are measured exactly
_NEAR = 0.5  # of the vector's length: at this distance other orders are tested
_SHORT = 12  # tokens of a text of which any token or piece may go anywhere
_FARTHEST = 6  # places that a token of a longer text may go
_NUM_ORDERS = {False: 400, True: 800}  # that are tested of one text, by whether a language model takes part
_LARGEST_EFFECTS = 2**28  # numbers: texts that are expanded together times their edits times the width


@dataclass
class VectorSearch:
    """The search for one vector: one attempt after the other, and the closest text of all of them."""

    vector: Float[Tensor, " d"]
    is_reached: Callable[[Float[Tensor, "k d"]], Tensor]  # which vectors are the one that was stored
    attempts: Sequence[AttemptSettings]
    number: int = 0  # of the attempt
    attempt: Attempt | None = None
    text: tuple[int, ...] = ()
    distance: float = float("inf")
    num_texts: int = 0
    has_reached: bool = False
    close: TextBatch | None = None  # the closest texts that were tested when it ended
    ends: Ends = field(default_factory=Ends)

    @property
    def is_done(self) -> bool:
        """Whether the vector is reached, or no attempt is left."""
        return self.has_reached or self.number >= len(self.attempts)

    @property
    def share(self) -> float:
        """How far a search is by the texts that it tested: half at as many as one takes on average."""
        num_texts = self.num_texts + (self.attempt.num_texts if self.attempt else 0)
        return num_texts / (num_texts + _USUAL_TEXTS)

    def note_closest(self, text: tuple[int, ...], vector: Float[Tensor, " d"]) -> None:
        """The closest text after an expansion; the search, or an attempt, may end with it."""
        assert self.attempt is not None
        distance = float((self.vector - vector).norm())
        self.attempt.note_closest(distance)
        self.has_reached = bool(self.is_reached(vector[None])[0]) and bool(text)
        if distance < self.distance or self.has_reached:
            self.text, self.distance = text, distance
        if self.attempt.has_ended or self.has_reached:
            closest = self.attempt.distances.topk(min(_NUM_CLOSE, len(self.attempt.distances)), largest=False)
            close = self.attempt.texts[closest.indices]
            self.close = close[close.lengths > 0]
            self.num_texts += self.attempt.num_texts
            self.ends.by_distance.update(zip(close[:1].as_tuples(), closest.values[:1].tolist(), strict=True))
            if self.attempt.promising is not None:
                self.ends.by_key[self.attempt.promising] = self.attempt.best_key
            self.attempt, self.number = None, self.number + 1


@dataclass
class TextSearch:
    """Everything that does not depend on the vectors."""

    embedder: Embedder
    proposer: Proposer
    combinations: CombinationSettings = field(default_factory=CombinationSettings)
    language: Callable[[], LanguagePrior | None] = lambda: None
    hash_of: TextHash = field(init=False)
    respell: Respeller = field(init=False)
    num_attempts: int = field(default=0, init=False)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), init=False)

    def __post_init__(self) -> None:
        self.hash_of = TextHash(self.embedder.model.vocab_size, self.embedder.model.device)
        self.respell = Respeller(self.embedder.model)

    @torch.no_grad()
    def run(
        self, searches: list[VectorSearch], go_on: Callable[[], bool] = lambda: True, at_once: int | None = None
    ) -> None:
        """All searches to their ends, `at_once` in one batch; `go_on` is asked after every expansion.

        Every vector gets its first attempt before any gets a second, so that hard ones do not use up all the time.
        """
        while active := sorted((s for s in searches if not s.is_done), key=lambda search: search.number)[:at_once]:
            for search in active:
                if search.attempt is None:
                    search.attempt = self.begin(search, search.attempts[search.number])
            attempts = [search.attempt for search in active if search.attempt is not None]
            self.expand(attempts)
            for search, (texts, vectors) in zip(active, self.embed_closest(attempts), strict=True):
                reached = search.is_reached(vectors).nonzero()[:, 0]
                best = int(reached[0]) if len(reached) else int((search.vector - vectors).norm(dim=1).argmin())
                search.note_closest(texts[slice(best, best + 1)].as_tuples()[0], vectors[best])
            if not go_on():
                return

    def begin(self, search: VectorSearch, settings: AttemptSettings) -> Attempt:
        """An attempt; by frequencies of tokens where there is no language model to ask."""
        if settings.uses_language and self.language() is None:
            settings = replace(settings, nats=None)
        self.num_attempts += 1
        salt = _SALT * self.num_attempts % 2**63
        attempt = Attempt(search.vector, settings, self.proposer.effects.log_prior, salt=salt)
        text = search.ends.choose(self.generator) if settings.dropped else ()
        if len(text) > 2:
            language = self.language() if settings.uses_language else None
            votes = search.ends.votes(text)
            start = drop_doubtful(text, search.vector, settings.dropped, votes, self.embedder, language, self.generator)
            owners = torch.zeros(1, dtype=torch.long, device=start.tokens.device)
            self._record([attempt], owners, start, (search.vector - self.embedder(start)).norm(dim=1))
            attempt.widths[attempt.salt] = 1  # nothing grows from the empty text
        return attempt

    def expand(self, attempts: list[Attempt]) -> None:
        """Expand the most promising texts of all attempts; those with a language model apart from the others."""
        for reads in (False, True):
            own = [attempt for attempt in attempts if attempt.settings.uses_language is reads]
            language = self.language() if reads and own else None
            if language is not None:
                _read_shortlists(own, language)
            chosen: dict[tuple[int, bool], list[tuple[int, TextBatch]]] = {}  # the empty text has edits of its own
            for k, attempt in enumerate(own):
                for row, width in attempt.choose():
                    text = attempt.texts[slice(row, row + 1)]  # now, as tests change the pool
                    chosen.setdefault((width, attempt.is_empty(row)), []).append((k, text))
            for width, is_empty in sorted(chosen):
                some = chosen[width, is_empty]
                texts = concatenate([text for _, text in some])
                owners = torch.tensor([k for k, _ in some], device=texts.tokens.device)
                for part in torch.arange(len(texts), device=owners.device).split(self._at_once(texts, width)):
                    self._test_edits(own, owners[part], texts[part], width, language)

    def _at_once(self, texts: TextBatch, width: int) -> int:
        settings = self.proposer.settings
        edits = (texts.tokens.shape[1] + 1) * (settings.exchanges + settings.insertions) * width + 100
        return max(1, _LARGEST_EFFECTS // (edits * self.proposer.effects.rows.shape[1]))

    def _test_edits(
        self,
        attempts: list[Attempt],
        owners: Int[Tensor, " c"],
        texts: TextBatch,
        width: int,
        language: LanguagePrior | None,
    ) -> None:
        seen = torch.stack([attempt.vector for attempt in attempts])[owners]
        texts = TextBatch(texts.tokens[:, : max(1, int(texts.lengths.max()))])
        vectors = self.embedder(texts)
        removed = deletions(texts)
        shorter, without = self._test_singly(texts, removed, vectors)
        local = None
        if language is not None and int(texts.lengths.max()):
            local = language.log_next(texts, self.proposer.effects.log_prior)
        edits = self.proposer(texts, seen, vectors, without, width, local)
        is_near = (seen - vectors).norm(dim=1) < _NEAR * seen.norm(dim=1)
        if width == 1 and bool(is_near.any()):
            longest = texts.tokens.shape[1]
            edits = edits.beside(moves(texts, is_near, longest if longest <= _SHORT or language else _FARTHEST))
        changed, after = self._test_singly(texts, edits, vectors)
        effects = torch.cat([without, after], 1) - vectors[:, None]
        sets = combine_edits(removed.beside(edits), effects, seen - vectors, self.combinations)
        rows, columns = sets.valid.nonzero(as_tuple=True)
        together = [(rows, texts.edit(rows, sets.slots[rows, columns], sets.values[rows, columns]))]
        near = (is_near & (texts.lengths > 1)).nonzero()[:, 0]
        if len(near):
            others = [self.respell(texts[near], widely=width > 1)]
            if width == 1:
                at_most = _NUM_ORDERS[language is not None]
                others.append(reorder(texts[near], self.respell.continues, at_most, self.generator))
            together += [(near[rows], batch) for rows, batch in others]
        for rows, tried, found in (shorter, changed):
            self._record(attempts, owners[rows], tried, (seen[rows] - found).norm(dim=1))
        rows, tried = torch.cat([rows for rows, _ in together]), concatenate([batch for _, batch in together])
        is_new = self._is_new(attempts, owners[rows], tried)
        rows, tried = rows[is_new], tried[is_new]
        if len(rows):
            self._record(attempts, owners[rows], tried, (seen[rows] - self.embedder(tried)).norm(dim=1))

    def _test_singly(self, texts: TextBatch, edits: Edits, vectors: Tensor) -> tuple[Tried, Float[Tensor, "c k d"]]:
        """Make edits one by one: the texts with their vectors, and the vectors in the edits' places."""
        rows, columns = edits.valid.nonzero(as_tuple=True)
        tried = texts.edit(rows, edits.slots[rows, columns], edits.values[rows, columns])
        found = vectors[:, None].repeat(1, edits.slots.shape[1], 1)
        after = self.embedder(tried) if len(rows) else vectors[:0]
        found[rows, columns] = after
        return (rows, tried, after), found

    def _is_new(self, attempts: list[Attempt], owners: Int[Tensor, " k"], texts: TextBatch) -> Bool[Tensor, " k"]:
        """Which texts their attempts have not tested yet; of equal ones the first."""
        different, first = first_of_each(self._hash(attempts, owners, texts))
        is_new = torch.zeros(len(texts), dtype=torch.bool, device=owners.device)
        tested = torch.cat([attempt.tested for attempt in attempts])
        is_new[first[~torch.isin(different, tested)]] = True
        return is_new & (texts.lengths > 0)

    def _record(
        self, attempts: list[Attempt], owners: Int[Tensor, " k"], texts: TextBatch, distances: Float[Tensor, " k"]
    ) -> None:
        """Give each attempt the texts that it has not seen yet."""
        if not len(owners):
            return
        for number, count in enumerate(torch.bincount(owners, minlength=len(attempts)).tolist()):
            attempts[number].num_texts += count
        new = self._is_new(attempts, owners, texts).nonzero()[:, 0]
        new = new[owners[new].argsort(stable=True)]
        hashes = self._hash(attempts, owners[new], texts[new])
        counts = torch.bincount(owners[new], minlength=len(attempts)).tolist()
        parts = zip(texts.tokens[new].split(counts), distances[new].split(counts), hashes.split(counts), strict=True)
        for attempt, (tokens, off, of) in zip(attempts, parts, strict=True):
            if len(tokens):
                attempt.add(TextBatch(tokens), off, of)

    def _hash(self, attempts: list[Attempt], owners: Int[Tensor, " k"], texts: TextBatch) -> Int[Tensor, " k"]:
        """Numbers of texts, others for every attempt."""
        salts = torch.tensor([attempt.salt for attempt in attempts], device=owners.device)
        return self.hash_of(texts) + salts[owners]

    def embed_closest(self, attempts: list[Attempt]) -> list[tuple[TextBatch, Float[Tensor, "k d"]]]:
        """The closest texts of each attempt with their exact vectors, all of them in one batch."""
        texts = []
        for attempt in attempts:
            rows = attempt.distances.topk(min(_NUM_EXACT + 1, len(attempt.distances)), largest=False).indices
            some = attempt.texts[rows]
            texts.append(some[some.lengths > 0])
        vectors = self.embedder.precise(concatenate(texts))
        return list(zip(texts, vectors.split([len(batch) for batch in texts]), strict=True))


Tried = tuple[Int[Tensor, " k"], TextBatch, Float[Tensor, "k d"]]  # rows that were edited, the texts, their vectors


def _read_shortlists(attempts: list[Attempt], language: LanguagePrior) -> None:
    """Let the language model read what it has not read, of all attempts at once."""
    rows = [attempt.unread() for attempt in attempts]
    if not any(map(len, rows)):
        return
    texts = concatenate([attempt.texts[index] for attempt, index in zip(attempts, rows, strict=True)])
    losses = iter(language.log_losses(texts).tolist())
    for attempt, index in zip(attempts, rows, strict=True):
        attempt.read({h: next(losses) for h in attempt.hashes[index].tolist()})
