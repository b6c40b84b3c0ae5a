"""Run a benchmark by its room and name; it gets all further options.

python benchmarks/run.py                                  # lists them
python benchmarks/run.py gradients decoders --help
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from unittest.mock import patch

# Room → script → its modes, with a sentence each. A script with one mode is that mode, and is not told.
ROOMS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "gradients": {
        "gradients.decoders": {"decoders": "decoders against DAGER, same gradients, one process"},
        "gradients.decoders_cuda": {"decoders_cuda": "the Llama-2-7B shape on a GPU"},
        "gradients.beyond": {"beyond": "more tokens than the width"},
        "gradients.bfloat16": {"bfloat16": "a client in bfloat16"},
        "gradients.encoders": {"encoders": "encoders: exact texts, the paper's data sets, slopes, against DAGER"},
        "gradients.speed": {"speed": "the same attacks in two editions of the package, in turns"},
        "gradients.paper_tables": {"paper_tables": "the paper's data sets on decoders"},
        "gradients.leak_map": {"leak_map": "what protocols and defences leave: noise, few digits, local steps, LoRA"},
    },
    "outputs": {
        "outputs.paper": {
            "hessian": "the paper's Hessian in closed form against torch.func.hessian",
            "gamma": "how far the paper's regulariser moves the minimum away from the input",
            "bounds": "the paper's bounds over the largest values found",
            "iterations": "Newton steps against the logarithm of the accuracy",
            "sketch": "sampled rows of the Hessian: error and failure rate against matrix Chernoff",
        },
        "outputs.solvers": {
            "definite": "inputs of one attention layer, sym(W) positive definite",
            "indefinite": "distinct pre-images, and whether the true one is among them",
            "unique": "is RECOVERED ever said where a second pre-image exists?",
            "causal": "one causal attention layer, position by position",
            "peers": "our solvers against scipy's and torch's",
            "slopes": "seconds against the number of tokens and the width",
        },
        "outputs.blocks": {
            "stack": "twelve random blocks of GPT-2's shape, inverted block by block",
            "trained": "single trained blocks: zero residual, and is it the client's row?",
            "first-attention": "tokens from the first attention module's output",
        },
        "outputs.encoders": {
            "prompts": "texts from hidden states of an encoder, layer by layer",
            "pooled": "bags of words from means of states",
        },
        "outputs.vectors": {
            "vectors": "texts from stored embeddings: lengths and storage types",
            "vector-control": "random, foreign, mixed and shuffled vectors: nothing may be claimed",
            "vector-rate": "texts embedded a second by the search, beside the model alone",
        },
        "outputs.vectors_utility": {
            "vectors-utility": "stored embeddings behind defences: neighbours that stay, texts that are recovered",
        },
        "outputs.prompts": {
            "exact": "prompts from hidden states: exact, candidates, tokens a second",
            "against-gradient": "prompts: ours against SipIt-style search and a vocabulary scan",
            "coarse": "prompts from states that were stored coarsely or have noise",
            "control": "noise instead of states: nothing may be claimed",
        },
        "outputs.speed": {"speed": "prompts from hidden states in two editions of the package, in turns"},
        "outputs.caches": {
            "caches": "prompts from cached keys and values: blocks and storage types",
            "cache-parts": "the same of keys alone, values alone, some of the heads",
            "cache-control": "random, shuffled, foreign and cloaked caches: nothing may be certain",
            "known-beginning": "coarse hidden states with and without a known beginning",
        },
    },
    "queries": {
        "queries.single": {"one-head": "one head: the paper's learners beside ours, ranks, noise, signs, slopes"},
        "queries.heads": {
            "sizes": "several heads: errors and queries against the degrees of freedom",
            "defended": "what rounding, noise and bounds on norms leave",
            "odd": "equal, parallel, opposite, silent and too many heads; oracles that are no layers",
            "vectors": "answers in R^p",
            "slopes": "queries against d, H and r",
            "trained": "attention layers of SmolLM2-135M, real weights",
        },
        "queries.repetition": {"repetition": "repeated tokens of bounded norm; heads in orthogonal subspaces"},
        "queries.networks": {
            "relu": "two-layer ReLU networks, with and without biases",
            "transformers": "one-layer transformers",
        },
        "queries.logits": {"logits": "hidden size and output layer of SmolLM2-135M behind an OpenAI-style server"},
    },
    "paper": {
        "paper.dager": {"dager": "DAGER's tables and figures whole, with TAG and LAMP: published numbers beside ours"},
        "paper.unmasking": {
            "unmasking": "arXiv 2310.12462, whole: stacks, descent, wrong weights, bounds, indefinite W"
        },
        "paper.queries": {"queries": "arXiv 2601.16873 whole: counts, noise, bounded norms, samples; page and plots"},
    },
    "models": {
        "models.editions": {"editions": "the same work in two editions of the package, in turns"},
    },
    "scale": {
        "scale.memory": {"memory": "a 7B update on a CPU machine: peak memory, tensor by tensor from the disk"},
        "scale.estimates": {"estimates": "the minutes that --dry-run estimates beside those that an audit took"},
        "scale.audit": {"audit": "the same plan with one and with several workers: speed-up and efficiency"},
    },
    "baselines": {
        "baselines.against_papers": {"against_papers": "every 'against' number: DAGER at its best, the query papers"},
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Pass everything on to the script of the mode."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if len(arguments) == 1 and arguments[0] not in ("-h", "--help", *ROOMS):
        raise SystemExit(f"there is no room '{arguments[0]}'; choose one of these benchmarks:\n\n{listing()}")
    if len(arguments) < 2:
        print(listing())
        return
    room, mode, *options = arguments
    script = script_of(room, mode)
    told = [mode, *options] if len(ROOMS[room][script]) > 1 else options
    with patch.object(sys, "argv", [f"{script}", *told]):  # not every script's main takes arguments
        importlib.import_module(script).main()


def script_of(room: str, mode: str) -> str:
    """The script that knows the mode."""
    for script, modes in ROOMS.get(room, {}).items():
        if mode in modes:
            return script
    raise SystemExit(f"there is no benchmark '{room} {mode}'; choose one of these:\n\n{listing()}")


def listing() -> str:
    """All benchmarks, one line each, by room."""
    lines = [__doc__.strip()]
    for room, scripts in ROOMS.items():
        modes = {mode: sentence for each in scripts.values() for mode, sentence in each.items()}
        lines += ["", *(f"  {room} {mode:<18}{sentence}" for mode, sentence in modes.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
