"""The parts of the soak campaign (`benchmarks/soak.py`): recipes that a seed draws, runs them, and shrinks them."""
