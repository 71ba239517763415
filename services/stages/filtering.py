"""Dynamic sampling (DAPO, arXiv 2503.14476): a group whose samples all have one reward teaches nothing.

It is dropped, counted as `filtered`, and makes room for another prompt: admission counts what is outstanding, so the
staleness bound holds as before. A step replaces at most `limit` groups and then trains on what there is, so a run whose
prompts are all too easy or too hard goes on.
"""

from services.records.book import Group


class Filtering:
    """Counts what the next step has replaced so far."""

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        """Groups that a step may replace; 0: none."""
        self.replaced = 0
        """Groups that were replaced for the step that is being formed, in this life of the conductor."""

    def drops(self, group: Group) -> bool:
        """Whether this complete group is to be dropped; counts it."""
        if self.replaced >= self.limit or not has_equal_rewards(group):
            return False
        self.replaced += 1
        return True

    def recorded(self) -> None:
        """The batch is formed: the next step has its own limit."""
        self.replaced = 0


def has_equal_rewards(group: Group) -> bool:
    """Whether at least two samples are left, the baseline aside, and all have exactly one reward."""
    rewards = [sample.trajectory.reward for sample in group.drawn() if sample.trajectory is not None]
    return len(rewards) > 1 and len(set(rewards)) == 1
