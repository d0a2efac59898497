"""What a configuration fetches from the hub, and whether it is what the run needs."""
