#include "calibrate/kernel_call.h"

#include <algorithm>
#include <cmath>

#include "bench/clock.h"
#include "check/tensors.h"
#include "device/device.h"
#include "index.h"

namespace weft::tool {
namespace {

constexpr Index kApart = (Index{3} << 20) + 4112;  // bytes between inputs: never whole rows, so that none is another

void fill(const TensorView& to, std::uint32_t seed) {
  with_type(to.dtype, [&]<class T>(std::type_identity<T>) {
    T* const x = to.at<T>(0, 0);
    for (Index i = 0; i < to.rows * to.heads * to.dim; ++i) {
      seed = seed * 1664525U + 1013904223U;
      x[i] = static_cast<T>(static_cast<float>(static_cast<std::int32_t>(seed)) * (0x1p-31F * 1.7F));  // variance 1
    }
  });
}

}  // namespace

bool on_gpu(const std::string& kernel) { return kernel.starts_with("cuda"); }

Noise::~Noise() {
  for (void* data : made_) device::give_back(data);
}

void* Noise::at(const Place& place, DType dtype, Index bytes, Index n) {
  const Index needed = bytes + 4 * kApart;
  if (needed > bytes_ || dtype != dtype_ || made_.empty()) {
    constexpr Index kPiece = (Index{1} << 24) - 3;  // elements; odd, so that repeats do not fall on the same columns
    const Index all = max_of(needed, bytes_), piece = min_of(kPiece * size_of(dtype), all);
    check::Tensor host(dtype, piece / size_of(dtype), 1, 1);
    fill(host.view, 1);
    made_.push_back(device::take(place, all));
    char* const to = static_cast<char*>(made_.back());
    for (Index begin = 0; begin < all; begin += piece)
      device::to_device(place, to + begin, host.bytes.data(),
                        min_of(min_of(piece, all - begin), static_cast<Index>(host.bytes.size())));
    device::synchronize(place);
    dtype_ = dtype;
    bytes_ = all;
  }
  return static_cast<char*>(made_.back()) + n * kApart;
}

struct KernelCall::Parts {
  Parts(const KernelCase& c, DType dtype, Index dim, Pass p, const std::string& k, Noise& noise)
      : given(c), pass(p), kernel(k) {
    if (on_gpu(kernel)) place.kind = DeviceKind::cuda;
    // Inputs have numbers; outputs are written before they are read.
    Index inputs = 0;
    const auto tensor = [&](DType type, Index rows, Index heads, Index width, bool input) {
      if (place.kind == DeviceKind::cpu) {
        host.push_back(std::make_unique<check::Tensor>(type, rows, heads, width));
        if (input) fill(host.back()->view, static_cast<std::uint32_t>(host.size()));
        return host.back()->view;
      }
      const Index bytes = max_of(1, rows * heads * width * size_of(type));
      void* data = nullptr;
      if (input)
        data = noise.at(place, type, bytes, inputs++);
      else
        memory.push_back(data = device::take(place, bytes));
      return thd(data, type, rows, heads, width);
    };
    q = tensor(dtype, c.q_rows, c.heads_q, dim, true);
    k_ = tensor(dtype, c.k_rows, c.heads_k, dim, true);
    v = tensor(dtype, c.k_rows, c.heads_k, dim, true);
    out = tensor(dtype, c.q_rows, c.heads_q, dim, false);
    lse = tensor(DType::f32, c.q_rows, c.heads_q, 1, false);
    run(Pass::forward);
    wait();
    if (pass == Pass::forward) return;
    dout = tensor(dtype, c.q_rows, c.heads_q, dim, true);
    dq = tensor(dtype, c.q_rows, c.heads_q, dim, false);
    const DType gradients = c.steps ? DType::f32 : dtype;
    dk = tensor(gradients, c.k_rows, c.heads_k, dim, false);
    dv = tensor(gradients, c.k_rows, c.heads_k, dim, false);
  }
  ~Parts() {
    for (void* data : memory) device::give_back(data);
  }

  void run(Pass which) {
    const ForwardArgs forward{.q = q, .k = k_, .v = v, .slices = given.slices, .out = out, .lse = lse, .place = place};
    const BackwardArgs backward{.q = q,
                                .k = k_,
                                .v = v,
                                .slices = given.slices,
                                .dout = dout,
                                .out = out,
                                .lse = lse,
                                .dq = dq,
                                .dk = dk,
                                .dv = dv,
                                .place = place};
    if (which == Pass::forward)
      given.steps ? given.steps->forward(forward, kernel) : attend(forward, kernel);
    else
      given.steps ? given.steps->backward(backward, kernel) : attend_backward(backward, kernel);
  }
  void wait() {
    if (place.kind != DeviceKind::cpu) device::synchronize(place);
  }
  // Seconds of each of so many calls, waited for one by one or all together.
  double timed(int calls, bool each) {
    const auto now = [&] { return place.kind == DeviceKind::cpu ? thread_seconds_now() : seconds_now(); };
    const double start = now();
    for (int n = 0; n < calls; ++n) {
      run(pass);
      if (each || n + 1 == calls) wait();
    }
    return (now() - start) / calls;
  }
  // As many calls as fill a sample.
  int calls_of(double sample) {
    constexpr double kMost = 400;
    if (once == 0) {
      timed(1, true);
      once = std::max(1e-7, timed(1, true));
    }
    return static_cast<int>(std::clamp(std::ceil(sample / once), 1.0, kMost));
  }

  const KernelCase& given;
  Pass pass;
  std::string kernel;
  Place place;
  std::vector<std::unique_ptr<check::Tensor>> host;
  std::vector<void*> memory;
  TensorView q, k_, v, out, lse, dout, dq, dk, dv;
  double once = 0;
};

KernelCall::KernelCall(const KernelCase& c, DType dtype, Index dim, Pass pass, const std::string& kernel, Noise& noise)
    : parts_(std::make_unique<Parts>(c, dtype, dim, pass, kernel, noise)) {}
KernelCall::~KernelCall() = default;

double KernelCall::seconds() { return parts_->timed(parts_->calls_of(4e-3), true); }

double KernelCall::gpu_seconds() {
  std::vector<double> times(at(parts_->calls_of(10e-3)));  // as long as the peer's
  for (double& t : times) t = device::seconds_of(parts_->place, [&] { parts_->run(parts_->pass); });
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

double KernelCall::sustained_seconds() {
  if (parts_->place.kind == DeviceKind::cpu) return seconds();
  const int calls = parts_->calls_of(20e-3);
  parts_->timed((calls + 1) / 2, false);
  return parts_->timed(calls, false);
}

}  // namespace weft::tool
