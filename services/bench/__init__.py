"""`offbeat bench`: every published figure beside its bare baseline, measured in the same run, as JSON."""
