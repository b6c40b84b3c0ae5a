"""Attacks: evidence in, recovery out. Nothing here imports the secret's side (protocols, defences, scores, audit)."""
