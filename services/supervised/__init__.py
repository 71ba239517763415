"""`offbeat sft`: supervised training with the trainer's own core."""
