"""The page of DAGER's tables: every published number with ours beside it, or the reason why there is none.

It is made from stored results alone (`dager_summary.py`), with plots beside it (`dager_plots.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paper.dager_cells import Cell, all_cells, why_not_run
from paper.dager_models import ENTRIES, FINETUNE_STEPS
from paper.dager_plots import FIGURES, draw_figures
from paper.dager_summary import Summary, best, every_batch, read_results, summarise
from published import published, published_cells, published_hours
from text_sets import SETS

MODELS = {
    "gpt2": "GPT-2",
    "gpt2-finetuned": "GPT-2, fine-tuned",
    "gpt2-nexttoken": "GPT-2, next token",
    "gpt2-large": "GPT-2 large",
    "bert": "BERT",
    "llama2-7b": "Llama-2-7B",
}
Lookup = Callable[[str, str, int, str], Summary | None]

TEMPLATE = Path(__file__).parent / "templates" / "dager.md"
NOT_DRAWN = "Not run yet: `benchmarks/run.py paper dager --cells 'fig*' 'long/*'`."


def write_page(results: Path, page: Path) -> None:
    """Read the results, write the page, draw the plots that there are points for."""
    lines = read_results(results)
    if not lines:
        raise SystemExit(f"{results} holds no paper_dager*.jsonl; run some cells first, without --only-page")
    summaries = summarise(lines)
    drawn = draw_figures([line for line in lines if "figure" in line["spec"]], page)
    page.write_text(make_page(summaries, drawn), encoding="utf-8")


def make_page(summaries: Sequence[Summary], drawn: dict[str, str]) -> str:
    """The page in Markdown."""

    def lookup(model: str, data: str, texts: int, attack: str) -> Summary | None:
        return every_batch(summaries, Cell(model, data, texts, attack))

    def lookup_times(model: str, data: str, texts: int, attack: str) -> Summary | None:
        return best(summaries, Cell(model, data, texts, attack))

    figures = [f"### {title}\n\n{text}\n\n{drawn.get(name, NOT_DRAWN)}" for name, (title, text) in FIGURES.items()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        steps=FINETUNE_STEPS,
        found=count_found(summaries),
        table_1=table_1(lookup),
        table_2=dager_table(2, lookup),
        table_3=dager_table(3, lookup),
        real=real_table(lookup),
        hours=hours_table(lookup_times),
        cut=cut_table(lookup),
        figures="\n\n".join(figures),
        details=details(summaries),
    )


def count_found(summaries: Sequence[Summary]) -> str:
    """All cells in a sentence."""
    ours = [one for one in summaries if one.cell.attack == "ours"]
    texts, exact, false = (sum(one.total(name) for one in ours) for name in ("num_texts", "exact", "false_certain"))
    again = sum(one.total("false_certain") for one in summaries if one.cell.attack == "dager")
    batches = sum(one.num_batches for one in ours)
    return (
        f"**In all:** {batches:,} batches and {texts:,} texts attacked with this package, {exact:,} exact, "
        f"{false} falsely certain. {_not_whole(ours)} DAGER again: {again} falsely certain."
    )


def _not_whole(ours: Sequence[Summary]) -> str:
    """Which batches were not read in full: of decoders by their tokens, as multiples of the width."""
    missed = [(one.cell.model, r) for one in ours for r in one.results if r["exact"] < r["num_texts"]]
    of_encoders = [r for model, r in missed if model in ("bert", "minilm")]
    shares = [r["tokens"] / r["width"] for model, r in missed if model not in ("bert", "minilm")]
    if not missed:
        return "Every batch came back whole."
    least = f", of {min(shares):.1f} times as many tokens as the width and more" if shares else ""
    return (
        f"Not whole are {len(shares)} batches of decoders{least}, and {len(of_encoders)} of encoders, whose search "
        "ended at its budget."
    )


# ---- tables


def table_1(lookup: Lookup) -> str:
    """All methods beside one another."""
    rows = []
    for model, data, texts in _keys(1):
        row = [MODELS[model], SETS[data], str(texts)]
        for method in ("TAG", "LAMP"):
            row += [_pair(published(method)[model, data, texts]), _again(lookup, model, data, texts, method)]
        row += [_pair(published()[model, data, texts]), _text(lookup(model, data, texts, "dager"))]
        rows.append([*row, _again(lookup, model, data, texts, "DAGER"), _exact(lookup(model, data, texts, "ours"))])
    heads = [
        "model",
        "set",
        "texts",
        "TAG, published",
        "TAG again",
        "LAMP, published",
        "LAMP again",
        "DAGER, published",
    ]
    return _markdown([*heads, "DAGER again", "this package", "its texts exact"], rows)


def dager_table(table: int, lookup: Lookup) -> str:
    """DAGER alone: published, again, and this package."""
    rows = [
        [
            MODELS[model],
            SETS[data],
            str(texts),
            _pair(published()[model, data, texts]),
            _text(lookup(model, data, texts, "dager")),
            _again(lookup, model, data, texts, "DAGER"),
            _exact(lookup(model, data, texts, "ours")),
        ]
        for model, data, texts in _keys(table)
    ]
    return _markdown(_HEADS, rows)


_HEADS = ["model", "set", "texts", "DAGER, published", "DAGER again", "this package", "its texts exact"]


def real_table(lookup: Lookup) -> str:
    """The models whose weights are real."""
    rows = []
    keys = dict.fromkeys((c.model, c.data, c.texts) for c in all_cells() if "real" in ENTRIES[c.model].weights)
    for model, data, texts in keys:
        row = [ENTRIES[model].label, SETS[data], str(texts)]
        row += [_text(lookup(model, data, texts, attack)) for attack in ("tag", "lamp", "dager")]
        rows.append([*row, _again(lookup, model, data, texts, "DAGER"), _exact(lookup(model, data, texts, "ours"))])
    return _markdown(["model", "set", "texts", "TAG", "LAMP", "DAGER", "this package", "its texts exact"], rows)


def hours_table(lookup: Lookup) -> str:
    """Hours for 100 batches."""
    rows = []
    for (model, data, method, texts), hours in published_hours().items():
        attack = "ours" if method == "DAGER" else method.lower()
        ours, again = lookup(model, data, texts, attack), lookup(model, data, texts, "dager")
        row = [MODELS[model], SETS[data], str(texts), method, f"{hours:g}"]
        row.append("–" if again is None or method != "DAGER" else _hours(again))
        rows.append([*row, why_not_run(model, method, texts) if ours is None else _hours(ours)])
    heads = ["model", "set", "texts", "method", "published, hours", "DAGER again", "this package (TAG, LAMP: ours)"]
    return _markdown(heads, rows)


def cut_table(lookup: Lookup) -> str:
    """With and without the cut."""
    rows = []
    for model, data, texts in _keys(6):
        again = lookup(model, data, texts, "dager")
        without = why_not_run(model, "DAGER", texts) if again is None else _pair(again.rouge_without_cut())
        row = [SETS[data], str(texts), _pair(published()[model, data, texts]), _text(again)]
        row += [_pair(published("DAGER without rank cut")[model, data, texts]), without]
        rows.append([*row, _again(lookup, model, data, texts, "DAGER")])
    heads = ["set (GPT-2)", "texts", "with the cut, published", "again", "without, published", "again", "this package"]
    return _markdown(heads, rows)


def details(summaries: Sequence[Summary]) -> str:
    """Seconds, machines and budgets."""
    machines = list(dict.fromkeys(one.machine for one in summaries))
    budgets = list(dict.fromkeys(_budget(one) for one in summaries if _budget(one)))
    rows = [
        [
            f"`{one.cell.name}`",
            str(one.num_batches),
            *(f"{value:.1f}" for value in one.rouge()),
            f"{one.total('exact')} of {one.total('num_texts')}",
            f"{one.total('certain')}",
            f"{one.total('false_certain')}",
            f"{one.median('seconds'):.1f}",
            f"{one.median('cpu_seconds'):.1f}",
            str(1 + machines.index(one.machine)),
            str(1 + budgets.index(_budget(one))) if _budget(one) else "",
        ]
        for one in sorted(summaries, key=lambda one: (one.cell.attack, one.cell.model, one.cell.data, one.cell.texts))
    ]
    heads = ["cell", "batches", "ROUGE-1", "ROUGE-2", "exact", "certain", "falsely", "s, median", "CPU s", "machine"]
    lines = [_markdown([*heads, "budget"], rows), "", "Machines:", ""]
    lines += [f"{number}. {name}" for number, name in enumerate(machines, start=1)]
    return "\n".join([*lines, "", "Budgets:", "", *(f"{n}. `{text}`" for n, text in enumerate(budgets, start=1))])


def _budget(one: Summary) -> str:
    priors = {result.get("prior") for result in one.results} - {None, ""}
    return " ".join([one.settings, *(f"prior: {prior.split(' of ')[0]}" for prior in sorted(map(str, priors)))]).strip()


# ---- cells of a table


def _keys(table: int) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys((c.model, c.data, c.texts) for c in published_cells() if c.table == table))


def _again(lookup: Lookup, model: str, data: str, texts: int, method: str) -> str:
    """Ours beside a published number, or why there is none."""
    found = lookup(model, data, texts, "ours" if method == "DAGER" else method.lower())
    return why_not_run(model, method, texts) if found is None else _text(found)


def _text(found: Summary | None) -> str:
    return "–" if found is None else f"{_pair(found.rouge())} ({found.num_batches})"


def _exact(found: Summary | None) -> str:
    return "–" if found is None else f"{found.total('exact')} of {found.total('num_texts')}"


def _hours(found: Summary) -> str:
    seconds = found.median("seconds" if found.on_gpu else "cpu_seconds")
    return f"{100 * seconds / 3600:.2g}{' (GPU)' if found.on_gpu else ' (one core)'}"


def _pair(rouge: tuple[float, float]) -> str:
    return " / ".join(f"{value:.1f}" for value in rouge)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
