#include "run/rows.h"

#include <atomic>
#include <cstring>

#include "kernel/cpu/parallel.h"
#include "weft/slice.h"

namespace weft::run {
namespace {

constexpr Index kRowsAtATime = 64;

// each(row, head) on all of them; worth threads where there is much to touch.
template <class Each>
void for_rows(const ConstTensorView& view, const Each& each) {
  std::atomic<Index> next = 0;
  const auto body = [&] {
    for (Index first; (first = next.fetch_add(kRowsAtATime)) < view.rows;) {
      for (Index row = first; row < min_of(first + kRowsAtATime, view.rows); ++row)
        for (Index head = 0; head < view.heads; ++head) each(row, head);
    }
  };
  cpu::on_threads(cpu::worth_threads(view.rows * view.heads, view.dim), body);
}

}  // namespace

void clear(const TensorView& view) {
  const auto bytes = static_cast<std::size_t>(view.dim * size_of(view.dtype));
  for_rows(view, [&](Index row, Index head) {
    std::memset(view.at<char>(0, 0) + view.offset(row, head) * size_of(view.dtype), 0, bytes);
  });
}

void add(const TensorView& to, const ConstTensorView& from) {
  for_rows(to, [&](Index row, Index head) {
    float* a = to.at<float>(row, head);
    const float* b = from.at<float>(row, head);
    for (Index i = 0; i < to.dim; ++i) a[i] += b[i];
  });
}

void round_to(const TensorView& to, const ConstTensorView& from) {
  with_type(to.dtype, [&]<class T>(std::type_identity<T>) {
    for_rows(to, [&](Index row, Index head) {
      T* a = to.at<T>(row, head);
      const float* b = from.at<float>(row, head);
      for (Index i = 0; i < to.dim; ++i) a[i] = static_cast<T>(b[i]);
    });
  });
}

}  // namespace weft::run
