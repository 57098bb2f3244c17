"""One backward pass, understood."""
