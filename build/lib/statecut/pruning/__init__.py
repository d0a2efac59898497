"""Which channels stay: the methods, and what they have in common."""
