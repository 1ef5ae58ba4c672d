// Pages and pictures of schedules.
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "draw/figure.h"
#include "gil.h"
#include "module.h"
#include "problem.h"
#include "schedule_options.h"
#include "tensor.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {

using namespace nb::literals;

void bind_draw(nb::module_& m) {
  nb::class_<draw::Figure>(m, "Scene", "A problem under layouts and schedules, ready to be drawn.")
      .def(
          "__init__",
          [](draw::Figure* self, const Problem& problem, const std::vector<const PlacedLayouts*>& layouts,
             const std::vector<std::pair<std::string, nb::dict>>& schedules, Index heads_q, Index heads_k, DType dtype,
             Index dim_qk, Index dim_v, const Machine& machine, std::string title, std::string_view colour) {
            if (colour != "rank" && colour != "step")
              throw Error(text("there is no colour '", colour, "'"), "use 'rank' or 'step'");
            draw::Subject subject{.problem = problem,
                                  .heads_q = heads_q,
                                  .heads_k = heads_k,
                                  .shape = {.dtype = dtype, .dim_qk = dim_qk, .dim_v = dim_v},
                                  .machine = machine,
                                  .title = std::move(title),
                                  .by_step = colour == "step"};
            std::vector<draw::PanelSpec> specs;
            for (const PlacedLayouts* placed : layouts)
              for (const auto& [schedule, options] : schedules)
                specs.push_back(schedule == "auto"
                                    ? chosen(subject, placed->layouts)
                                    : draw::PanelSpec{placed->layouts, schedule_options(schedule, options)});
            const ReleaseGil others_run;
            new (self) draw::Figure(make_figure(subject, specs));
          },
          "problem"_a, "layouts"_a, "schedules"_a, "heads_q"_a, "heads_k"_a, "dtype"_a, "dim_qk"_a, "dim_v"_a,
          "machine"_a, "title"_a = "", "colour"_a = "rank")
      .def(
          "html", [](const draw::Figure& s) { return html(s); }, nb::call_guard<ReleaseGil>(),
          "One file, no network: the whole page.")
      .def("svg", [](const draw::Figure& s) { return svg(s); }, nb::call_guard<ReleaseGil>(), "A static picture.");
}

}  // namespace weft::python
