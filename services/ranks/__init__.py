"""A trainer of several processes: what each of them does, and how they are started."""
