"""Each sample has a seed of its own: the same on every attempt, and far from its neighbours'."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.stages.generation import seed_of


def test_known_seeds_stay_what_they_are() -> None:
    """Changing them would change what every seeded run draws."""
    assert [seed_of(0, 0, 0), seed_of(0, 0, 1), seed_of(1, 2, 3)] == [
        3119036373970289394,
        7919892530791287365,
        3168204422549370719,
    ]


def test_samples_of_a_run_have_different_seeds() -> None:
    seeds = {seed_of(run, group, index) for run in range(4) for group in range(500) for index in range(16)}
    assert len(seeds) == 4 * 500 * 16


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 65534))
def test_a_seed_fits_the_wire_and_differs_from_its_neighbours_in_many_bits(run: int, group: int, index: int) -> None:
    seed = seed_of(run, group, index)
    assert 0 <= seed < 2**63
    assert seed == seed_of(run, group, index)
    neighbours = (seed_of(run, group, index + 1), seed_of(run, group + 1, index))
    assert all(8 <= (seed ^ other).bit_count() <= 56 for other in neighbours)
