"""How a client makes what the adversary sees. The secret's side of the fence: attacks never import from here."""

from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.hidden import observe_hidden

__all__ = ["observe_gradients", "observe_hidden"]
