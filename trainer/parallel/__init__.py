"""The trainer's ranks: processes that hold a part of the weights each and take a part of every batch."""

from trainer.parallel.ranks import ALONE, Ranks

__all__ = ["ALONE", "Ranks"]
