"""What is refused, and in which words."""

import contextlib

import pytest
import weft


@contextlib.contextmanager
def refused(*parts):
    """What is inside raises weft.Error, with a problem and a remedy, that says all of the parts."""
    with pytest.raises(weft.Error) as caught:
        yield caught
    e = caught.value
    assert e.problem and e.remedy
    assert str(e) == f"{e.problem}; {e.remedy}"
    for part in parts:
        assert part in str(e), str(e)
