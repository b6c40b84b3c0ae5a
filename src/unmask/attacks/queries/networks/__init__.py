"""ReLU networks and one-layer transformers from their answers."""
