"""Weights into buckets, and bucket by bucket to the rollout servers."""
