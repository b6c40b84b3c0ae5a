"""One door to the benchmarks of the queries channel: the mode says which script runs, and it gets all the options.

python benchmarks/queries.py MODE [options]        python benchmarks/queries.py MODE --help
"""

from __future__ import annotations

from door import enter

MODES = {
    "queries_single": {"one-head": "one head: the paper's learners beside ours, ranks, noise, signs, slopes"},
    "queries_heads": {
        "sizes": "several heads: errors and queries against the degrees of freedom",
        "defended": "what rounding, noise and bounds on norms leave",
        "odd": "equal, parallel, opposite, silent and too many heads; oracles that are no layers",
        "vectors": "answers in R^p",
        "slopes": "queries against d, H and r",
        "trained": "attention layers of SmolLM2-135M, real weights",
    },
    "queries_repetition": {"repetition": "repeated tokens of bounded norm; heads in orthogonal subspaces"},
    "queries_networks": {
        "relu": "two-layer ReLU networks, with and without biases",
        "transformers": "one-layer transformers",
    },
    "queries_logits": {"logits": "hidden size and output layer of SmolLM2-135M behind an OpenAI-style server"},
}

if __name__ == "__main__":
    enter(__doc__, MODES)
