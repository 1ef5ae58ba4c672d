"""Plants faults where rooms meet (executor, communicators, K/V buffers, the torch transport), one at a time: what goes
wrong is an order, a wait, a buffer, a sum or a head, and a named test must notice.

    python tests/planted_run_faults.py --build build/release
    python tests/planted_run_faults.py --build build/release --only relay       those whose words or file have this in them
    python tests/planted_run_faults.py --build build/gpu --cuda                 those in CUDA sources, on a machine with a GPU

Each fault is one edit of one file. What depends on it is compiled again (in a copy; the build stays as it is), the test
program is linked with it, and the tests named beside the fault must fail; without a fault they must pass.
"""
import argparse
import collections
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools/mutate"))
import build as mutate

Fault = collections.namedtuple("Fault", "what file text instead program tests")

RETURN, FEED, SWAP = "src/run/gradient_return.cpp", "src/run/key_feed.h", "src/run/swap.cpp"
QUERIES = "src/run/query_moves.cpp"
FORWARD, BACKWARD, BUFFER = "src/run/forward.cpp", "src/run/backward.cpp", "src/prepare/kv_buffer.cpp"
PLACES, TRANSPORT = "src/prepare/key_places.cpp", "python/weft/torch/transport.py"
MESH = ("unit_run", "Mesh.*")
SOURCE, EXPANDED = "src/run/source.cpp", ("unit_run", "Source.*")
STRICT, EXECUTOR = ("unit_run", "Strict.*"), ("unit_run", "Executor.EqualsTheReference:Executor.AnyHeadsOnAnyRanks")
KV, CHECKED, SEALS = ("unit_prepare", "KvBuffer.*:KvDrop.*:KvTree.*"), ("unit_run", "Checked.*"), ("unit_comm", "CheckedMessages.*")
ROWS = ("unit_rows", "*")
COMM, GLOO = ("unit_comm", "Communicator.*:Request.*"), ("pytest", "python/tests/distributed/test_transport.py")
RANKS = ("pytest", "python/tests/distributed/test_distributed.py")
STEPS = ("pytest", "python/tests/pytorch/test_tree_micro.py")

FAULTS = [Fault(*fault[:4], *fault[4]) for fault in [
    # Slices on expanded rows, which are those that are seen.
    ("among expanded rows the diagonal stays where it was", SOURCE, "  s.hi = shift_bound(s.hi, by);\n", "", EXPANDED),
    ("among expanded rows a window's far end stays where it was", SOURCE, "  s.lo = shift_bound(s.lo, by);\n", "", EXPANDED),
    ("among expanded rows those between the seen ones count too", SOURCE, "++r) before += r->size();", "++r) before = r->end;",
     EXPANDED),
    ("expanded rows are attended by the slices of the rows that moved", FORWARD, "        call.slices = source->slices(n);\n", "",
     EXPANDED),
    ("gradients of expanded rows are made by the slices of the rows that moved", BACKWARD,
     "          call.slices = source->slices(n);\n", "", EXPANDED),
    # Gradients on their way home.
    ("gradients of several stages are added as they come", RETURN,
     "  if (alone(n)) home = at_once(std::move(home), !adds_);", "  home = at_once(std::move(home), !adds_);", STRICT),
    ("gradients that leave a node are added as they come", RETURN,
     "  if (alone(n)) home = at_once(std::move(home), false);", "  home = at_once(std::move(home), false);", STRICT),
    ("a step's gradients are written while those of two steps before are still sent", RETURN,
     "  in_flight_[odd(n)].wait();\n  const Kv to", "  const Kv to", STRICT),
    ("sums of a node are written while those of two steps before still leave", RETURN,
     "    leaving_[odd(n)].wait();  // of the last move but one: its buffer is used again", "", STRICT),
    ("what comes home from the ring is added while the step before still is", RETURN,
     "    in_flight_[odd(n - 1)].wait();  // in order, so that sums are deterministic", "", STRICT),
    ("sums that travel around the ring replace those of the step", RETURN,
     "nothing ? Message::Combine::replace : adding(own_.k.dtype);", "Message::Combine::replace;", EXECUTOR),
    ("sums that travel around the ring are added to an old step's where the step has none", RETURN,
     "nothing ? Message::Combine::replace : adding(own_.k.dtype);", "adding(own_.k.dtype);", STRICT),
    ("the sums of a node start as those of an old step", RETURN, "      clear(place_, sums.k);", "", STRICT),
    ("the sums of the last step stay in the node", RETURN, "  leave_node(steps - 1);\n", "", EXECUTOR),
    ("own sums point into a slot that then grows", BACKWARD, "  if (shared)  // grows the slot", "  if (false)  //", STRICT),
    ("dQ of all steps but the first is lost", BACKWARD,
     "    if (!once_ && !first_) run::add(place_, sum_, part_);", "", EXECUTOR),
    ("dQ of heads that see nothing is left as it was", BACKWARD,
     "run::clear(place_, run::some_heads(dq_, blind.q));", "static_cast<void>(blind);", EXECUTOR),
    ("the largest dsink of a rank is taken for their sum", BACKWARD, "Reduce::sum, args.dsink", "Reduce::max, args.dsink",
     EXECUTOR),
    ("dsink is made of the rows of the group's first rank", BACKWARD,
     "schedule.swap ? (schedule.rank - schedule.swap->group.begin) * schedule.q_rows : 0", "Index{0}", EXECUTOR),
    ("dsink is made with the LSE of the first head", "src/kernel/sink_gradient.cpp", "load_one(rows.lse, row, head)",
     "load_one(rows.lse, row, 0)", EXECUTOR),
    # Keys on their way to the steps.
    ("keys are read before they have come", FEED, "    if (steps_.source(n) >= 0) arrivals_[odd(n)].wait();\n", "", STRICT),
    ("rows are passed on inside a node before they have entered it", FEED, "      entered_[odd(n)].wait();\n", "", STRICT),
    ("keys arrive where the step before still reads", FEED, "by_turn(Slot::keys_0, steps_.turn(n))", "Slot::keys_0", STRICT),
    ("rows enter a node where others are still passed on from", FEED, "by_turn(Slot::relay_0, steps_.turn(n))",
     "Slot::relay_0", STRICT),
    ("a ring sends its own keys on, not those that came", FEED,
     "move.kind == Move::Kind::shift ? kv_of(n - 1) : heads_of(own_, heads)", "heads_of(own_, heads)", EXECUTOR),
    ("partial states of a call before are gone on with", FORWARD,
     "    std::uninitialized_fill_n(partial.states, rows * heads, RowState<float>{});", "    static_cast<void>(rows);", EXECUTOR),
    ("rows are finished with the sink of the first head", "src/kernel/finish.cpp", "finish(state, sinks[at(h)])",
     "finish(state, sinks[0])", EXECUTOR),
    ("the head map of a group of heads counts from the first head of all", "src/run/executor.cpp",
     "attention.head_map[at(h)] - heads_k.begin", "attention.head_map[at(h)]", STRICT),
    ("rows enter a node a step too late", FEED, "    enter_nodes(n + 2);\n", "", STRICT),
    ("gradients of rows without keys are made of what was there", "src/kernel/finish.cpp",
     "      store(args.out, row, h, nothing.data(), T{0});", "      store(args.out, row, h, sums.at<T>(row, h), T{0});",
     ("unit_check", "*")),
    # Queries of other ranks, and what comes of them.
    ("queries of other ranks are read before they have come", QUERIES, "if (r.begin < rows.end && rows.begin < r.end) there_[m].wait();",
     "if (r.begin < rows.end && rows.begin < r.end) continue;", STRICT),
    ("states that come home are merged before they have come", QUERIES,
     "    finish_home(m);\n    for (const PeerRows& p", "    for (const PeerRows& p", STRICT),
    ("states go home while a later step adds to them", QUERIES, "last_[m] = max_of(last_[m], n);", "last_[m] = n;", MESH),
    ("states that come home are merged twice", QUERIES,
     "        first += rows.size();\n", "        merge(place_, rows_of(states_, rows), rows_of(arrived_, {first, first + rows.size()}));\n"
     "        first += rows.size();\n", MESH),
    ("states of one rank are merged in place of another's", QUERIES,
     "        first += rows.size();\n", "", MESH),
    ("states of a mesh are merged in the order of the ranks' places from the last", QUERIES,
     "  for (std::size_t m = 0; m < schedule_.query_moves.size(); ++m) {\n    finish_home(m);",
     "  for (std::size_t m = 0; m < schedule_.query_moves.size(); ++m) {\n    if (m > 0) first = 0;\n    finish_home(m);", MESH),
    ("dQ that comes home replaces the own", QUERIES, "message(p.peer, adding(own_sums_.dtype))", "message(p.peer)", MESH),
    ("dQ of another rank's queries starts as what was there", QUERIES,
     "  if (!written_[part]) clear(place_, sums_of(rows_of_part(part)));", "", STRICT),
    ("dQ of a step of a mesh replaces that of the step before", QUERIES,
     "  if (adds_) add(place_, sums_of(steps_[n].queries), step_);", "  if (adds_) round_to(place_, sums_of(steps_[n].queries), step_);", MESH),
    ("gradients of keys that are read again replace those of the step before", RETURN,
     "return {buffer(source), true};", "return {buffer(source), false};", MESH),
    ("keys that are read again are sent home after the first step", RETURN, "  if (!steps_.ends_keys(n)) return;\n", "", MESH),
    ("rows that see keys on other ranks alone have no part in dsink", BACKWARD,
     "  if (!schedule.query_moves.empty()) return schedule.seeing;\n", "", MESH),
    # What a schedule says.
    ("a rank of a mesh attends other ranks' queries as if they were its own", "src/schedule/groups.h",
     "s_.layouts.q.runs(owner(part))", "s_.layouts.q.runs(owner(0))", MESH),
    ("keys of a mesh are those of neighbours", "src/schedule/groups.h", "rank_order({peer(first), count, size_})",
     "rank_order({first, count, 1})", MESH),
    ("keys of all groups of a step come to one place", "src/schedule/build.cpp",
     "Range{(d - distances.begin) * rows, (d - distances.begin + 1) * rows}", "Range{0, rows}", EXECUTOR),
    ("gradients go home around the ring the wrong way", "src/schedule/build.cpp", "move.home.push_back({peer(d), {place(d)}});",
     "move.home.push_back({peer(-d), {place(d)}});", EXECUTOR),
    ("slices of the rows that were sent count from the owner's rows", "src/schedule/build.cpp",
     "places[at(range)] - touched[at(range)].begin", "places[at(range)]", EXECUTOR),
    ("swapped query heads look for their K/V head among all", "src/schedule/build.cpp", "kv_head(s, h) - swap.heads_k[me].begin",
     "kv_head(s, h)", EXECUTOR),
    ("gradients of the own keys are counted as if they travelled", "src/schedule/traffic.cpp",
     "      if (shifted) count.move(move.sends, move.receives, sums);", "      count.move(move.sends, move.receives, sums);",
     ("unit_check", "*")),
    # Heads swapped for sequence.
    ("every member of a group sends the rows of the first one", SWAP, "{i * p.own.rows, (i + 1) * p.own.rows}",
     "{0, p.own.rows}", EXECUTOR),
    ("gradients of replicated K/V heads replace each other", SWAP, "sums.v, true)}, adding(own_.k.dtype));",
     "sums.v, true)}, Message::Combine::replace);", EXECUTOR),
    ("gradients of swapped heads are added to what was there", SWAP, "    clear(place_, own_.k);\n", "", STRICT),
    ("swapped heads take the sinks of the first ones", SWAP, "some_heads(all.sink.logits, heads_q(n))",
     "some_heads(all.sink.logits, {0, heads_q(n).size()})", EXECUTOR),
    ("the largest logits of swapped heads are those of the first ones", FORWARD,
     "run::some_heads(max_logit, swap.heads_q(n))",
     "run::some_heads(max_logit, {0, swap.heads_q(n).size()})", EXECUTOR),
    ("numbers of heads start as those of the call before", "src/run/head_numbers.cpp",
     "    std::uninitialized_fill_n(numbers_, heads, value);", "    static_cast<void>(value);", EXECUTOR),
    # Checked ranks.
    ("a checked rank takes the message of another call", "src/comm/checked.cpp", "const Seal want{call_, route",
     "const Seal want{arrived[i].seal.call, route", SEALS),
    ("a checked rank takes a message that was meant for another one", "src/comm/checked.cpp", "route(m.peer, inner_.rank()), static",
     "arrived[i].seal.route, static", SEALS),
    ("a checked rank takes other bytes than were sent", "src/comm/checked.cpp", "static_cast<std::uint64_t>(m.size()), arrived[i].sum}",
     "static_cast<std::uint64_t>(m.size()), arrived[i].seal.sum}", SEALS),
    ("a backward with the results of another forward is not noticed", "src/run/agreement.cpp", "  check_forwards(all);\n", "", CHECKED),
    ("calls of two layers are taken for one", "src/run/agreement.cpp",
     "std::array{r.kind, r.layer, r.micro, r.object}", "std::array{r.kind, r.micro}", CHECKED),
    ("executors are not told apart", "src/run/agreement.cpp", "object_(++ranks.calls().objects)", "object_(0)", CHECKED),
    # Communicators.
    ("sums of f64 are made of halves of numbers", "src/comm/blocks.cpp", "return add_numbers<double>(from, to, bytes);",
     "return add_numbers<float>(from, to, bytes);", COMM),
    ("what is to be added replaces", "src/comm/blocks.cpp", "to[i] += from[i];", "to[i] = from[i];", COMM),
    ("heads with gaps between them are taken for one piece", "src/comm/blocks.cpp",
     "  if (block.parts == 1 || block.part_stride == block.bytes) {", "  if (block.parts >= 1) {", ("unit_comm", "Blocks.*")),
    ("a split of processes takes messages of the whole", "src/comm/processes/communicator.cpp",
     "(group_->context * 1'000'003 + number + 1) * 0x9e3779b97f4a7c15", "group_->context", ("unit_comm", "Processes.*")),
    ("processes take messages of another size", "src/comm/processes/communicator.cpp",
     "    if (static_cast<Index>(got->size()) != m.size()) refuse(m, text(got->size(), \" bytes\"));\n", "",
     ("unit_comm", "Processes.*")),
    ("a reduce-scatter adds to what was there", "src/comm/communicator.cpp", "peer == 0 ? Message::Combine::replace : add)",
     "add)", COMM),
    ("a NaN of one rank does not show in the largest", "src/comm/communicator.cpp", "value > into || std::isnan(value)",
     "value > into", COMM),
    ("what was buffered for a call is not added in its wait", "src/comm/threads/exchange.cpp",
     "  waiting_ = true;\n  deliver_aside(lock);", "  waiting_ = true;", COMM),
    ("where a rank has left, nobody looks at what it has shown of its pass", "src/comm/threads/exchange.cpp",
     "if (!found && mine_->sign.given())", "if (false)", ("unit_run", "DisagreesInPass.*")),
    ("ranks that differ in anything but the pass are taken for alike", "src/comm/threads/exchange.cpp",
     "!post->sign.given() || post->sign == mine_->sign;", "!post->sign.given() || post->sign.number() == mine_->sign.number();",
     ("unit_run", "*Disagrees*")),
    ("fingerprints that came in a stream are thrown away", "src/comm/signs_in_flight.h", "      if (!found) continue;\n",
     "      continue;\n", ("unit_comm", "SignsInFlight.*")),
    ("memory that a stream may still write to is given back", "src/comm/signs_in_flight.h",
     "      if (!signs->came()) signs->abandon();\n", "      static_cast<void>(signs);\n", ("unit_comm", "SignsInFlight.*")),
    ("what the transport knows of fingerprints that differ is not asked", "src/comm/signs_in_flight.h",
     "      if (tell_ != nullptr) tell_(*found);\n", "", ("unit_comm", "SignsInFlight.*")),
    ("a rank's fingerprint goes with the first pass alone", "src/comm/sign.cpp", "met.pass == pass ||", "met.pass != 0 ||",
     ("unit_comm", "SignedCalls.*")),
    ("ranks of a split come in the order of their numbers, not of their keys", "src/comm/split.cpp",
     "  std::sort(all.begin(), all.end());", "", COMM),
    # K/V buffers and caches.
    ("a K/V buffer drops rows as if the last micro-sequence alone needed any", PLACES,
     "needed[m - 1] = min_of(needed[m - 1], needed[m]);", "needed[m - 1] = needed[m];", KV),
    ("a K/V buffer drops all rows before the next micro-sequence", PLACES, "{{needed[at(m)], needed[at(m + 1)]}}",
     "{{needed[at(m)], micros.rows(m).end}}", KV),
    ("a row is free while a later query sees its token", PLACES, "Ranges last = without(keys[at(m)], later);",
     "Ranges last = keys[at(m)];", KV),
    ("a row is free while keys come ahead of the queries that see its token", PLACES, "m - (ahead ? 2 : 1)", "m - 1", KV),
    ("rows of tokens that nobody sees are never free", PLACES, "    keys[at(m)].push_back(micros.rows(m));\n", "", KV),
    ("ranges of rows are joined over rows of others", PLACES, "rows.back().end == part.begin", "rows.back().end <= part.begin", KV),
    ("of a slice's keys those in a second range of rows are left out", PLACES, "run->begin < slice.k_end; ++run",
     "run->begin < slice.k_end && run == run_of(slice.k_begin); ++run", KV),
    ("gradients of a branch start as those of the branch before", BUFFER, "m >= micro; --m", "m > micro; --m", KV),
    ("a step of a tree has the positions of a document", "python/weft/torch/micro_steps.py",
     "        if self.owner.tree is not None:\n            return self.take", "        if False:\n            return self.take", STEPS),
    ("the first edge of the next step counts in both", "python/weft/torch/trees.py", "(edge_rows >= begin) & (edge_rows < end)",
     "(edge_rows >= begin) & (edge_rows <= end)", STEPS),
    ("gradients of a window are added to those of the one before", BUFFER, "run::constant(mine), adding(type)), true))",
     "run::constant(mine), adding(type)), false))", KV),
    ("gradients of keys that are met for the first time start as what was there", BUFFER,
     "        run::clear(options.place, view);\n", "", KV),
    ("a backward does not wait for keys that are still on their way", BUFFER,
     "  while (!d.arrivals.empty()) d.wait_for(d.arrivals.front().micro);\n", "", KV),
    ("slices in a K/V buffer that has gone round are those of its first round", PLACES, "shift_bound(slice.lo, by)",
     "slice.lo", KV),
    ("a K/V cache forgets how many rows were appended", "src/prepare/kv_cache.cpp", "used_[i] += counts[i];",
     "static_cast<void>(i);", ("unit_prepare", "KvCache.*")),
    ("queries on a K/V cache see as if they were its first rows", "src/prepare/kv_cache.cpp",
     "  if (!mask.slices) mask.align = Align::bottom_right;", "", ("unit_prepare", "KvCache.*")),
    ("a first document that began in the past has lost its past", "src/prepare/micro.cpp", "w.first_document_begin = span->keys_begin",
     "w.first_document_begin = span->begin", ("unit_prepare", "*")),
    ("packs are filled as if documents had no padding", "src/prepare/packer.cpp", "pack.room -= padded(piece.length, o.multiple);",
     "pack.room -= piece.length;", ("unit_prepare", "Packer.*")),
    ("keys of a window are counted as if its first document began in it", "src/prepare/micro.cpp",
     "w.cu_seqlens_k[i] += w.begin - w.first_document_begin;", "w.cu_seqlens_k[i] += 0;", ("unit_prepare", "*")),
    # Rows.
    ("rows go from sequence order to rank order where they should come back", "src/rows/rows.cpp",
     "copy_rows(ranks, row, sequence, token, count)", "copy_rows(sequence, token, ranks, row, count)", ROWS),
    ("a shard's rows without a token keep what was there", "src/rows/rows.cpp",
     "    if (!filled[at(row)]) std::memset(row_of(local, row), 0, at(local.row_bytes));", "    static_cast<void>(row);", ROWS),
    ("every chunk begins where its sequence does", "src/rows/rows.cpp", "out.cu_seqlens_padded.push_back(stream.offset(i) + begin);",
     "out.cu_seqlens_padded.push_back(stream.offset(i));", ROWS),
    ("a step's keys are counted with those that nobody sees", "src/rows/varlen_steps.cpp", "add_side(e.k.begin, e.keys(),",
     "add_side(e.k.begin, e.k.size(),", ROWS),
    ("a ring is gone around the other way", "src/rows/varlen_steps.cpp", "rank >= step ? rank - step : rank - step + ranks",
     "(rank + step) % ranks", ROWS),
    # Over torch's groups.
    ("the gradient of a change of layout goes the way of the rows", "python/weft/torch/relayout.py",
     "gradient, receive, ctx.receive_counts, send, ctx.send_counts, ctx.rows", "gradient, send, ctx.send_counts, receive, ctx.receive_counts, ctx.rows",
     ("pytest", "python/tests/pytorch/test_any_order.py")),
    ("a rank whose stream waits does not learn that another has given up", TRANSPORT, "        elif failed and waits():",
     "        elif False:", RANKS),
    ("fingerprints of an earlier pass are believed where NCCL was given up", TRANSPORT,
     "        if self.broken:  # where NCCL was given up, those of an earlier pass may lie there\n            raise self._again()\n"
     "        if self.has_nccl_error():\n            raise self._nccl_error()\n", "", RANKS),
    ("messages over gloo have no number", TRANSPORT, "(number * 1000003 + size) % _TAGS", "size % _TAGS", GLOO),
    ("a rank that gives up an exchange over gloo tells nobody", TRANSPORT,
     '            self.transport.fail("gave up an exchange after an error")\n', "", GLOO),
]]

DEVICE, STAGED = "src/device/cuda/device.cu", "src/comm/cuda/staged.cpp"
ON_GPU = ("cuda_test", "DeviceExecutor.EqualsTheDefinitionOnRandomProblems:DeviceExecutor.TransportsOfTheHostGiveTheSameBits")
CUDA_FAULTS = [Fault(*fault[:4], *fault[4]) for fault in [
    ("dsink on a GPU is made with the LSE of the first head", DEVICE, "exp(logit - load(lse, row, head, 0))",
     "exp(logit - load(lse, row, 0, 0))", ON_GPU),
    ("sums on a GPU replace each other", DEVICE, "element<float>(to, row, head)[i] += element", "element<float>(to, row, head)[i] = element",
     ON_GPU),
    ("states that come home on a GPU are added as if their maxima were equal", DEVICE,
     "merge(a, b)(sum, more)", "sum + more", ON_GPU),
    ("the state of a row on a GPU stays as it was when another is merged into it", DEVICE,
     "if (!is_empty(from[n])) states[n] = merge(states[n], from[n]).state;", "", ON_GPU),
    ("ranks' numbers on a GPU: the smallest is taken for the largest", DEVICE, "else if (next > value || isnan(next))",
     "else if (next < value)", ON_GPU),
    ("messages through the host are sent before they are packed", STAGED, "    WEFT_CUDA(cudaEventSynchronize(packed.get()));\n", "",
     ("cuda_test", "*DeviceCommunicator.*:DeviceExecutor.TransportsOfTheHostGiveTheSameBits")),
    ("a message to itself moves those of others in the staging memory", STAGED, "      if (m.peer != rank_) next += padded(m);",
     "      next += padded(m);", ("cuda_test", "*DeviceCommunicator.*:DeviceExecutor.TransportsOfTheHostGiveTheSameBits")),
]]


class Runtime:
    """The build that faults are planted in, and which of its objects depend on a file."""

    def __init__(self, folder, programs, cuda):
        self.cuda = cuda
        self.build = mutate.Build(ROOT, folder)
        self.folder = folder
        self.programs = {name: mutate.Program(self.build, f"tests/{name}") for name in programs}
        self.users = collections.defaultdict(set)  # file below the root -> objects
        obj = None
        for line in subprocess.run(["ninja", "-t", "deps"], cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines():
            if not line.startswith(" "):
                obj = line.split(":")[0] or None
            elif obj in self.build.commands:
                path = os.path.normpath(folder / line.strip())
                if path.startswith(f"{ROOT}{os.sep}"):
                    self.users[os.path.relpath(path, ROOT)].add(obj)

    def objects(self, fault):
        own = set(self.programs[fault.program].own)
        return sorted(o for o in self.users[fault.file] if o in own or o in self.build.objects)

    def overlay(self, fault, folder):
        """The edited file, and the files of its unity builds that include it, in a folder of their own."""
        content = (ROOT / fault.file).read_text()
        if content.count(fault.text) != 1:
            return f"the text to replace occurs {content.count(fault.text)} times in {fault.file}: mend the list of faults"
        edited = folder / fault.file
        edited.parent.mkdir(parents=True, exist_ok=True)
        edited.write_text(content.replace(fault.text, fault.instead))
        return None

    def compile(self, fault, folder):
        """Object of the build -> object with the fault; or what was wrong."""
        made = {}
        for number, obj in enumerate(self.objects(fault)):
            source = self.build.sources[obj]
            if "/Unity/" in source:
                text = (ROOT / source).read_text()
                (folder / source).parent.mkdir(parents=True, exist_ok=True)
                (folder / source).write_text(text.replace(f'"{ROOT / fault.file}"', f'"{folder / fault.file}"'))
            out = folder / f"{number}.o"
            if not self.build.compile(obj, folder, out, flags=[] if source.endswith(".cu") else ["-O0"]):
                return f"{source} does not compile with the fault: mend the list of faults"
            made[obj] = out
        return made or f"nothing that {fault.program} runs is made of {fault.file}"

    def plant(self, fault, folder):
        """Whether it was caught, and by what."""
        wrong = self.overlay(fault, folder)
        if wrong:
            return False, wrong
        if fault.program == "pytest":
            package = folder / "package"
            shutil.copytree(self.folder / "python", package)
            shutil.copy(folder / fault.file, package / pathlib.Path(fault.file).relative_to("python"))
            why = self.pytest(fault.tests, package, folder)
            return why is not None, why
        made = self.compile(fault, folder)
        if isinstance(made, str):
            return False, made
        program = folder / "program"
        try:
            self.build.link(self.programs[fault.program], made, program)
        except mutate.LinkError as e:
            return False, f"does not link: {e}"
        why = self.gtest(program, [f"--gtest_filter={fault.tests}", "--gtest_fail_fast"], 120, folder)
        return why is not None, why

    def gtest(self, program, arguments, limit, folder):
        more = {"limits": 'exec "$@"'} if self.cuda else {}  # CUDA reserves more addresses than a limit of memory allows
        return mutate.run(program, [*arguments, "--gtest_brief=1"], {}, limit, folder, **more)

    def pytest(self, file, package, folder):
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", str(ROOT / file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(package)},
                              timeout=300, check=False)
        found = re.search(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
        return None if done.returncode == 0 else found[1] if found else f"exit {done.returncode}: {done.stdout[-500:]}"

    def clean(self, faults, folder):
        """The tests without a fault: what fails."""
        tests = collections.defaultdict(dict)
        for fault in faults:
            tests[fault.program][fault.tests] = True
        for program, filters in tests.items():
            for file in filters if program == "pytest" else ():
                why = self.pytest(file, self.folder / "python", folder)
                if why:
                    return f"{file}: {why}"
            if program != "pytest":
                why = self.gtest(self.folder / "tests" / program, [f"--gtest_filter={':'.join(filters)}"], 300, folder)
                if why:
                    return f"{program}: {why}"
        return None


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--build", required=True, type=pathlib.Path)
    args.add_argument("--only", default="", help="those whose words or file have this text in them")
    args.add_argument("--cuda", action="store_true", help="those in CUDA sources")
    args.add_argument("--jobs", type=int, default=os.cpu_count())
    args.add_argument("--list", action="store_true", help="says what there is, and whether each text is found once")
    args = args.parse_args()
    faults = [f for f in (CUDA_FAULTS if args.cuda else FAULTS) if args.only in f"{f.what} {f.file}"]
    if args.list:
        for f in faults:
            print(f"{(ROOT / f.file).read_text().count(f.text)}  {f.what} ({f.file})")
        return int(any((ROOT / f.file).read_text().count(f.text) != 1 for f in faults))
    here = Runtime(args.build.resolve(), {f.program for f in faults} - {"pytest"}, args.cuda)
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        scratch = pathlib.Path(scratch)
        wrong = here.clean(faults, scratch)
        if wrong:
            print("without a fault:", wrong)
            return 1

        def one(numbered):
            folder = scratch / f"fault{numbered[0]}"
            folder.mkdir()
            result = here.plant(numbered[1], folder)
            shutil.rmtree(folder)
            return result

        missed = 0
        for fault, (caught, evidence) in zip(faults, pool.map(one, enumerate(faults))):
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}  {fault.what} ({fault.file})\n        {evidence}", flush=True)
        print(f"{len(faults) - missed} of {len(faults)} faults caught")
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
