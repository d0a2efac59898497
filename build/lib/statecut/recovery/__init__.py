"""Pretraining and recovery, on one loop, with checkpoints that survive a crash."""
