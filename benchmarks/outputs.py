"""One door to the benchmarks of the outputs channel: the mode says which script runs, and it gets all the options.

python benchmarks/outputs.py MODE [options]        python benchmarks/outputs.py MODE --help
"""

from __future__ import annotations

from door import enter

MODES = {
    "outputs_paper": {
        "hessian": "the paper's Hessian in closed form against torch.func.hessian",
        "gamma": "how far the paper's regulariser moves the minimum away from the input",
        "bounds": "the paper's bounds over the largest values found",
        "iterations": "Newton steps against the logarithm of the accuracy",
        "sketch": "sampled rows of the Hessian: error and failure rate against matrix Chernoff",
    },
    "outputs_solvers": {
        "definite": "inputs of one attention layer, sym(W) positive definite",
        "indefinite": "distinct pre-images, and whether the true one is among them",
        "unique": "is RECOVERED ever said where a second pre-image exists?",
        "causal": "one causal attention layer, position by position",
        "peers": "our solvers against scipy's and torch's",
        "slopes": "seconds against the number of tokens and the width",
    },
    "outputs_blocks": {
        "stack": "twelve random blocks of GPT-2's shape, inverted block by block",
        "trained": "single trained blocks: zero residual, and is it the client's row?",
        "first-attention": "tokens from the first attention module's output",
    },
    "outputs_encoders": {
        "prompts": "texts from hidden states of an encoder, layer by layer",
        "pooled": "bags of words from means of states",
    },
    "outputs_prompts": {
        "exact": "prompts from hidden states: exact, candidates, tokens a second",
        "against-gradient": "prompts: ours against SipIt-style search and a vocabulary scan",
        "coarse": "prompts from states that were stored coarsely or have noise",
        "control": "noise instead of states: nothing may be claimed",
    },
}


if __name__ == "__main__":
    enter(__doc__, MODES)
