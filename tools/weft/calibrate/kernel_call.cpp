#include "calibrate/kernel_call.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "bench/clock.h"
#include "check/tensors.h"
#include "device/device.h"
#include "weft/device_plan.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

// Bytes between the inputs of one call: never a whole number of rows, so that no input equals another.
constexpr Index kApart = (Index{3} << 20) + 4112;

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
  for (void* data : buffers_) device::give_back(data);
}

void* Noise::at(const Place& place, DType dtype, Index bytes, Index n) {
  const Index needed = bytes + 4 * kApart;
  if (needed > bytes_ || dtype != dtype_ || buffers_.empty()) {
    constexpr Index kPiece = (Index{1} << 24) - 3;  // elements; odd, so that repeats do not fall on the same columns
    const Index all = max_of(needed, bytes_), piece = min_of(kPiece * size_of(dtype), all);
    check::Tensor host(dtype, piece / size_of(dtype), 1, 1);
    fill(host.view, 1);
    buffers_.push_back(device::take(place, all));
    char* const to = static_cast<char*>(buffers_.back());
    for (Index begin = 0; begin < all; begin += piece)
      device::to_device(place, to + begin, host.bytes.data(),
                        min_of(min_of(piece, all - begin), static_cast<Index>(host.bytes.size())));
    device::synchronize(place);
    dtype_ = dtype;
    bytes_ = all;
  }
  return static_cast<char*>(buffers_.back()) + n * kApart;
}

namespace {

// A case's plan on the device, from cu_seqlens that lie there.
class PlanOnDevice {
 public:
  PlanOnDevice(const CaseSpec& spec, const Place& place) : context_(place) {
    if (spec.schedule || spec.rank_order)
      throw Error("a CUDA graph of a case of several calls", "leave out --graph, or choose others by --cases");
    std::vector<std::int32_t> offsets{0};
    for (const Index length : spec.lengths) offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
    const Index bytes = static_cast<Index>(offsets.size() * sizeof(offsets[0]));
    offsets_ = device::take(place, bytes);
    device::to_device(place, offsets_, offsets.data(), bytes);
    args_ = {{offsets_, nullptr, OffsetType::i32, static_cast<Index>(spec.lengths.size()), offsets.back()},
             {},
             mask_of(spec),
             DeviceLayout{spec.layout, spec.ranks}.runs(spec.rank),
             DeviceLayout::sequence_order()};
    plan_.emplace(context_, device_plan_capacity(args_));
  }
  ~PlanOnDevice() { device::give_back(offsets_); }
  PlanOnDevice(const PlanOnDevice&) = delete;
  PlanOnDevice& operator=(const PlanOnDevice&) = delete;

  DevicePlan* planned() {
    plan_->plan(args_);
    return &*plan_;
  }
  void check() { context_.check(); }

 private:
  DeviceContext context_;
  void* offsets_ = nullptr;
  DevicePlanArgs args_;
  std::optional<DevicePlan> plan_;
};

}  // namespace

struct KernelCall::Data {
  Data(const KernelCase& c, const CallOptions& o, Noise& noise) : given(c), options(o) {
    if (on_gpu(o.kernel)) place.kind = DeviceKind::cuda;
    if (o.graph) place.stream = device::thread_stream();  // the default stream cannot be captured
    // Inputs hold numbers; outputs are written before they are read.
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
    q = tensor(o.dtype, c.q_rows, c.heads_q, o.dim, true);
    k = tensor(o.dtype, c.k_rows, c.heads_k, o.dim, true);
    v = k;
    v.dim = o.dim_v;
    if (!o.v_is_k) v = tensor(o.dtype, c.k_rows, c.heads_k, o.dim_v, true);
    out = tensor(o.dtype, c.q_rows, c.heads_q, o.dim_v, false);
    lse = tensor(DType::f32, c.q_rows, c.heads_q, 1, false);
    run(Pass::forward);
    wait();
    if (o.pass == Pass::backward) {
      dout = tensor(o.dtype, c.q_rows, c.heads_q, o.dim_v, true);
      dq = tensor(o.dtype, c.q_rows, c.heads_q, o.dim, false);
      const DType gradients = c.steps ? DType::f32 : o.dtype;  // gradients of several steps are summed in f32
      dk = tensor(gradients, c.k_rows, c.heads_k, o.dim, false);
      dv = tensor(gradients, c.k_rows, c.heads_k, o.dim_v, false);
    }
    if (!o.graph) return;
    plan.emplace(c.spec, place);
    replay = device::captured(place, [&] { run(o.pass, plan->planned()); });
  }
  ~Data() {
    replay = {};
    for (void* data : memory) device::give_back(data);
  }

  void run(Pass pass, DevicePlan* on_device = nullptr) {
    const std::vector<Slice> none;
    const std::vector<Slice>& slices = on_device != nullptr ? none : given.slices;
    const Attention attention{.softcap = options.softcap};
    if (pass == Pass::forward) {
      const ForwardArgs args{.q = q,
                             .k = k,
                             .v = v,
                             .slices = slices,
                             .device_plan = on_device,
                             .attention = attention,
                             .out = out,
                             .lse = lse,
                             .keys_per_split = options.keys_per_split,
                             .place = place};
      return given.steps ? given.steps->forward(args, options.kernel) : attend(args, options.kernel);
    }
    const BackwardArgs args{.q = q,
                            .k = k,
                            .v = v,
                            .slices = slices,
                            .device_plan = on_device,
                            .attention = attention,
                            .dout = dout,
                            .out = out,
                            .lse = lse,
                            .dq = dq,
                            .dk = dk,
                            .dv = dv,
                            .place = place,
                            .deterministic = options.deterministic};
    given.steps ? given.steps->backward(args, options.kernel) : attend_backward(args, options.kernel);
  }
  void call() { replay ? replay() : run(options.pass); }
  void wait() {
    if (place.kind != DeviceKind::cpu) device::synchronize(place);
    if (plan) plan->check();
  }
  // Seconds of each of so many calls, which are waited for one by one or all together.
  double timed(int calls, bool each) {
    const auto now = [&] { return place.kind == DeviceKind::cpu ? thread_seconds_now() : seconds_now(); };
    const double start = now();
    for (int n = 0; n < calls; ++n) {
      call();
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
  CallOptions options;
  Place place;
  std::vector<std::unique_ptr<check::Tensor>> host;
  std::vector<void*> memory;
  TensorView q, k, v, out, lse, dout, dq, dk, dv;
  std::optional<PlanOnDevice> plan;  // with CallOptions::graph
  std::function<void()> replay;
  double once = 0;
};

KernelCall::KernelCall(const KernelCase& c, const CallOptions& options, Noise& noise)
    : data_(std::make_unique<Data>(c, options, noise)) {}
KernelCall::~KernelCall() = default;

double KernelCall::call() { return data_->timed(1, true); }

double KernelCall::seconds() { return data_->timed(data_->calls_of(4e-3), true); }

double KernelCall::gpu_seconds() {
  std::vector<double> times;
  for (int n = data_->calls_of(10e-3); n > 0; --n)  // the peer's samples last as long
    times.push_back(device::seconds_of(data_->place, [&] { data_->call(); }));
  return median(std::move(times));
}

double KernelCall::sustained_seconds() {
  if (data_->place.kind == DeviceKind::cpu) return seconds();
  const int calls = data_->calls_of(20e-3);
  data_->timed((calls + 1) / 2, false);
  return data_->timed(calls, false);
}

double KernelCall::host_seconds() {
  constexpr int kWarmUps = 2, kCalls = 40;
  std::vector<double> times;
  for (int n = -kWarmUps; n < kCalls; ++n) {
    const double start = seconds_now();
    data_->call();
    if (n >= 0) times.push_back(seconds_now() - start);
  }
  data_->wait();
  return median(std::move(times));
}

}  // namespace weft::tool
