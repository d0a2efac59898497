"""Which engines run a cut model, and what a request costs there."""
