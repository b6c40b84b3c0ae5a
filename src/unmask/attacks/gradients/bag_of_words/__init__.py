"""Which tokens a batch holds: rows of embeddings, spans, the test under noise, LoRA."""
