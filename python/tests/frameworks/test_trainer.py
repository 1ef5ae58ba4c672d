"""Hugging Face's Trainer on two and four ranks with weft.trainer against the Trainer itself on one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer wants accelerate (tools/setup.sh run)")

import weft
import weft.trainer

import processes
import trainer_worker

ids = torch.arange(6)[None]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    runs = {}
    for ranks in (1, 2, 4):
        folder = tmp_path_factory.mktemp("trainer")
        processes.start("trainer_worker.py", folder, ranks)
        runs[ranks] = torch.load(folder / "found.pt")
    return runs


@pytest.mark.long
@pytest.mark.parametrize("resumed", [0, 1])
@pytest.mark.parametrize("case", trainer_worker.CASES)
def test_ranks(found, case, resumed):
    """Loss, norm of gradients before clipping, loss of evaluation, and parameters after four steps and after resuming."""
    ranks = trainer_worker.CASES[case].ranks
    (log, loss, parameters), (our_log, our_loss, our_parameters) = (found[n][case][resumed] for n in (1, ranks))
    assert len(log) == len(our_log) == 6 and our_loss == pytest.approx(loss, rel=1e-5)
    for line, ours in zip(log, our_log):
        assert line.keys() == ours.keys()
        assert ours == pytest.approx(line, rel=1e-5)
    assert max(line.get("grad_norm", 0) for line in log) > 0.5  # so that clipping does something
    for name, x in parameters.items():
        assert (our_parameters[name] - x).abs().max() <= 1e-5 * x.abs().max(), name


@pytest.mark.long
def test_other_batches(found):
    assert "given different ones" in found[2]["other batches"]


def test_documents():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    packing, tokens, labels = weft.trainer.documents(dict(input_ids=ids, position_ids=positions, labels=ids))
    assert packing.cu_seqlens_q.tolist() == [0, 3, 4, 6] and torch.equal(tokens, ids[0]) and torch.equal(labels, ids[0])
    seen = torch.tensor([[1, 1, 0], [0, 1, 1]])
    packing, tokens, labels = weft.trainer.documents(dict(input_ids=ids.view(2, 3), attention_mask=seen))
    assert packing.cu_seqlens_q.tolist() == [0, 2, 4] and tokens.tolist() == [0, 1, 4, 5] and labels is None
    positions = torch.tensor([[0, 0, 7], [7, 0, 1]])  # two rows, of two documents and of one
    packing, tokens, _ = weft.trainer.documents(dict(input_ids=ids.view(2, 3), attention_mask=seen, position_ids=positions))
    assert packing.cu_seqlens_q.tolist() == [0, 1, 2, 4] and tokens.tolist() == [0, 1, 4, 5]
    seen = torch.tensor([[1, 1, 0, 1, 1, 1]])  # padding between two documents
    packing, tokens, _ = weft.trainer.documents(
        dict(input_ids=ids, attention_mask=seen, position_ids=torch.tensor([[0, 1, 9, 0, 1, 2]])))
    assert packing.cu_seqlens_q.tolist() == [0, 2, 5] and tokens.tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("batch, words", [
    (dict(input_ids=ids, pixel_values=ids), "pixel_values"), (dict(input_ids=ids, position_ids=ids + 1), "do not count"),
    (dict(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 2, 3]])), "do not count"),
    (dict(input_ids=ids.view(2, 3), position_ids=ids.view(2, 3)), "do not count"),
    (dict(input_ids=ids, position_ids=ids.view(2, 3)), "position_ids [2, 3]"),
    (dict(input_ids=ids, labels=torch.tensor([1])), "labels [1]"),
    (dict(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]), position_ids=ids), "do not count"),
    (dict(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]])), "inside a sequence"),
    (dict(input_ids=ids, attention_mask=ids[:, None]), "[batch, length]"),
])
def test_batches_refused(refused, batch, words):
    with refused(words):
        weft.trainer.documents(batch)


def trainer(folder, args=None, size=None, router=False, **changes):
    from small_models import config_of

    kind = type("OurTrainer", (weft.trainer.ContextParallelMixin, transformers.Trainer),
                {"context_parallel_size": size, "aux_loss_enabled": router})
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="weft")
    given = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], **(args or {}))
    return kind(model=model, args=given, **changes)


@pytest.mark.parametrize("changes, words", [
    (dict(args=dict(label_smoothing_factor=0.1)), "label_smoothing_factor"), (dict(compute_loss_func=print), "compute_loss_func"),
    (dict(compute_metrics=print), "compute_metrics"), (dict(size=2), "context_parallel_size is 2"),
    (dict(args=dict(train_sampling_strategy="batch_rebalance")), "batch_rebalance"),
    (dict(router=True), "TRL adds the loss of a router"),
])
def test_trainers_refused(refused, tmp_path, changes, words):
    with refused(words):
        trainer(tmp_path, **changes)


def test_no_labels_refused(refused, tmp_path):
    with refused("no labels"):
        trainer(tmp_path)._prepare_context_parallel_inputs(None, dict(input_ids=ids))


def test_logits_refused(refused, tmp_path):
    with refused("logits", "compute_metrics"):
        trainer(tmp_path).prediction_step(None, {}, False)


SOURCE = Path(__file__).parents[3]


@pytest.mark.parametrize("number, example", enumerate(["hf_trainer.py", "trl_sft.py"]))
def test_three_lines(number, example):
    """What the page says that changes in a program is what the example has, and no more than three lines."""
    block = re.findall(r"^```diff\n(.*?)^```$", (SOURCE / "docs/transformers.md").read_text(), re.M | re.S)[number]
    added = [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
    program = (SOURCE / "examples" / example).read_text().splitlines()
    own = [line.partition("  #")[0].strip() for line in program if "weft" in line and not line.startswith("#")]
    assert own == added and len(added) == 3


@pytest.mark.long
@pytest.mark.parametrize("example", ["hf_trainer.py", "trl_sft.py"])
def test_the_examples(tmp_path, example):
    if "trl" in example:
        pytest.importorskip("trl", reason="tools/setup.sh run full")
    losses = {}
    for ranks in (1, 2):  # by address: there are machines that do not know the name localhost
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
             "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", SOURCE / "examples" / example],
            capture_output=True, text=True, timeout=240, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"})  # accelerate asks for cores otherwise, and fails where there is no /sys
        assert done.returncode == 0, done.stderr
        losses[ranks] = [float(x) for x in re.findall(rf"loss (\S+), norm of gradients \S+ on {ranks} ranks", done.stdout)]
    assert len(losses[1]) == 6 and losses[1][-1] < 0.9 * losses[1][0]
    assert losses[2] == pytest.approx(losses[1], abs=2e-3)
