"""Plants faults in planner and layouts, one at a time, and checks that the law catches every one.

    python tests/planted_faults.py --source . --compiler g++

Each fault is one edit of a copy of the sources. What depends on the edited file is compiled again, linked with
law_soak.cpp, and must report a violation; without a fault it must report none.
"""
import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

# what goes wrong | file | text | instead
FAULTS = [
    ("a strided band's upper bound rounds toward zero", "src/plan/cut.h",
     "floor_div(global.hi - shift, stride)", "(global.hi - shift) / stride"),
    ("a strided band's lower bound rounds down", "src/plan/cut.h",
     "ceil_div(global.lo - shift, stride)", "floor_div(global.lo - shift, stride)"),
    ("a narrow band looks at one residue too few", "src/plan/cut.h",
     "residues = {q.token + global.lo, global.hi - global.lo + 1}", "residues = {q.token + global.lo, global.hi - global.lo}"),
    ("k_begin is trimmed in sequence order", "src/plan/cut.h",
     "stride), !keep_k_begin)", "stride), true)"),
    ("keys end one before the last visible one", "src/plan/cut.h",
     "shift_bound(global.hi, q_last + 1)", "shift_bound(global.hi, q_last)"),
    ("a run cut by a range keeps one token too many", "src/plan/cut.h",
     "min_of(run.count, ceil_div(b - run.token, run.stride))", "min_of(run.count, ceil_div(b - run.token, run.stride) + 1)"),
    ("the second piece lies on the first one's rows", "src/plan/runs.h",
     "fold.row + (second ? fold.piece : 0), token", "fold.row, token"),
    ("the last rank's second piece is forgotten", "src/plan/runs.h",
     "rank == ranks - 1 ? 2 * fold.piece : fold.piece", "fold.piece"),
    ("keys in the last rank's second piece are not found", "src/plan/runs.h",
     "first <= ranks ? members_between", "first < ranks ? members_between"),
    ("dual_chunk rows count from token 0, not from the first offset", "src/plan/runs.h",
     "(from - begin) / ranks}", "from / ranks}"),
    ("residues that wrap around are lost", "src/plan/runs.h",
     "if (high >= ranks)", "if (high > ranks)"),
    ("the table's search skips a run that ends at the first token", "src/plan/runs.h",
     "r.token + (r.count - 1) * r.stride < a", "r.token + (r.count - 1) * r.stride <= a"),
    ("bottom_right is shifted the wrong way", "src/plan/views.h",
     "mask.bottom_right ? k.size() - q.size() : 0", "mask.bottom_right ? q.size() - k.size() : 0"),
    ("causal does not cap a window's right side", "src/plan/views.h",
     "mask.causal ? 0 : mask.right", "mask.causal && mask.right < 0 ? 0 : mask.right"),
    ("the last, shorter chunk is dropped", "src/plan/views.h",
     "floor_div(k_.size() - 1, chunk_)", "floor_div(k_.size(), chunk_) - 1"),
    ("padding is taken for real", "src/plan/views.h",
     "{offsets[i], offsets[i] + used[i]}", "{offsets[i], offsets[i + 1]}"),
    ("rows that see nothing at the end are kept, the last that sees is cut", "include/weft/slice.h",
     "shift_bound(-s.lo, s.k_end)", "shift_bound(-s.lo, s.k_end - 1)"),
    ("zigzag pieces are rounded down: the stream's tail is lost", "src/plan/layout.cpp",
     "ceil_div(stream.extent().size(), 2 * ranks)", "stream.extent().size() / (2 * ranks)"),
    ("balanced gives joined blocks one row too many", "src/plan/balanced.cpp",
     "row += t.size();", "row += t.size() + (runs.back().count > t.size());"),
    ("balanced deals the blocks of the last kind twice", "src/plan/balanced.cpp",
     "full() * size + (n - full()) * last", "full() * size + (n - full()) / 2 * last"),
    ("placed gives the second chunks out in the order of the first", "src/plan/placed/solver.cpp",
     "for (std::size_t n = ranks; n-- > 0 && !split.gaps;) add(n, split.share[n] - split.share[n] / 2);",
     "for (std::size_t n = ranks; n-- > 0 && !split.gaps;) add(n, split.share[n] / 2);"),
    ("placed takes the keys of another stream from the queries' offsets", "src/plan/placed/placed.cpp",
     "k.padded(i) * (n + 1) / parts;", "k.padded(i) * n / parts + 1;"),
    ("a node is sent what its first rank sees, not what all see", "src/schedule/two_hops.cpp",
     "groups.touched(nodes.group(to, 0), node, me)", "groups.touched(nodes.group(to, 0), 1, me)"),
    ("a rank passes on the rows that it sees itself", "src/schedule/two_hops.cpp",
     "groups.touched(first + place, 1, source)", "groups.touched(groups.mine(), 1, source)"),
    ("keys of a node lie in the wrong order of its ranks", "src/schedule/two_hops.cpp",
     "{{place * rows, (place + 1) * rows}}", "{{(node - 1 - place) * rows, (node - place) * rows}}"),
    ("stages cut by ranks let rows enter a node in several", "src/schedule/exact.cpp",
     ".distances = {nodes * n / parts, nodes * (n + 1) / parts}", ".distances = {0, nodes * (n + 1) / parts}"),
    ("a tree's window does not count from positions", "src/prepare/tree_slices.cpp",
     "shift(from) - shift(node) - mask_.left", "-mask_.left"),
    ("a chunk of ancestors begins one too early", "src/prepare/tree_slices.cpp",
     "shift(from) + chunk_of(node.position) * *mask_.chunk", "shift(from) + (chunk_of(node.position) - 1) * *mask_.chunk"),
    ("a node that a window reaches in part is taken for whole", "src/prepare/tree_slices.cpp",
     "last[i] - node.position <= mask_.left", "last[i] - node.position <= mask_.left + 1"),
    ("the ancestor at the edge of a window is left out", "src/prepare/tree_slices.cpp",
     "from.position + from.size() <= reach", "from.position + from.size() <= reach + 1"),
    ("a first child goes on where its parent ends, its siblings too", "src/prepare/tree_slices.cpp",
     "slices_[at(above)].k_end == node.begin && slices_[at(above)].q_end == node.subtree_end",
     "slices_[at(above)].k_end == node.begin"),
    ("a last child goes on where its siblings begin", "src/prepare/tree_slices.cpp",
     "slices_[at(above)].k_end == node.begin && slices_[at(above)].q_end == node.subtree_end",
     "slices_[at(above)].q_end == node.subtree_end"),
    ("siblings see each other", "src/prepare/tree_slices.cpp",
     "{node.begin, node.subtree_end, node.begin, node.end,", "{node.begin, node.subtree_end, node.begin, node.subtree_end,"),
]

FLAGS = ["-std=c++20", "-O0"]
TREES = ["tree", "tree_slices"]
ROOMS = ["src/plan", "src/plan/placed", "src/rows", "src/schedule"]
CORE = ["dtype", "error", "tensor", "without_cuda"]
LAW = ["cases/case", "cases/random_case", "cases/tree_case", "definition", "law", "law_soak", "moves"]
PROBLEMS = "6000"


def sources(tree):
    """What the law needs: attention is not part of it."""
    found = [f for room in ROOMS for f in sorted((tree / room).glob("*.cpp")) if f.name != "traffic.cpp"]
    found += [tree / "src" / f"{name}.cpp" for name in CORE]
    found += [tree / "src/prepare" / f"{name}.cpp" for name in TREES]
    return found + [tree / "src/check" / f"{name}.cpp" for name in LAW]


def compile_one(compiler, tree, source, out):
    command = [compiler, *FLAGS, "-I", tree / "include", "-I", tree / "src", "-MMD", "-c", source, "-o", out]
    subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)


def object_of(folder, tree, source):
    return folder / (str(source.relative_to(tree)).replace("/", "_") + ".o")


def soak(compiler, objects, out):
    subprocess.run([compiler, *map(str, objects), "-o", str(out)], check=True, capture_output=True, text=True)
    return subprocess.run([str(out), PROBLEMS], capture_output=True, text=True, timeout=600)


def plant(compiler, good, good_tree, fault, folder):
    """Returns (caught, first line of evidence)."""
    what, name, text, instead = fault
    tree = folder / "tree"
    shutil.copytree(good_tree, tree)
    edited = tree / name
    content = edited.read_text()
    if content.count(text) != 1:
        return False, f"the text to replace occurs {content.count(text)} times in {name}: mend the list of faults"
    edited.write_text(content.replace(text, instead))
    objects = []
    for source, obj in good.items():
        depends = obj.with_suffix(".d").read_text()
        if str(good_tree / name) in depends:
            obj = object_of(folder, good_tree, source)
            compile_one(compiler, tree, tree / source.relative_to(good_tree), obj)
        objects.append(obj)
    result = soak(compiler, objects, folder / "law_soak")
    if result.returncode < 0:
        return True, f"stopped by signal {-result.returncode}"
    lines = result.stdout.splitlines()
    return result.returncode != 0, lines[0] if lines else f"exit {result.returncode}"


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--source", required=True, type=pathlib.Path)
    args.add_argument("--compiler", required=True)
    args = args.parse_args()
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        scratch = pathlib.Path(scratch)
        tree = scratch / "good"
        for part in ("include", "src"):
            shutil.copytree(args.source / part, tree / part)
        shutil.copy(args.source / "tests/check/law_soak.cpp", tree / "src/check/law_soak.cpp")
        good = {source: object_of(scratch, tree, source) for source in sources(tree)}
        list(pool.map(lambda s: compile_one(args.compiler, tree, s, good[s]), good))
        clean = soak(args.compiler, good.values(), scratch / "law_soak")
        print("without a fault:", clean.stdout.strip())
        if clean.returncode != 0:
            return 1

        def one(numbered):
            number, fault = numbered
            folder = scratch / f"fault{number}"
            folder.mkdir()
            return plant(args.compiler, good, tree, fault, folder)

        missed = 0
        for fault, (caught, evidence) in zip(FAULTS, pool.map(one, enumerate(FAULTS))):
            missed += not caught
            print(f"{'caught' if caught else 'MISSED'}  {fault[0]} ({fault[1]})\n        {evidence}", flush=True)
        print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults caught")
        return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
