#include "weft/trace.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <tuple>
#include <vector>

#include "cost/machine/json.h"
#include "index.h"
#include "text.h"
#include "weft/executor.h"
#include "weft/simulate.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  std::string name;
  double begin = 0, end = 0;  // seconds
  std::string args;           // members of a JSON object
};

// A rank of one run or simulation.
struct Process {
  std::string name;
  std::size_t run = 0;  // by name, in the order of their first events
  Index rank = 0;
  std::vector<Event> compute = {}, communication = {};
  // Of a run: when its latest pass began, and the end of that pass's last event so far.
  double pass_begin = 0, last = 0;
};

// Whole nanoseconds, so that what nests and what follows in seconds does so in the file.
long long nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// The format counts in microseconds.
std::string microseconds(long long ns) {
  std::string fraction = std::to_string(ns % 1000);
  return text(ns / 1000, ".", std::string(3 - fraction.size(), '0'), fraction);
}

std::string name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

std::string step_name(std::string_view name, Index step) {
  return step < 0 ? std::string(name) : text(name, ", step ", step);
}

class Writer {
 public:
  void process(const Process& p, std::size_t number) {
    pid_ = number;
    about("process_name", 0, text("\"name\":", cost::quoted(p.name)));
    about("process_sort_index", 0, text("\"sort_index\":", number));
    track("compute", 1, p.compute);
    // Exchanges that overlap would not nest, so each goes to the first track where all before it have ended.
    std::vector<std::vector<Event>> tracks(1);
    std::vector<Event> sorted = p.communication;
    std::sort(sorted.begin(), sorted.end(),
              [](const Event& a, const Event& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
    for (Event& e : sorted) {
      const auto free = std::find_if(tracks.begin(), tracks.end(), [&](const std::vector<Event>& t) {
        return t.empty() || nanoseconds(t.back().end) <= nanoseconds(e.begin);
      });
      (free == tracks.end() ? tracks.emplace_back() : *free).push_back(std::move(e));
    }
    for (std::size_t i = 0; i < tracks.size(); ++i)
      track(i == 0 ? "communication" : text("communication ", i + 1), i + 2, tracks[i]);
  }

  std::string json() const { return text("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n", out_, "\n]}\n"); }

 private:
  void line(const std::string& members, std::size_t tid) {
    out_ += text(out_.empty() ? "" : ",\n", "{\"pid\":", pid_, ",\"tid\":", tid, ",", members, "}");
  }
  void about(std::string_view what, std::size_t tid, const std::string& args) {
    line(text("\"ph\":\"M\",\"name\":\"", what, "\",\"args\":{", args, "}"), tid);
  }
  void track(const std::string& name, std::size_t tid, const std::vector<Event>& events) {
    about("thread_name", tid, text("\"name\":\"", name, "\""));
    about("thread_sort_index", tid, text("\"sort_index\":", tid));
    for (const Event& e : events)
      line(text("\"ph\":\"X\",\"name\":", cost::quoted(e.name), ",\"ts\":", microseconds(nanoseconds(e.begin)),
                ",\"dur\":", microseconds(nanoseconds(e.end) - nanoseconds(e.begin)), ",\"args\":{", e.args, "}"),
           tid);
  }

  std::size_t pid_ = 0;
  std::string out_;
};

}  // namespace

struct Trace::Data {
  mutable std::mutex mutex;
  Clock::time_point start = Clock::now();
  std::vector<std::string> runs;
  std::vector<Process> processes;

  Process& process(Index rank, std::string_view name) {
    const std::string said = text(name, name.empty() ? "" : ": ", "rank ", rank);
    const auto found =
        std::find_if(processes.begin(), processes.end(), [&](const Process& p) { return p.name == said; });
    if (found != processes.end()) return *found;
    const auto run = std::find(runs.begin(), runs.end(), name);
    processes.push_back({.name = said, .run = static_cast<std::size_t>(run - runs.begin()), .rank = rank});
    if (run == runs.end()) runs.emplace_back(name);
    return processes.back();
  }
};

Trace::Trace() : data_(std::make_unique<Data>()) {}
Trace::~Trace() = default;

void Trace::add(const Timeline& timeline, std::string_view name, double begin) {
  const std::lock_guard lock(data_->mutex);
  for (const RankTimeline& line : timeline.detail) {
    Process& p = data_->process(line.rank, name);
    double last = 0;
    for (const TimelineEvent& e : line.events) last = std::max(last, e.end);
    p.compute.push_back({name_of(timeline.pass), begin, begin + last, ""});
    for (const TimelineEvent& e : line.events) {
      const bool exchange = e.kind == TimelineEvent::Kind::exchange, wait = e.kind == TimelineEvent::Kind::wait;
      std::string args = text("\"kind\":\"", weft::name(e.kind), "\"");
      if (e.kind == TimelineEvent::Kind::compute) args += text(",\"pairs\":", e.pairs);
      if (exchange) args += text(",\"bytes_in\":", e.bytes_in, ",\"bytes_out\":", e.bytes_out);
      (exchange ? p.communication : p.compute)
          .push_back({step_name(wait ? text("wait for ", e.name) : std::string(e.name), e.step), begin + e.begin,
                      begin + e.end, std::move(args)});
    }
  }
}

std::function<void(const StepEvent&)> Trace::observer(Index rank, std::string_view name) {
  return [data = data_.get(), rank, name = std::string(name)](const StepEvent& e) {
    const double now = std::chrono::duration<double>(Clock::now() - data->start).count();
    const bool compute = e.kind == StepEvent::Kind::compute;
    const char* what = compute ? "attend" : e.kind == StepEvent::Kind::wait ? "wait for keys" : "wait for gradients";
    const std::lock_guard lock(data->mutex);
    Process& p = data->process(rank, name);
    // An event is told when it ends. Those of a pass come in order, and keep the distances that the executor measured.
    if (p.last == 0 || e.begin < p.last) p.pass_begin = now - e.end;
    p.last = e.end;
    (compute ? p.compute : p.communication)
        .push_back({step_name(text(name_of(e.pass), " ", what), e.step), p.pass_begin + e.begin, p.pass_begin + e.end,
                    text("\"slices\":", e.slices, ",\"steps\":", e.steps)});
  };
}

std::string Trace::json() const {
  const std::lock_guard lock(data_->mutex);
  std::vector<Process> sorted = data_->processes;
  std::sort(sorted.begin(), sorted.end(),
            [](const Process& a, const Process& b) { return a.run != b.run ? a.run < b.run : a.rank < b.rank; });
  Writer writer;
  for (std::size_t i = 0; i < sorted.size(); ++i) writer.process(sorted[i], i + 1);
  return writer.json();
}

}  // namespace weft
