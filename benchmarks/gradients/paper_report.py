"""The table of `paper_tables.py` in Markdown, with the paper's numbers beside ours."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from intervals import mean_with_interval
from published import published
from result_lines import Result
from text_sets import SETS

TASKS = {"classification": "classification", "next_token": "next token"}
UNKNOWN = "–"
# (row, task) → the paper's name of the model in its tables.
PAPERS_MODELS = {
    ("base", "classification"): "gpt2",
    ("base", "next_token"): "gpt2-nexttoken",
    ("large", "classification"): "gpt2-large",
}
# (row, task, set, texts) → the paper's (ROUGE-1, ROUGE-2) × 100.
PUBLISHED = {
    (row, task, set_name, num_texts): rouge
    for (row, task), name in PAPERS_MODELS.items()
    for (model_name, set_name, num_texts), rouge in published().items()
    if model_name == name
}


def report(results: Sequence[Result], labels: dict[str, str], model: str | None) -> str:
    """A header, the table in Markdown, and what was not exact."""
    cells: defaultdict[tuple[str, str, str, int], list[Result]] = defaultdict(list)
    for result in results:
        cells[cell_of(result)].append(result)
    weights = "its own weights and tokenizer" if model else "true shape, random weights, SmolLM2's tokenizer"
    machines = sorted({result["machine"] for result in results})
    lines = [
        f"DAGER's tables (arXiv 2405.15586): {', '.join(labels.values())}; {weights}; float32, dropout off.",
        *(f"Machine: {name}." for name in machines),
        f"The update: {_update(results)}.",
        "The adversary knows the model, the task and the number of texts.",
        "ROUGE: × 100, mean over batches, 95 % bootstrap interval (zero wide where all batches agree, however few).",
        "Exact: texts recovered token by token, in %. Seconds (elapsed and CPU): the attack alone, median.",
        "Paper: DAGER's ROUGE-1 / ROUGE-2 on the pretrained model (its Tables 1 to 3, 100 batches a cell).",
        "",
        "| model | task | set | texts | batches | ROUGE-1 | ROUGE-2 | exact, % | s/batch | CPU s | paper |",
        "| --- | --- | --- | --: | --: | --- | --- | --: | --: | --: | --: |",
        *(_line(cell, held, labels) for cell, held in cells.items()),
        "",
        *_not_exact(results),
    ]
    return "\n".join(lines)


def _line(cell: tuple[str, str, str, int], results: list[Result], labels: dict[str, str]) -> str:
    row, task, set_name, num_texts = cell
    seed = results[0]["spec"]["seed"]
    published = PUBLISHED.get(cell)
    columns = [
        labels[row],
        TASKS[task],
        SETS[set_name],
        str(num_texts),
        str(len(results)),
        *(mean_with_interval([100 * result[name] for result in results], seed) for name in ("rouge1", "rouge2")),
        f"{100 * statistics.fmean(result['exact_rate'] for result in results):.1f}",
        *(f"{statistics.median(result[name] for result in results):.2f}" for name in ("seconds", "cpu_seconds")),
        UNKNOWN if published is None else f"{published[0]:.1f} / {published[1]:.1f}",
    ]
    return f"| {' | '.join(columns)} |"


def _not_exact(results: Sequence[Result]) -> list[str]:
    """Batches with a text missed or made up, or of another status than RECOVERED; exact ones with a lower ROUGE."""
    lines = []
    for result in results:
        cell = "{row}, {task}, {set}, {texts} texts, batch {batch}".format(**result["spec"])
        rate, num_false = result["exact_rate"], result["num_false"]
        if rate < 1 or num_false or result["status"] != "RECOVERED" or not result["certificate_holds"]:
            lines.append(f"- {cell}: {rate:.0%} exact, {num_false} false; {result['status']}: {result['reason']}")
        elif min(result["rouge1"], result["rouge2"]) < 1:
            lines.append(f"- {cell}: exact, but a text of a single word has no bigram, so ROUGE-2 counts 0 for it")
    return ["Not exact:", *lines] if lines else ["Every batch was recovered exactly, and its certificate holds."]


def _update(results: Sequence[Result]) -> str:
    if any(result["spec"]["whole_update"] for result in results):
        return "all parameters"
    return "block 0, the last down projection, with classification the embeddings too (the paper reads blocks 0 and 1)"


def cell_of(result: Result) -> tuple[str, str, str, int]:
    """The line of the table that a batch counts in."""
    spec = result["spec"]
    return spec["row"], spec["task"], spec["set"], spec["texts"]
