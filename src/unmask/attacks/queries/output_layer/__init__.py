"""A language model's output layer from its logits."""
