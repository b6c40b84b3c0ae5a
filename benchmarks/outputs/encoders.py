"""Texts from hidden states of an encoder, and bags of tokens from pooled states.

    python benchmarks/run.py outputs prompts [--model minilm-l6] [--layers 0 … 6] [--data FILE.tsv] [--texts 20]
    python benchmarks/run.py outputs pooled [--model smollm2-135m] [--layers 0 3 6 15] [--lengths 5 10 20 40]

`prompts`: exact texts, tokens right, texts run and seconds a text, by layer; the fit of a layer is timed apart.
`pooled`: recall and precision of the bag of tokens from one mean state, and how often the bag is certain.
Texts are invented where no file is given; of a file, the first column of each line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from invented import invented
from machine import machine

from unmask.attacks.outputs.prompts.encoder_attack import EncoderPromptAttack
from unmask.attacks.outputs.prompts.encoder_templates import encoder_templates_for
from unmask.attacks.outputs.vectors.pooled import PooledAttack
from unmask.evidence.outputs import HiddenEvidence, Site
from unmask.models import Model, load_model
from unmask.protocols.hidden import observe_hidden
from unmask.recovery import Status


def main() -> None:
    """Measure one of the two, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("prompts", "pooled"))
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 10, 20, 40], help="pooled: tokens of a text")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--max-length", type=int, default=30, help="prompts: longer texts are cut")
    parser.add_argument("--skip", type=int, default=0, help="lines of the file that are left out")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load_model(options.model or ("minilm-l6" if options.mode == "prompts" else "smollm2-135m"))
    print(machine())
    lines = read_lines(options.data, options.skip, options.texts)
    if options.mode == "prompts":
        layers = options.layers or list(range(model.num_blocks + 1))
        rows = prompts(model, [cut(model.encode(line), options.max_length) for line in lines[: options.texts]], layers)
    else:
        rows = pooled(model, lines, options.layers or [0, 3, 6, 15], options.lengths, options.texts)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine(), options.mode: rows}, indent=2) + "\n")


def read_lines(path: Path | None, skip: int, count: int) -> list[str]:
    """The file's lines without their labels, or invented sentences."""
    if path is None:
        return invented(skip + 10 * count)[skip:]
    return [line.split("\t")[0] for line in path.read_text().splitlines()[skip:]]


def cut(tokens: list[int], length: int) -> list[int]:
    """At most `length` tokens, the last one ([SEP]) kept."""
    return tokens if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]


def prompts(model: Model, texts: list[list[int]], layers: list[int]) -> list[dict]:
    """One row a layer."""
    lengths = sorted(map(len, texts))
    print(f"\n{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens")
    print("layer  exact  certain  tokens  runs/text  s/text  fit s")
    rows = []
    for layer in layers:
        started = time.perf_counter()
        encoder_templates_for(model, layer)
        fitted = time.perf_counter() - started
        found = [one_prompt(model, text, layer) for text in texts]
        row = {
            "layer": layer,
            "texts": len(texts),
            "exact": sum(one["exact"] for one in found),
            "certain": sum(one["certain"] for one in found),
            "tokens_right": sum(one["right"] for one in found) / sum(lengths),
            "runs_a_text": sum(one["runs"] for one in found) / len(texts),
            "seconds_a_text": sum(one["seconds"] for one in found) / len(texts),
            "fit_seconds": fitted,
            "each": found,
        }
        rows.append(row)
        print(
            f"{layer:>5} {row['exact']:>6} {row['certain']:>8} {row['tokens_right']:>7.3f} {row['runs_a_text']:>10.0f} "
            f"{row['seconds_a_text']:>7.1f} {fitted:>6.1f}",
            flush=True,
        )
    return rows


def one_prompt(model: Model, text: list[int], layer: int) -> dict:
    """One text; `certain` and not `exact` would be a false certificate."""
    recovery = EncoderPromptAttack()(observe_hidden(model, [text], layer=layer), model)
    found = recovery.value.texts[0]
    return {
        "tokens": len(text),
        "exact": found.tokens == tuple(text),
        "certain": found.certain,
        "right": sum(a == b for a, b in zip(found.tokens, text, strict=True)),
        "runs": recovery.cost.forward_passes,
        "seconds": recovery.cost.seconds,
        "rejected": recovery.certificate.rejected,
    }


def pooled(model: Model, lines: list[str], layers: list[int], lengths: list[int], count: int) -> list[dict]:
    """One row for each layer and length."""
    print("\nlayer  length  recall  precision  certain bags  s/text")
    stream = [token for line in lines for token in model.encode(line)]
    rows = []
    for layer in layers:
        for length in lengths:
            texts = [stream[start : start + length] for start in range(0, count * length, length)]
            found = [one_bag(model, text, layer) for text in texts if len(text) == length]
            means = {key: sum(one[key] for one in found) / len(found) for key in found[0]}
            row = {"layer": layer, "length": length, "texts": len(found)} | means
            rows.append(row)
            print(
                f"{layer:>5} {length:>7} {row['recall']:>7.2f} {row['precision']:>10.2f} {row['certain']:>13.2f} "
                f"{row['seconds']:>7.1f}",
                flush=True,
            )
    return rows


@torch.no_grad()
def one_bag(model: Model, text: list[int], layer: int) -> dict:
    """Counts of tokens that both bags hold, by the size of each; a certain bag that is not the text's is an error."""
    evidence: HiddenEvidence = observe_hidden(model, [text], layer=layer, site=Site.MEAN)
    recovery = PooledAttack()(evidence, model)
    guess = Counter(recovery.value.texts[0].tokens) if recovery.value.texts else Counter()
    both = (guess & Counter(text)).total()
    certain = recovery.status is Status.PARTIAL
    if certain and recovery.value.token_set != set(text):
        raise AssertionError(f"a certain bag that is not the text's: {sorted(recovery.value.token_set)}, {text}")
    return {
        "recall": both / len(text),
        "precision": both / max(guess.total(), 1),
        "certain": float(certain),
        "seconds": recovery.cost.seconds,
    }


if __name__ == "__main__":
    main()
