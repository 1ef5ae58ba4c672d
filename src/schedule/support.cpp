#include "weft/support.h"

#include "schedule/description.h"
#include "text.h"
#include "weft/layout.h"

namespace weft {
namespace {

constexpr Index kSomeRanks = 4;  // a stride for the row "striped"

bool is_fp8(DType dtype) { return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2; }

void add(std::vector<SupportRow>& rows, std::string group, std::string name, const Use& use) {
  SupportRow row{std::move(group), std::move(name), use, refusal(use), {}};
  for (const ScheduleKind kind : schedule_kinds()) {
    Use with = use;
    with.schedule = kind;
    row.schedules.push_back(refusal(with));
  }
  rows.push_back(std::move(row));
}

}  // namespace

std::optional<Refusal> refusal(const Use& use) {
  if (use.bias)
    return Refusal{
        "a bias is given, and no kernel adds one: it has a number for every pair, which would have to be moved "
        "and differentiated with its slice",
        "write masks as slices (Mask::slices); a bias of each key alone fits in one more element of q and k"};
  if (use.dropout != 0)
    return Refusal{text("dropout is ", use.dropout, ", and attention here is exact"), "use dropout 0, or drop outputs"};
  if (is_fp8(use.dtype))
    return Refusal{text("dtype ", name(use.dtype), " needs a scale for every block, which no kernel here keeps"),
                   "use bf16"};
  if (use.source && use.schedule && !schedule::definition(*use.schedule).source)
    return Refusal{text("a source is given, and schedule ", name(*use.schedule), " moves more than rows of K and V"),
                   "use all_gather, ring, all_to_all, hybrid or exact, or give K and V"};
  if (use.source && use.device_plan)
    return Refusal{"a source is given with device_plans, and which of its rows are seen is known to the GPU alone",
                   "give lengths on the host, or K and V"};
  if (!use.schedule) return {};
  if (use.device_plan)
    return Refusal{"a device_plan is given, and the steps of a schedule are planned on the host",
                   "leave it out, or gather keys yourself and call attend"};
  if (const std::string_view why = schedule::definition(*use.schedule).by_lengths; use.device_lengths && !why.empty())
    return Refusal{text("schedule ", name(*use.schedule), ", ", why, ", and lengths are not known on the host"),
                   "use all_gather, ring, all_to_all or hybrid, or keep cu_seqlens on the CPU"};
  if (use.stride_q != use.stride_k)
    return Refusal{
        text("queries have stride ", use.stride_q, " and keys ", use.stride_k, ": a band between them is no slice"),
        "use layouts of the same stride for both"};
  if (uses(*use.schedule, "key_order") && use.key_order == KeyOrder::sequence && use.stride_q != 1)
    return Refusal{text("keys in sequence order have stride 1 and queries stride ", use.stride_q,
                        ": a band between them is no slice"),
                   "gather keys in rank order (KeyOrder::rank), or use a layout that is not striped"};
  return {};
}

void require_support(const Use& use) {
  if (const std::optional<Refusal> no = refusal(use)) throw Error(no->problem, no->remedy);
}

std::vector<SupportRow> support_table() {
  std::vector<SupportRow> rows;
  for (const char* mask : {"full", "causal", "bottom_right", "window", "window_right", "chunked", "slices"})
    add(rows, "mask", mask, {});
  for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped,
                                LayoutKind::balanced, LayoutKind::placed, LayoutKind::explicit_runs}) {
    const Index stride = kind == LayoutKind::striped ? kSomeRanks : 1;
    add(rows, "layout", std::string(name(kind)), {.stride_q = stride, .stride_k = stride});
  }
  add(rows, "layout", "striped, keys in sequence order",
      {.key_order = KeyOrder::sequence, .stride_q = kSomeRanks, .stride_k = kSomeRanks});
  add(rows, "layout", "striped queries, other keys", {.stride_q = kSomeRanks});
  for (const char* packing : {"any lengths", "empty sequences", "padding between sequences", "cross-attention"})
    add(rows, "packing", packing, {});
  for (const char* format : {"thd", "bshd", "sbhd"}) add(rows, "format", format, {});
  for (const char* heads : {"grouped-query", "head map", "widths 192/128", "widths 576/512"})
    add(rows, "heads", heads, {});
  for (const char* feature : {"softcap", "sink off_by_one", "sink learnable", "max_logit", "scale"})
    add(rows, "feature", feature, {});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::f8_e4m3, DType::f8_e5m2})
    add(rows, "dtype", std::string(name(dtype)), {.dtype = dtype});
  add(rows, "feature", "device_plan, on a GPU", {.device_plan = true});
  add(rows, "feature", "cu_seqlens on a GPU", {.device_lengths = true});
  add(rows, "feature", "source in place of K and V", {.source = true});
  add(rows, "feature", "bias", {.bias = true});
  add(rows, "feature", "dropout", {.dropout = 0.1});
  return rows;
}

}  // namespace weft
