#include "torch/runs.h"

#include <unordered_map>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "convert.h"
#include "module.h"

namespace weft::python::torch {
namespace {

using namespace nb::literals;

struct Numbered {
  std::mutex guard;
  std::unordered_map<Index, std::weak_ptr<const CallSettings>> all;
  Index next = 1;
};
Numbered& numbered() {
  static auto* const all = new Numbered;  // never destroyed: settings may be let go while the process ends
  return *all;
}

RunKey key_of(Index problem, const std::pair<Index, Index>& heads, DType dtype, const std::pair<Index, Index>& dims,
              std::optional<int> device, const nb::bytes& packing) {
  return {problem,    heads.first, heads.second,        dtype,
          dims.first, dims.second, device.value_or(-1), {packing.c_str(), packing.size()}};
}

}  // namespace

Run::Run(const RunKey& k, nb::object o, nb::object c)
    : packing(k.packing), key(k), object(std::move(o)), core(std::move(c)) {
  key.packing = packing;
  if (nb::isinstance<OneRank>(core)) one = nb::cast<OneRank*>(core);
  if (nb::isinstance<HeldExecutor>(core)) executor = nb::cast<HeldExecutor*>(core);
}

std::shared_ptr<Run> RunCache::find(const RunKey& key) {
  const std::lock_guard lock(guard_);
  for (auto at = runs_.begin(); at != runs_.end(); ++at) {
    if (!((*at)->key == key)) continue;
    runs_.splice(runs_.begin(), runs_, at);
    return runs_.front();
  }
  return nullptr;
}

void RunCache::put(std::shared_ptr<Run> run, std::size_t most) {
  std::list<std::shared_ptr<Run>> gone;  // ends after the lock is free
  const std::lock_guard lock(guard_);
  for (auto at = runs_.begin(); at != runs_.end();) {
    const auto here = at++;
    if ((*here)->key == run->key) gone.splice(gone.end(), runs_, here);
  }
  runs_.push_front(std::move(run));
  while (runs_.size() > most) gone.splice(gone.end(), runs_, std::prev(runs_.end()));
}

void RunCache::drop(nb::handle object) {
  std::list<std::shared_ptr<Run>> gone;
  const std::lock_guard lock(guard_);
  for (auto at = runs_.begin(); at != runs_.end();) {
    const auto here = at++;
    if ((*here)->object.is(object)) gone.splice(gone.end(), runs_, here);
  }
}

void RunCache::clear() {
  std::list<std::shared_ptr<Run>> gone;
  const std::lock_guard lock(guard_);
  gone.swap(runs_);
}

std::vector<std::shared_ptr<Run>> RunCache::all() {
  const std::lock_guard lock(guard_);
  return {runs_.begin(), runs_.end()};
}

std::shared_ptr<const CallSettings> settings_numbered(Index number) {
  Numbered& n = numbered();
  const std::lock_guard lock(n.guard);
  const auto found = n.all.find(number);
  return found == n.all.end() ? nullptr : found->second.lock();
}

namespace {

std::shared_ptr<CallSettings> make_settings(std::shared_ptr<RunCache> runs, std::optional<Index> problem, Format format,
                                            std::optional<double> scale, double softcap, bool off_by_one,
                                            nb::object head_map, bool max_logit, Index layer) {
  Numbered& n = numbered();
  std::shared_ptr<CallSettings> made(new CallSettings, [](CallSettings* old) {
    Numbered& known = numbered();
    {
      const std::lock_guard lock(known.guard);
      known.all.erase(old->number);
    }
    delete old;
  });
  made->runs = std::move(runs);
  made->format = format;
  made->settings = {scale, softcap, std::nullopt, off_by_one,
                    optional_indices(head_map, "head_map").value_or(std::vector<Index>{})};
  made->max_logit = max_logit;
  made->layer = layer;
  const std::lock_guard lock(n.guard);
  made->number = n.next++;
  made->problem = problem.value_or(made->number);
  n.all[made->number] = made;
  return made;
}

}  // namespace

void bind_runs(nb::module_& m) {
  nb::class_<RunCache>(m, "TorchRuns", "Plans or executors of one group, for torch's operators to use again.")
      .def("__init__", [](RunCache* self) { new (self) RunCache; })
      .def(
          "get",
          [](RunCache& runs, Index problem, std::pair<Index, Index> heads, DType dtype, std::pair<Index, Index> dims,
             std::optional<int> device, const nb::bytes& packing) -> nb::object {
            const auto run = runs.find(key_of(problem, heads, dtype, dims, device, packing));
            return run ? run->object : nb::none();
          },
          "problem"_a, "heads"_a, "dtype"_a, "dims"_a, "device"_a.none(), "packing"_a, "What was put, or None.")
      .def(
          "put",
          [](RunCache& runs, Index problem, std::pair<Index, Index> heads, DType dtype, std::pair<Index, Index> dims,
             std::optional<int> device, const nb::bytes& packing, nb::object object, nb::object core, Index most) {
            runs.put(std::make_shared<Run>(key_of(problem, heads, dtype, dims, device, packing), std::move(object),
                                           std::move(core)),
                     static_cast<std::size_t>(max_of(most, 1)));
          },
          "problem"_a, "heads"_a, "dtype"_a, "dims"_a, "device"_a.none(), "packing"_a, "run"_a, "core"_a.none(),
          "most"_a, "Keeps a run and what computes it, and at most so many in all.")
      .def(
          "drop", [](RunCache& runs, nb::handle run) { runs.drop(run); }, "run"_a)
      .def("clear", &RunCache::clear)
      .def("values", [](RunCache& runs) {
        nb::list out;
        for (const auto& run : runs.all()) out.append(run->object);
        return out;
      });
  nb::class_<CallSettings>(m, "TorchSettings", "What torch's operators are called with beside tensors.")
      .def(nb::new_(&make_settings), "runs"_a, "problem"_a.none(), "format"_a, "scale"_a.none(), "softcap"_a,
           "off_by_one"_a, "head_map"_a.none(), "max_logit"_a, "layer"_a)
      .def_ro("runs", &CallSettings::runs)
      .def_ro("problem", &CallSettings::problem)
      .def_ro("number", &CallSettings::number);
}

}  // namespace weft::python::torch
