"""As much of flame as our launcher depends on, without a GPU."""
