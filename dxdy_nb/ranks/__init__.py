"""The same function on several processes, and whether they do the same."""
