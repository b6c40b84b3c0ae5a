"""From heads at one y to their whole W: column after column, each checked by predictions before it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unmask.attacks.queries.many_heads.heads_at_point import HeadsAtPoint
from unmask.attacks.queries.many_heads.isolation import Isolation
from unmask.attacks.queries.resolution import NoPlane
from unmask.attacks.run import Run

_BATCH_BYTES = 2**25  # of tokens that are probed with at once
_MOST_TRIES = 14
_GAP = 10.0  # between the last singular value and the first that is noise: trained heads may have none in float32
_SHARE = 0.4  # of the step that would turn a unit on
_MOST_MOVED = 0.05  # of W y: a second measurement that differs more from the first was disturbed by other heads


@dataclass(eq=False)
class Columns:
    """Columns of W of every unit; those that were not learned are NaN.

        W_k e_j = (W_k(y + δ·e_j) − W_k y)/δ,   j ≥ 1;      W_k e_0 = (W_k y − Σ_{j≥1} y_j·W_k e_j)/y_0

    Notation: y, w_k = W_k y those of the view; δ small enough that other units stay off. Once the columns of a unit
    have a rank r below their number, only the r directions of their span are probed.
    Limits: |1/δ| is lost in digits, 3 to 5 for 8 to 32 heads; `polish` measures again with |δ| = 1 and takes it back.
    Cost: units·width queries a column, units·rank once the rank is known, and three more a column.
    """

    view: HeadsAtPoint
    run: Run
    W: Float[Tensor, "k d d"] = field(init=False)
    spans: list[Float[Tensor, "d r"] | None] = field(init=False)

    def __post_init__(self) -> None:
        num_units, width = self.view.w.shape
        self.W = torch.full((num_units, width, width), torch.nan, dtype=torch.float64, device=self.view.w.device)
        self.spans = [None] * num_units

    def learn(self) -> None:
        """All columns. What is known so far is in `W` at any time."""
        width = len(self.view.y)
        todo, done = torch.arange(1, width, device=self.W.device), 0
        while len(todo):
            size = min(max(1, done // 8), self._most_at_once())
            self._learn_some(todo[:size], self._reach())
            todo, done = todo[size:], done + size
            self._find_spans()
            self.run.progress("learning columns of W", done, width - 1)
        y = self.view.y
        self.W[:, :, 0] = (self.view.w - self.W[:, :, 1:] @ y[1:]) / y[0]

    def polish(self) -> None:
        """Measure again from points that are made for each column, which takes the factor 1/δ back."""
        view, width = self.view, len(self.view.y)
        for j in range(1, width):
            y = view.y.clone()
            y[j] += 1
            try:
                isolation = Isolation.at(view.units, self.W @ y, view.isolation.resolution)
                w = isolation.columns(view.pairs, y[None], self.spans)
                off = isolation.misprediction(view.pairs, y[None], w, self.run.generator)
            except NoPlane:
                continue
            moved = float((w[0] - self.W @ y).norm() / w[0].norm())
            if float(off[0]) < view.isolation.allowed and moved < _MOST_MOVED:
                self.W[:, :, j] = w[0] - view.w
            self.run.progress("measuring columns again", j, width - 1)
        self.W[:, :, 0] = (view.w - self.W[:, :, 1:] @ view.y[1:]) / view.y[0]

    @property
    def ranks(self) -> list[int]:
        """The rank of every unit's W."""
        return [self.W.shape[1] if span is None else span.shape[1] for span in self.spans]

    def _reach(self) -> float:
        """δ at which most columns leave the other units off, going by the columns that are known.

        A step along e_j turns a unit on where δ·(W_k e_j)ᵀw_k = −|w_k|², which is soon if W_k is nearly of rank one.
        """
        known = self.W[0, 0].isfinite()
        turns = (self.W[:, :, known] * self.view.w[:, :, None]).sum(1).abs() / self.view.w.square().sum(1)[:, None]
        often = float(turns.max(0).values.quantile(0.8)) if bool(known.any()) else 0.0
        return min(self.view.isolation.reach(), _SHARE / max(often, 1e-300))

    def _most_at_once(self) -> int:
        num_units, width = self.view.w.shape
        rows = sum(self.ranks) if num_units else 1
        return max(1, _BATCH_BYTES // (8 * width * rows))

    def _learn_some(self, columns: Int[Tensor, " j"], reach: float) -> None:
        """Learn these columns, with smaller δ and without the spans where predictions fail."""
        view = self.view
        eye = torch.eye(len(view.y), dtype=torch.float64, device=self.W.device)
        delta = torch.full((len(columns),), reach, dtype=torch.float64, device=self.W.device)
        todo, spans = torch.arange(len(columns), device=self.W.device), self.spans
        for attempt in range(_MOST_TRIES):
            y = view.y + delta[todo, None] * eye[columns[todo]]
            w, off = self._read(y, spans)
            good = off < 2.5 * view.isolation.allowed
            change = (w - view.w) / delta[todo, None, None]
            self.W[:, :, columns[todo[good]]] = change[good].permute(1, 2, 0)
            todo = todo[~good]
            if len(todo) == 0:
                return
            delta[todo] *= -0.5
            if attempt == 1:  # not the step but a span may be at fault
                spans = [None] * len(spans)
        raise NoPlane("a column's predictions fail at any distance from y")

    def _read(
        self, y: Float[Tensor, "j d"], spans: list[Float[Tensor, "d r"] | None]
    ) -> tuple[Float[Tensor, "j k d"], Float[Tensor, " j"]]:
        """The units' directions at every y, and how far predictions with them are off; infinite where none was read."""
        isolation, pairs = self.view.isolation, self.view.pairs
        try:
            w = isolation.columns(pairs, y, spans)
            return w, isolation.misprediction(pairs, y, w, self.run.generator)
        except NoPlane:
            if len(y) > 1:  # one of them is to blame
                parts = [self._read(row[None], spans) for row in y]
                return torch.cat([w for w, _ in parts]), torch.cat([off for _, off in parts])
            num_units, width = self.view.w.shape
            return y.new_full((1, num_units, width), torch.nan), y.new_full((1,), torch.inf)

    def _find_spans(self) -> None:
        """The column space of every unit that shows more columns than its rank."""
        known = self.W[0, 0].isfinite() if len(self.W) else self.W.new_zeros(0, dtype=torch.bool)
        for k in range(len(self.W)):
            columns = torch.cat([self.view.w[k][:, None], self.W[k][:, known]], dim=1)
            if self.spans[k] is not None and not self._has_left(k, columns):
                continue
            basis, values, _ = torch.linalg.svd(columns / columns.norm(dim=0).clamp_min(1e-300), full_matrices=False)
            rank = int((values > self.view.isolation.resolution.rank * values[0]).sum())
            has_spare = rank + self.view.isolation.resolution.spare_columns <= columns.shape[1] and rank < len(columns)
            is_clear = has_spare and float(values[rank - 1]) > _GAP * float(values[rank])
            self.spans[k] = basis[:, :rank] if is_clear else None

    def _has_left(self, k: int, columns: Float[Tensor, "d j"]) -> bool:
        """Whether a column that was measured whole lies outside of the span."""
        span = self.spans[k]
        assert span is not None
        last = columns[:, -1]
        tolerance = self.view.isolation.resolution.rank * 10
        return float((last - span @ (span.T @ last)).norm()) > tolerance * float(last.norm())
