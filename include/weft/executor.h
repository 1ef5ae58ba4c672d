// The executor runs a schedule, forward and backward: the only place where plans, kernels and communicators meet.
#pragma once

#include <functional>
#include <memory>
#include <memory_resource>
#include <string>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/config.h"
#include "weft/device.h"
#include "weft/kernel.h"
#include "weft/schedule.h"

namespace weft {

// One thing that happened on this rank.
struct StepEvent {
  enum class Kind {
    wait,
    compute,
    give_back
  };  // waited for keys; attended slices; waited for gradients to be returned
  Kind kind = Kind::compute;
  Pass pass = Pass::forward;
  Index step = 0, steps = 0;
  Index slices = 0;
  double begin = 0, end = 0;  // seconds since the pass began
};

struct ExecutorOptions {
  std::string kernel = {};  // as for attend
  // Gradients have the same bits on every run. The CPU kernels and all sums over ranks have a fixed order always, at no
  // cost; kernels that have not ask for this.
  bool deterministic = false;
  // Ranks compare fingerprints of the problem, the options and each call's arguments, and messages carry checksums: an
  // Error names the ranks that differ. Makes the constructor collective.
  bool checked = false;
  std::function<void(const StepEvent&)> observer = {};
  std::pmr::memory_resource* memory = nullptr;  // for workspaces; new and delete, or the GPU's pool, if not given
  // Where the tensors of all calls lie. On a GPU the constructor is collective, a call returns when its work is in its
  // place's stream, and there is no checked mode.
  Place place = {};
};

// Belongs to one thread at a time: a call that begins while another is in it is an Error. All ranks make the same calls
// in the same order. Workspaces are kept for the next call and given back at the end.
class WEFT_API Executor {
 public:
  Executor(Communicator& communicator, Schedule schedule, ExecutorOptions options = {});
  ~Executor();
  Executor(Executor&&) noexcept;
  Executor& operator=(Executor&&) = delete;

  // The rank's own rows of every tensor; `slices` and `partial` must be left out: they are the schedule's business.
  // max_logit is over all ranks.
  void forward(const ForwardArgs& args);
  // out and lse of the forward must be given. dsink is over all ranks.
  void backward(const BackwardArgs& args);

  const Schedule& schedule() const;
  Index workspace_bytes() const;  // held now

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft
