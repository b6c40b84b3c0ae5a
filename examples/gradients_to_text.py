"""A server reads a client's texts off its gradients: the whole protocol in one short script.

python examples/gradients_to_text.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import unmask

TEXTS = [
    "The biopsy was positive, and the treatment starts on Monday.",
    "Please wire 48,200 euros to the account that ends in 7713.",
    "The spare key lies under the blue flower pot.",
]

model = unmask.load_model("smollm2-135m")

with TemporaryDirectory() as folder:
    path = Path(folder) / "update.safetensors"
    unmask.observe_gradients(model, TEXTS).save(path)  # the client
    recovery = unmask.recover_text(unmask.load_evidence(path), model)  # the server: it has the file and the model

print(f"{recovery.status.name}: {recovery.reason}")
for text in recovery.value.texts:
    print(f"  {'certain' if text.certain else 'guess  '}  {text.text!r}")
print(f"certificate: the replayed update differs by {recovery.certificate.residual:.1e}")

score = unmask.score_texts(recovery.value.expand(), [model.encode(text) for text in TEXTS], model.decode)
print(f"score: {score.exact_rate:.0%} exact, {score.num_false} false")
