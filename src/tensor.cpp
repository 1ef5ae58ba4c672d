#include "weft/tensor.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "sizes.h"
#include "text.h"
#include "weft/slice.h"

namespace weft {

namespace {

std::string size_text(Index size) { return size == TensorSpec::kAny ? "any" : text(size); }

std::string shape_text(Index rows, Index heads, Index dim) {
  return text("[", size_text(rows), ", ", size_text(heads), ", ", size_text(dim), "]");
}

std::string strides_text(const ConstTensorView& view) {
  std::string result = text("row ", view.row_stride, ", head ", view.head_stride);
  if (view.inner != 0) result += text(", outer ", view.outer_stride, " every ", view.inner, " rows");
  return result;
}

bool fits(Index size, Index wanted) { return wanted == TensorSpec::kAny || size == wanted; }

void check_shape(const ConstTensorView& view, const TensorSpec& spec) {
  // Words are put together for errors alone: they cost more than a small call.
  const auto shape = [&] { return shape_text(view.rows, view.heads, view.dim); };
  if (view.rows < 0 || view.heads < 1 || view.dim < 1) {
    throw Error(text(spec.name, " has shape ", shape()), "give at least 0 rows, 1 head and a dim of 1");
  }
  if (view.rows > kMaxTokens || view.heads > kMaxTokens || view.dim > kMaxTokens) {
    throw Error(text(spec.name, " has shape ", shape(), ": a size is past ", kMaxTokens), "split the batch");
  }
  if (!fits(view.rows, spec.rows) || !fits(view.heads, spec.heads) || !fits(view.dim, spec.dim)) {
    throw Error(text(spec.name, " has shape ", shape()),
                text("give it shape ", shape_text(spec.rows, spec.heads, spec.dim), " (rows, heads, dim)"));
  }
}

// Strides of 0 make a view of any size of little memory; workspaces are as large as the view.
void check_size(const ConstTensorView& view, const TensorSpec& spec) {
  checked_product(spec.name, {view.rows, view.heads, view.dim, size_of(view.dtype)});
}

void check_dtype(const ConstTensorView& view, const TensorSpec& spec) {
  if (std::find(spec.dtypes.begin(), spec.dtypes.end(), view.dtype) != spec.dtypes.end()) return;
  std::string names;
  for (const DType allowed : spec.dtypes) names += text(names.empty() ? "" : " or ", name(allowed));
  throw Error(text(spec.name, " is ", name(view.dtype)), text("give it as ", names));
}

void check_pointer(const ConstTensorView& view, const TensorSpec& spec) {
  if (view.data == nullptr) {
    if (view.rows == 0) return;
    throw Error(text(spec.name, " has ", view.rows, " rows and a null pointer"), "point it at its elements");
  }
  const auto past = reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(size_of(view.dtype));
  if (past != 0) {
    throw Error(text(spec.name, " is ", name(view.dtype), " and lies ", past, " bytes past a multiple of ",
                     size_of(view.dtype)),
                text("align it to ", size_of(view.dtype), " bytes"));
  }
}

// Strides that nest, each at least what all smaller ones span, never let two elements meet.
bool elements_apart(const ConstTensorView& view) {
  struct Axis {
    Index stride, size;
  };
  if (view.rows == 0) return true;
  const Index inner = view.inner == 0 ? view.rows : min_of(view.inner, view.rows);
  const Index outer = ceil_div(view.rows, inner);
  std::array<Axis, 3> axes = {{{view.head_stride, view.heads}, {view.row_stride, inner}, {view.outer_stride, outer}}};
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  Index span = view.dim;
  for (const Axis& axis : axes) {
    if (axis.size < 2) continue;
    if (axis.stride < span) return false;
    span += axis.stride * (axis.size - 1);
  }
  return true;
}

void check_strides(const ConstTensorView& view, const TensorSpec& spec) {
  if (view.inner < 0 || view.row_stride < 0 || view.head_stride < 0 || view.outer_stride < 0) {
    throw Error(text(spec.name, " has a negative stride (", strides_text(view), ")"),
                "give strides of at least 0, in elements");
  }
  const Index most = kUnlimited / max_of(1, max_of(view.rows, view.heads));
  if (max_of(view.row_stride, max_of(view.head_stride, view.outer_stride)) > most) {
    throw Error(text(spec.name, " has strides past 64-bit offsets (", strides_text(view), ")"),
                text("give strides of at most ", most, " elements"));
  }
  if (spec.output && !elements_apart(view)) {
    throw Error(text(spec.name, " is written to, and its elements share memory: strides ", strides_text(view),
                     " for shape ", shape_text(view.rows, view.heads, view.dim)),
                text("let a head span at least ", view.dim, " elements and a row at least ", view.heads * view.dim,
                     " (contiguous: TensorView thd, bshd, sbhd)"));
  }
}

}  // namespace

void detail::check_part(std::string_view what, Index first, Index count, Index size) {
  if (first >= 0 && count >= 1 && count <= size && first <= size - count) return;
  const auto last = static_cast<Index>(static_cast<std::uint64_t>(first) + static_cast<std::uint64_t>(count) - 1);
  throw Error(text(what, " ", first, " .. ", last, " asked of a view that has ", size),
              text("ask for at least one of 0 .. ", size - 1));
}

void detail::check_whole(std::string_view what, Index parts, Index size) {
  if (parts == size) return;
  throw Error(text("q, k and v together take ", parts, " of ", what, ", and the fused view has ", size),
              text("give the view as [.., heads_q + 2*heads_k, dim] or [.., heads, 3*dim], or cut it with head_range"));
}

void check_tensor(const ConstTensorView& view, const TensorSpec& spec) {
  check_shape(view, spec);
  check_dtype(view, spec);
  check_size(view, spec);
  check_pointer(view, spec);
  check_strides(view, spec);
}

}  // namespace weft
