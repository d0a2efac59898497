"""Whether this GPU computes a shape correctly."""
