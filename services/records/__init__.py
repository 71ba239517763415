"""Where every sample is, and what the run tells of it: in memory, in SQLite, in JSON lines."""
