import os

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The same problems on every run; with WEFT_RANDOM=10 new ones, ten times as many.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("random" if "WEFT_RANDOM" in os.environ else "same")


@pytest.fixture
def refused():
    """refusals.refused"""
    import refusals  # which imports weft: not before a test wants it

    return refusals.refused


@pytest.fixture
def seen(monkeypatch):
    """Addresses of the arrays that the library is given on one rank, by pass."""
    from weft import _core

    def spy_on(name):
        real, calls[name] = getattr(_core.OneRank, name), []

        def spy(self, *args, **options):
            calls[name] = [x.address for x in args if isinstance(x, _core.Array)]
            return real(self, *args, **options)

        monkeypatch.setattr(_core.OneRank, name, spy)

    calls = {}
    for name in ("forward", "backward"):
        spy_on(name)
    return calls
