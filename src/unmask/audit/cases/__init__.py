"""Cases, the data and secrets that they are about, and their names."""
