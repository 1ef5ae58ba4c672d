// Bytes to a problem, a layout, a schedule on one to three ranks and its results; or to one call of a kernel with views
// and slices of any kind. Right by the dense softmax, or a weft::Error; nothing else.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#include "bytes.h"
#include "check/attend.h"
#include "check/by_schedule.h"
#include "index.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace {

using weft::at;
using weft::Index;
using weft::check::Case;
using weft::fuzz::ByteChoices;

[[noreturn]] void found(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

constexpr Index kMostRanks = 4;

weft::ScheduleOptions options_of(ByteChoices& bytes, const Case& c) {
  weft::ScheduleOptions o{.kind = weft::schedule_kinds()[at(bytes.pick(0, 5))]};
  if (weft::uses(o.kind, "key_order")) o.key_order = static_cast<weft::KeyOrder>(bytes.pick(0, 2));
  if (weft::uses(o.kind, "head_groups")) o.head_groups = bytes.pick(1, c.heads_k);
  if (o.kind == weft::ScheduleKind::hybrid) {
    o.ulysses = c.ranks > 1 && bytes.one_in(2) ? c.ranks : 1;
    o.outer = bytes.one_in(2) ? weft::ScheduleKind::all_gather : weft::ScheduleKind::ring;
  }
  o.stages = bytes.pick(1, 5);
  o.ranks_per_step = bytes.pick(1, 3);
  o.query_ranks = bytes.one_in(2) ? c.ranks : 0;
  o.node = c.ranks % 2 == 0 && bytes.one_in(2) ? 2 : 1;
  return o;
}

void spoil(weft::ScheduleOptions& o, ByteChoices& bytes) {
  Index* const fields[] = {&o.head_groups, &o.ulysses, &o.stages, &o.ranks_per_step, &o.node, &o.query_ranks};
  Index& x = *fields[bytes.pick(0, 5)];
  x = weft::fuzz::hostile(bytes, x);
  if (bytes.one_in(4)) o.outer = static_cast<weft::ScheduleKind>(bytes.pick(0, 5));
}

void spoil_attention(Case& c, ByteChoices& bytes) {
  constexpr double kOdd[] = {std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity(),
                             -1,
                             -0.0,
                             1e-300,
                             1e300,
                             1e-29};
  const double odd = kOdd[bytes.pick(0, 6)];
  switch (bytes.pick(0, 3)) {
    case 0:
      c.scale = odd;
      break;
    case 1:
      c.softcap = odd;
      break;
    case 2:
      for (Index h = 0; h < c.heads_q; ++h) c.head_map.push_back(bytes.pick(0, c.heads_k - 1));
      break;
    default:
      weft::fuzz::spoil_entry(bytes, c.head_map);
  }
}

// The dense formula and the oracle take what the library would refuse; such a case asks the library alone.
bool has_answer(const Case& c) {
  const bool scale = !c.scale || std::isfinite(*c.scale);
  bool map = c.head_map.empty() || static_cast<Index>(c.head_map.size()) == c.heads_q;
  for (const Index h : c.head_map) map = map && h >= 0 && h < c.heads_k;
  return scale && map && std::isfinite(c.softcap) && c.softcap >= 0;
}

int by_schedule(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(2);
  Case c = weft::check::random_case(bytes);
  if (c.ranks > kMostRanks) return -1;
  weft::check::Way way{.schedule = options_of(bytes, c), .checked = bytes.one_in(4)};
  if (bytes.one_in(3)) {
    const std::span<const weft::Kernel> all = weft::kernels();
    way.kernel = all[at(bytes.pick(0, static_cast<Index>(all.size()) - 1))].name;
  }
  if (spoiled) {
    weft::fuzz::spoil(c, bytes);
    if (bytes.one_in(3)) spoil(way.schedule, bytes);
    if (bytes.one_in(3)) spoil_attention(c, bytes);
  }
  try {
    if (!weft::fuzz::small(c, kMostRanks) || !has_answer(c)) return 0;
    weft::check::Oracle oracle(c, weft::check::executor_arithmetic(c));
    if (spoiled) {
      const weft::check::AttendReport report = check_schedule(oracle, c, way);
      if (!report.ok())
        found("a spoiled problem is computed wrongly: " + flags(c) + " " + weft::check::flags(way.schedule));
      return 0;
    }
    const weft::check::Tried tried = try_schedule(oracle, c, way);
    if (tried.failure) found(*tried.failure + "\nweft verify " + flags(c) + " " + weft::check::flags(way.schedule));
    if (tried.report && !tried.report->ok())
      found("wrong: " + tried.report->fault.value_or("a number") + "\nweft verify " + flags(c) + " " +
            weft::check::flags(way.schedule));
  } catch (const weft::Error& e) {
    if (!spoiled) found(std::string("a valid problem is refused: ") + e.what() + "\nweft verify " + flags(c));
  }
  return 0;
}

// Views whose sizes and strides are odd but small: whatever passes the checks stays inside the memory at hand.
constexpr Index kMost = 12, kRoom = 16 * (kMost + 2) * (kMost + 2) * (kMost + 2);

struct Memory {
  std::vector<double> of = std::vector<double>(at(kRoom), 0.25);
};

weft::TensorView view_of(ByteChoices& bytes, Memory& memory, weft::DType dtype, Index rows, Index heads, Index dim) {
  weft::TensorView v = weft::thd(static_cast<void*>(memory.of.data()), dtype, rows, heads, dim);
  if (!bytes.one_in(6)) return v;
  Index* const fields[] = {&v.rows, &v.heads, &v.dim, &v.row_stride, &v.head_stride, &v.inner, &v.outer_stride};
  for (Index n = bytes.pick(1, 3); n > 0; --n) *fields[bytes.pick(0, 6)] = bytes.pick(-1, kMost);
  if (bytes.one_in(4)) v.data = static_cast<char*>(v.data) + bytes.pick(0, 8);
  if (bytes.one_in(8)) v.data = nullptr;
  if (bytes.one_in(4)) v.dtype = static_cast<weft::DType>(bytes.pick(0, 3));
  return v;
}

void check_numbers(ByteChoices& bytes) {
  double element = 0;
  weft::TensorView v{.data = &element};
  for (Index* field : {&v.rows, &v.heads, &v.dim, &v.row_stride, &v.head_stride, &v.inner, &v.outer_stride})
    *field = weft::fuzz::hostile(bytes, bytes.pick(0, 100));
  check_tensor(v, {.name = "t", .output = bytes.one_in(2)});
}

int by_kernel(ByteChoices& bytes) {
  const Index tq = bytes.pick(0, kMost), tk = bytes.pick(0, kMost), hk = bytes.pick(1, 3), hq = hk * bytes.pick(1, 3),
              dim = bytes.pick(1, kMost), dim_v = bytes.one_in(2) ? dim : bytes.pick(1, kMost);
  const auto dtype = static_cast<weft::DType>(bytes.pick(0, 3));
  std::vector<weft::Slice> slices(at(bytes.pick(0, 4)));
  for (weft::Slice& s : slices) {
    s = {bytes.pick(0, tq), tq, bytes.pick(0, tk), tk};
    if (bytes.one_in(2)) s.hi = bytes.pick(-3, 9);
    if (bytes.one_in(2)) s.lo = bytes.pick(-9, 3);
    if (bytes.one_in(4)) weft::fuzz::spoil_slice(bytes, s);
  }
  Memory q, k, v, dout, out, lse, max_logit, dq, dk, dv, sums, sink;
  std::vector<weft::RowState<float>> states(at((kMost + 1) * (kMost + 1)));
  const std::span<const weft::Kernel> all = weft::kernels();
  const std::string_view kernel = all[at(bytes.pick(0, static_cast<Index>(all.size()) - 1))].name;
  try {
    if (bytes.one_in(4)) check_numbers(bytes);
    weft::Attention attention{};
    if (bytes.one_in(3)) attention.sink = weft::Sink::learnable(view_of(bytes, sink, weft::DType::f32, 1, hq, 1));
    weft::KernelForwardArgs f{{.q = view_of(bytes, q, dtype, tq, hq, dim),
                               .k = view_of(bytes, k, dtype, tk, hk, dim),
                               .v = view_of(bytes, v, dtype, tk, hk, dim_v),
                               .slices = slices,
                               .attention = attention}};
    if (bytes.one_in(3))
      f.partial = {view_of(bytes, sums, weft::DType::f32, tq, hq, dim_v), states.data()};
    else
      f.out = view_of(bytes, out, dtype, tq, hq, dim_v);
    if (bytes.one_in(2)) f.lse = view_of(bytes, lse, weft::DType::f32, tq, hq, 1);
    if (bytes.one_in(2)) f.max_logit = view_of(bytes, max_logit, weft::DType::f32, 1, hq, 1);
    attend(f, kernel);
    weft::KernelBackwardArgs b{{.q = f.q,
                                .k = f.k,
                                .v = f.v,
                                .slices = slices,
                                .attention = attention,
                                .dout = view_of(bytes, dout, dtype, tq, hq, dim_v),
                                .out = f.out,
                                .lse = f.lse,
                                .dq = view_of(bytes, dq, dtype, tq, hq, dim),
                                .dk = view_of(bytes, dk, dtype, tk, hk, dim),
                                .dv = view_of(bytes, dv, dtype, tk, hk, dim_v)},
                               bytes.one_in(4)};
    attend_backward(b, kernel);
  } catch (const weft::Error&) {
  }
  return 0;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  weft::set_cpu_threads(1);  // ranks are threads enough
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices bytes(data, size);
  return bytes.one_in(3) ? by_kernel(bytes) : by_schedule(bytes);
}
