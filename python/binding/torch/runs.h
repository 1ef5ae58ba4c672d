// Plans and executors that torch's operators use again, and the settings they are called with.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention.h"
#include "gil.h"

namespace weft::python::torch {

// What a plan or an executor is made for.
struct RunKey {
  Index problem = 0;  // number of the settings, of which one layer's number makes no difference
  Index heads_q = 0, heads_k = 0;
  DType dtype = DType::f32;
  Index dim_qk = 0, dim_v = 0;
  int device = -1;           // number of the GPU
  std::string_view packing;  // the bytes of its tensor

  bool operator==(const RunKey&) const = default;
};

// A plan or an executor. May be released without the GIL.
struct Run {
  Run(const RunKey& key, nb::object object, nb::object core);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run() {
    const AcquireGil locked;
    object.reset();
    core.reset();
  }

  std::string packing;  // what key.packing points at
  RunKey key;
  nb::object object, core;  // Python's, and the OneRank or Executor; None for those made anew in every call
  OneRank* one = nullptr;   // one of the two, or none
  HeldExecutor* executor = nullptr;
};

// Runs of one group, the most recently used first. All methods may be called by any thread, with or without the GIL.
class RunCache {
 public:
  std::shared_ptr<Run> find(const RunKey& key);
  void put(std::shared_ptr<Run> run, std::size_t most);
  void drop(nb::handle object);
  void clear();
  std::vector<std::shared_ptr<Run>> all();

 private:
  std::mutex guard_;
  std::list<std::shared_ptr<Run>> runs_;
};

// What operators are called with beside tensors. Known to them by `number`, as long as Python holds it.
struct CallSettings {
  std::shared_ptr<RunCache> runs;
  Index problem = 0;  // RunKey::problem
  Format format = Format::thd;
  Settings settings;  // without the sink
  bool max_logit = false;
  Index layer = kNoLayer;
  Index number = 0;
};

// By number; null if Python has let it go.
std::shared_ptr<const CallSettings> settings_numbered(Index number);

}  // namespace weft::python::torch
