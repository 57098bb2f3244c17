"""The same function on several processes."""
