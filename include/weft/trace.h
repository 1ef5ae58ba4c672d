// Traces of what ranks did, or would do, for ui.perfetto.dev and chrome://tracing (the Chrome trace event format).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "weft/config.h"

namespace weft {

struct StepEvent;
struct Timeline;

// Every rank is a process with a track "compute" and, for what it waits for or exchanges, a track "communication";
// exchanges that overlap get further tracks.
class WEFT_API Trace {
 public:
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // The events of the ranks in `timeline.detail`, from `begin` seconds on. `name` stands before the number of the rank,
  // so that several simulations can be compared in one trace.
  void add(const Timeline& timeline, std::string_view name = {}, double begin = 0);

  // For ExecutorOptions::observer of a rank of this process: records its steps by the clock, 0 being when the trace was
  // made. Ranks may be threads that run at once. The trace must outlive the executors. On a GPU the times are those of
  // the host's calls.
  std::function<void(const StepEvent&)> observer(Index rank, std::string_view name = {});

  // JSON, to be written into a file.
  std::string json() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace weft
