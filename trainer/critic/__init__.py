"""The value model of PPO and its updates."""
