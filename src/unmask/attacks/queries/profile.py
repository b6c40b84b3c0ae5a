"""Before anything is learned: what kind of answers the oracle gives, how noisy, how exact, and for which tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.evidence.oracles import OracleEvidence, Refused

_NUM_REPEATS = 6
_NUM_SCALES = 12
_NUM_NEARBY, _NEARBY = 16, 1e-7  # questions that differ by so much: a smooth function is linear in between
_LONGER, _SHORT = 10, 2  # powers of two: errors of arithmetic grow with the token, noise does not
_MOST_DECIMALS = 12
_LONG_ENOUGH = 1e9  # a token to which any layer answers more than a rounding
_LARGEST_NORM = 1e12  # more is never needed, and float32 squares it without overflow
_SUMMED_ANOTHER_WAY = 1e-14  # of an answer: what float64 sums differ by when a batch is cut differently
_BEST = 1.1e-16  # float64
_HIDDEN = 4  # standard deviations of seven answers, at most
_LONGEST_STEP = 10.0  # from one norm of a token to the next
_EVEN = 1e3  # times the precision: far above an answer's own error, and far below any network's part that is even
_MANY = 10.0  # deviations of noise, or of the coarsest arithmetic
_LINEAR = 0.05  # of an answer: the coarsest arithmetic in use, float8, is off by 0.06 at most; chance by the order of 1


@dataclass(frozen=True)
class OracleProfile:
    """What probing tells of an oracle.

    `noise` is the standard deviation of a repeated answer, or, where it `repeats`, of answers to questions that are
    nearly the same; `step` the grid that answers are rounded to (0: none); both in units of an answer. `precision` is
    what its arithmetic loses, relative to an answer. `max_norm` is the largest norm of a token that is answered as
    smaller ones are. `is_linear`: answers to one token grow with it, as those of attention layers do. `is_odd`: the
    negative of a token is answered by the negative, as layers of heads do and networks behind them do not.
    """

    num_outputs: int  # 0: one number
    signs_only: bool
    is_linear: bool
    noise: float
    step: float
    precision: float
    max_norm: float
    num_queries: int
    is_odd: bool = True
    repeats: bool = False

    @property
    def absolute_error(self) -> float:
        """The standard deviation of what is added to an answer whatever its size."""
        return math.hypot(self.noise, self.step / math.sqrt(12))

    def boost(self, answer_scale: float, token_norm: float) -> float:
        """R of the symmetry (u, y) → (R·u, y/R) that makes added errors as small as those of the arithmetic.

        Limits: at most what the norms of tokens allow; 1 where nothing is added to answers.
        """
        if self.absolute_error == 0 or answer_scale == 0:
            return 1.0
        wanted = self.absolute_error / (answer_scale * max(self.precision, 1e-15))
        return max(1.0, min(wanted, self.max_norm / token_norm))

    def describe(self) -> list[str]:
        """What a person wants to know, a sentence each."""
        kind = "signs only" if self.signs_only else f"vectors of {self.num_outputs}" if self.num_outputs else "numbers"
        lines = [f"answers: {kind}"]
        if not self.signs_only:
            noise = f"noise of a repeated answer: {self.noise:.1e}" if self.noise else "repeated answers are the same"
            lines += [
                f"noise that repeats, from question to question: {self.noise:.1e}" if self.repeats else noise,
                f"answers are rounded to multiples of {self.step:g}" if self.step else "answers are not rounded",
                f"relative precision of its arithmetic: {self.precision:.1e}",
            ]
        if self.is_linear and not self.is_odd:
            lines.append(
                "the answer to a token's negative is not the negative of its answer: a network is behind the heads"
            )
        bound = "none found" if math.isinf(self.max_norm) else f"{self.max_norm:.3g}"
        return [*lines, f"largest token norm that is answered faithfully: {bound}"]


def probe_oracle(evidence: OracleEvidence, generator: torch.Generator) -> OracleProfile:
    """Ask about forty questions whose answers are known up to a factor: one token at many lengths, and repetitions.

    f([λx]) = λ·f([x]) for every attention layer, with or without a network that is positively homogeneous behind it.
    Deviations tell the arithmetic's precision; where they begin, the bound on norms; repetitions, the noise. Noise that
    repeats, as the oracle of arXiv 2601.16873, Thm 6.1, has it, shows in questions that differ by 10⁻⁷: no head
    changes so fast.

    Limits: rounding is seen if it is to a decimal place, to 12 places at most. An error that is the same for nearly
    the same questions cannot be told from a function, and shows in the certificate only.
    Cost: about 60 queries.
    """
    before = evidence.ledger.num_asked
    direction = torch.randn(evidence.width, generator=generator, dtype=torch.float64)
    direction = (direction / direction.norm()).to(evidence.device)
    largest = _LARGEST_NORM if evidence.max_norm is None else evidence.max_norm

    unit = min(1.0, largest)
    first = _answers(evidence, direction, [unit])
    if first is None:
        unit = _first_norm(evidence, direction, unit)
        first = evidence.ask((unit * direction)[None, None])
    if not bool(first.any()):  # a ReLU network may answer 0 to a token, and not to its negative
        other = _answers(evidence, -direction, [unit])
        if other is not None and bool(other.any()):
            direction, first = -direction, other
    while not bool(first.any()) and unit < min(largest, _LONG_ENOUGH):  # rounded away, unless all answers are 0
        unit = min(1e3 * unit, largest)
        longer = _answers(evidence, direction, [unit])
        if longer is None:
            unit /= 1e3
            break
        first = longer
    num_outputs = first.shape[1] if first.ndim == 2 else 0
    scales = unit * (0.2 + 0.8 * torch.rand(_NUM_SCALES, generator=generator, dtype=torch.float64))
    answers = evidence.ask((scales.to(direction)[:, None] * direction)[:, None])

    if _are_signs(answers) and _stays_a_sign(evidence, direction, min(1e3, largest)):
        asked = evidence.ledger.num_asked - before
        return OracleProfile(num_outputs, True, True, 0.0, 0.0, 0.0, largest_of(evidence), asked)

    noise = _measure_repetition(evidence, direction * unit)
    step = 0.0 if noise > 0 else _grid(answers)
    nearby = _measure_nearby(evidence, direction * unit) if noise == step == 0 else 0.0
    added = math.hypot(noise + nearby, step / math.sqrt(12))
    max_norm, slope, is_linear = _reach(evidence, direction, unit, largest, added)
    if nearby > 0 and _grows(evidence, direction, unit, max_norm, nearby):
        nearby = added = 0.0
    relative_noise = _measure_repetition(evidence, direction * min(max_norm, _LARGEST_NORM)) if noise > 0 else 0.0
    size = float(slope.norm()) * min(max_norm, _LARGEST_NORM)
    is_relative = size > 0 and relative_noise > 30 * noise
    deviation = _deviation(evidence, direction, slope, min(max_norm, _LARGEST_NORM))
    # What is added to answers hides the precision of the arithmetic, where it is the larger of the two.
    precision = deviation if size and deviation > _HIDDEN * added / size else _BEST
    if is_relative:
        precision, noise = max(precision, relative_noise / size), 0.0
    step = step if step > precision * float(answers.abs().mean()) else 0.0  # few binary digits look like decimals
    is_linear = is_linear and precision <= _LINEAR
    is_odd = _is_odd(evidence, direction, slope, min(max_norm, _LARGEST_NORM), precision, added)
    asked = evidence.ledger.num_asked - before
    bound = math.inf if max_norm >= _LARGEST_NORM and evidence.max_norm is None else max_norm
    repeats, noise = nearby > 0, noise + nearby
    return OracleProfile(num_outputs, False, is_linear, noise, step, precision, bound, asked, is_odd, repeats)


def largest_of(evidence: OracleEvidence) -> float:
    """The bound on norms that is known beforehand, if any."""
    return math.inf if evidence.max_norm is None else evidence.max_norm


def _answers(evidence: OracleEvidence, direction: Tensor, norms: list[float]) -> Float[Tensor, "b *p"] | None:
    """f([λ·direction]) for every λ; None where the oracle refuses."""
    scales = torch.tensor(norms, dtype=torch.float64, device=direction.device)
    try:
        return evidence.ask((scales[:, None] * direction)[:, None])
    except Refused:
        return None


def _first_norm(evidence: OracleEvidence, direction: Tensor, unit: float) -> float:
    """The largest power of ten below `unit` that is answered; its refusal is raised where none is."""
    for place in range(1, 9):
        if _answers(evidence, direction, [unit * 10.0**-place]) is not None:
            return unit * 10.0**-place
    evidence.ask((unit * direction)[None, None])
    raise AssertionError("the oracle answered what it had refused before")


def _stays_a_sign(evidence: OracleEvidence, direction: Tensor, norm: float) -> bool:
    answers = _answers(evidence, direction, [norm, -norm])
    return answers is not None and _are_signs(answers)


def _are_signs(answers: Float[Tensor, "b *p"]) -> bool:
    return bool((answers.abs().eq(1) | answers.eq(0)).all() and answers.any())


def _measure_repetition(evidence: OracleEvidence, token: Float[Tensor, " d"]) -> float:
    """The standard deviation of one answer, asked several times."""
    answers = torch.stack([evidence.ask(token[None, None], repetition)[0] for repetition in range(_NUM_REPEATS)])
    deviation, size = float(answers.std(0).square().mean().sqrt()), float(answers.square().mean().sqrt())
    return deviation if deviation > _SUMMED_ANOTHER_WAY * size else 0.0


def _measure_nearby(evidence: OracleEvidence, token: Float[Tensor, " d"]) -> float:
    """The standard deviation of answers to tokens that differ by 10⁻⁷, from a line."""
    place = torch.linspace(-1, 1, _NUM_NEARBY, dtype=torch.float64, device=token.device)
    answers = evidence.ask((1 - _NEARBY * (1 + place))[:, None, None] * token).reshape(_NUM_NEARBY, -1)
    line = torch.stack([torch.ones_like(place), place / place.norm()])
    line[0] /= line[0].norm()
    off = answers - line.T @ (line @ answers)
    deviation = math.sqrt(float(off.square().sum(0).mean()) / (_NUM_NEARBY - 2))
    return deviation if deviation > _SUMMED_ANOTHER_WAY * float(answers.square().mean().sqrt()) else 0.0


def _grows(evidence: OracleEvidence, direction: Tensor, unit: float, max_norm: float, nearby: float) -> bool:
    """Whether a deviation grows with the token, as that of coarse arithmetic does; so too where none can be longer."""
    power = min(math.floor(math.log2(max_norm / unit)), _LONGER)
    return power < _SHORT or _measure_nearby(evidence, direction * unit * 2**power) > 2 ** (power / 2) * nearby


def _grid(answers: Float[Tensor, "b *p"]) -> float:
    """The coarsest decimal place that all answers are rounded to; 0 where there is none."""
    for place in range(_MOST_DECIMALS + 1):
        counts = answers * 10.0**place
        if bool(((counts - counts.round()).abs() <= 1e-13 * counts.abs().clamp_min(1)).all()) and counts.round().any():
            return 10.0**-place
    return 0.0


def _reach(
    evidence: OracleEvidence, direction: Tensor, unit: float, largest: float, added: float
) -> tuple[float, Float[Tensor, "*p"], bool]:
    """How far answers grow with the token: the largest norm, the answer to a unit token, and whether they do at all."""
    norm, last, slack = unit, evidence.ask((unit * direction)[None, None]), 0.0
    factor, is_refused = _LONGEST_STEP, False

    def follows(longer: float) -> tuple[Tensor, float] | None:
        """The answer at a longer token and the share by which it may be off; None where it is off by more."""
        nonlocal is_refused
        answer = _answers(evidence, direction, [longer])
        if answer is None:
            is_refused = True
            return None
        expected = last * (longer / norm)
        size = float(expected.norm())
        allowed = _LINEAR * size + 6 * added * (1 + longer / norm)
        is_off = float((answer - expected).norm()) > allowed
        # A small step whose growth does not stand out from noise tells nothing; many of them would lead anywhere.
        is_told = factor == _LONGEST_STEP or is_refused or allowed < (1 - norm / longer) * size
        return (answer, allowed / max(size, 1e-300)) if is_told and not is_off else None

    is_linear = follows(unit / 2) is not None
    while is_linear and norm < largest and factor > 1.05:
        longer = min(norm * factor, largest)
        heard = follows(longer)
        if heard is None:
            factor = math.sqrt(factor)
        else:
            norm, (last, slack) = longer, heard
    if norm < largest and not is_refused:  # the last answer may be past the bound by as much as was allowed
        norm = norm * max(0.5, 1 - slack)
        last = evidence.ask((norm * direction)[None, None])
    return norm, last[0] / norm, is_linear


def _is_odd(
    evidence: OracleEvidence,
    direction: Tensor,
    slope: Float[Tensor, "*p"],
    norm: float,
    precision: float,
    added: float,
) -> bool:
    """Whether f([−x]) = −f([x]), up to errors, for the longest x. Two-layer ReLU networks that are odd are linear."""
    back = _answers(evidence, -direction, [norm])
    if back is None:
        return True
    off, size = float((back[0] + slope * norm).abs().max()), float((slope * norm).abs().max())
    relative = min(_EVEN * precision, max(_LINEAR, _MANY * precision))
    return off <= relative * size + _MANY * added


def _deviation(evidence: OracleEvidence, direction: Tensor, slope: Float[Tensor, "*p"], norm: float) -> float:
    """The relative deviation from growing with the token, at norms near the largest, where added errors are small."""
    norms = norm * torch.tensor([0.31, 0.47, 0.59, 0.73, 0.83, 0.91], dtype=torch.float64)
    answers = _answers(evidence, direction, norms.tolist())
    if answers is None or not bool(slope.any()):
        return 0.0
    slopes = torch.cat([answers / norms.to(answers.device).reshape(-1, *[1] * (answers.ndim - 1)), slope[None]])
    return float((slopes - slopes.mean(0)).square().mean().sqrt() / slope.square().mean().sqrt())
