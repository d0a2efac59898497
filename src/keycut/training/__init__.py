"""Training that survives: pretraining and recovery on one loop, with checkpoints that are whole."""
