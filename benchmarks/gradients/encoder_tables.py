"""`--mode exact` and `--mode paper`: batches of sentences, attacked one by one, and tables of how many fell."""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradients.encoder_cases import ROWS, Attack, Result, Tokens, attacked, code, key_of, word_salad
from gradients.paper_report import UNKNOWN
from intervals import mean_with_interval
from machine import machine
from progress_bar import progress_bar
from published import published
from result_lines import append, open_results
from text_sets import SETS, draw_batch, read_set

from unmask import observe_gradients
from unmask.attacks.gradients.encoder.attack import EncoderAttack
from unmask.models import Model

WHOLE = "all"
INVENTED = "invented"
NUM_INVENTED = 1200  # as many as the sets have
# (set, texts) → DAGER's ROUGE-2 × 100 on BERT-base, the paper's Table 1.
PUBLISHED = {(name, texts): rouge[1] for (model, name, texts), rouge in published().items() if model == "bert"}
Example = tuple[Tokens, int | None]  # tokens, label; None: drawn by the seed


@dataclass(frozen=True)
class Spec:
    """One batch. Whatever changes its result is in here, but for the code of the attack itself."""

    row: str
    set: str
    pooling: str
    keep: str
    texts: int
    batch: int
    seed: int
    min_tokens: int
    max_tokens: int
    data_sha256: str
    attack: str

    @property
    def cell(self) -> tuple[str, str, int, str, str]:
        """The line of the table that the batch counts in."""
        return self.row, self.set, self.texts, self.pooling, self.keep


@dataclass(frozen=True)
class Source:
    """Sentences with their labels, None where the seed draws them; no sentences: they are to be invented."""

    name: str
    sentences: tuple[tuple[str, int | None], ...]
    sha256: str

    @classmethod
    def read(cls, path: Path, *, labels: bool) -> Source:
        """From a file; without `labels` only its first column is read."""
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if labels:
            return cls(path.stem, tuple(read_set(path)), digest)
        lines = path.read_text(encoding="utf-8").splitlines()
        return cls(path.stem, tuple((line.split("\t")[0], None) for line in lines if line.strip()), digest)

    def examples(self, model: Model, spec: Spec) -> list[Example]:
        """What the batches are drawn from: texts of the lengths asked for."""
        if not self.sentences:
            salad = word_salad(model, NUM_INVENTED, spec.min_tokens, spec.max_tokens, seed=spec.seed)
            return [(text, None) for text in salad]
        encoded = [(model.encode(sentence), label) for sentence, label in self.sentences]
        return [pair for pair in encoded if spec.min_tokens <= len(pair[0]) <= spec.max_tokens]


def exact(options: argparse.Namespace) -> str:
    """Texts of the length of Rotten Tomatoes: are they exact, and is none false?"""
    source = Source(INVENTED, (), "")
    if options.data is not None and options.data.is_file():
        source = Source.read(options.data, labels=False)
    title = f"Texts: {_told(source, options)}; labels drawn at random; float32, dropout off."
    return run(options, [source], title)


def paper(options: argparse.Namespace) -> str:
    """The paper's Table 1 for BERT: ROUGE on three sets, classification on [CLS]."""
    sources = [Source.read(options.data / f"{name}.tsv", labels=True) for name in options.sets]
    return run(options, sources, "DAGER's Table 1 (arXiv 2405.15586), BERT: classification; float32, dropout off.")


def run(options: argparse.Namespace, sources: Sequence[Source], title: str) -> str:
    """Attack the batches that the file does not hold yet; then the table of all that were asked for."""
    specs = plan(options, sources)
    results = open_results(options.out, options.resume)
    missing = [spec for spec in specs if key_of(spec) not in results]
    attack = EncoderAttack(max_anchors=options.max_anchors)
    with progress_bar(len(missing)) as advance:
        for row in dict.fromkeys(spec.row for spec in missing):
            model = ROWS[row].load()
            for source in sources:
                todo = [spec for spec in missing if (spec.row, spec.set) == (row, source.name)]
                examples = source.examples(model, todo[0]) if todo else []
                for spec in todo:
                    advance(f"{row}, {source.name}, {spec.texts} texts, {spec.pooling}, {spec.keep}, {spec.batch}", 0)
                    results[key_of(spec)] = measure(attack, model, spec, examples)
                    append(options.out, results[key_of(spec)])
                    advance("done", 1)
    return report([results[key_of(spec)] for spec in specs], title)


def plan(options: argparse.Namespace, sources: Sequence[Source]) -> list[Spec]:
    """Every batch that was asked for, in the order of the table."""
    attack = repr(EncoderAttack(max_anchors=options.max_anchors))
    return [
        Spec(row, source.name, pooling, keep, texts, batch, options.seed, *options.tokens, source.sha256, attack)
        for row in options.rows
        for source in sources
        for texts in options.texts
        for pooling in options.poolings
        for keep in options.keep
        for batch in range(options.batches)
    ]


def measure(attack: Attack, model: Model, spec: Spec, examples: list[Example]) -> Result:
    """One batch; the same texts whatever the model, the pooling and the part of the update."""
    texts, labels = zip(*draw_batch(examples, spec.set, spec.texts, spec.batch, spec.seed), strict=True)
    evidence = observe_gradients(
        model,
        texts,
        task="classification",
        labels=None if None in labels else labels,
        pooling=spec.pooling,
        parameters=None if spec.keep == WHOLE else [spec.keep],
        seed=spec.seed + spec.batch,
    )
    result = attacked(attack, evidence, model, texts)
    return {"key": key_of(spec), "spec": asdict(spec), **result, "code": code(), "machine": machine()}


# ---- the report


def report(results: Sequence[Result], title: str) -> str:
    """A header, a line for each cell, and what was not exact."""
    cells: defaultdict[tuple[str, str, int, str, str], list[Result]] = defaultdict(list)
    for result in results:
        cells[Spec(**result["spec"]).cell].append(result)
    lines = [
        title,
        *(f"Machine: {name}." for name in sorted({result["machine"] for result in results})),
        *(f"Attack: {attack}." for attack in sorted({result["spec"]["attack"] for result in results})),
        "The adversary knows the model and the number of texts. Update: all gradients, or those named.",
        "Exact: texts recovered token by token, best-effort guesses included. False: texts that the certificate calls",
        "certain and that are not in the batch. ROUGE: × 100 over words, mean over batches, 95 % bootstrap interval.",
        "Seconds: the attack alone, median [least, most]. Paper: its ROUGE-2 on BERT-base, where we know it.",
        "",
        "| model | set | texts | pooling | update | batches | exact | exact, % | false | ROUGE-1 | ROUGE-2 | paper "
        "| s/batch | status |",
        "| --- | --- | --: | --- | --- | --: | --: | --: | --: | --- | --- | --: | --- | --- |",
        *(_line(cell, held) for cell, held in cells.items()),
        "",
        *_remarks(results),
    ]
    return "\n".join(lines)


def _line(cell: tuple[str, str, int, str, str], results: list[Result]) -> str:
    row, set_name, num_texts, pooling, keep = cell
    num_exact, num_texts_all = sum(r["exact"] for r in results), sum(r["texts"] for r in results)
    seconds = [result["seconds"] for result in results]
    statuses = Counter(result["status"] for result in results)
    seed = results[0]["spec"]["seed"]
    published = PUBLISHED.get((set_name, num_texts))
    columns = [
        ROWS[row].label,
        SETS.get(set_name, set_name),
        str(num_texts),
        pooling,
        keep,
        str(len(results)),
        f"{num_exact}/{num_texts_all}",
        f"{100 * num_exact / num_texts_all:.1f}",
        str(sum(result["false_certain"] for result in results)),
        *(mean_with_interval([100 * r[name] for r in results], seed) for name in ("rouge1", "rouge2")),
        UNKNOWN if published is None else f"{published:.1f}",
        f"{statistics.median(seconds):.1f} [{min(seconds):.1f}, {max(seconds):.1f}]",
        ", ".join(f"{count} {status}" for status, count in statuses.most_common()),
    ]
    return f"| {' | '.join(columns)} |"


def _remarks(results: Sequence[Result]) -> list[str]:
    """Batches that were not exact, false texts, and results of another version of the code."""
    lines = []
    for result in results:
        name = "{row}, {set}, {texts} texts, {pooling}, {keep}, batch {batch}".format(**result["spec"])
        if result["false_certain"]:
            lines.append(f"- FALSE: {name}: {result['false_certain']} texts under the certificate are not in the batch")
        if result["exact"] < result["texts"] or result["status"] != "RECOVERED" or not result["certificate_holds"]:
            found = f"{result['exact']} of {result['texts']} exact, {result['certain_exact']} certain"
            lines.append(f"- {name}: {found}; {result['status']}: {result['reason']}")
    remarks = ["Not exact:", *lines] if lines else ["Every batch was recovered exactly, and its certificate holds."]
    num_old = sum(result["code"] != code() for result in results)
    if num_old:
        remarks.append(f"{num_old} of {len(results)} batches were measured with another version of the code.")
    return remarks


def _told(source: Source, options: argparse.Namespace) -> str:
    lengths = "{} to {} tokens with [CLS] and [SEP]".format(*options.tokens)
    if source.sentences:
        return f"{SETS.get(source.name, source.name)}, those of {lengths}"
    return f"INVENTED, as there is no data file: random whole words (Zipf) of {lengths}"
