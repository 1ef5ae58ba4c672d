#include "check/device_mirror.h"

#include <algorithm>
#include <cstring>

#include "index.h"
#include "text.h"

namespace weft::check {
namespace {

// From the first element to past the last one.
Index span_bytes(const ConstTensorView& view) {
  if (view.rows == 0 || view.heads == 0 || view.dim == 0) return 0;
  const Index inner = view.inner == 0 ? view.rows : min_of(view.inner, view.rows);
  const Index last_row =
      (inner - 1) * view.row_stride + (view.inner == 0 ? 0 : (view.rows - 1) / view.inner * view.outer_stride);
  return (last_row + (view.heads - 1) * view.head_stride + view.dim) * size_of(view.dtype);
}

}  // namespace

weft::Place place_of(std::string_view kernel, Index rank) {
  if (!kernel.starts_with("cuda")) return {};
  const auto gpu = rank == 0 ? 0 : static_cast<int>(rank % max_of(1, static_cast<Index>(device::count())));
  return {.kind = DeviceKind::cuda, .device = gpu, .stream = device::thread_stream()};
}

DeviceMirror::DeviceMirror(const weft::Place& place) : place_(place) {
  if (place.kind != DeviceKind::cpu) memory_ = device::make_memory(place);
}

DeviceMirror::~DeviceMirror() {
  for (const Block& b : blocks_) memory_->deallocate(b.device, b.room);
}

void* DeviceMirror::put(const void* host, Index bytes, bool written) {
  constexpr std::size_t kApart = 256, kRoom = std::size_t{1} << 18;
  const auto size = at(bytes);
  const std::size_t whole = (size / kApart + 2) * kApart;  // with guard bytes behind the tensor
  if (blocks_.empty() || blocks_.back().room - blocks_.back().before.size() < whole) {
    const std::size_t room = std::max(whole, kRoom);
    blocks_.push_back({.device = static_cast<char*>(memory_->allocate(room)), .room = room});
  }
  Block& b = blocks_.back();
  const std::size_t offset = b.before.size();
  b.before.resize(offset + whole, '\xff');
  if (size > 0) std::memcpy(b.before.data() + offset, host, size);
  b.copies.push_back({offset, const_cast<void*>(host), bytes, written});  // written back only if it is an output
  return b.device + offset;
}

ConstTensorView DeviceMirror::in(ConstTensorView view) {
  if (memory_ != nullptr && view.given()) view.data = put(view.data, span_bytes(view), false);
  return view;
}

TensorView DeviceMirror::out(TensorView view) {
  if (memory_ != nullptr && view.given()) view.data = put(view.data, span_bytes(view), true);
  return view;
}

Attention DeviceMirror::in(Attention attention) {
  attention.sink.logits = in(attention.sink.logits);
  return attention;
}

PartialView DeviceMirror::out(const PartialView& host) {
  if (memory_ == nullptr || !host.given()) return host;
  const Index bytes = host.sums.rows * host.sums.heads * static_cast<Index>(sizeof(RowState<float>));
  return {out(host.sums), static_cast<RowState<float>*>(put(host.states, bytes, true))};
}

void DeviceMirror::send() {
  for (Block& b : blocks_) {
    if (b.sent == b.before.size()) continue;
    device::to_device(place_, b.device + b.sent, b.before.data() + b.sent,
                      static_cast<Index>(b.before.size() - b.sent));
    b.sent = b.before.size();
  }
}

void DeviceMirror::fetch() {
  std::vector<std::vector<char>> now;
  std::vector<device::HostCopy> all;
  for (const Block& b : blocks_) {
    now.emplace_back(b.before.size());
    all.push_back({now.back().data(), b.device, static_cast<Index>(b.before.size())});
  }
  if (!all.empty()) device::to_host(place_, all);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    compare(blocks_[i], now[i]);
    for (const Copy& c : blocks_[i].copies)
      if (c.written && c.bytes > 0) std::memcpy(c.host, now[i].data() + c.offset, at(c.bytes));
  }
}

void DeviceMirror::compare(const Block& block, const std::vector<char>& now) {
  std::vector<char> allowed = block.before;
  for (const Copy& c : block.copies)
    if (c.written && c.bytes > 0) std::memcpy(allowed.data() + c.offset, now.data() + c.offset, at(c.bytes));
  const auto wrong = std::mismatch(now.begin(), now.end(), allowed.begin()).first;
  if (wrong == now.end()) return;
  const auto byte = at(wrong - now.begin());
  std::size_t n = 0;
  while (n + 1 < block.copies.size() && block.copies[n + 1].offset <= byte) ++n;
  throw Error(text("byte ", byte - block.copies[n].offset, " of tensor ", n, ", which has ", block.copies[n].bytes,
                   " and is ", block.copies[n].written ? "an output" : "an input", ", was changed"),
              "look for a kernel that writes where it should not");
}

}  // namespace weft::check
