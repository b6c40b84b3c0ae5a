"""Prompts from hidden states in two editions of the package, in turns: CPU seconds, tokens a second, and their ratio.

python benchmarks/run.py outputs speed --before ../other-checkout/src [--sizes 8] [--batches 3] [--data sentences.tsv]

Each task runs in a process of its own, one edition after the other on the same texts, with one thread. A batch holds
texts of 24 tokens, at least one in eight of random tokens. Fitting a layer, once a model, is not in the seconds.
"""

from __future__ import annotations

from gradients.speed import compare_editions

# As in gradients/speed.py: it gives `model`, `evidence`, `texts` and `attack`.
PROMPTS = """
from unmask.attacks.outputs.prompts.attack import PromptAttack
model = unmask.load_model("smollm2-135m")
lines = [line.split("\\t")[0] for line in Path(data).read_text(encoding="utf-8").splitlines()]
generator = torch.Generator().manual_seed(batch)
order = torch.randperm(len(lines), generator=generator).tolist()
long = (tokens for tokens in (model.encode(lines[index]) for index in order) if len(tokens) >= 24)
random = torch.randint(0, model.vocab_size, (-(-size // 8) if size > 1 else 0, 24), generator=generator).tolist()
texts = [next(long)[:24] for _ in range(size - len(random))] + random
evidence = unmask.observe_hidden(model, texts, layer={layer})
attack = PromptAttack()
attack(unmask.observe_hidden(model, [texts[0][:2]], layer={layer}), model)
"""
TASKS = {
    "SmolLM2-135M, layer 15 of 30": ((8,), PROMPTS.format(layer=15)),
    "SmolLM2-135M, layer 30 of 30": ((1, 8), PROMPTS.format(layer=30)),
}


def main() -> None:
    """Prompts in both editions."""
    compare_editions(TASKS, __doc__)


if __name__ == "__main__":
    main()
