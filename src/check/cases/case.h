// One problem as the flags of the command give it: plain values, not yet checked.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/dtype.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/tensor.h"

namespace weft::check {

struct Side {
  std::vector<Index> cu_seqlens = {0};
  std::vector<Index> cu_seqlens_padded = {};  // empty: as cu_seqlens
  std::optional<Index> tokens = {};           // rows of the buffer
};

// A forest of branches that share prefixes (weft::Tree), under a causal mask with a window and chunks.
struct TreeCase {
  std::vector<Index> parents = {};  // [nodes] -1: a root
  std::vector<Index> lengths = {};  // [nodes]
  Index left = -1;
  std::optional<Index> chunk = {};
  Index multiple = 1;              // that roots are padded to
  std::optional<Index> rows = {};  // of the buffer
};

struct Case {
  Side q = {};
  std::optional<Side> k = {};  // cross-attention; otherwise keys are where the queries are
  Mask mask = {};
  // What q and mask.slices were made of (set_tree), which the checks go by instead of the slices.
  std::optional<TreeCase> tree = {};
  LayoutKind layout = LayoutKind::zigzag;
  Index ranks = 1;
  std::vector<std::vector<Run>> runs = {}, k_runs = {};  // layout explicit, by rank
  // Attention; the law does not look at these.
  Index heads_q = 2, heads_k = 1, dim_qk = 8, dim_v = 8;
  std::vector<Index> head_map = {};  // [hq] K/V head of each query head; empty: heads in equal groups
  DType dtype = DType::f32;
  std::optional<double> scale = {};
  double softcap = 0;
  enum class SinkKind { none, off_by_one, learnable } sink = SinkKind::none;
  // How a rank's own rows lie in memory. bshd [b, s/ranks, h, d] and sbhd [s/ranks, b, h, d] are batches: layout
  // dual_chunk, documents of one padded length.
  enum class Format { thd, bshd, sbhd } format = Format::thd;
  unsigned long long seed = 0;
};

// These throw weft::Error as the library does.
Problem problem_of(const Case& c);
Layouts layouts_of(const Case& c, const Problem& problem);

std::string_view name(Case::Format format);
// Error if the case's format does not go with its layout or its documents.
void check_format(const Case& c, const Problem& problem);
// A contiguous tensor of a rank's own rows, seen in the case's format.
TensorView local_view(const Case& c, const Stream& stream, const TensorView& contiguous);

// The flags that give this case to the command, each value quoted for a shell where needed.
std::string flags(const Case& c);
// One word for the mask: full, causal, bottom_right, window, window_right, chunked, chunked_window, slices, tree.
std::string mask_class(const Case& c);

}  // namespace weft::check
