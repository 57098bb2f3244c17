"""The reference loop: data, models, and one run from a configuration."""
