"""Models of transformers on GPU ranks whose latent moves (latent_worker.py)."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.22")  # layers that expand their latent by a method of their own

import processes
from gpu import needs_gpu


@needs_gpu
def test_deepseek_v3(tmp_path):
    """In bf16, on four ranks over NCCL, as near to eager attention in f32 as eager attention in bf16 is."""
    print(processes.start("latent_worker.py", tmp_path, "cuda"))
    for rank in range(4):
        said = json.loads((tmp_path / f"results{rank}.json").read_text())
        assert len(said) == 7 and set(said.values()) == {None}, said
