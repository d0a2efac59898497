"""Text to packed tokens."""
