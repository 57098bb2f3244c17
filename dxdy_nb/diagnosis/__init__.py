"""A training set-up, judged stage by stage: data, forward, loss, backward, update, comm, reproduce."""
