#!/usr/bin/env python3
"""Checks the operators on a small text: what each of them does there, and that comments, texts of errors and assertions
stay as they are. Also that every change of the sources is one that the tools can apply and name."""
import pathlib
import sys
import tempfile

sys.dont_write_bytecode = True
import cpp
import mutate
import operators
import report

TEXT = '''
#include <vector>  // 1 + 1
static_assert(sizeof(int) == 4);
template <class T, int kLanes = 4>
struct Tile {
  float sum = 0;
  void add(float x) { sum = sum + x; }
};
int middle(const std::vector<int>& v, int a, Range r) {
  if (v.empty() && a < 3) throw Error(text("a is ", a - 1), "give 3");
  float total = scale * 2.5f;
  total += half(a);
  queue.start(v).wait();
  /* a - 1 */ notify_all();
  visit(r.end);
  return std::max(a - v[0], !flag);
}
'''

EXPECTED = {
    "off by one": {"a < 3 => a < 4", "a < 3 => a < 2", "v[0] => v[1]", "visit(r.end => visit(r.end + 1",
                   "visit(r.end => visit(r.end - 1", "sum = 0 => sum = 1"},
    "constant": {"a < 3 => a < 6", "a < 3 => a < 0", "2.5f => (2 * 2.5f)", "2.5f => (0 * 2.5f)"},
    "swapped operands": {"a - v[0] => v[0] - a"},
    "relational": {"a < 3 => a <= 3", "a < 3 => a > 3"},
    "arithmetic": {"sum + x => sum - x", "scale * 2.5f => scale / 2.5f", "total += => total -=", "a - v[0] => a + v[0]"},
    "logical": {"v.empty() && a < 3 => !(v.empty() && a < 3)", "&& => ||", "!flag => flag"},
    "dropped statement": {"sum = sum + x; => ;", "total += half(a); => ;", "visit(r.end); => ;"},
    "missing wait": {".wait(); => ;", "notify_all(); => ;"},
    "min/max": {"max => min"},
    "rounded": {"sum + x => weft_mutant_rounded(sum + x)", "scale * 2.5f => weft_mutant_rounded(scale * 2.5f)",
                "half(a) => weft_mutant_rounded(half(a))"},
    "early return": {"add(float x) { => add(float x) { return;", "Range r) { => Range r) { return {};"},
}


def found(source):
    """operator -> the mutated texts."""
    result = {name: set() for name in operators.OPERATORS}
    for name, begin, end, text in operators.edits(source):
        result[name].add(source.text[:begin] + text + source.text[end:])
    return result


def check_operators():
    source = cpp.parse(TEXT)
    got = found(source)
    for name, changes in EXPECTED.items():
        wanted = set()
        for change in changes:
            was, is_ = change.split(" => ")
            at = TEXT.rindex(was)
            wanted.add(TEXT[:at] + is_ + TEXT[at + len(was):])
        assert got[name] == wanted, f"{name}:\n" + "\n---\n".join(sorted(got[name] ^ wanted))
    assert source.function_lines(TEXT.index("total +=")) == (9, 17), source.function_lines(TEXT.index("total +="))


def check_draws():
    for room in mutate.ROOMS:
        drawn = [m.name for m, _ in zip(mutate.draws(room, 1), range(50))]
        assert drawn == [m.name for m, _ in zip(mutate.draws(room, 1), range(50))], "a seed draws the same again"
        assert len(set(drawn)) == len(drawn) >= 30, room
    for m, _ in zip(mutate.draws("plan", 2), range(50)):
        was, is_ = m.change()
        assert was != is_ and m.text() != m.source.text, m.name


def check_report():
    one = {"room": "plan", "operator": "constant", "file": "f", "line": 1, "was": "a", "is": "b"}
    results = {"1": one | {"verdict": "killed"}, "2": one | {"verdict": "survived"}, "3": one | {"verdict": "same code"},
               "4": one | {"verdict": "survived", "is": "c"}, "5": {"room": "control", "verdict": "survived"}}
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder) / "equivalent.json"
        listed.write_text('[{"file": "f", "was": "a", "is": "c", "why": "it is"}]')
        assert "| plan | 3 | 1 | 1 | 1 | 50.0 % |" in report.summary(results, listed)


check_operators()
check_draws()
check_report()
print("operators, draws and report are as they should be")
