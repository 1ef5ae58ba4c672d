"""Ranks that are given different things are told, all of them, and what differs is named with the rank: by default."""

import json

import pytest

pytest.importorskip("torch")
import processes
from disagreement_worker import RANKS, WAYS, check_told

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagreement")
    processes.start("disagreement_worker.py", folder, seconds=280)
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
def test_all_are_told(told, way):
    check_told(told, way)
