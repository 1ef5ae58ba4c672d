#include "calibrate/calibrate.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include "bench/case.h"
#include "bench/clock.h"
#include "calibrate/kernel_call.h"
#include "calibrate/kernel_fit.h"
#include "calibrate/reference.h"
#include "check/tensors.h"
#include "flags/machine_flag.h"
#include "index.h"
#include "run/rows.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "weft/communicator.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft::tool {
namespace {

CallOptions call_options(const CalibrateOptions& options, Pass pass, DType dtype, Index dim) {
  return {.kernel = options.kernel, .pass = pass, .dtype = dtype, .dim = dim, .dim_v = dim};
}

// Seconds of a call in each case, by a GPU: medians of interleaved rounds.
std::vector<double> times_on_gpu(const std::vector<KernelCase>& cases, const CallOptions& call, Index rounds,
                                 Noise& noise) {
  std::vector<std::unique_ptr<KernelCall>> calls;
  for (const KernelCase& c : cases) calls.push_back(std::make_unique<KernelCall>(c, call, noise));
  std::vector<std::vector<double>> seconds(cases.size());
  for (Index round = 0; round < rounds; ++round)
    for (std::size_t n = 0; n < calls.size(); ++n) seconds[n].push_back(calls[n]->sustained_seconds());
  std::vector<double> medians;
  for (const std::vector<double>& each : seconds) medians.push_back(median(each));
  return medians;
}

// The same on the CPU, one call on each core at once, as ranks compute: they share caches, memory and power. The cases
// are called in turn, so that each finds its tensors where a layer of a model does, outside of the inner caches. In
// references of the same round, which are not the same seconds in all rounds: clocks change.
std::vector<double> references_on_cores(const std::vector<KernelCase>& cases, const CallOptions& call, Index rounds,
                                        std::vector<double>& references) {
  const Index cores = std::max(1U, std::thread::hardware_concurrency());
  std::mutex mutex;
  std::vector<std::vector<double>> ratios(cases.size());
  run_ranks(cores, [&](Communicator& comm) {
    stay_on_core(comm.rank(), cores);
    Noise none;
    std::vector<std::unique_ptr<KernelCall>> calls;
    for (const KernelCase& c : cases) calls.push_back(std::make_unique<KernelCall>(c, call, none));
    for (Index round = -1; round < rounds; ++round) {
      float token = 0;  // all begin together
      comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
      const double reference = reference_seconds();
      std::vector<double> seconds;
      for (const auto& each : calls) seconds.push_back(each->call());
      if (round < 0) continue;
      const std::lock_guard lock(mutex);
      references.push_back(reference);
      for (std::size_t n = 0; n < calls.size(); ++n) ratios[n].push_back(seconds[n] / reference);
    }
  });
  std::vector<double> medians;
  for (const std::vector<double>& each : ratios) medians.push_back(median(each));
  return medians;
}

constexpr Index kCallsARound = 8;  // of each case on each core

// One kernel: a pass, a dtype and a width, with the times of its cases.
struct MeasuredKernel {
  Pass pass;
  DType dtype;
  Index dim;
  std::vector<double> times = {};  // seconds, or references until all kernels have been measured
};

// Measured, or read from a file.
std::vector<double> times_of(const MeasuredKernel& kernel, const std::vector<KernelCase>& cases,
                             const CalibrateOptions& options, Noise& noise, std::vector<double>& references) {
  const CallOptions call = call_options(options, kernel.pass, kernel.dtype, kernel.dim);
  if (!options.measured.read_from_file())
    return on_gpu(options.kernel) ? times_on_gpu(cases, call, options.rounds, noise)
                                  : references_on_cores(cases, call, kCallsARound * options.rounds, references);
  std::vector<double> seconds;
  for (const KernelCase& c : cases)
    seconds.push_back(options.measured.seconds(c.name, kernel.dtype, kernel.dim, kernel.pass));
  return seconds;
}

KernelRate rate_of(const MeasuredKernel& kernel, const std::vector<KernelCase>& cases,
                   const CalibrateOptions& options) {
  const bool gpu = on_gpu(options.kernel);
  KernelRate rate = fitted_rate(tilings_of(kernel.pass, kernel.dtype, kernel.dim, gpu), cases, kernel.times);
  rate.source = fmt::format("weft bench --calibrate, kernel {}{}", options.kernel,
                            gpu ? ", calls one after another" : ", one call a core");
  if (!options.show) return rate;
  fmt::print("{} {} {}: {:.1f} GFLOP/s, tiles of {} rows {:.3g} us each, {:.3g} us a row and head, ", name(kernel.pass),
             weft::name(kernel.dtype), kernel.dim, rate.flops * 1e-9, rate.tile_q, rate.tile_seconds * 1e6,
             rate.row_seconds * 1e6);
  if (rate.copy_rows > 0) fmt::print("{:.3g} us a copied key and K/V head, ", rate.key_seconds * 1e6);
  fmt::print("{:.3g} us a call\n", rate.call_seconds * 1e6);
  for (std::size_t n = 0; n < cases.size(); ++n)
    fmt::print("  {:<34}{:>10.1f} us, fitted {:+.0f} %\n", cases[n].name, kernel.times[n] * 1e6,
               100 * (predicted_seconds(cases[n], rate) / kernel.times[n] - 1));
  std::fflush(stdout);
  return rate;
}

// All kernels, by the same reference; what that takes.
double measure_kernels(const CalibrateOptions& options, Calibration& into) {
  const std::vector<KernelCase> cases = learned_cases(on_gpu(options.kernel));
  std::vector<MeasuredKernel> kernels;
  std::vector<double> references;
  for (const DType type : options.dtypes)
    for (const Index dim : options.dims)
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        kernels.push_back({pass, type, dim});
        kernels.back().times = times_of(kernels.back(), cases, options, *into.noise, references);
      }
  const double usual = references.empty() ? 1 : median(references);
  for (MeasuredKernel& kernel : kernels) {
    for (std::size_t n = 0; n < cases.size(); ++n) {
      kernel.times[n] *= usual;
      if (!options.measured.read_from_file())
        into.times.add(cases[n].name, kernel.dtype, kernel.dim, kernel.pass, kernel.times[n]);
    }
    into.machine.kernels.push_back(rate_of(kernel, cases, options));
  }
  return usual;
}

// Takes the inner caches, as a kernel between two exchanges does.
class OtherWork {
 public:
  void run_for(double seconds) {
    constexpr std::size_t kPiece = 4096;
    for (const double end = thread_seconds_now() + seconds; thread_seconds_now() < end; at_ = (at_ + kPiece) % kBytes)
      for (std::size_t n = 0; n < kPiece; n += 64) ++memory_[at_ + n];
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{3} << 20;
  std::vector<char> memory_ = std::vector<char>(kBytes);
  std::size_t at_ = 0;
};

constexpr Index kExchangedRow = 512;  // bytes

// Ranks send rows to the next or to all, and work between the start of a call and its end, as an executor does.
// Seconds from one call to the next.
double exchange_seconds(Index ranks, Index rows, bool to_all, double computing, const ThreadRanks& world = {}) {
  constexpr int kTimes = 5, kCalls = 20;
  constexpr Index kTensors = 4;
  const Index bytes = rows * kExchangedRow;
  double found = 0;
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        stay_on_core(comm.rank(), comm.ranks());
        // Several tensors in turn: between two exchanges of a layer its kernels drive what moved from the inner caches.
        std::vector<char> memory(at(kTensors * bytes * (1 + comm.ranks())));
        const auto block = [&](Index n) {  // of each tensor, what a rank has and then what it gets from each
          return Block{.data = memory.data() + n * bytes,
                       .rows = rows,
                       .bytes = kExchangedRow,
                       .row_stride = kExchangedRow,
                       .part_stride = kExchangedRow};
        };
        OtherWork work;
        std::vector<Block> mine;
        std::vector<std::vector<Block>> theirs(at(kTensors));
        for (Index t = 0; t < kTensors; ++t) {
          mine.push_back(block(t * (1 + comm.ranks())));
          for (Index r = 0; r < comm.ranks(); ++r) theirs[at(t)].push_back(block(t * (1 + comm.ranks()) + 1 + r));
        }
        const Index next = (comm.rank() + 1) % comm.ranks(), before = (comm.rank() + comm.ranks() - 1) % comm.ranks();
        std::vector<double> times;
        for (int n = 0; n < kTimes; ++n) {
          const double start = seconds_now();
          for (int call = 0; call < kCalls; ++call) {
            const std::size_t t = at(call % kTensors);
            Request request =
                to_all ? comm.all_gather(mine[t], theirs[t]) : comm.send_receive(next, mine[t], before, theirs[t][0]);
            work.run_for(computing);
            request.wait();
          }
          times.push_back((seconds_now() - start) / kCalls);
        }
        if (comm.rank() == 0) found = median(times);
      },
      world);
  return found;
}

// As many ranks as problems have that are measured beside their predictions: what a call takes grows with the threads
// that wait for the same lock, so 64 ranks on 16 cores say nothing of eight that have a core each.
constexpr Index kMostRanks = 8;

// What exchanges take, in one look at them. Processor time of a call and of a message shows where many ranks share a
// core.
struct Exchange {
  double call = 0, message = 0, byte = 0, latency = 0;
};
Exchange measured_exchange() {
  constexpr Index kFew = 2, kRows = 256;
  constexpr double kComputing = 200e-6, kLink = 500e-6;
  const Index cores = std::max(1U, std::thread::hardware_concurrency()), many = std::min(4 * cores, kMostRanks);
  const Index few = std::min(cores, many), each = ranks_a_core(many);
  const auto beside_computing = [&](Index ranks, Index rows, bool to_all) {
    return exchange_seconds(ranks, rows, to_all, kComputing) - static_cast<double>(ranks_a_core(ranks)) * kComputing;
  };
  const double small = beside_computing(few, kFew, false);
  const double shared = each > 1 ? beside_computing(many, kFew, false) : small;
  const double gathered = beside_computing(many, kFew, true), large = beside_computing(many, kRows, true);
  Exchange found;
  // A core copies what its ranks get of all.
  found.byte = std::max(1e-6, large - gathered) / static_cast<double>((kRows - kFew) * kExchangedRow * many * each);
  found.call = each > 1 ? std::clamp((shared - small) / static_cast<double>(each - 1), 0.0, 1e-3) : 0;
  found.message = std::clamp((gathered - shared) / static_cast<double>(each * (many - 2)), 0.0, 1e-3);
  // Ranks that sleep until bytes arrive: on a fast link they are there before anybody has gone to sleep.
  const double slept = exchange_seconds(few, kFew, false, kComputing, {.latency = kLink}) - kLink;
  found.latency = std::max(0.0, std::max(small, slept) - found.call);
  return found;
}

// The median of some looks, each over the reference of its moment, because single ones differ too much.
void measure_exchange(Machine& m, double usual_reference) {
  constexpr int kLooks = 9;
  std::vector<double> calls, messages, bytes, latencies;
  for (int n = 0; n < kLooks; ++n) {
    const double scale = usual_reference / reference_seconds();
    const Exchange look = measured_exchange();
    calls.push_back(look.call * scale);
    messages.push_back(look.message * scale);
    bytes.push_back(look.byte * scale);
    latencies.push_back(look.latency * scale);
  }
  m.exchange_seconds = median(calls);
  m.copy_seconds = median(messages);
  m.copy_bandwidth = 1 / median(bytes);
  m.levels[0].latency = median(latencies);
  m.levels[0].message_seconds = 0;
}

// How long a thread has a core that another one wants as well: two of them look at the clock all the time.
void measure_timeslice(Machine& m) {
  constexpr double kSeconds = 0.1, kPause = 100e-6;
  std::mutex mutex;
  std::vector<double> pauses;
  run_ranks(2, [&](Communicator& comm) {
    stay_on_core(0, 1);
    float token = 0;  // both begin together
    comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
    std::vector<double> mine;
    double last = seconds_now();
    for (const double end = last + kSeconds; last < end;) {
      const double now = seconds_now();
      if (now - last > kPause) mine.push_back(now - last);
      last = now;
    }
    const std::lock_guard lock(mutex);
    pauses.insert(pauses.end(), mine.begin(), mine.end());
  });
  m.timeslice = pauses.empty() ? 0 : median(pauses);
}

void measure_rows(Machine& m, double usual_reference) {
  const double scale = usual_reference / reference_seconds();
  const auto pass = [scale](Index rows) {
    check::Tensor a(DType::f32, rows, 1, 256), b(DType::f32, rows, 1, 256);
    run::clear({}, a.view);
    run::clear({}, b.view);
    std::vector<double> times;
    for (int n = 0; n < 9; ++n) {
      const double start = seconds_now();
      run::add({}, a.view, b.view);
      times.push_back(seconds_now() - start);
    }
    return median(times) * scale;
  };
  constexpr Index kRows = 8192;
  m.row_seconds = pass(1);
  m.row_bandwidth = 3.0 * static_cast<double>(kRows * 256 * 4) / std::max(1e-7, pass(kRows) - m.row_seconds);
}

void show_exchange(const Machine& m) {
  fmt::print(
      "threads: {:.3g} us until a message comes, {:.3g} us of the processor a call and {:.3g} us a message, copies "
      "{:.3g} GB/s; passes over rows {:.3g} GB/s, {:.3g} us each; timeslices {:.3g} us\n",
      m.levels[0].latency * 1e6, m.exchange_seconds * 1e6, m.copy_seconds * 1e6, m.copy_bandwidth * 1e-9,
      m.row_bandwidth * 1e-9, m.row_seconds * 1e6, m.timeslice * 1e6);
}

std::vector<DType> dtypes_of(const Flags& flags) {
  std::vector<DType> all;
  const std::string given = flags.text("dtype", "f32,bf16");
  for (const std::string_view part : split(given, ',')) all.push_back(dtype(part));
  return all;
}

CalibrateOptions options_of(const Flags& flags) {
  CalibrateOptions options{.dtypes = dtypes_of(flags),
                           .dims = {64, 128},
                           .kernel = flags.text("kernel", "cpu"),
                           .rounds = flags.within("repeat", 5, 1, 1000),
                           .show = true};
  if (flags.given("dim")) options.dims = whole_numbers("--dim", *flags.find("dim"), "64,128");
  for (const Index dim : options.dims)
    if (dim < 1 || dim > 1024) throw Error(fmt::format("--dim {}", dim), "use from 1 to 1024");
  if (on_gpu(options.kernel) && !flags.given("dtype")) options.dtypes = {DType::bf16};
  if (const std::string* path = flags.find("measured")) options.measured = KernelTimes::read(*path);
  return options;
}

}  // namespace

Index ranks_a_core(Index ranks) { return ceil_div(ranks, std::max<Index>(1, std::thread::hardware_concurrency())); }

void stay_on_core(Index rank, Index ranks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(at(rank / ranks_a_core(ranks)), &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // if it may not, it runs anywhere
  prctl(PR_SET_TIMERSLACK, 1UL);
}

Machine slowed(const Machine& machine, double times) {
  Machine m = machine;
  for (KernelRate& k : m.kernels) {
    k.flops /= times;
    for (double* seconds : {&k.tile_seconds, &k.row_seconds, &k.key_seconds, &k.call_seconds}) *seconds *= times;
  }
  for (double* seconds : {&m.row_seconds, &m.copy_seconds, &m.exchange_seconds}) *seconds *= times;
  for (double* bandwidth : {&m.row_bandwidth, &m.copy_bandwidth}) *bandwidth /= times;
  return m;
}

Calibration calibrate(const CalibrateOptions& options) {
  const bool gpu = on_gpu(options.kernel);
  Calibration c;
  c.noise = std::make_shared<Noise>();
  c.machine = machine_preset(gpu ? "h200-shared" : "cpu");
  c.machine.name = "here";
  c.machine.about = gpu ? "this GPU, shared by ranks that are threads" : "this machine, ranks that are threads";
  c.machine.kernels.clear();
  set_cpu_threads(1);
  const double usual_reference = measure_kernels(options, c);
  if (!gpu && !options.measured.read_from_file()) {
    c.machine.processor_kernels = static_cast<double>(std::max(1U, std::thread::hardware_concurrency()));
    measure_exchange(c.machine, usual_reference);
    measure_timeslice(c.machine);
    measure_rows(c.machine, usual_reference);
    c.machine.source = c.machine.levels[0].source = "weft bench --calibrate";
    if (options.show) show_exchange(c.machine);
  }
  set_cpu_threads(0);
  return c;
}

int bench_calibrate(const Flags& flags) {
  const std::string path = flags.text("calibrate", "");
  if (path.empty()) throw Error("--calibrate without a file", "write --calibrate machine.json");
  const CalibrateOptions options = options_of(flags);
  const FileOutput file("--calibrate", &path);
  JsonOutput output(flags.find("json"));
  const Calibration c = calibrate(options);
  file.write(to_json(c.machine));
  if (!c.times.empty()) output.write(c.times.json());
  fmt::print("written to {}\n", path);
  return 0;
}

int bench_check_kernels(const Flags& flags) {
  const CalibrateOptions options = options_of(flags);
  const bool gpu = on_gpu(options.kernel);
  const Machine machine = machine_of(flags, gpu ? "h200-shared" : "cpu");
  JsonOutput output(flags.find("json"));
  Noise noise;
  KernelTimes times;
  std::vector<double> errors;
  set_cpu_threads(1);
  fmt::print("{:<44}{:<6}{:>5} {:<9}{:>12}{:>12}{:>9}\n", "case", "dtype", "dim", "pass", "measured us", "predicted",
             "error");
  const auto check = [&](const KernelCase& c, DType type, Index dim, Pass pass) {
    double seconds = 0;
    if (!options.measured.read_from_file()) {
      KernelCall call(c, call_options(options, pass, type, dim), noise);
      std::vector<double> rounds;
      for (Index n = 0; n < options.rounds; ++n) rounds.push_back(call.sustained_seconds());
      seconds = median(rounds);
      times.add(c.name, type, dim, pass, seconds);
    } else {
      seconds = options.measured.seconds(c.name, type, dim, pass);
    }
    const double predicted =
        predicted_seconds(c, kernel_rate(machine, pass, {.dtype = type, .dim_qk = dim, .dim_v = dim}));
    errors.push_back(std::abs(predicted / seconds - 1));
    fmt::print("{:<44}{:<6}{:>5} {:<9}{:>12.1f}{:>12.1f}{:>+8.0f}%\n", c.name, weft::name(type), dim, name(pass),
               seconds * 1e6, predicted * 1e6, 100 * (predicted / seconds - 1));
    std::fflush(stdout);
  };
  for (const KernelCase& c : gpu ? anchor_cases() : learned_cases(false))
    for (const DType type : options.dtypes)
      for (const Index dim : options.dims)
        for (const Pass pass : {Pass::forward, Pass::backward})
          if (c.dim == 0 || c.dim == dim) check(c, type, dim, pass);
  set_cpu_threads(0);
  if (!times.empty()) output.write(times.json());
  if (errors.empty()) throw Error("no case has a width of --dim", "use --dim 64,128");
  fmt::print("median error {:.0f} %, worst {:.0f} %\n", 100 * median(errors),
             100 * *std::max_element(errors.begin(), errors.end()));
  return 0;
}

}  // namespace weft::tool
