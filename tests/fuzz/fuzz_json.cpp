// Files as somebody else wrote them: machines, slices, runs and trees. A value that holds its promises, or a
// weft::Error; in time and memory that grow with the file and not faster.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "terminal/json_file.h"
#include "weft/cost.h"
#include "weft/error.h"
#include "weft/layout.h"
#include "weft/simulate.h"

namespace {

[[noreturn]] void found(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

// Errors are read by people: one line of theirs, not the file again.
void check_words(const weft::Error& e) {
  if (std::string_view(e.what()).size() > 8192)
    found("an error of " + std::to_string(std::string_view(e.what()).size()));
}

void machine(std::string_view json) {
  const weft::Machine m = weft::machine_from_json(json, "m.json");
  const std::string text = to_json(m);
  if (to_json(weft::machine_from_json(text, "again")) != text) found("written and read again it is another: " + text);
  const weft::Problem problem(weft::Stream::from_lengths(std::vector<weft::Index>{30, 7, 60}), {.causal = true});
  const weft::Job job{.problem = problem,
                      .layouts = make_layouts(weft::LayoutKind::zigzag, problem, 4),
                      .heads_q = 4,
                      .heads_k = 2,
                      .shape = {.dim_qk = 64, .dim_v = 64}};
  const weft::Timeline t = simulate(job, m, weft::Pass::forward);
  if (std::isnan(t.seconds) || t.seconds < 0 || std::isnan(t.efficiency()))
    found("predicted: " + std::to_string(t.seconds));
}

void slices(const std::string& json) {
  std::vector<weft::Slice> all = weft::tool::read_slices("--slices", json);
  const weft::Problem problem(weft::Stream::from_lengths(std::vector<weft::Index>{8, 24}), {.slices = std::move(all)});
  if (problem.visible_pairs() < 0 || problem.visible_pairs() > 32 * 32) found("more pairs than there are");
}

void runs(const std::string& json) {
  const std::vector<std::vector<weft::Run>> all = weft::tool::read_runs("--runs", json);
  const weft::Stream stream = weft::Stream::from_lengths(std::vector<weft::Index>{8, 24});
  const weft::Layout layout = weft::Layout::explicit_runs(stream, all);
  weft::Index held = 0;
  for (weft::Index rank = 0; rank < layout.ranks(); ++rank)
    if (layout.rows() < 100000)
      for (const weft::Index token : layout.tokens(rank)) held += token != weft::kNoToken;
  if (layout.rows() < 100000 && held != 32) found("a layout of 32 tokens holds " + std::to_string(held));
}

void tree(const std::string& json) {
  const weft::Tree all = weft::tool::read_tree("--tree", json);
  if (all.separate_tokens() < all.used_rows()) found("fewer tokens than rows");
  if (all.rows() > 1000) return;
  const weft::Problem problem = all.problem({.causal = true, .left = 5, .chunk = 7});
  if (problem.visible_pairs() > all.problem().visible_pairs()) found("a window shows more than there is");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return -1;
  const std::string json(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 4) {
      case 0:
        machine(json);
        break;
      // A name of a file is no business of this program.
      case 1:
        json.starts_with('[') || json.starts_with('{') ? slices(json) : slices("[" + json);
        break;
      case 2:
        json.starts_with('[') || json.starts_with('{') ? runs(json) : runs("[" + json);
        break;
      default:
        tree(json.starts_with('{') ? json : "{" + json);
    }
  } catch (const weft::Error& e) {
    check_words(e);
  }
  return 0;
}
