"""What stands behind the commands of `offbeat` that are not services."""
