"""Any number of heads from their answers."""
