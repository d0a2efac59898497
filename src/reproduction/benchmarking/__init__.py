"""Speed on the machine at hand, one cell of a benchmark at a time, each in a process of its own."""
