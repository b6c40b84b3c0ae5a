"""How each channel is audited: the axes of its plans, what does not go together in a case, and the audit of a case."""
