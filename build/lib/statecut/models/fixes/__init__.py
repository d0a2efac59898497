"""Changes to other software, one file for each."""
