#include "run/rows.h"

#include <cstring>

#include "device/device.h"
#include "index.h"
#include "kernel/convert.h"
#include "kernel/each_row.h"
#include "rows/round.h"

namespace weft::run {
namespace {

template <class T>
void add_rows(const TensorView& to, const ConstTensorView& from) {
  each_row(to, [&](Index row) {
    for (Index head = 0; head < to.heads; ++head) {
      T* a = to.at<T>(row, head);
      const T* b = from.at<T>(row, head);
      for (Index i = 0; i < to.dim; ++i) a[i] += b[i];
    }
  });
}

}  // namespace

void clear(const Place& place, const TensorView& view) {
  if (view.dim == 0) return;  // there is no V where a source moves
  if (place.kind != DeviceKind::cpu) return device::clear(place, view);
  const auto bytes = at(view.dim * size_of(view.dtype));
  each_row(view, [&](Index row) {
    for (Index head = 0; head < view.heads; ++head)
      std::memset(view.at<char>(0, 0) + view.offset(row, head) * size_of(view.dtype), 0, bytes);
  });
}

void add(const Place& place, const TensorView& to, const ConstTensorView& from) {
  if (to.dim == 0) return;
  if (place.kind != DeviceKind::cpu) return device::add(place, to, from);
  if (to.dtype == DType::f64)
    add_rows<double>(to, from);
  else
    add_rows<float>(to, from);
}

void round_to(const Place& place, const TensorView& to, const ConstTensorView& from) {
  if (place.kind != DeviceKind::cpu) return round_on_device(place, {from, to});
  each_row(to, [&](Index row) {
    for (Index head = 0; head < to.heads; ++head) {
      if (from.dtype == DType::f64)
        store_row(to, row, head, from.at<double>(row, head));
      else
        store_f32(to, row, head, from.at<float>(row, head), 1);
    }
  });
}

void round_to(const Place& place, const Kv& to, const ConstKv& from) {
  const bool k = to.k.data != from.k.data, v = to.v.data != from.v.data;
  if (k && v && place.kind != DeviceKind::cpu) {
    const Rounding values{from.v, to.v};
    return round_on_device(place, {from.k, to.k}, &values);
  }
  if (k) round_to(place, to.k, from.k);
  if (v) round_to(place, to.v, from.v);
}

}  // namespace weft::run
