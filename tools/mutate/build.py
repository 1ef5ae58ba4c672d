"""One build folder (preset `mutants`), and how to compile a mutated file and link and run the programs that check it."""
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
TIME_LIMIT = "time limit"
LIMITS = "ulimit -c 0 -f 200000 -v 24000000; exec \"$@\""  # a mutant may write and ask for memory without end


class LinkError(Exception):
    pass


class Build:
    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.commands = {}     # object -> argv
        self.sources = {}      # object -> path below the root
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            argv = shlex.split(entry["command"])
            target = argv[argv.index("-o") + 1]
            self.commands[target] = argv
            self.sources[target] = str(pathlib.Path(entry["file"]).relative_to(root))
        self.objects = [o for o in self.commands if "/weft_objects.dir/" in o or "/weft_check.dir/" in o]
        self.lines = {}        # object -> file -> lines that code was made of
        self.users = collections.defaultdict(set)  # file -> objects
        self.live_lines = {}
        self.plain = {}        # object -> bytes without debug info
        self.lock = threading.Lock()
        self.linker = ["-fuse-ld=lld"] if shutil.which("ld.lld") else []

    def read_lines(self, programs):
        """Which lines of which files each object was made of, from its line table."""
        for obj in self.objects + [o for p in programs for o in p.own]:
            table = subprocess.run(["readelf", "-wL", obj], cwd=self.folder, capture_output=True, text=True).stdout
            found = self.lines.setdefault(obj, collections.defaultdict(set))
            name = None
            for row in table.splitlines():
                if row.endswith(":"):
                    path = os.path.normpath(self.folder / row[:-1].removesuffix("[++]"))
                    name = os.path.relpath(path, self.root) if path.startswith(str(self.root) + os.sep) else None
                elif name and (m := re.match(r"\S+ +(\d+) +(0x)?[0-9a-f]+", row)):
                    found[name].add(int(m[1]))
            for name in found:
                self.users[name].add(obj)
            self.users[self.sources.get(obj, "")].add(obj)

    def objects_of(self, file, span, among):
        """Objects with code of these lines of the file."""
        wanted = set(range(span[0], span[1] + 1))
        return [o for o in among if o in self.users[file] and self.lines[o].get(file, set()) & wanted]

    def live(self, file, obj, line):
        """Whether the line comes through the preprocessor."""
        with self.lock:
            known = self.live_lines.get((file, obj))
        if known is None:
            argv = [a for a in self.commands[obj] if a != "-c"]
            argv[argv.index("-o") + 1] = "-"
            text = subprocess.run(argv + ["-E"], cwd=self.folder, capture_output=True, text=True).stdout
            known, here, number, target = set(), False, 0, str(self.root / file)
            for row in text.splitlines():
                if m := re.match(r'# (\d+) "(.*?)"', row):
                    number, here = int(m[1]) - 1, os.path.normpath(self.folder / m[2]) == target
                    continue
                number += 1
                if here and row.strip():
                    known.add(number)
            with self.lock:
                self.live_lines[(file, obj)] = known
        return line in known

    def compile(self, obj, overlay, out, rounded=False, flags=()):
        """Compiles an object with the files below `overlay` in place of the originals. False: it does not compile."""
        argv = [a for a in self.commands[obj] if not a.startswith("-W")] + list(flags)
        argv[argv.index("-o") + 1] = str(out)
        own = overlay / self.sources[obj]
        if own.exists():
            argv[argv.index("-c") + 1] = str(own)
        first = next(i for i, a in enumerate(argv) if a.startswith("-I"))
        argv[first:first] = [f"-I{overlay}/include", f"-I{overlay}/src", "-w"]
        if rounded:
            argv[first:first] = ["-include", str(HERE / "rounded.h")]
        try:
            return subprocess.run(argv, cwd=self.folder, capture_output=True, timeout=200).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def same(self, obj, out):
        """Whether the object is the original but for debug info."""
        with self.lock:
            known = self.plain.get(obj)
        if known is None:
            known = plain(self.folder / obj, out.with_suffix(".plain"))
            with self.lock:
                self.plain[obj] = known
        return plain(out, out.with_suffix(".plain")) == known

    def link(self, program, mutated, out):
        """Links a program with mutated objects before all others, so that theirs is every inline function."""
        argv = list(program.link)
        argv[argv.index("-o") + 1] = str(out)
        for obj, replacement in mutated.items():
            argv = [str(replacement) if a == obj else a for a in argv]
        first = next(i for i, a in enumerate(argv) if a.endswith(".o"))
        argv[first:first] = [str(m) for obj, m in mutated.items() if obj in self.objects and obj not in program.own]
        done = subprocess.run(argv + ["-Wl,-S"] + self.linker, cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise LinkError(done.stderr[-2000:])


class Program:
    """A program of the build and its link command."""
    def __init__(self, build, target):
        self.target = target
        line = subprocess.run(["ninja", "-t", "commands", target], cwd=build.folder, capture_output=True, text=True,
                              check=True).stdout.strip().splitlines()[-1]
        self.link = shlex.split(line.removeprefix(": && ").removesuffix(" && :"))
        self.own = [a for a in self.link if a.endswith(".o")]
        # What of the archives goes in: a mutant elsewhere cannot be noticed.
        scratch = build.folder / "mutants" / "traced"
        scratch.parent.mkdir(exist_ok=True)
        argv = list(self.link)
        argv[argv.index("-o") + 1] = str(scratch)
        trace = subprocess.run(argv + ["-Wl,-S", "-Wl,--trace"] + build.linker, cwd=build.folder, capture_output=True,
                               text=True, check=True)
        self.members = set(re.findall(r"\(?([\w.]+\.cpp\.o)\)?", trace.stdout + trace.stderr))

    def holds(self, objects):
        return any(o in self.own or pathlib.Path(o).name in self.members for o in objects)


def plain(obj, scratch):
    subprocess.run(["objcopy", "-g", str(obj), str(scratch)], check=True)
    data = scratch.read_bytes()
    scratch.unlink()
    return data


def pinned(number):
    """On a machine with many cores two are enough for each program, and their threads do not get in each other's way."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= 4 or not shutil.which("taskset"):
        return []
    return ["taskset", "-c", f"{cores[number % len(cores)]},{cores[(number + 1) % len(cores)]}"]


def run(program, arguments, environment, limit, folder, number=0, limits=LIMITS):
    """None if the program succeeds in time, else what happened."""
    log = folder / "log"
    argv = ["sh", "-c", limits, "sh", *pinned(number), str(program), *arguments]
    with open(log, "w") as out:
        child = subprocess.Popen(argv, stdout=out, stderr=out, cwd=folder, stdin=subprocess.DEVNULL,
                                 env={**os.environ, **environment}, start_new_session=True)
        # Seconds are counted by naps: a machine that was halted for a while has not taken the program's time.
        naps = 0
        while (status := child.poll()) is None and naps < limit * 10:
            time.sleep(0.01 if naps < 10 else 0.1)
            naps += 1
        if status is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return TIME_LIMIT
    if status == 0:
        return None
    if status < 0 or status > 128:
        return f"signal {-status if status < 0 else status - 128}"
    with open(log, errors="replace") as text:
        found = re.search(r"\[  FAILED  \] ([\w/.]+)", text.read(4_000_000))
    return found[1] if found else f"exit {status}"


def timed(call):
    start = time.monotonic()
    result = call()
    return result, time.monotonic() - start
