"""Ranks that are given different things are told, all of them, and what differs is named with the rank: by default."""

import json
import re

import pytest

pytest.importorskip("torch")
import processes
from disagreement_worker import LIMIT, ODD, RANKS, WAYS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagreement")
    processes.start("disagreement_worker.py", folder, seconds=280)
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
def test_all_are_told(told, way):
    for rank in range(RANKS):
        text, seconds = told[rank][way]["told"], told[rank][way]["seconds"]
        assert text, f"rank {rank} was not told"
        assert seconds < LIMIT, f"rank {rank} was told after {seconds:.1f} s: {text}"
        assert told[rank][way]["named"] in text, f"rank {rank}: {text}"
        assert re.search(rf"ranks? ([\d, ]*|\d and ){ODD}\b", text), text
