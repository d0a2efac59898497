"""Models: where an architecture keeps its key channels, how one is loaded, saved and created."""
