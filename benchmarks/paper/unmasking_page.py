"""The page docs/paper-unmasking.md and its plots, from stored results; nothing is measured here."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from paper.unmasking_plots import draw_plots

PAGE = "paper-unmasking.md"
_PLOTS = "paper_unmasking"


def write_page(results: dict, folder: Path) -> None:
    """Write the page, and the plots where matplotlib is installed; parts that are not stored are named as missing."""
    parts = {name: results["parts"].get(name, []) for name in _SECTIONS}
    parts["indefinite"] = sorted(parts["indefinite"], key=lambda row: (row["causal"], row["n"], row["sharpness"]))
    drawn = draw_plots(parts, folder, _PLOTS)
    sections = [_SECTIONS[name](rows) if rows else _missing(name) for name, rows in parts.items()]
    machine = results.get("machine", "no machine")
    (folder / PAGE).write_text("\n\n".join([_head(machine, parts), *sections, _TAIL]) + "\n", encoding="utf-8")
    print(
        f"wrote {folder / PAGE}"
        + (f" and {', '.join(drawn)}" if drawn else "; no plots, for want of matplotlib or results")
    )


def table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [list(names), ["---"] * len(names), *([_show(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _show(cell: object) -> str:
    if isinstance(cell, dict):
        words = (str(name).lower().replace("_", " ") for name in cell)
        return ", ".join(f"{word} {count}" for word, count in zip(words, cell.values(), strict=True))
    if not isinstance(cell, float):
        return str(cell)
    if not math.isfinite(cell):
        return "–"
    if 100 <= abs(cell) < 1e5:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if 1e-3 <= abs(cell) < 100 else re.sub(r"e([+-])0*", _exponent, f"{cell:.0e}")


def _exponent(found: re.Match[str]) -> str:
    """e-08 is e-8, and e+05 e5."""
    return "e" + found[1].removeprefix("+")


def _missing(name: str) -> str:
    return f"## {name.capitalize()}\n\nNot measured yet: `python benchmarks/run.py paper unmasking --parts {name}`."


def _head(machine: str, parts: dict[str, list[dict]]) -> str:
    return f"""# Unmasking Transformers, whole

*Unmasking Transformers: A Theoretical Approach to Data Recovery via Attention Weights*
([arXiv 2310.12462](https://arxiv.org/abs/2310.12462)) recovers the input X of attention layers from their weights
and their output, by Newton's method. Its formulas, and where its text contradicts itself, are in [the
paper](outputs-paper.md); what works from afar in [solvers](outputs-solvers.md). This page measures everything else
that it speaks of, or leaves out.

`python benchmarks/run.py paper unmasking` measures all of it and writes this page; `--only-page` writes it from
`benchmarks/results/paper_unmasking.json`. Measured on {machine}; seconds are CPU seconds of one thread, on a shared
machine. Right means a relative error of X of at most 1e-8. pd is W = s·AAᵀ/d^1.5, pdskew adds s·(K − Kᵀ)/d, gauss
is s·G/d (indefinite); s is the sharpness, and X has standard normal entries.

{_summary(parts)}"""


def _summary(parts: dict[str, list[dict]]) -> str:
    lines = []
    if rows := parts["stacks"]:
        count = [
            sum(row[name] for row in rows) for name in ("problems", "right", "recovered", "wrong", "inside_radius")
        ]
        lines.append(
            f"- **Stacks** of 1 to 4 definite layers: {count[1]} of {count[0]} inputs right, {count[2]} RECOVERED, "
            f"{count[3]} of these wrong; the input lies within the radius that is proved, "
            f"wherever one is ({count[4]} of {count[0]})."
        )
    if rows := parts["rivals"]:
        total = sum(row["problems"] for row in rows if row["method"] == "ours")
        right = {m: sum(row["right_1e-8"] for row in rows if row["method"] == m) for m in _methods(rows)}
        words = "; ".join(f"{method} {count}" for method, count in right.items())
        lines.append(
            f"- **Gradient descent** with the best of 5 rates and 8 starts, right of {total} problems: {words}."
        )
    if rows := parts["sensitivity"]:
        ratios = [row["error"] / row["first_order"] for row in rows if row["level"] >= 1e-10 and row["first_order"] > 0]
        lines.append(
            "- **Wrong weights** move X by what first order predicts (median ratio "
            f"{statistics.median(ratios):.2f}), and show only where the evidence has redundancy: a wide V, "
            "or known norms."
        )
    if rows := parts["indefinite"]:
        at = {(r["n"], r["sharpness"], r["way"]): r for r in rows if not r["causal"]}
        cells = [(n, at.get((n, 1.0, "search")), at.get((n, 1.0, "norms"))) for n in (8, 16, 32)]
        words = "; ".join(
            f"{n} × {2 * n}: {norms['input_found']} of {norms['problems']}"
            + (f", without {plain['input_found']}" if plain else "")
            for n, plain, norms in cells
            if norms
        )
        lines.append(f"- **Indefinite W**, input found where the norms of its rows are known (s = 1): {words}.")
    return "\n".join(lines)


def _methods(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _stacks(rows: Sequence[dict]) -> str:
    columns = "n", "d", "sharpness", "layers", "right", "recovered", "wrong", "median_error", "median_radius"
    columns += "median_amplification", "noise", "seconds"
    names = ["n", "d", "s", "layers", f"right of {rows[0]['problems']}", "RECOVERED", "wrong", "error", "proved radius"]
    names += ["growth of errors", "noise as output", "CPU s"]
    return f"""## Stacks of layers

Theorem 1.3 has several layers. `recover_inputs(AttentionStackEvidence(layers, output))` inverts
the last one first. The radius that Newton–Kantorovich proves for a layer's input is the error of the output of the
layer before it, so the certificate holds for the whole chain. A layer with several pre-images branches; all chains
are returned, as PARTIAL.

{table(names, [[row[name] for name in columns] for row in rows])}

![Error of X and proved radius against the number of layers](paper_unmasking_stacks.svg)

Bare attention averages. Where tokens see each other (here: of 16 coordinates) every layer makes rows more alike, and
errors grow faster with each layer: after four, float64 has few digits left. What cannot be certified then is not
RECOVERED. Noise in place of the output (last V wide, 4 more columns than rows) is refused by the last layer."""


def _rivals(rows: Sequence[dict]) -> str:
    columns = "family", "n", "d", "method", "right_1e-2", "right_1e-4", "right_1e-8", "median_error", "steps", "seconds"
    names = ["W", "n", "d", "method", "error ≤ 1e-2", "≤ 1e-4", f"≤ 1e-8, of {rows[0]['problems']}"]
    names += ["median error", "steps", "CPU s"]
    shown = [[row[name] or "–" if name == "steps" else row[name] for name in columns] for row in rows]
    return f"""## Gradient descent as a rival

The same problems, V eliminated and reduced to the row space of the output for both. Descent gets the best of 5
learning rates and 8 starts (the output itself and seven of our search's) of each problem, judged by the input
itself, which no adversary has; Adam's rate falls along a cosine. Its seconds are those of that one run alone. Ours:
one start, the output, without the search for other pre-images and without the certificate.

{table(names, shown)}

Definite layers are within reach of Adam, {_ratios(rows)} our seconds. Where W is indefinite, none of
them finds the input reliably ([below](#indefinite-w)). L-BFGS, scipy's least squares and Newton by autograd are in
[solvers](outputs-solvers.md#measured) (`outputs peers`)."""


def _ratios(rows: Sequence[dict]) -> str:
    """Seconds of Adam over ours, where it is right throughout."""
    seconds = {(row["family"], row["n"], row["method"]): row["seconds"] for row in rows}
    whole = [r for r in rows if r["method"] == "Adam" and r["right_1e-8"] == r["problems"]]
    ratios = [row["seconds"] / seconds[row["family"], row["n"], "ours"] for row in whole]
    return f"at {min(ratios):.0f} to {max(ratios):.0f} times" if ratios else "at no multiple of"


def _sensitivity(rows: Sequence[dict]) -> str:
    columns = "wrong", "level", "error", "first_order", "worst_case", "said_square", "said_wide", "said_norms"
    names = ["wrong", "by", "error of X", "‖J⁻¹δ‖", "‖J⁻¹‖‖δ‖", "said, V square", "V wide", "norms known"]
    return f"""## Wrong weights

W or V is off by a relative error, the output is that of the right ones (pd, s = 1,
n = {rows[0]["n"]}, d = {rows[0]["d"]}; medians of {rows[0]["problems"]}). δ is what the wrong weights give
for the input, less the output, with V eliminated. To first order X moves by J⁻¹δ.

{table(names, [[row[name] for name in columns] for row in rows])}

![Error of X against the error of the weights: measured, first order, worst case](paper_unmasking_sensitivity.svg)

**RECOVERED is a claim about the weights given**: 'each of the inputs listed gives this output under the weights
given'. A definite layer with a square V maps some input to every matrix, so wrong weights do not show, and the X
that is returned is exact for them. They show where the evidence has redundancy. A wide V that is wrong leaves part
of the output unexplained; a wrong W does not, as XV's row space stays. Known norms of the rows show both, from
about the error at which they move a norm by 1e-6."""


def _bounds(rows: Sequence[dict]) -> str:
    columns = "n", "d", "R", "negative_eigenvalue", "our_gamma", "paper_gamma"
    columns += "hessian_change", "our_lipschitz", "paper_lipschitz"
    names = ["n", "d", "R", "−λ_min(∇²L)/2 seen", "our γ", "Lemma 4.5, n·d·R⁸"]
    names += ["‖Δ∇²L‖/‖ΔX‖ seen", "our constant", "Lemma 4.4, n³d³R¹⁰"]
    return f"""## The lemmas' constants

Theorem 1.3 has ‖W‖_F ≤ R, ‖V‖_F ≤ R, |b_ij| ≤ R and R > 1. For these, Lemma 4.4 (section 4.3) has ∇²L Lipschitz with a
constant O(n³d³R¹⁰), and Lemma 4.5 has it positive definite for a γ of the order n·d·R⁸. The constants behind these
orders, and the paper's appendix, were not at hand: both are shown with constant 1. Ours are proved
(`benchmarks/outputs/paper_bounds.py`). In the draws ‖W‖_F = ‖V‖_F = R, the largest entry of B is R, and ‖X‖_F = R as
well. Seen is the largest of {rows[0]["draws"]} draws, less than the largest there is: draws can refute a bound, not
prove it.
`python benchmarks/run.py paper unmasking --parts bounds` measures this table.

{table(names, [[row[name] for name in columns] for row in rows])}

![Negative eigenvalue and change of the Hessian against R: seen, ours, the paper's orders](paper_unmasking_bounds.svg)

- Log–log slopes in R between the two largest R, n = {rows[-1]["n"]}:
  {_slopes(rows)}.
- With constant 1, {_verdict("Lemma 4.5's γ", rows, "paper_gamma", "negative_eigenvalue")};
  {_verdict("Lemma 4.4's constant", rows, "paper_lipschitz", "hessian_change")}. Ours:
  {_verdict("γ", rows, "our_gamma", "negative_eigenvalue")};
  {_verdict("the constant", rows, "our_lipschitz", "hessian_change")}."""


def _verdict(name: str, rows: Sequence[dict], bound: str, seen: str) -> str:
    """How a bound compares with the largest that was seen, over all sizes and R."""
    ratios = [row[bound] / row[seen] for row in rows]
    below = sum(ratio < 1 for ratio in ratios)
    held = f"is too small for {below} of {len(rows)} sizes and R" if below else "holds in every draw"
    return f"{name} {held} ({_show(min(ratios))} to {_show(max(ratios))} times what was seen)"


def _slopes(rows: Sequence[dict]) -> str:
    low, high = rows[-2:]
    names = {"negative_eigenvalue": "eigenvalue seen", "our_gamma": "our γ", "hessian_change": "change seen"}
    names |= {"our_lipschitz": "our constant", "paper_gamma": "Lemma 4.5", "paper_lipschitz": "Lemma 4.4"}
    span = math.log(high["R"] / low["R"])
    return ", ".join(f"{word} {math.log(high[name] / low[name]) / span:.1f}" for name, word in names.items())


_WAYS = {
    "search": "the search, nothing known",
    "shift": "homotopy, W + (1 − τ)cI",
    "dilation": "homotopy from the first order",
    "norms": "norms of the rows known",
}


def _indefinite(rows: Sequence[dict]) -> str:
    shown = [
        [
            f"{row['n']} × {row['d']}" + (", causal" if row["causal"] else ""),
            row["sharpness"],
            _WAYS[row["way"]],
            f"{row['any_preimage']} of {row['problems']}",
            f"{row['input_found']} ({row['input_to_1e-4']})",
            row["recovered"] if row["way"] in ("search", "norms") else "",
            row["wrong"] if row["way"] in ("search", "norms") else "",
            row["most_preimages"],
            row["seconds"],
        ]
        for row in rows
    ]
    names = [
        "n × d",
        "s",
        "way",
        "any pre-image",
        "input, to 1e-8 (1e-4)",
        "RECOVERED",
        "wrong",
        "most pre-images",
        "s",
    ]
    return f"""## Indefinite W

Trained heads are indefinite (gauss). Then an output has many pre-images, and few starts reach any.

{table(names, shown)}

![How often the input is found, by size and way](paper_unmasking_indefinite.svg)

**What helps: the norm of each row** (`AttentionEvidence(…, row_norms=…)`; √d behind an RMS norm without gains).
They are n equations more. Levenberg–Marquardt then reaches the input from many starts, at sizes where without them
it reaches nothing, and other pre-images are refused. In a causal layer every row has one equation more, and wrong
branches die at once. As noise and wrong weights show too, one certified pre-image with these norms is RECOVERED;
that no other has them is a matter of coincidence, not proved, and said so.

**Starts from the first order.** Where weights are nearly equal, attention is x̄_i = m + C Wᵀx_i with the mean m and
the covariance C of the tokens. That has *one* solution for every regular W, definite or not: C is the fixed point of a
contraction by ½ in Thompson's metric (theorem and proof in `linalg/first_order_attention.py`). It is nearer to the
input than noise with the same norms; half of the starts come from it, half are such noise.

**What does not help.** The homotopy from the same solution (softmax(τS) in place of softmax(S), rescaled) reaches
pre-images where the search reaches none, in seconds, but from 8 × 16 on not the input. The curve from the definite
layer W + cI mostly runs off before τ = 1. Sharp scores (s = 3) at 16 × 32 stay closed, norms or not."""


_SECTIONS = {
    "stacks": _stacks,
    "rivals": _rivals,
    "sensitivity": _sensitivity,
    "bounds": _bounds,
    "indefinite": _indefinite,
}

_TAIL = """## Left out

- Heads, residuals, norms and MLPs between the layers: [real blocks](outputs-blocks.md).
- Norms that are known roughly, and other priors on X.
- The constants of the paper's appendix."""
