"""As much of torchtitan as our launcher depends on."""
