// weft bench: times kernels on the CPU, next to a peer, and their memory; other modes are in files of their own.
#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "bench/memory.h"
#include "bench/modes.h"
#include "bench/peer.h"
#include "bench/rounds.h"
#include "calibrate/calibrate.h"
#include "calibrate/kernel_call.h"
#include "flags/schedule_flags.h"
#include "terminal/columns.h"
#include "terminal/json_file.h"
#include "terminal/words.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/version.h"

namespace weft::tool {
namespace {

using nlohmann::json;

struct Bench {
  std::string kernel;
  int threads = 1;
  Index rounds = 5;
  std::unique_ptr<Peer> peer;
};

// Why none of the kernels that `kernel` stands for can do the task; none if one can.
std::optional<std::string> refusal_of(const std::string& kernel, const BenchTask& task) {
  const KernelRequest request{task.pass, task.problem.dtype, task.problem.dim_qk, task.problem.dim_v, false};
  if (!kernel.empty() && kernel != "cpu") return find_kernel(kernel).refusal(request);
  for (const Kernel& k : kernels()) {
    if (k.name.starts_with(kernel) && !k.refusal(request)) return {};
  }
  return find_kernel(kernel).refusal(request);
}

// Refuses before minutes of work, not in the middle of them.
void check_supported(const std::string& kernel, const std::vector<BenchTask>& tasks) {
  const std::string_view found = find_kernel(kernel).name;
  for (const BenchTask& t : tasks) {
    if (const std::optional<std::string> why = refusal_of(kernel, t))
      throw Error(fmt::format("kernel {} cannot do {} {} {}: {}", found, t.name, weft::name(t.problem.dtype),
                              name(t.pass), *why),
                  "choose others by --cases, --dtype and --pass, or another --kernel");
  }
}

void show_progress(std::string_view doing, const BenchTask& task) {
  static const bool terminal = isatty(fileno(stderr)) == 1;
  if (!terminal) return;
  fmt::print(stderr, "\r\x1b[K{} {} {} {}\r", doing, task.name, weft::name(task.problem.dtype), name(task.pass));
  std::fflush(stderr);
}

void end_progress() {
  if (isatty(fileno(stderr)) == 1) fmt::print(stderr, "\r\x1b[K");
}

const std::vector<Column> kColumns = {{"case", "/case", -10},
                                      {"dtype", "/dtype", -6},
                                      {"pass", "/pass", -9},
                                      {"useful\nGFLOP/s", "/gflops", 9, Column::kRate},
                                      {"", "", 2},
                                      {"peer", "/peer", -28},
                                      {"peer's\nGFLOP/s", "/peer_gflops", 9, Column::kRate},
                                      {"times\npeer", "/ratio", 8, 2},
                                      {"over\ngemm", "/over_gemm", 9, 2},
                                      {"peak\nmemory", "/peak_bytes", 11, Column::kBytes},
                                      {"memory\nover I/O", "/over_io", 11, 2}};

// A line of the table; what stays unknown is null.
json record_of(const BenchTask& task, const std::optional<MemoryProbe>& memory) {
  json record = {{"case", task.name}, {"dtype", weft::name(task.problem.dtype)}, {"pass", name(task.pass)}};
  for (const char* key : {"peer", "peer_gflops", "ratio", "gemm_gflops", "over_gemm", "peak_bytes", "over_io"})
    record[key] = nullptr;
  if (!memory) return record;
  record["peak_bytes"] = memory->peak_bytes;
  record["over_io"] = static_cast<double>(memory->peak_bytes) / static_cast<double>(max_of(memory->tensor_bytes, 1));
  return record;
}

void set_rates(json& record, double gflops, const std::optional<Contender>& gemm) {
  record["gflops"] = gflops;
  if (!gemm) return;
  record["gemm_gflops"] = tool::gflops(*gemm);
  record["over_gemm"] = gflops / tool::gflops(*gemm);
}

void set_peer(json& record, const std::string& name, double gflops, double ratio) {
  record["peer"] = name;
  record["peer_gflops"] = gflops;
  record["ratio"] = ratio;
}

// The same problem in a peer's dtype, for Weft beside itself.
BenchTask in_dtype(BenchTask task, DType dtype) {
  task.problem.dtype = dtype;
  return task;
}

// Everything that runs in one task's rounds; operands stay while samples are taken.
class Rounds {
 public:
  Rounds(const BenchTask& task, Bench& bench)
      : bench_(bench), operands_(task), weft_(weft_contender(task, operands_, bench.kernel, bench.threads)) {
    for (const Rival& rival : task.rivals) add(task, rival);
    if (bench.peer) gemm_ = gemm_contender(*bench.peer, task.problem.dtype, bench.threads);
  }
  Rounds(const Rounds&) = delete;
  ~Rounds() = default;

  std::vector<json> run(json record) {
    std::vector<Contender*> all = {&weft_};
    for (Contender& r : rivals_) all.push_back(&r);
    if (gemm_) all.push_back(&*gemm_);
    run_rounds(all, bench_.rounds);
    set_rates(record, gflops(weft_), gemm_);
    std::vector<json> records;
    for (const Contender& r : rivals_) {
      set_peer(record, r.name, gflops(r), ratio(weft_, r));
      records.push_back(record);
    }
    return rivals_.empty() ? std::vector{record} : records;
  }

 private:
  void add(const BenchTask& task, const Rival& rival) {
    if (rival.kind == Rival::Kind::weft) {
      const BenchTask other = in_dtype(task, rival.dtype);
      other_operands_ = std::make_unique<Operands>(other);
      rivals_.push_back(weft_contender(other, *other_operands_, bench_.kernel, bench_.threads));
    } else if (bench_.peer) {
      if (auto found = peer_contender(*bench_.peer, task, rival, bench_.threads)) rivals_.push_back(*found);
    }
  }

  Bench& bench_;
  Operands operands_;
  std::unique_ptr<Operands> other_operands_;
  Contender weft_;
  std::vector<Contender> rivals_;
  std::optional<Contender> gemm_;
};

// Weft with all threads over Weft with one, and that gain over the gain of a gemm.
std::vector<json> scaling(const BenchTask& task, Bench& bench, json record) {
  Operands operands(task);
  Contender all = weft_contender(task, operands, bench.kernel, bench.threads);
  Contender one = weft_contender(task, operands, bench.kernel, 1);
  std::optional<Contender> gemm_all, gemm_one;
  if (bench.peer) {
    gemm_all = gemm_contender(*bench.peer, task.problem.dtype, bench.threads);
    gemm_one = gemm_contender(*bench.peer, task.problem.dtype, 1);
  }
  const bool gemm = gemm_all && gemm_one;
  run_rounds(gemm ? std::vector{&all, &one, &*gemm_all, &*gemm_one} : std::vector{&all, &one}, bench.rounds);
  set_rates(record, gflops(all), gemm ? gemm_all : std::nullopt);
  set_peer(record, "weft 1 thread", gflops(one), ratio(all, one));
  std::vector<json> records(1, record);
  if (gemm) {
    const double gain = ratio(*gemm_all, *gemm_one);
    set_peer(record, "weft 1 thread x gemm's gain", gflops(one) * gain, ratio(all, one) / gain);
    records.push_back(record);
  }
  return records;
}

// The one run of the memory probe.
json once(const BenchTask& task, Bench& bench, double seconds, json record) {
  std::optional<Contender> gemm;
  if (bench.peer) gemm = gemm_contender(*bench.peer, task.problem.dtype, bench.threads);
  if (gemm) run_rounds({&*gemm}, bench.rounds);
  set_rates(record, useful_flops(task) / seconds * 1e-9, gemm);
  return record;
}

std::vector<json> run_task(const BenchTask& task, Bench& bench, const std::optional<MemoryProbe>& memory) {
  const json record = record_of(task, memory);
  std::vector<json> records;
  if (task.timing == Timing::once)
    records.push_back(once(task, bench, memory->seconds, record));
  else if (task.timing == Timing::scaling)
    records = scaling(task, bench, record);
  else
    records = Rounds(task, bench).run(record);
  if (bench.peer) bench.peer->forget();
  return records;
}

// Scaling needs a second thread; asked for by name that is an error, otherwise it is left out.
void drop_scaling(std::vector<BenchTask>& tasks, bool by_name) {
  const auto is_scaling = [](const BenchTask& t) { return t.timing == Timing::scaling; };
  const auto first = std::find_if(tasks.begin(), tasks.end(), is_scaling);
  if (first == tasks.end()) return;
  if (by_name) throw Error("case scaling with --threads 1", "use 2 threads or more");
  tasks.erase(std::remove_if(first, tasks.end(), is_scaling), tasks.end());
}

void print_heading(const Bench& bench) {
  fmt::print("weft {}, kernel {}, {} thread{}, {} round{}; peer: {}\n\n", version(), find_kernel(bench.kernel).name,
             bench.threads, bench.threads == 1 ? "" : "s", bench.rounds, bench.rounds == 1 ? "" : "s",
             bench.peer ? fmt::format("{} {}", bench.peer->name(), bench.peer->version()) : "none (--peer)");
}

}  // namespace

std::vector<FlagSpec> bench_flags() {
  return with_schedule_options(
      {{"cases", "A,B", "named cases (--list); all of them if no problem is given by the flags below"},
       {"list", "", "say which named cases there are; with --kernel cuda.sm90, those of a GPU"},
       {"pass", "NAME", "both (default), forward or backward"},
       {"kernel", "NAME", "cpu (default: the best of this machine), or any other by name"},
       {"repeat", "N", "interleaved rounds, 5 if not given; the median counts"},
       {"threads", "N", "of Weft and of the peer; as many as the machine has if not given"},
       {"peer", "COMMAND", "a program that times somebody else in the same rounds, e.g. 'python bench/torch_peer.py'"},
       {"deterministic", "", "with a kernel of a GPU: backward with the same bits on every run"},
       {"graph", "", "with a kernel of a GPU: plan on the device, and replay plan and pass as a CUDA graph"},
       {"host", "", "with a kernel of a GPU: host time of a call while the GPU is busy, instead of GPU time"},
       {"keys-per-split", "N", "with a kernel of a GPU: split the keys of long rows into parts of N; -1: never"},
       {"schedule", "LIST",
        "instead: schedules on ranks as threads, with their options below: all, or all_gather,ring,..,auto"},
       {"links", "A,B", "with --schedule: links on which the exchange takes A, B, .. times the compute; 0: memory"},
       {"trace", "FILE",
        "with --schedule: write the ranks' steps of the last round for ui.perfetto.dev or chrome://tracing"},
       {"calibrate", "FILE", "instead: measure kernels and ranks as threads here, for a machine file"},
       {"check-kernels", "", "instead: times of kernel calls beside those that --machine predicts"},
       {"predict", "N", "instead: N random problems by every schedule on slowed links, beside their predictions"},
       {"machine", "NAME", "with --check-kernels, --schedule auto, --layout auto: a machine file, or a preset's name"},
       {"measured", "FILE", "with --calibrate, --check-kernels: times that --json wrote, instead of measuring"}});
}

int bench(const Flags& flags) {
  if (flags.given("calibrate")) return bench_calibrate(flags);
  if (flags.given("check-kernels")) return bench_check_kernels(flags);
  if (flags.given("predict")) return bench_predict(flags);
  if (flags.given("schedule")) return bench_schedules(flags);
  flags.refuse(schedule_option_names({"links", "trace"}), " without --schedule", "add --schedule all");
  if (on_gpu(flags.text("kernel", "cpu"))) return bench_gpu(flags);
  flags.refuse({"deterministic", "graph", "host", "keys-per-split"}, " without a kernel of a GPU",
               "add e.g. --kernel cuda.sm90");
  std::vector<BenchTask> tasks = bench_tasks(flags);
  if (flags.given("list")) return list_bench_cases(), 0;
  Bench bench{.kernel = flags.text("kernel", "cpu"),
              .threads = static_cast<int>(threads_of(flags)),
              .rounds = flags.within("repeat", 5, 1, 10'000),
              .peer = {}};
  if (bench.threads == 1) drop_scaling(tasks, flags.given("cases"));
  check_supported(bench.kernel, tasks);
  JsonOutput output(flags.find("json"));
  if (const std::string* command = flags.find("peer")) bench.peer = std::make_unique<Peer>(*command);

  print_heading(bench);
  std::vector<std::optional<MemoryProbe>> memory(tasks.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    show_progress("memory of", tasks[i]);
    if (tasks[i].timing != Timing::scaling) memory[i] = probe_memory(tasks[i], bench.kernel, bench.threads);
  }
  fmt::print("{}", head_of(kColumns));
  json all = json::array();
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    show_progress("timing", tasks[i]);
    const std::vector<json> records = run_task(tasks[i], bench, memory[i]);
    end_progress();
    for (const json& record : records) {
      fmt::print("{}\n", line_of(kColumns, record));
      all.push_back(record);
    }
    std::fflush(stdout);  // the next line may take a minute
  }
  output.write(all);
  return 0;
}

}  // namespace weft::tool
