"""What the states of a model look like, and what the paper proves of them."""
