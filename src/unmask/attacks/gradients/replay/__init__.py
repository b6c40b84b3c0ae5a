"""What runs the model again on recovered texts, and compares."""
