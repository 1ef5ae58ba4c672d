#include "check/twins.h"

namespace weft::check {
namespace {

// From the first element to behind the last one.
Index span_bytes(const ConstTensorView& view) {
  if (view.rows == 0 || view.heads == 0 || view.dim == 0) return 0;
  const Index inner = view.inner == 0 ? view.rows : min_of(view.inner, view.rows);
  const Index last_row =
      (inner - 1) * view.row_stride + (view.inner == 0 ? 0 : (view.rows - 1) / view.inner * view.outer_stride);
  return (last_row + (view.heads - 1) * view.head_stride + view.dim) * size_of(view.dtype);
}

}  // namespace

weft::Place place_of(std::string_view kernel) {
  if (!kernel.starts_with("cuda")) return {};
  return {.kind = DeviceKind::cuda, .device = 0, .stream = device::thread_stream()};
}

Twins::Twins(const weft::Place& place) : place_(place) {
  if (place.kind != DeviceKind::cpu) memory_ = device::make_memory(place);
}

Twins::~Twins() {
  for (const Copy& c : copies_) memory_->deallocate(c.twin, static_cast<std::size_t>(c.bytes));
}

void* Twins::put(const void* host, Index bytes, bool written) {
  void* twin = memory_->allocate(static_cast<std::size_t>(bytes));
  copies_.push_back({twin, const_cast<void*>(host), bytes, written});  // written back only if it could be
  device::to_device(place_, twin, host, bytes);
  return twin;
}

ConstTensorView Twins::in(const ConstTensorView& host) {
  if (memory_ == nullptr || !host.given()) return host;
  ConstTensorView twin = host;
  twin.data = put(host.data, span_bytes(host), false);
  return twin;
}

TensorView Twins::out(const TensorView& host) {
  if (memory_ == nullptr || !host.given()) return host;
  TensorView twin = host;
  twin.data = put(host.data, span_bytes(host), true);
  return twin;
}

Attention Twins::in(const Attention& host) {
  Attention twin = host;
  twin.sink.logits = in(host.sink.logits);
  return twin;
}

PartialView Twins::out(const PartialView& host) {
  if (memory_ == nullptr || !host.given()) return host;
  const Index bytes = host.sums.rows * host.sums.heads * static_cast<Index>(sizeof(RowState<float>));
  return {out(host.sums), static_cast<RowState<float>*>(put(host.states, bytes, true))};
}

void Twins::fetch() {
  if (memory_ == nullptr) return;
  std::vector<device::HostCopy> copies;
  for (const Copy& c : copies_)
    if (c.written) copies.push_back({c.host, c.twin, c.bytes});
  device::to_host(place_, copies);
}

}  // namespace weft::check
