"""What the conductor does with a sample between its lease and its step, and with whom."""
