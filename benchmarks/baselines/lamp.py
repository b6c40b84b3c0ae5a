"""LAMP: gradient matching by cosines, with moves of words that a language model weighs; our own implementation.

    x ← Adam on  mean over tensors (1 − cos(G(x), G)) + ρ·(mean ‖x_i‖ − mean ‖embedding‖)²          continuous steps
    every 75 steps, for each text: 200 orders of its words (swap two, move one, move a run, put a beginning behind),
    the one of least  distance + λ·nats a token  is taken                                              discrete steps

Notation: G the observed gradient; x (texts, length, d) embeddings; ρ `norm_weight`; λ `prior_weight`.

The attack is given its best: labels, lengths and the frame, several starts with rates of their own, and of all starts
the one whose rounded tokens have the least total. Starts: the best of 500 random ones, then of 500 orders of each.
Limits: as TAG's; the language model helps where words are known and their order is not.
Cost: `num_steps` double backward passes; every `move_every` steps `num_moves` gradients and prior scores a text.
Source: Balunović et al., LAMP, NeurIPS 2022, arXiv 2202.08827 (LAMP_cos), settings of the authors' public code.
Deviations: starts side by side; all moves of a text in one pass; the prior is what the caller has (`lamp_priors.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from baselines.embedding_search import (
    BERT_ENTRY,
    Descent,
    entry_size,
    nearest_tokens,
    random_starts,
    read_texts,
    rounded,
)
from baselines.gradient_matching import Client, Update, cosine_distance, drop_rounding, terms
from baselines.lamp_priors import Prior
from torch import Tensor

Text = tuple[int, ...]


@dataclass(frozen=True)
class Lamp:
    """The attack; `rates` one a start; `batch_size` gradients in one pass."""

    num_steps: int = 2000
    rates: tuple[float, ...] = (0.01, 0.03)
    decay: float = 0.89
    prior_weight: float = 0.2
    norm_weight: float = 1.0
    num_candidates: int = 500
    num_moves: int = 200
    move_every: int = 75
    burn_in: float = 0.1
    batch_size: int = 50
    seed: int = 0

    def __call__(self, client: Client, update: Update, prior: Prior) -> list[Text]:
        """Texts of the batch."""
        update = drop_rounding(update)
        generator = torch.Generator().manual_seed(self.seed)
        rates = torch.tensor(self.rates, device=client.model.device) * entry_size(client) / BERT_ENTRY
        usual = client.embeddings.norm(dim=-1).mean()

        def loss_of(x: Tensor) -> Tensor:
            distance = cosine_distance(terms(client, update, x, differentiable=True))
            return distance + self.norm_weight * (x.norm(dim=-1).mean((1, 2)) - usual).square()

        decay = self.decay ** (2000 / self.num_steps)  # fewer steps end at the rate of its authors' 2000
        descent = Descent(client, self._starts(client, update, generator), rates, decay, loss_of)
        for step in range(self.num_steps):
            descent.step()
            if step >= self.burn_in * self.num_steps and step % self.move_every == 1:
                descent.x.copy_(self._move(client, update, prior, descent.x, generator))
        tokens = nearest_tokens(client, descent.best)
        distance = self._distances(client, update, rounded(client, descent.best, tokens))
        nats = torch.tensor([_nats(client, prior, one) for one in tokens], device=distance.device)
        return read_texts(client, tokens[int((distance + self.prior_weight * nats).argmin())])

    def _starts(self, client: Client, update: Update, generator: torch.Generator) -> Tensor:
        """The best of the random starts, then the best order of each."""
        count = len(self.rates)
        found = random_starts(client, max(count, self.num_candidates), generator)
        best = found[self._distances(client, update, found).topk(count, largest=False).indices]
        for start in range(count):
            orders = [list(range(client.known.shape[1]))]
            orders += [_shuffle(_places(client, 0), orders[0], generator) for _ in range(self.num_candidates // count)]
            if len(client.lengths) > 1:  # one order for all texts would move the frame of the shorter ones
                orders = orders[:1]
            ordered = best[start][:, torch.tensor(orders, device=best.device)].transpose(0, 1)
            best[start] = ordered[int(self._distances(client, update, ordered).argmin())]
        return best

    def _distances(self, client: Client, update: Update, x: Tensor) -> Tensor:
        """Distances of many guesses, some at a time."""
        return torch.cat([cosine_distance(terms(client, update, part)).detach() for part in x.split(self.batch_size)])

    def _move(self, client: Client, update: Update, prior: Prior, x: Tensor, generator: torch.Generator) -> Tensor:
        """For each start and each text, the order of its words with the least total; the order as it is counts too."""
        x = x.clone()
        for start in range(len(x)):
            for row in range(x.shape[1]):
                places = _places(client, row)
                if len(places) < 2:
                    continue
                same = list(range(x.shape[2]))
                orders = torch.tensor([same, *moves(places, same, self.num_moves - 1, generator)], device=x.device)
                orders = orders.unique(dim=0)
                moved = x[start].repeat(len(orders), 1, 1, 1)
                moved[:, row] = x[start, row][orders]
                tokens = nearest_tokens(client, x[start][None])[0, row]
                nats = prior([tokens[order][: client.lengths[row]].tolist() for order in orders])
                weight = self.prior_weight / x.shape[1]
                total = self._distances(client, update, moved) + weight * torch.tensor(nats, device=x.device)
                x[start, row] = x[start, row][orders[int(total.argmin())]]
        return x


def moves(places: list[int], order: list[int], count: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Orders that differ by one of LAMP's four moves, in turn, within `places`, which follow one another."""
    first, num = places[0], len(places)
    for number in range(count):
        inner = order[first : first + num]
        i, j, k = sorted(torch.randint(num + 1, (3,), generator=generator).tolist())
        a, b = torch.randint(num, (2,), generator=generator).tolist()
        match number % 4:
            case 0:
                inner[a], inner[b] = inner[b], inner[a]
            case 1:
                inner.insert(b, inner.pop(a))
            case 2:
                inner = inner[:i] + inner[j:k] + inner[i:j] + inner[k:]
            case _:
                inner = inner[i:] + inner[:i]
        yield order[:first] + inner + order[first + num :]


def _shuffle(places: list[int], order: list[int], generator: torch.Generator) -> list[int]:
    shuffled = [places[number] for number in torch.randperm(len(places), generator=generator)]
    changed = dict(zip(places, shuffled, strict=True))
    return [changed.get(place, place) for place in order]


def _places(client: Client, row: int) -> list[int]:
    """Places of a text whose tokens are looked for; they follow one another."""
    return (client.known[row] < 0).nonzero().flatten().tolist()


def _nats(client: Client, prior: Prior, tokens: Tensor) -> float:
    scores = prior(read_texts(client, tokens))
    return sum(scores) / len(scores)
