"""Any training loop, observed: what happened at each step, kept as one record a step."""
