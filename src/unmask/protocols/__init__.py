"""How a client makes what the adversary sees. The secret's side of the fence: attacks never import from here."""

from unmask.protocols.caches import observe_cache
from unmask.protocols.dpsgd import PrivateUpdate, epsilon_spent, observe_dpsgd
from unmask.protocols.fedavg import observe_fedavg
from unmask.protocols.fedsgd import observe_gradients
from unmask.protocols.hidden import observe_hidden
from unmask.protocols.lora import observe_lora
from unmask.protocols.next_token import observe_next_token
from unmask.protocols.vectors import observe_vectors

__all__ = [
    "PrivateUpdate",
    "epsilon_spent",
    "observe_cache",
    "observe_dpsgd",
    "observe_fedavg",
    "observe_gradients",
    "observe_hidden",
    "observe_lora",
    "observe_next_token",
    "observe_vectors",
]
