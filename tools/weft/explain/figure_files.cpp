#include <fmt/format.h>

#include "draw/figure.h"
#include "explain/modes.h"
#include "flags/machine_flag.h"
#include "flags/schedule_flags.h"
#include "terminal/file_output.h"
#include "terminal/numbers.h"
#include "weft/choose.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

const std::vector<std::string> kLayouts = {"contiguous", "dual_chunk", "zigzag", "striped", "balanced", "placed"};

draw::Subject subject_of(const Flags& flags, const check::Case& c) {
  return {.problem = check::problem_of(c),
          .heads_q = c.heads_q,
          .heads_k = c.heads_k,
          .head_map = c.head_map,
          .shape = {.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v},
          .machine = machine_of(flags, "h100-400g"),
          .title = flags.text("title", ""),
          .command = "weft explain" + flags.words(),
          .by_step = flags.one_of("colour", {"rank", "step"}) == "step"};
}

Layouts chosen_layouts(const draw::Subject& s, Index ranks) {
  const Layer layer{.problem = s.problem, .heads_q = s.heads_q, .heads_k = s.heads_k, .shape = s.shape};
  return make_layouts(choose({&layer, 1}, ranks, s.machine).layout, s.problem, ranks);
}

void write(FileOutput& to, const std::string& text, std::size_t panels) {
  if (!to) return;
  to.write(text);
  fmt::print("{}: {}, {} panel{}\n", to.path(), bytes_text(static_cast<Index>(text.size())), panels,
             panels == 1 ? "" : "s");
}

}  // namespace

std::vector<FlagSpec> with_figure_flags(std::vector<FlagSpec> flags) {
  flags.insert(flags.end(),
               {{"html", "FILE",
                 "draw a page to look into instead: mask, work, bytes, timeline; --layout may then be a list, or auto"},
                {"svg", "FILE", "draw a picture for papers and pages, of the same"},
                {"title", "TEXT", "--html, --svg: a heading"},
                {"colour", "NAME", "--html, --svg: of the matrix, by rank (default) or step"},
                {"machine", "NAME",
                 "--html, --svg: a preset (h100-400g if not given) or a file, that the timeline is simulated on"},
                {"schedule", "LIST",
                 "--html, --svg: a panel for each of all_gather (default), ring, all_to_all, hybrid, exact, auto"},
                kHeadMapFlag});
  return with_schedule_options(std::move(flags));
}

bool asks_for_figure(const Flags& flags) { return flags.given("html") || flags.given("svg"); }

void refuse_figure_flags(const Flags& flags) {
  for (const FlagSpec& flag : with_figure_flags({}))
    flags.refuse({flag.name}, " without --html or --svg", "add --html FILE or --svg FILE");
}

int explain_figure(const Flags& flags) {
  for (const char* drawing : {"html", "svg"})
    flags.exclude(drawing, {"json", "view", "keys", "support", "micro", "remainder", "even"},
                  "write pages and pictures by themselves");
  FileOutput page("--html", flags.find("html")), picture("--svg", flags.find("svg"));
  const AskedSchedules schedules = asked_schedules(flags, flags.text("schedule", "all_gather"));
  std::vector<draw::PanelSpec> specs;
  std::optional<draw::Subject> subject;
  for (const std::string& layout : list_of("--layout", flags.text("layout", kDefaultLayout), kLayouts)) {
    const bool automatic = layout == "auto";
    const check::Case c = case_of(flags.with("layout", automatic ? "zigzag" : layout), kExplainDefaults);
    if (!subject) subject = subject_of(flags, c);
    const Layouts layouts = automatic ? chosen_layouts(*subject, c.ranks) : check::layouts_of(c, subject->problem);
    for (const ScheduleOptions& options : schedules.given) specs.push_back({layouts, fitted(options, c)});
    if (schedules.automatic) specs.push_back(chosen(*subject, layouts));
  }
  const draw::Figure figure = make_figure(*subject, specs);
  const std::string page_text = page ? html(figure) : "", picture_text = picture ? svg(figure) : "";
  write(page, page_text, specs.size());
  write(picture, picture_text, specs.size());
  return 0;
}

}  // namespace weft::tool
