"""What proves a text: the client or the service, run again on it, and how well that agrees with the evidence."""
