#include "kernel_cases.h"

#include <algorithm>
#include <cmath>

#include "bench_clock.h"
#include "check/tensors.h"
#include "device/device.h"
#include "weft/layout.h"
#include "weft/plan.h"

namespace weft::tool {
namespace {

// Figures of other libraries are told on these documents: 65,536 tokens.
const std::vector<Index> kPacked = {1456, 1952, 704,  4320, 2624,  1280, 4560, 1008, 16384,
                                    4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512};

std::vector<Index> short_documents() {
  std::vector<Index> all(64, 512);
  all.insert(all.end(), 16, 1024);
  all.insert(all.end(), 8, 2048);
  return all;
}

KernelCase from_plan(std::string name, Plan plan, Index heads_q, Index heads_k) {
  return {std::move(name), std::move(plan.slices), plan.q_rows, plan.k_rows, heads_q, heads_k};
}

}  // namespace

bool on_gpu(const std::string& kernel) { return kernel.starts_with("cuda"); }

KernelCase documents_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                          bool causal, Index window) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = causal, .left = window > 0 ? window : -1});
  const RunList all = RunList::sequence_order(problem.packing().q().tokens());
  return from_plan(std::move(name), make_plan(problem, all, all), heads_q, heads_k);
}

KernelCase rank_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k, Index rank,
                     Index ranks) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), ranks);
  return from_plan(std::move(name), make_plan(problem, layout.runs(rank), layout.sequence_order()), heads_q, heads_k);
}

// Keys in rank order: many small slices.
KernelCase pieces_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                       LayoutKind kind, Index rank, Index ranks) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(kind, problem, ranks);
  return from_plan(std::move(name), make_plan(problem, layouts.q.runs(rank), layouts.k.rank_order()), heads_q, heads_k);
}

std::vector<KernelCase> learned_cases(bool gpu) {
  const auto docs = [](std::size_t count, Index length) { return std::vector<Index>(count, length); };
  if (gpu)
    return {documents_case("causal 1 x 8192", {8192}, 32, 8, true, 0),
            documents_case("causal 1 x 24576", {24576}, 32, 8, true, 0),
            documents_case("causal 8 x 3072", docs(8, 3072), 32, 8, true, 0),
            documents_case("causal 48 x 640", docs(48, 640), 32, 8, true, 0),
            documents_case("causal 200 x 160", docs(200, 160), 32, 8, true, 0),
            documents_case("full 1 x 8192, heads 16", {8192}, 16, 16, false, 0),
            documents_case("full 12 x 1000, heads 16", docs(12, 1000), 16, 16, false, 0),
            documents_case("window 1024, 1 x 16384", {16384}, 32, 8, true, 1024),
            documents_case("causal 1 x 512", {512}, 32, 8, true, 0),
            rank_case("rank 1 of 4, 12 x 4096", docs(12, 4096), 32, 8, 1, 4),
            pieces_case("zigzag, rank 5 of 8", {9000, 3000, 20000, 768}, 32, 8, LayoutKind::zigzag, 5, 8)};
  return {documents_case("causal 1 x 768", {768}, 4, 2, true, 0),
          documents_case("causal 24 x 32", docs(24, 32), 4, 2, true, 0),
          documents_case("causal 100 x 9", docs(100, 9), 4, 2, true, 0),
          documents_case("causal 8 x 96, heads 4", docs(8, 96), 4, 4, true, 0),
          documents_case("full 1 x 256, heads 4:1", {256}, 4, 1, false, 0),
          documents_case("window 48, 1 x 768", {768}, 4, 2, true, 48),
          documents_case("full 1 x 48, heads 2:1", {48}, 2, 1, false, 0),
          documents_case("full 1 x 8, 1 head", {8}, 1, 1, false, 0),
          rank_case("rank 1 of 4, 4 x 256", docs(4, 256), 4, 2, 1, 4),
          pieces_case("striped, rank 3 of 8", {700, 61, 40, 300, 250, 185}, 4, 2, LayoutKind::striped, 3, 8),
          pieces_case("balanced, rank 2 of 4", {90, 400, 30, 248}, 2, 2, LayoutKind::balanced, 2, 4),
          pieces_case("zigzag, rank 5 of 8", {500, 200, 300, 24}, 4, 4, LayoutKind::zigzag, 5, 8)};
}

std::vector<KernelCase> anchor_cases() {
  return {documents_case("dense: causal 1 x 16384, heads 32:8", {16384}, 32, 8, true, 0),
          documents_case("packed: 18 documents, 65,536 tokens", kPacked, 32, 8, true, 0),
          documents_case("window (4096, 0): 1 x 32768", {32768}, 32, 8, true, 4096),
          documents_case("MHA causal 1 x 16384, heads 16", {16384}, 16, 16, true, 0),
          documents_case("MHA full 1 x 16384, heads 16", {16384}, 16, 16, false, 0),
          rank_case("rank 3 of 8 of packed", kPacked, 32, 8, 3, 8),
          rank_case("rank 3 of 8 of short documents", short_documents(), 32, 8, 3, 8)};
}

struct KernelCall::Parts {
  Parts(const KernelCase& c, DType dtype, Index dim, Pass p, const std::string& k) : given(c), pass(p), kernel(k) {
    if (on_gpu(kernel)) place.kind = DeviceKind::cuda;
    const auto tensor = [&](DType type, Index rows, Index heads, Index width) {
      check::Tensor t(type, rows, heads, width);
      std::uint64_t x = 88172645463325252ULL + static_cast<std::uint64_t>(host.size());
      with_type(type, [&]<class T>(std::type_identity<T>) {
        T* const to = t.view.at<T>(0, 0);
        for (Index i = 0; i < rows * heads * width; ++i) {
          x ^= x << 13, x ^= x >> 7, x ^= x << 17;
          to[i] = static_cast<T>((static_cast<double>(x >> 11) * 0x1p-53 - 0.5) * 3.4);  // variance 1
        }
      });
      if (place.kind == DeviceKind::cpu) {
        host.push_back(std::make_unique<check::Tensor>(std::move(t)));
        return host.back()->view;
      }
      const Index bytes = static_cast<Index>(t.bytes.size());
      TensorView view = t.view;
      view.data = device::take(place, max_of(1, bytes));
      memory.push_back(view.data);
      device::to_device(place, view.data, t.view.data, bytes);
      device::synchronize(place);
      return view;
    };
    q = tensor(dtype, c.q_rows, c.heads_q, dim);
    k_ = tensor(dtype, c.k_rows, c.heads_k, dim);
    v = tensor(dtype, c.k_rows, c.heads_k, dim);
    out = tensor(dtype, c.q_rows, c.heads_q, dim);
    lse = tensor(DType::f32, c.q_rows, c.heads_q, 1);
    run(Pass::forward);
    if (pass == Pass::forward) return;
    dout = tensor(dtype, c.q_rows, c.heads_q, dim);
    dq = tensor(dtype, c.q_rows, c.heads_q, dim);
    dk = tensor(dtype, c.k_rows, c.heads_k, dim);
    dv = tensor(dtype, c.k_rows, c.heads_k, dim);
  }
  ~Parts() {
    for (void* data : memory) device::give_back(data);
  }

  void run(Pass which) {
    if (which == Pass::forward)
      attend({.q = q, .k = k_, .v = v, .slices = given.slices, .out = out, .lse = lse, .place = place}, kernel);
    else
      attend_backward({.q = q,
                       .k = k_,
                       .v = v,
                       .slices = given.slices,
                       .dout = dout,
                       .out = out,
                       .lse = lse,
                       .dq = dq,
                       .dk = dk,
                       .dv = dv,
                       .place = place},
                      kernel);
    if (place.kind != DeviceKind::cpu) device::synchronize(place);
  }

  const KernelCase& given;
  Pass pass;
  std::string kernel;
  Place place;
  std::vector<std::unique_ptr<check::Tensor>> host;
  std::vector<void*> memory;
  TensorView q, k_, v, out, lse, dout, dq, dk, dv;
  int calls = 0;
};

KernelCall::KernelCall(const KernelCase& c, DType dtype, Index dim, Pass pass, const std::string& kernel)
    : parts_(std::make_unique<Parts>(c, dtype, dim, pass, kernel)) {}
KernelCall::~KernelCall() = default;

double KernelCall::seconds() {
  constexpr double kSample = 4e-3;
  constexpr int kMost = 400;
  const auto timed = [&](int calls) {
    const auto now = [&] { return parts_->place.kind == DeviceKind::cpu ? thread_seconds_now() : seconds_now(); };
    const double start = now();
    for (int n = 0; n < calls; ++n) parts_->run(parts_->pass);
    return (now() - start) / calls;
  };
  if (parts_->calls == 0) {
    timed(1);
    parts_->calls =
        static_cast<int>(std::clamp(std::ceil(kSample / std::max(1e-7, timed(1))), 1.0, static_cast<double>(kMost)));
  }
  return timed(parts_->calls);
}

}  // namespace weft::tool
