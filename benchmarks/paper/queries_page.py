"""docs/paper-queries.md and its plots, from the stored results of `paper queries`; all its numbers are stored ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
PAGE = "paper-queries.md"
PLOTS = {
    "counts": "paper_queries_counts.svg",
    "zeros": "paper_queries_noise.svg",
    "samples": "paper_queries_samples.svg",
}
_KINDS = ("float64", "float32", "6 decimals", "4 decimals", "2 decimals", "noise 1e-3")

_HEAD = """# Learning attention with queries: the paper, theorem by theorem

arXiv 2601.16873 (Bhattamishra, Shah, Hahn, Kanade, 'Provably Learning Attention with Queries'). `benchmarks/run.py
paper queries` measures everything on this page and
writes it; `--only-page` writes it from `benchmarks/results/paper_queries.json`. Layers are random, entries of
variance 1/d; errors of W are relative, of the worst head; queries are those of
learning, to which come about 60 of probing and 87 to 103 fresh ones. CPU seconds are those of one thread.

    f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_n)·v_hᵀ x_i,     x_n the last row
"""

_COUNTS = """
## Counts

![The theorem's count of queries against ours](paper_queries_counts.svg)
"""

_AFTER_COUNTS = """
Thm 4.1's count is reached exactly, and so is that of Prop. C.2 where the subspaces are known (`recover_weights(…,
subspaces=[…])`, the attack `known-subspaces`). Thm 5.1 is stated as O(r·d); the count beside it is
the number of degrees of freedom, r(2d − r) + d. Thm B.1 has O(d² log 1/ε) queries for W by bisection, and a first
phase for the direction of v by random ones, whose count Hoeffding's bound gives: about 1/ε² (`signs.py`), with a
probability of failure. That phase is not built: ours bisects v too and cannot fail by chance there. The count beside it
is ours, one query for each bit of each weight. For §7, several heads, the paper has no learner; the count is that of
arXiv 2608.03294, 4Hd² − 2H + 1. Prop. 7.1 says what no query tells: two heads with one W are the same function as one
head with the sum of their v, and that head is returned. The
one-layer transformer of §4.1 has its own page ([networks](queries-networks.md)).
"""

_ZEROS = """
## Thm 6.1: noise, and zeros of v

![Error against the noise of an answer](paper_queries_noise.svg)

Errors are the largest of an entry of W, for answers that are off by at most τ; d = 32. Noise is fresh at every answer
(uniform), but for the columns 'repeats': they have the theorem's own oracle, which answers the same question alike, and
wrong by −τ or τ. 'Limit' is the theorem's bound, re-derived with its constants: 5.1·B^{3/2}·(τ_f + 2κτ_v)/(γ − τ_v),
with κ = B^{−1/2} the norm of probes, B the largest |W_ij|, at which the paper's estimates are cut, and γ the
smallest |v_i| that is not 0. So τ(ε), the noise up to which W is known to ε, is linear in ε. **Where v_i = 0** the
paper probes e_i + e_p with v_p ≠ 0 and takes W_pj off. Scores then reach 2 and two errors add up: the constant is
5.1 + 9.5, with τ_f + 3κτ_v and γ − 2τ_v for the second, and γ is that of the entries that are not zero. Two things
follow.

- Noise turns zeros into small numbers. Without a margin below which v_i counts as zero, the paper's learner divides
  by noise ('paper'); with γ/2 for the margin it does not ('paper, margin'). γ must be known.
- Probes that lean towards v divide by no entry of v, so zeros change nothing for ours, and no γ is needed. Ours has
  tokens of norm 7 at most; the paper's have about 2. Where tokens may have any norm, `recover_weights` as it is reads
  noise that repeats as it does fresh noise (by hand, d = 16, τ = 0.01: W to 7e-12).
"""

_BOUNDED = """
## Several heads, token norms bounded by 4√d

Where norms are bounded, heads cannot be turned off one by one. But on a circle of first tokens the answer is a
meromorphic function of the angle, and every head has a ladder of poles beside the circle:

    G(θ) = ½ Σ_h (α_h cos θ + β_h sin θ)·tanh((p_h cos θ + q_h sin θ)/2)
    poles at θ_h ± i·arsinh((2k + 1)·π/|(p_h, q_h)|),  k = 0, 1, …

A rational fit (AAA) finds them, least squares makes them exact, offsets from the circle give v_h and W_h y, and steps
of y the columns (`CircleHeadsAttack`, the attack `circle-heads`; the default runs it where isolation fails). The
error
of the worst W, and learning queries for each degree of freedom:
"""

_AFTER_BOUNDED = """
'Nothing' means that no weights were returned: no circle was explained, or fresh sequences disagreed. None of these
runs returned wrong weights. One layer a cell (seed 1); an empty cell was not run.
"""

_MULTIPLES = """
## Heads that are multiples of one another; H² > d; controls

Five heads of width 16, the last a multiple of the first, by `recover_weights` as it is; heads beyond the root of the
width; and oracles that are no layers, which must be refused. Heads W and λW cross at the same
angle, but their poles have other heights, so λ < 0 is read too. Two copies of the first token tell W from −W.
"""

_SAMPLES = """
## Samples that nobody chose

![Share of runs that recover the head, against samples for each weight](paper_queries_samples.svg)

`recover_weights(unmask.SampleEvidence(sequences, answers))`, or a file of them: only pairs (X, f(X)), four Gaussian
tokens a sequence, one head; a tenth is held out and must be answered too. No theorem of the paper that we know
speaks of given samples: its learners choose. 'Spread' is the deviation of scores.
"""

_AFTER_SAMPLES = """
A query learner asks one question for each weight; so many samples are nearly enough where scores are of the order of
one. Scores that saturate lead least squares into local minima, which the held-out samples refuse. In noise the error is
told by the fit itself (`estimated_error`). Answers by chance are the last row.
"""

_LEFT = """
## What is not here

- Bounded norms: more heads than the table shows, and answers that are vectors. Two decimals and noise hide more than
  a few heads; the table says where.
- Samples of several heads (`samples:max_heads=2` tries them; not measured here), and widths above 16.
- §4.1's transformer with more than √d heads: its routing solves H² equations for d unknowns
  ([networks](queries-networks.md)).
- Attention layers of SmolLM2 in float32: they stand beside those in float64 ([real weights](queries-heads.md)).
"""


def write_page(stored: Mapping[str, Any], docs: Path) -> None:
    """The page, and a plot for each part that has one; parts that were not measured are left out."""
    parts = {name: part["rows"] for name, part in stored.items() if part["rows"]}
    text = _HEAD
    if "counts" in parts:
        text += _COUNTS + "\n" + _table(parts["counts"], _COUNT_COLUMNS) + _AFTER_COUNTS
    if "zeros" in parts:
        text += _ZEROS + "\n" + _table(parts["zeros"], _ZERO_COLUMNS) + _tolerances(parts["zeros"])
    if "bounded" in parts:
        text += _BOUNDED + "\n" + bounded_table(parts["bounded"]) + _AFTER_BOUNDED
    if "multiples" in parts:
        text += _MULTIPLES + "\n" + _table(parts["multiples"], _MULTIPLE_COLUMNS)
    if "samples" in parts:
        text += _SAMPLES + "\n" + _table(parts["samples"], _SAMPLE_COLUMNS) + _enough(parts["samples"])
    machines = sorted({part["machine"] for part in stored.values()})
    text += _LEFT + f"\nMeasured on: {'; '.join(machines)}.\n"
    (docs / PAGE).write_text(text, encoding="utf-8")
    draw(parts, docs)


def _number(value: Any) -> str:
    """A number as tables have it; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if value and not 0.1 <= abs(value) < 1e4 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


Column = tuple[str, Callable[[Mapping[str, Any]], Any]]


def _field(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row[name]


_COUNT_COLUMNS: Sequence[Column] = (
    ("statement", _field("what")),
    ("case", _field("case")),
    ("its count", _field("count")),
    ("our queries", _field("queries")),
    ("W", _field("error")),
    ("CPU s", _field("seconds")),
)
_ZERO_COLUMNS: Sequence[Column] = tuple(
    (name, _field(name))
    for name in (
        "v",
        "τ",
        "limit",
        "paper",
        "paper, margin",
        "paper, repeats",
        "ours",
        "ours, 16 passes",
        "ours, repeats",
    )
)
_MULTIPLE_COLUMNS: Sequence[Column] = (
    ("layer", _field("layer")),
    ("status", _field("status")),
    ("W", _field("error")),
    ("queries", _field("queries")),
    ("CPU s", _field("seconds")),
)
_SAMPLE_COLUMNS: Sequence[Column] = (
    ("d", _field("width")),
    ("spread", _field("spread")),
    ("noise, of an answer", lambda row: "chance" if row["noise"] is None else row["noise"]),
    ("samples a weight", _field("per_weight")),
    ("recovered", lambda row: f"{row['recovered']} of {row['of']}"),
    ("false", _field("false")),
    ("W, median", _field("error")),
)


def _table(rows: Rows, columns: Sequence[Column]) -> str:
    """Markdown; the first column to the left."""
    head = "| " + " | ".join(name for name, _ in columns) + " |\n| --- |" + " --: |" * (len(columns) - 1) + "\n"
    return head + "".join("| " + " | ".join(_number(get(row)) for _, get in columns) + " |\n" for row in rows)


def bounded_table(rows: Rows) -> str:
    """Heads and widths down, kinds of answers across."""
    kinds = [kind for kind in _KINDS if any(row["answers"] == kind for row in rows)]
    cases = sorted({(row["width"], row["heads"]) for row in rows})
    lines = ["| heads, width, norm | " + " | ".join(kinds) + " | queries / unknowns, float64 | CPU s, float64 |"]
    lines.append("| --- |" + " --: |" * (len(kinds) + 2))
    for width, heads in cases:
        own = {row["answers"]: row for row in rows if (row["width"], row["heads"]) == (width, heads)}
        cells = [_outcome(own.get(kind)) for kind in kinds]
        exact = own.get("float64")
        cost = ["", ""] if exact is None else [f"{exact['per_dof']:.2f}", _number(exact["seconds"])]
        lines.append("| " + " | ".join([f"{heads}, {width}, ≤ {4 * width**0.5:.3g}", *cells, *cost]) + " |")
    return "\n".join(lines) + "\n"


def _outcome(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    return "nothing" if row["error"] is None else _number(row["error"])


def _tolerances(rows: Rows) -> str:
    """τ(0.01), as the last sentence of the part: by linear scaling from the smallest τ."""
    sentences = []
    for v in dict.fromkeys(row["v"] for row in rows):
        row = next(row for row in rows if row["v"] == v)
        names = ("limit", "paper, margin", "ours", "ours, 16 passes", "ours, repeats")
        told = ", ".join(f"{_number(0.01 * row['τ'] / row[name])} ({name})" for name in names if row[name])
        sentences.append(f"{v}: {told}")
    return f"\nτ(0.01), the noise at which an entry of W is off by 0.01: {'; '.join(sentences)}.\n"


def _enough(rows: Rows) -> str:
    """From how many samples on every run recovered the head."""
    sentences = []
    for group in dict.fromkeys((row["width"], row["spread"], row["noise"]) for row in rows if row["noise"] is not None):
        own = [row for row in rows if (row["width"], row["spread"], row["noise"]) == group]
        failed = [row["per_weight"] for row in own if row["recovered"] < row["of"]]
        enough = min((row["per_weight"] for row in own if row["per_weight"] > max(failed, default=0)), default=None)
        sentences.append(f"{_number(enough)} (d = {group[0]}, spread {group[1]:g}, noise {group[2]:g})")
    return f"\nSamples a weight from which on every run recovered the head: {', '.join(sentences)}.\n" + _AFTER_SAMPLES


def draw(parts: Mapping[str, Rows], docs: Path) -> None:
    """The plots."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unmask"
    from matplotlib import pyplot

    painters: dict[str, Callable[[Any, Rows], None]] = {"counts": _counts, "zeros": _zeros, "samples": _samples}
    for part, paint in painters.items():
        if part in parts:
            figure, axes = pyplot.subplots(1, 2 if part == "zeros" else 1, figsize=(8, 3.6), squeeze=False, sharey=True)
            paint(axes[0], parts[part])
            figure.tight_layout()
            figure.savefig(docs / PLOTS[part], metadata={"Date": None})
            pyplot.close(figure)


def _counts(axes: Any, rows: Rows) -> None:
    counted = [row for row in rows if row["count"]]
    for what in dict.fromkeys(row["what"] for row in counted):
        own = [row for row in counted if row["what"] == what]
        axes[0].loglog([row["count"] for row in own], [row["queries"] for row in own], "o", label=what)
    ends = [min(row["count"] for row in counted), max(row["count"] for row in counted)]
    axes[0].loglog(ends, ends, "k:", label="equal")
    axes[0].set(xlabel="the statement's count", ylabel="our learning queries")
    axes[0].legend(fontsize=8)


def _zeros(axes: Any, rows: Rows) -> None:
    kinds = dict.fromkeys(row["v"] for row in rows)
    for axis, v in zip(axes, kinds, strict=True):
        own = [row for row in rows if row["v"] == v]
        for name in ("limit", "paper", "paper, margin", "ours", "ours, 16 passes"):
            seen = [(row["τ"], row[name]) for row in own if row[name] is not None]
            if seen:
                axis.loglog(*zip(*seen, strict=True), "k:" if name == "limit" else "o-", label=name)
        axis.set(xlabel="τ", title=v)
        axis.legend(fontsize=8)
    axes[0].set(ylabel="largest error of an entry of W")


def _samples(axes: Any, rows: Rows) -> None:
    groups: Iterable[tuple] = dict.fromkeys((row["width"], row["spread"], row["noise"]) for row in rows)
    for width, spread, noise in groups:
        if noise is None:
            continue
        own = [row for row in rows if (row["width"], row["spread"], row["noise"]) == (width, spread, noise)]
        label = f"d = {width}, spread {spread:g}" + (f", noise {noise:g}" if noise else "")
        axes[0].plot(
            [row["per_weight"] for row in own], [row["recovered"] / row["of"] for row in own], "o-", label=label
        )
    axes[0].set(xlabel="samples for each weight", ylabel="share of runs that recover the head")
    axes[0].legend(fontsize=8)
