"""Rows, copies, groups and what checked ranks tell each other. A case runs on every rank, in the same order."""

import contextlib
import copy
import gc
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import weft
import weft.torch
from weft.torch import gpu_calls, watch
from weft.torch import transport as module

import checked
from group_cases import CASES, LAYOUTS, MASKS, PADDED, RANKS, SCHEDULES, SELF, case, compare, run, tensors, told
from refusals import refused


@case
def rows_there_and_back():
    for layout, packing in [*((name, SELF) for name in LAYOUTS[:4]), *((name, PADDED) for name in LAYOUTS)]:
        mask = MASKS["causal"]
        place = dict(layout=layout, mask=mask)
        ids = torch.arange(1, packing.tokens_q + 1)
        mine = weft.torch.shard(ids, packing, **place)
        assert torch.equal(weft.torch.unshard(mine, packing, **place), ids), layout
        batch = weft.torch.shard(ids[None], packing, dim=1, **place)
        assert torch.equal(batch[0], mine) and torch.equal(weft.torch.unshard(batch, packing, dim=1, **place)[0], ids)
        # Positions, real rows and labels are those of the tokens that lie here.
        everything = torch.full((packing.tokens_q,), -1)
        for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q):
            everything[begin:begin + n] = torch.arange(n)
        real = weft.torch.valid_rows(packing, **place)
        expected = weft.torch.shard(everything, packing, fill=-1, **place)
        assert torch.equal(expected >= 0, real)
        assert torch.equal(weft.torch.position_ids(packing, **place), expected.clamp(min=0))
        labels = weft.torch.shard(weft.torch.next_token_labels(ids, packing), packing, fill=-100, **place)
        for token, label in zip(mine.tolist(), labels.tolist()):
            last = any(token == begin + n for begin, n in zip(packing.cu_seqlens_q_padded, packing.lengths_q))
            unreal = token == 0 or everything[token - 1] < 0
            assert label == (-100 if last or unreal else token + 1), (layout, token, label)
        count = torch.tensor([(labels >= 0).sum()])
        dist.all_reduce(count)
        assert count.item() == int(np.maximum(packing.lengths_q - 1, 0).sum())


@case
def copies():
    group = dist.new_group([0, 1, 2, 3])
    rows = [weft.torch.shard(x, SELF, group) for x in tensors(SELF)[:3]]
    layer = weft.torch.ContextParallelAttention(group=group, sink="learnable", heads=4)
    out = layer(*rows, SELF)
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), out)
    micros = weft.prepare.MicroSequences(SELF, ranks=4, micros=2, pad=True)
    micro = weft.torch.MicroSequenceAttention(group=group)
    x = torch.randn(2 * micros.local, 2, 8)
    assert torch.equal(micro(x, x, x, micros), copy.deepcopy(micro)(x, x, x, micros))


def _disagreement(body, text):
    def check():
        told(text, lambda: body(weft.torch.communicator(), dist.get_rank() == checked.ODD))
    return check


for _name, (_body, _text) in checked.CASES.items():
    CASES[f"checked: {_name}"] = _disagreement(_body, _text)


@case
def a_problem_that_was_refused_is_known():
    """The second time executors of the right problem are at hand, and the wrong one is refused again."""
    rows, odd = [weft.torch.shard(x, SELF) for x in tensors(SELF)], dist.get_rank() == checked.ODD
    for _ in range(2):
        told("packing: rank 1 differs", lambda: run(*rows, weft.Packing([0, 9, 10, 33, 61]) if odd else SELF, causal=True,
                                                    schedule="ring", checked=True))
    told("the backward: out and lse are those of call", lambda: _backwards(rows, (2, 0, 1) if odd else (2, 1, 0)))
    told(None, lambda: _backwards(rows, (0, 2, 1)))


def _backwards(rows, order):
    """Without numbers of layers: each rank knows which of its forwards wrote what a backward is given."""
    leaves = [[(n * x).requires_grad_() for x in rows[:3]] for n in (1, 2, 3)]
    out = [weft.torch.context_parallel_attention(*x, SELF, causal=True, checked=True) for x in leaves]
    for n in order:
        out[n].sum().backward()


@case
def meshes():
    """A DeviceMesh of one dimension is a group; of several, the error says how to name one."""
    from torch.distributed.device_mesh import init_device_mesh

    flat, both = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    compare(SELF, MASKS["causal"], SCHEDULES["ring"], group=flat)
    compare(SELF, MASKS["window"], SCHEDULES["all_gather"], group=both["cp"], seed=dist.get_rank() // 2)
    layer = weft.torch.ContextParallelAttention(group=both["cp"])
    rows = [weft.torch.shard(x, SELF, both["cp"]) for x in tensors(SELF)[:3]]
    assert torch.equal(copy.deepcopy(layer)(*rows, SELF), layer(*rows, SELF))
    assert weft.torch.communicator(both["cp"]).ranks == 2
    for use in (weft.torch.shard, weft.torch.unshard):
        with refused("2 dimensions", 'mesh["cp"]'):
            use(rows[0], SELF, both)


@case
def whatever_takes_a_group():
    """Takes a process group, its name, a DeviceMesh of one dimension, and the name of a dimension inside `with mesh:`."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x, micros = tensors(SELF)[0], weft.prepare.MicroSequences(SELF, ranks=2, micros=2, pad=True)
    group = mesh["cp"].get_group()
    mine, window = weft.torch.shard(x, SELF, group), torch.ones(2 * micros.local, 2, 8)
    uses = {
        "attention": lambda g: weft.torch.context_parallel_attention(mine, mine, mine, SELF, group=g),
        "layer": lambda g: weft.torch.ContextParallelAttention(group=g)(mine, mine, mine, SELF),
        "ContextParallel": lambda g: weft.torch.ContextParallel(SELF, g).attention(mine, mine, mine),
        "shard": lambda g: weft.torch.shard(x, SELF, g), "unshard": lambda g: weft.torch.unshard(mine, SELF, g),
        "position_ids": lambda g: weft.torch.position_ids(SELF, g), "valid_rows": lambda g: weft.torch.valid_rows(SELF, g),
        "use_layout": lambda g: weft.torch.use_layout(SELF, g),
        "relayout": lambda g: weft.torch.relayout(mine, None, "contiguous", SELF, g),
        "all_gather": lambda g: torch.stack(weft.torch.all_gather(mine, g)),
        "micro layer": lambda g: weft.torch.MicroSequenceAttention(group=g)(window, window, window, micros),
        "micro": lambda g: weft.torch.micro_sequence_attention(window, window, window, micros, group=g),
        "communicator": lambda g: torch.tensor(weft.torch.communicator(g).ranks),
    }
    for name, use in uses.items():
        expected = use(group)
        found = [use(given) for given in (group.group_name, mesh["cp"])]
        with mesh:
            found.append(use("cp"))
        assert all(x is expected is None or torch.equal(x, expected) for x in found), name
        with refused("named 'cp'", 'mesh["cp"]', "with mesh"):
            use("cp")
    with mesh:  # a layer that is built inside, and used outside
        layer, micro = weft.torch.ContextParallelAttention(group="cp"), weft.torch.MicroSequenceAttention(group="cp")
    assert torch.equal(layer(mine, mine, mine, SELF), uses["layer"](group))
    assert torch.equal(micro(window, window, window, micros), uses["micro"](group))
    for cu in ([0, 7, 10, 33, 61], torch.tensor([0, 7, 10, 33, 61]), torch.tensor([0, 7, 10, 33, 61], dtype=torch.int32)):
        assert torch.equal(weft.torch.shard(x, cu, group), mine)
        assert torch.equal(weft.torch.unshard(mine, cu, group), x)
        assert torch.equal(weft.torch.position_ids(cu, group), uses["position_ids"](group))
        assert torch.equal(weft.torch.valid_rows(cu, group), uses["valid_rows"](group))
        assert torch.equal(weft.torch.relayout(mine, None, "contiguous", cu, group), uses["relayout"](group))
        assert torch.equal(weft.torch.context_parallel_attention(mine, mine, mine, cu, group=group), uses["attention"](group))
        assert torch.equal(weft.torch.next_token_labels(torch.arange(61), cu),
                           weft.torch.next_token_labels(torch.arange(61), SELF))


@case
def layouts_that_do_not_agree():
    """Over a group: unchecked and checked, attention and unshard, by group and by its communicator. The group stays whole."""
    packing, causal = weft.Packing([0, 9, 31, 77]), dict(causal=True, schedule="ring")
    x = tensors(packing)[0]

    group = dist.new_group([0, 1, 2, 3])
    contiguous = weft.torch.shard(x, packing, group, layout="contiguous")
    for compared in (False, True):
        with refused("under layout balanced", "under contiguous", "weft.torch.use_layout"):
            run(*[contiguous] * 4, packing, group=group, checked=compared, **causal)
    with refused("unshard under layout balanced"):
        weft.torch.unshard(contiguous, packing, group)
    run(*[contiguous] * 4, packing, group=group, layout="contiguous", **causal)
    weft.torch.use_layout(packing, group, layout="striped")
    run(*[contiguous] * 4, packing, group=group, layout="striped", **causal)
    # Of another group with as many ranks it is known how rows lie, until that group says otherwise.
    other = dist.new_group([0, 1, 2, 3])
    run(*[contiguous] * 4, packing, group=other, layout="contiguous", **causal)
    mine = weft.shard(x.numpy(), weft.torch.communicator(other), packing=packing)
    with refused("multiple of 2*ranks"):
        run(*[contiguous] * 4, packing, group=dist.new_group([0, 1, 2, 3]), layout="dual_chunk", **causal)
    with refused("under balanced"):
        run(*[torch.from_numpy(mine)] * 4, packing, group=other, layout="zigzag", **causal)
    run(*[torch.from_numpy(mine)] * 4, packing, group=other, **causal)


@case
def groups_that_end_are_forgotten():
    from weft import _placed
    from weft.torch import group as module

    group = dist.new_group([0, 1, 2, 3])
    weft.torch.position_ids(SELF, group)
    scope, name = module.scope_of(group), group.group_name
    assert any(key[0] is scope for key in _placed._known)
    dist.barrier()  # every rank has connected: one that leaves before would break the others' new_group
    dist.destroy_process_group(group)
    del group
    gc.collect()
    weft.torch.position_ids(SELF)
    assert not any(key[0] is scope for key in _placed._known) and name not in module._scopes


@contextlib.contextmanager
def without_streams():
    """What NCCL is asked for goes by gloo, which knows no streams."""
    streams, gpu_calls.in_stream = gpu_calls.in_stream, lambda device, stream: contextlib.nullcontext()
    try:
        yield
    finally:
        gpu_calls.in_stream = streams


@case
def messages_of_gpus():
    """The operations that NCCL is asked for, by gloo: ranks of a group, in the order of the lists, none for some ranks."""
    group = dist.new_group([3, 1, 2])
    if dist.get_rank() == 0:
        return
    transport = module.Transport(group, 20.0)
    with without_streams():
        mine, got = transport.rank, [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
        to, back = (mine + 1) % 3, (mine - 1) % 3
        sent = [torch.full((8,), 10 * mine + i, dtype=torch.uint8) for i in range(2)]
        transport.exchange_on_gpu([(to, x) for x in sent], [(back, x) for x in got], 0, 0).wait()
        assert [x[0].item() for x in got] == [10 * back, 10 * back + 1], got
        everyone = torch.zeros(12, dtype=torch.uint8)
        transport.collective_on_gpu("all_gather", sent[0][:4], [4], everyone, [4] * 3, 0, 0).wait()
        assert everyone.tolist() == [0] * 4 + [10] * 4 + [20] * 4
        everyone.zero_()
        signs = torch.full((2,), 7 + mine, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)  # in the same launch
        transport.collective_on_gpu("all_gather", sent[0][:4], [4], everyone, [4] * 3, 0, 0, signs).wait()
        assert everyone.tolist() == [0] * 4 + [10] * 4 + [20] * 4 and signs[1].tolist() == [7, 7, 8, 8, 9, 9]
        parts, total = torch.arange(6.0) + mine, torch.zeros(2)
        transport.collective_on_gpu("reduce_scatter", parts.view(torch.uint8), [8] * 3, total.view(torch.uint8), [8], 0, 0).wait()
        assert total.tolist() == [6 * mine + 3, 6 * mine + 6], total
        to, came = torch.full((6,), mine, dtype=torch.uint8), torch.zeros(3 * (mine + 1), dtype=torch.uint8)
        transport.collective_on_gpu("all_to_all", to, [1, 2, 3], came, [mine + 1] * 3, 0, 0).wait()
        assert came.tolist() == [r for r in range(3) for _ in range(mine + 1)], came
        if mine < 2:
            other = 1 - mine
            transport.exchange_on_gpu([(other, sent[0])], [(other, got[0])], 0, 0).wait()
            assert got[0][0].item() == 10 * other


class _Event:
    """What lies in a stream behind messages."""

    def __init__(self, passed):
        self.passed, self.asked = passed, 0

    def query(self):
        self.asked += 1
        return self.passed


class _Group:
    """A group that counts how often it is aborted."""

    def __init__(self, group):
        self.group, self.aborted = group, 0

    def abort(self):
        self.aborted += 1

    def __getattr__(self, name):
        return getattr(self.group, name)


@case
def a_stream_that_does_not_come_past_its_messages():
    """The watch over NCCL, with streams made up: asks after the time limit alone, gives up once, and the next call raises."""
    group = _Group(dist.new_group([0, 1, 2, 3]))
    transport = module.Transport(group, 0.2)
    for passed in (True, False):
        event = _Event(passed)
        transport.watch.last = time.monotonic(), event, 0, [(dist.get_rank() + 1) % RANKS]
        assert transport.watch._next_look() > 0 and event.asked == 0
        time.sleep(0.25)
        assert (transport.watch._next_look() > 0) == passed and event.asked == 1
        assert (transport.watch.last is None) == passed and group.aborted == (not passed)
    assert transport.watch._next_look() == 0 and group.aborted == 1
    with refused("waited 0.2 seconds on GPU 0 for rank", "cannot be used any more"):
        transport.exchange_on_gpu([], [], 0, 0)


@case
def a_call_of_nccl_that_does_not_return():
    """The watch ends it, and it raises; no event is asked meanwhile."""
    group = _Group(dist.new_group([0, 1, 2, 3]))
    transport = module.Transport(group, 0.2)
    event = _Event(False)
    transport.watch.last = time.monotonic() - 1, event, 0, [0]
    with without_streams():
        for fails in (False, True):
            with refused("waited 0.2 seconds in a call of NCCL on GPU 0 for rank", "cannot be used any more"):
                with transport._launch(0, 0, [(dist.get_rank() + 1) % RANKS]):
                    if not transport.broken:
                        assert transport.watch._next_look() > 0 and group.aborted == 0
                        time.sleep(0.25)
                        assert transport.watch._next_look() == 0 and group.aborted == 1
                    if fails:
                        raise RuntimeError("NCCL communicator was aborted")
                transport._handle([], [], (0, 0), [])
            assert transport.launching is None and event.asked == 0


@case
def a_call_of_nccl_after_an_error_that_it_told():
    """It is not made, because torch would hold it for a minute; an error of NCCL without a type of torch's is one, too."""
    for early in (True, False):
        transport, aborted = _on_gpus("1:2", passed=True)
        transport.has_nccl_error = lambda: early
        with without_streams(), refused("lost one of the ranks ", " on GPU 0", "cannot be used any more"), \
                transport._launch(0, 0, [1]):
            assert not early
            raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")
        assert aborted == [1]
        dist.barrier()


class _Waits:
    """An operation that somebody waits for."""

    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


@case
def a_call_of_nccl_that_was_given_up_while_it_began():
    """The stream waits for it before the caller's memory goes back, and then it raises."""
    transport, _ = _on_gpus("1:2", passed=True)
    transport.fail("has waited")
    work = _Waits()
    with without_streams(), refused("has waited", "cannot be used any more"):
        transport._handle([work], [], (0, 0), [1])
    assert work.waited == 1


@case
def ranks_meet_before_nccl_begins():
    """All return once the last one has come. If one does not come, or has failed, the others raise, since NCCL would wait for
    ever."""
    me = dist.get_rank()
    for last, way in enumerate(("comes", "does not come", "fails")):
        transport = module.Transport(dist.new_group([0, 1, 2, 3]), 20.0 if way == "comes" else 1.0)
        begin = time.monotonic()
        if way == "comes" or me != last:
            if me == last:
                time.sleep(0.3)
            said = {"comes": contextlib.nullcontext(), "does not come": refused("waited 1 seconds to begin for ranks"),
                    "fails": refused("cannot go on", f"rank {last} has had enough")}[way]
            with said:
                transport.meet_in_store("to begin", 0)
            seconds = time.monotonic() - begin
            assert seconds < 15 and (seconds > 0.25 or way == "fails" or me == last), (way, seconds)
        elif way == "fails":
            transport.fail("has had enough")
        dist.barrier()


def _on_gpus(fingerprint, passed):
    """A transport whose calls on GPUs lie in a stream that is made up, the last of them with the rank that follows; and how often
    NCCL was aborted, a list of ones."""
    transport, me, aborted = module.Transport(dist.new_group([0, 1, 2, 3]), 20.0), dist.get_rank(), []
    transport.abort = lambda: aborted.append(1)
    transport.fingerprint = lambda: fingerprint
    transport.disagreement = lambda others: "; ".join(f"ranks {me} and {r} differ" for r, other in others if other != fingerprint)
    transport.watch.last = time.monotonic(), _Event(passed), 0, [(me + 1) % RANKS]
    transport.touched = time.monotonic()
    return transport, aborted


def _look(transport):
    """What the watch does in two seconds, with less patience than it has."""
    patience, watch._PATIENCE = watch._PATIENCE, 0.2
    ends = time.monotonic() + 2
    while time.monotonic() < ends and transport.watch._next_look() > 0:
        time.sleep(0.05)
    watch._PATIENCE = patience


@case
def ranks_whose_messages_on_gpus_do_not_meet():
    """One was given another problem, so that NCCL waits for ever: its neighbour sees that in the store, and all others that one
    has given up, long before the time limit. Those whose stream has come past its calls go on."""
    me = dist.get_rank()
    transport, aborted = _on_gpus("1:2" if me == 1 else "1:3", passed=me == 3)
    _look(transport)
    assert len(aborted) == (me != 3), (me, transport.broken)
    if me == 3:
        transport.watch.last = time.monotonic(), _Event(False), 0, [0]  # the next call, to which nobody comes
        transport.touched = time.monotonic()
        _look(transport)
        assert len(aborted) == 1
    with refused("cannot go on", "differ", "cannot be used any more"):
        transport.exchange_on_gpu([], [], 0, 0)
    with refused("cannot go on"):
        transport.check()


@case
def fingerprints_that_came_with_messages_of_gpus():
    """That they differ is an error; where NCCL was given up or tells of an error, what lies there may be of an earlier pass."""
    for trouble in ("", "NCCL", "given up"):
        transport, aborted = _on_gpus("1:2", passed=True)
        transport.has_nccl_error = lambda: trouble == "NCCL"
        transport.met = {0}
        if trouble == "given up":
            transport.fail("has waited")
        says = {"": "cannot go on: ranks 0 and 1 differ in the mask", "NCCL": "lost one of the ranks", "given up": "has waited"}
        with refused(says[trouble], "cannot be used any more"):
            transport.disagree("ranks 0 and 1 differ in the mask")
        assert len(aborted) == (trouble != "given up")
        with refused("cannot be used any more"):
            transport.check()
        dist.barrier()


@case
def a_check_sees_that_another_rank_has_given_up():
    """After the last call, which has ended here."""
    transport, aborted = _on_gpus("1:2", passed=True)
    transport.met = {0}
    transport.check()
    dist.barrier()
    if dist.get_rank() == 2:
        transport.fail("has had enough")
    dist.barrier()
    with refused("rank 2 has had enough", "cannot be used any more"):
        transport.check()
    assert len(aborted) == (dist.get_rank() != 2)



@case
def ranks_answer_those_that_wait():
    """A rank whose time limit is over, or that NCCL tells of an error, learns what others are at: one waits, one makes no calls,
    one is not there."""
    me, group, said, aborted = dist.get_rank(), dist.new_group([0, 1, 2, 3]), "", []
    if me != 3:
        transport = module.Transport(group, 0.4)
        calls = {0: 7, 1: 7, 2: 5}[me]
        transport.calls = lambda: f"#{calls} exchange of forward, 8 bytes to 1, waiting for 1.000 s"
        transport.abort = lambda: aborted.append(1)
        transport.waiting = [3] if me == 1 else []
        transport.watch.start()
    dist.barrier()  # what is wrong is raised after the last one, or others would wait for this rank
    if me == 0:
        time.sleep(0.4)
        said = str(transport.waited("", [1]))
    dist.barrier()
    if me == 1:
        transport.has_nccl_error = lambda: True
        transport.watch.last = time.monotonic() + 60, _Event(False), 0, [0, 2, 3]
        ends = time.monotonic() + 20
        while not aborted and time.monotonic() < ends:
            time.sleep(0.01)
        said = str(transport.failure)
    dist.barrier()
    parts = {0: ["rank 0 waited 0.4 seconds for rank 1 (pid ", "; rank 3 did not answer; rank 2 (pid ",
                 ") answers and is at #5 exchange of forward, ", "; rank 1 waits, too, for rank 3"],
             1: ["rank 1 lost one of the ranks 0, 2, 3 on GPU 0; rank 3 did not answer; rank 2 (pid ",
                 "rank 0 waits, too, for rank 1 (NCCL tells of an error)", "before that, rank 0 waited 0.4 seconds"]}
    for part in parts.get(me, []):
        assert part in said, (part, said)
    assert "kill -9" not in said  # which process rank 3 is nobody knows
    assert aborted == [1] * (me == 1)
    if me == 1:
        with refused("rank 1 lost one of the ranks 0, 2, 3 on GPU 0"):
            transport.exchange_on_gpu([], [], 0, 0)


@case
def a_world_by_the_name_of_one_that_ended():
    """The last case: the world ends, and another begins, in which ranks have other numbers."""
    me, group = dist.get_rank(), dist.new_group([0, 1, 2, 3])
    compare(SELF, MASKS["causal"], dict(schedule="ring"))
    names = dist.group.WORLD.group_name, group.group_name
    dist.destroy_process_group()
    with refused(names[1]):  # which has ended
        run(*tensors(SELF), SELF, group=names[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/again", rank=RANKS - 1 - me, world_size=RANKS)
    assert dist.group.WORLD.group_name == names[0]
    weft.torch.communicator(time_limit=20)
    compare(SELF, MASKS["causal"], dict(schedule="ring"))
