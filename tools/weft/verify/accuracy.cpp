#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "calibrate/kernel_call.h"
#include "check/judge.h"
#include "device/device.h"
#include "terminal/json_file.h"
#include "verify/hard_cases.h"
#include "verify/modes.h"
#include "weft/kernel.h"

namespace weft::tool {
namespace {

constexpr Index kHeads = HardCase::kHeads, kHeadsK = HardCase::kHeadsK, kDim = HardCase::kDim;

// A tensor on the host and, for a kernel of a GPU, its copy there.
class MirroredTensor {
 public:
  MirroredTensor(const Place& place, DType type, Index rows, Index heads, Index dim)
      : host_(type, rows, heads, dim), view_(host_.view), place_(place) {
    if (place_.kind != DeviceKind::cpu) view_.data = device::take(place_, bytes());
  }
  ~MirroredTensor() {
    if (place_.kind != DeviceKind::cpu) device::give_back(view_.data);
  }
  MirroredTensor(const MirroredTensor&) = delete;
  MirroredTensor& operator=(const MirroredTensor&) = delete;

  void set(const std::vector<double>& values) {
    from_f64(values, host_.view);
    if (place_.kind == DeviceKind::cpu) return;
    device::to_device(place_, view_.data, host_.view.data, bytes());
    device::synchronize(place_);
  }
  std::vector<double> values() {
    if (place_.kind != DeviceKind::cpu) {
      const device::HostCopy copy{.to = host_.view.data, .from = view_.data, .bytes = bytes()};
      device::to_host(place_, {&copy, 1});
    }
    return to_f64(host_.view);
  }
  const TensorView& view() const { return view_; }

 private:
  Index bytes() const { return static_cast<Index>(host_.bytes.size()); }

  check::Tensor host_;
  TensorView view_;
  Place place_;
};

// A kernel's results on a case, and the inputs as rounded for it.
struct Run {
  Run(const HardCase& c, DType type, const std::string& kernel)
      : place{.kind = on_gpu(kernel) ? DeviceKind::cuda : DeviceKind::cpu},
        exact(kernel == "reference"),
        q(place, type, c.queries, kHeads, kDim),
        k(place, type, c.keys, kHeadsK, kDim),
        v(place, type, c.keys, kHeadsK, kDim),
        dout(place, type, c.queries, kHeads, kDim),
        out(place, type, c.queries, kHeads, kDim),
        lse(place, exact ? DType::f64 : DType::f32, c.queries, kHeads, 1),
        dq(place, type, c.queries, kHeads, kDim),
        dk(place, type, c.keys, kHeadsK, kDim),
        dv(place, type, c.keys, kHeadsK, kDim) {
    q.set(c.q);
    k.set(c.k);
    v.set(c.v);
    dout.set(c.dout);
    const std::vector<Slice> slices = c.slices();
    const Attention attention{.scale = c.scale};
    attend({.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .slices = slices,
            .attention = attention,
            .out = out.view(),
            .lse = lse.view(),
            .place = place},
           kernel);
    BackwardArgs args{.q = q.view(),
                      .k = k.view(),
                      .v = v.view(),
                      .slices = slices,
                      .attention = attention,
                      .dout = dout.view(),
                      .dq = dq.view(),
                      .dk = dk.view(),
                      .dv = dv.view(),
                      .place = place};
    if (!exact) {  // the reference computes them anew, in f64
      args.out = out.view();
      args.lse = lse.view();
    }
    attend_backward(args, kernel);
  }

  Place place;
  bool exact;
  MirroredTensor q, k, v, dout, out, lse, dq, dk, dv;
};

check::DenseProblem dense_of(const HardCase& c, Run& run) {
  check::DenseProblem p{.tokens_q = c.queries, .tokens_k = c.keys, .heads_q = kHeads, .heads_k = kHeadsK};
  p.dim_qk = p.dim_v = kDim;
  p.q = run.q.values();
  p.k = run.k.values();
  p.v = run.v.values();
  p.sees = [](Index, Index) { return true; };
  p.scale = c.scale;
  return p;
}

struct Row {
  std::string input, kernel, tensor;
  DType dtype;
  double of_bound = 0;   // error over bound, of the worst element
  double roundings = 0;  // the largest error over one rounding of the tensor's largest element
  double norm = 0;       // relative
  bool cancels = false;  // no element exceeds its bound: the answer is 0 up to rounding, the two above mean nothing
  bool plain = false;    // the norm has a limit too
  Index terms = 1;       // of the longest sum

  bool ok() const { return of_bound <= 1 && (!plain || norm <= check::norm_limit(dtype, tensor, terms)); }
};

// One rounding to what the tensor is written in.
double rounding_of(const Row& row, bool exact, double largest) {
  if (row.tensor == "lse") return check::rounding(exact ? DType::f64 : DType::f32).of(largest);
  return check::rounding(row.dtype).of(largest);
}

void measure(Row row, bool exact, const std::vector<double>& got, const check::Bounded& want, Index heads, Index dim,
             std::vector<Row>& to) {
  const check::Comparison c = check::worst_element(got, want, heads, dim);
  double largest = 0, error = 0, bound = 0;
  for (std::size_t i = 0; i < want.value.size(); ++i) {
    largest = std::max(largest, std::abs(want.value[i]));
    error = std::max(error, std::abs(got[i] - want.value[i]));
    bound = std::max(bound, want.bound[i]);
  }
  row.of_bound = c.ratio;
  row.cancels = largest < bound;
  row.roundings = error == 0 ? 0 : error / rounding_of(row, exact, largest);
  row.norm = c.relative_norm;
  to.push_back(row);
}

void run_case(const HardCase& c, DType type, const std::string& kernel, std::vector<Row>& to) {
  Run run(c, type, kernel);
  check::Arithmetic by = run.exact ? check::exact_arithmetic(type) : check::kernel_arithmetic(type, type);
  by.gradients = check::rounding(type);
  const check::Expected want = check::expected(dense_of(c, run), run.dout.values(), by);
  const Row row{.input = c.name,
                .kernel = kernel,
                .tensor = "",
                .dtype = type,
                .plain = c.plain,
                .terms = std::max(c.keys, c.queries * kHeads)};
  const auto add = [&](const char* tensor, MirroredTensor& got, const check::Bounded& expected) {
    Row one = row;
    one.tensor = tensor;
    measure(one, run.exact, got.values(), expected, got.view().heads, got.view().dim, to);
  };
  add("out", run.out, want.out);
  add("lse", run.lse, want.lse);
  add("dq", run.dq, want.dq);
  add("dk", run.dk, want.dk);
  add("dv", run.dv, want.dv);
}

bool can(const Kernel& kernel, DType type) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const KernelRequest request{.pass = pass,
                                .dtype = type,
                                .dim_qk = kDim,
                                .dim_v = kDim,
                                .device = on_gpu(std::string(kernel.name)) ? DeviceKind::cuda : DeviceKind::cpu};
    if (kernel.refusal(request)) return false;
  }
  return true;
}

// The kernel that was named; or the reference, the best CPU kernel and all kernels of the GPU.
std::vector<std::string> kernels_of(const Flags& flags) {
  if (flags.given("kernel")) return {std::string(find_kernel(*flags.find("kernel")).name)};
  std::vector<std::string> names = {"reference", std::string(find_kernel("cpu").name)};
  for (const Kernel& kernel : kernels())
    if (on_gpu(std::string(kernel.name))) names.emplace_back(kernel.name);
  return names;
}

std::string number(double x) { return x < 1e4 ? fmt::format("{:.3g}", x) : fmt::format("{:.0e}", x); }

void print(const std::vector<Row>& rows) {
  fmt::print("{:<14}{:<6}{:<26}", "kernel", "dtype", "input");
  for (const char* tensor : {"out", "lse", "dq", "dk", "dv"}) fmt::print("{:>25} ", tensor);
  fmt::print("\n");
  for (std::size_t i = 0; i < rows.size(); i += 5) {
    fmt::print("{:<14}{:<6}{:<26}", rows[i].kernel, name(rows[i].dtype), rows[i].input);
    for (std::size_t j = i; j < i + 5; ++j)
      fmt::print("{:>9} {:>8} {:>6}{:>1}", number(rows[j].of_bound), rows[j].cancels ? "-" : number(rows[j].roundings),
                 rows[j].cancels ? "-" : fmt::format("{:.0e}", rows[j].norm), rows[j].ok() ? "" : "!");
    fmt::print("\n");
  }
}

nlohmann::json to_json(const std::vector<Row>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rows)
    list.push_back({{"kernel", row.kernel},
                    {"dtype", std::string(name(row.dtype))},
                    {"input", row.input},
                    {"tensor", row.tensor},
                    {"of_bound", row.of_bound},
                    {"roundings", row.roundings},
                    {"norm", row.norm},
                    {"cancels", row.cancels},
                    {"ok", row.ok()}});
  return {{"accuracy", list}};
}

}  // namespace

int verify_accuracy(const Flags& flags) {
  std::vector<std::string> others = problem_flags({"format", "head-map", "random", "matrix", "set", "pairwise",
                                                   "time-limit", "threads", "schedule", "comm", "checked", "seed"});
  std::erase(others, "dtype");
  flags.exclude("accuracy", others, "it brings its own inputs; only --kernel and --dtype can be chosen");
  const bool quick = flags.one_of("accuracy", {"quick", "full"}) == "quick";
  std::vector<DType> dtypes(std::begin(kDTypes), std::end(kDTypes));
  if (flags.given("dtype")) dtypes = {dtype(*flags.find("dtype"))};
  JsonOutput output(flags.find("json"));
  const std::vector<HardCase> cases = hard_cases(quick);
  std::vector<Row> rows;
  for (const std::string& kernel : kernels_of(flags))
    for (const DType type : dtypes)
      if (can(find_kernel(kernel), type))
        for (const HardCase& c : cases) run_case(c, type, kernel, rows);
  fmt::print(
      "Each tensor: the worst element's error in what its bound allows, the largest error in roundings of the\n"
      "tensor's largest element, and the relative norm of the error (both -: no element is larger than\n"
      "its bound, the answer is 0 but for roundings). Over a limit: !\n\n");
  print(rows);
  output.write(to_json(rows));
  const auto failed = std::count_if(rows.begin(), rows.end(), [](const Row& row) { return !row.ok(); });
  fmt::print("\n{} tensors, {} over a limit\n", rows.size(), failed);
  if (failed > 0) return kFailed;
  if (!rows.empty()) return 0;
  fmt::print(stderr,
             "weft: no kernel here does this dtype, so nothing was checked; choose others by --kernel and --dtype\n");
  return kNothingRan;
}

}  // namespace weft::tool
