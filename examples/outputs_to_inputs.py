"""What hidden states and an attention layer's output give away: a prompt, and an input matrix.

python examples/outputs_to_inputs.py
"""

import torch

import unmask

PROMPT = "The spare key lies under the blue flower pot behind the garage."

# A service hands out hidden states of its last layer; the model is public.
model = unmask.load_model("smollm2-135m")
states = unmask.observe_hidden(model, [PROMPT])
recovery = unmask.recover_text(states, model)
print(f"{recovery.status.name}: {recovery.value.texts[0].text!r}")
print(f"  worst distance of a recomputed state {recovery.certificate.residual:.1e}")
print(
    f"  {recovery.cost.candidates / len(recovery.value.texts[0].tokens):.0f} candidates a token of {model.vocab_size:,}"
)

# One attention layer with known weights W, V: its output determines its input.
generator = torch.Generator().manual_seed(0)
X, A, V = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((6, 16), (16, 16), (16, 16)))
W = A @ A.T / 64
output = (X @ W @ X.T).softmax(dim=1) @ X @ V
found = unmask.recover_inputs(unmask.AttentionEvidence(W=W, V=V, output=output))
print(f"{found.status.name}: {len(found.value)} pre-image(s), error {float((found.value.X - X).norm() / X.norm()):.0e}")
