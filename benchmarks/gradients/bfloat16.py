"""A client in bfloat16: precision and recall of the bag of words, SmolLM2-135M, next-token, invented texts.

python benchmarks/run.py gradients bfloat16 [--texts 2 4 8 16]
"""

from __future__ import annotations

import argparse

import torch
from machine import machine

import unmask
from unmask.audit.cases.data import INVENTED_TEXTS as TEXTS


def main() -> None:
    """One batch of each size; the last token of a text is only a label and leaves no vector to find."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, nargs="+", default=[2, 4, 8, 16])
    counts = parser.parse_args().texts
    model = unmask.load_model("smollm2-135m")
    client = model.to(dtype=torch.bfloat16)
    print(machine())
    print(f"{'texts':>6} {'tokens':>7} {'distinct':>9} {'precision':>10} {'recall':>7}  status")
    for count in counts:
        texts = [model.encode(text) for text in TEXTS[:count]]
        evidence = unmask.observe_gradients(client, texts, parameters=["layers.0.self_attn"])
        recovery = unmask.recover_text(evidence, model)
        held, found = {token for text in texts for token in text[:-1]}, recovery.value.token_set
        precision, recall = len(held & found) / max(1, len(found)), len(held & found) / len(held)
        num_tokens = sum(map(len, texts))
        status = recovery.status.name
        print(f"{count:>6} {num_tokens:>7} {len(held):>9} {precision:>10.3f} {recall:>7.3f}  {status}", flush=True)


if __name__ == "__main__":
    main()
