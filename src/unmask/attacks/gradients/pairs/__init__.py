"""An encoder–decoder's batch: the texts that it read and those that it wrote."""
