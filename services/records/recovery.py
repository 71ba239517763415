"""A conductor that comes back finds its book in the ledger."""

from __future__ import annotations

from services.records.book import FINAL, Book, Group, Sample, State
from services.records.ledger import Ledger, StoredSample


def recover(book: Book, ledger: Ledger) -> bool:
    """Fill an empty book; True where the ledger held a run already.

    What was leased is pending again, since its lease died with the conductor; what was generated keeps its place.
    """
    totals = ledger.totals()
    book.next_group = totals["accepted"]["next_group"]
    book.accepted = totals["accepted"]["samples"]
    book.quarantined = sum(totals["quarantined"].values())
    book.dropped.update(totals["dropped"])
    book.trained = totals["trained"]["samples"]
    book.recorded_step, book.trained_step = ledger.steps()
    book.pushed_version = int(ledger.fact("pushed_version", "0"))
    book.staleness = ledger.staleness()
    for batch in ledger.batches(after=0, trained=False):
        book.batches[batch.step] = batch
    for batch in ledger.batches(after=book.pushed_version):
        book.unpushed[batch.step] = len(batch.keys)
    for position, prompt, stored in ledger.groups():
        samples = [restore(sample, book) for sample in stored]
        unsettled = sum(sample.state < State.REFERENCED for sample in samples)
        book.groups[position] = Group(position, prompt, samples, unsettled)
        book.pending.extend(sample for sample in samples if sample.state is State.PENDING)
        if unsettled == 0:
            book.complete.add(position)
    still_open = sum(sample.state not in FINAL for group in book.groups.values() for sample in group.samples)
    book.outstanding = still_open + sum(book.unpushed.values())
    return book.accepted > 0


def restore(stored: StoredSample, book: Book) -> Sample:
    """A sample where it stood, as far as that outlives the conductor."""
    sample = Sample(*stored.key, baseline=book.is_baseline(stored.key[1]))
    sample.state = State.PENDING if stored.state is State.LEASED else stored.state
    sample.attempts, sample.trajectory = stored.attempts, stored.trajectory
    if stored.trajectory is not None:
        sample.oldest_version = min(span.policy_version for span in stored.trajectory.spans)
        if sample.state is State.SCORED and not book.lacks_reference(sample):
            sample.state = State.REFERENCED
    return sample
