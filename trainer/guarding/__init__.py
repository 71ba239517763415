"""What stops or warns a run."""
