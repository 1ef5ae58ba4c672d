// The fields of a machine: one list that files are read, written and checked by.
#pragma once

#include <type_traits>

#include "weft/cost.h"

namespace weft::cost {

// What a number must lie within. Far past any machine; within them no prediction leaves the range of a double.
struct Limit {
  double least, most;
  bool or_zero;
  const char* remedy;

  bool allows(double value) const { return (value >= least && value <= most) || (or_zero && value == 0); }
};
inline constexpr Limit kAny = {-1e300, 1e300, false, "give a finite number"};  // another rule looks at it
inline constexpr Limit kRate = {1e-12, 1e30, false, "give more than 0: from 1e-12 to 1e30"};
inline constexpr Limit kRateOrNone = {1e-12, 1e30, true, "give 0 for no limit, or from 1e-12 to 1e30"};
inline constexpr Limit kSeconds = {0, 1e12, false, "give from 0 to 1e12 seconds"};
inline constexpr Limit kWhole = {1, 65536, false, "give from 1 to 65536"};
inline constexpr Limit kWholeOrNone = {1, 65536, true, "give 0 for none, or from 1 to 65536"};
inline constexpr Limit kCount = {0, 1e300, false, "give 0 or more"};
inline constexpr Limit kShare = {0, 0.999, false, "give a share from 0 to 0.999"};

// Calls f(name, field, limit) for every field; only numbers have a limit.
template <class T, class F>
void fields(T& of, F&& f) {
  if constexpr (std::is_same_v<std::remove_const_t<T>, KernelRate>) {
    f("pass", of.pass, kAny);
    f("dtype", of.dtype, kAny);
    f("dim", of.dim, kWhole);
    f("flops", of.flops, kRate);
    f("tile_q", of.tile_q, kWhole);
    f("tile_k", of.tile_k, kWhole);
    f("tile_seconds", of.tile_seconds, kSeconds);
    f("row_seconds", of.row_seconds, kSeconds);
    f("copy_rows", of.copy_rows, kWholeOrNone);
    f("key_seconds", of.key_seconds, kSeconds);
    f("call_seconds", of.call_seconds, kSeconds);
    f("units", of.units, kWhole);
  } else if constexpr (std::is_same_v<std::remove_const_t<T>, Level>) {
    f("name", of.name, kAny);
    f("ranks", of.ranks, kAny);
    f("bandwidth", of.bandwidth, kRateOrNone);
    f("full_duplex", of.full_duplex, kAny);
    f("limits_sends", of.limits_sends, kAny);
    f("latency", of.latency, kSeconds);
    f("message_seconds", of.message_seconds, kSeconds);
    f("uplink", of.uplink, kRateOrNone);
    f("interference", of.interference, kShare);
  } else {
    f("name", of.name, kAny);
    f("about", of.about, kAny);
    f("kernels", of.kernels, kAny);
    f("levels", of.levels, kAny);
    f("memory_bytes", of.memory_bytes, kRateOrNone);
    f("row_bandwidth", of.row_bandwidth, kRateOrNone);
    f("row_seconds", of.row_seconds, kSeconds);
    f("copy_bandwidth", of.copy_bandwidth, kRateOrNone);
    f("copy_seconds", of.copy_seconds, kSeconds);
    f("exchange_seconds", of.exchange_seconds, kSeconds);
    f("progress", of.progress, kAny);
    f("relays_gathers", of.relays_gathers, kAny);
    f("processor_ranks", of.processor_ranks, kCount);
    f("processor_kernels", of.processor_kernels, kRate);
    f("timeslice", of.timeslice, kSeconds);
  }
  f("source", of.source, kAny);
}

}  // namespace weft::cost
