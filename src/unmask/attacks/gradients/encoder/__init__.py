"""An encoder's batch, text by text."""
