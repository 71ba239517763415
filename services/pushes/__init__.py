"""A new version on its way to the rollout servers: the trainer's end and theirs."""
