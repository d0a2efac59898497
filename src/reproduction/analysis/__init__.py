"""What the states and the filters of a model look like."""
