#include "run/fingerprint.h"

#include <cmath>

#include "device/device.h"
#include "hash.h"
#include "index.h"
#include "kernel/check_args.h"
#include "kernel/registry.h"

namespace weft::run {
namespace {

Hash& add(Hash& hash, const Stream& stream) {
  return hash.add(stream.offsets()).add(stream.used_lengths()).add(stream.tokens());
}

std::uint64_t of(const Packing& packing) {
  Hash hash;
  add(add(hash, packing.q()), packing.k());
  return hash.value();
}

std::uint64_t of(const Mask& mask) {
  Hash hash;
  hash.add(mask.causal).add(static_cast<Index>(mask.align)).add(mask.left).add(mask.right);
  hash.add(mask.chunk.value_or(0)).add(mask.slices.has_value());
  if (mask.slices)
    for (const Slice& s : *mask.slices)
      hash.add(s.q_begin).add(s.q_end).add(s.k_begin).add(s.k_end).add(s.lo).add(s.hi);
  return hash.value();
}

std::uint64_t of(const ScheduleOptions& options) {
  Hash hash;
  hash.add(static_cast<Index>(options.kind));
  for (const ScheduleOption& option : schedule_options()) hash.add(option.number(options));
  return hash.value();
}

std::uint64_t of(const Layouts& layouts) {
  return Hash().add(layouts.q.fingerprint()).add(layouts.k.fingerprint()).value();
}

std::uint64_t heads_of(const Schedule& s) {
  return Hash().add(s.heads_q).add(s.heads_k).add(std::span<const Index>(s.head_map)).value();
}

// A bit for each of schedule_options() that the schedule uses. Remembered, because executors may be made for one pass.
std::uint64_t used_options(const ScheduleOptions& options) {
  static const std::vector<std::vector<std::uint64_t>> known = [] {
    const auto kinds = schedule_kinds();
    std::vector<std::vector<std::uint64_t>> all(kinds.size(), std::vector<std::uint64_t>(kinds.size()));
    for (const ScheduleKind kind : kinds)
      for (const ScheduleKind outer : kinds)
        for (std::size_t n = 0; n < schedule_options().size(); ++n)
          if (uses(ScheduleOptions{.kind = kind, .outer = outer}, schedule_options()[n].name))
            all[static_cast<std::size_t>(kind)][static_cast<std::size_t>(outer)] |= std::uint64_t{1} << n;
    return all;
  }();
  const std::vector<std::uint64_t>& of_kind = known[static_cast<std::size_t>(options.kind)];
  const auto outer = static_cast<std::size_t>(options.outer);
  return of_kind[outer < of_kind.size() ? outer : 0];  // only composed schedules use it, others may hold any value
}

std::uint64_t of(const Attention& attention) {
  return Hash()
      .add(attention.scale.has_value())
      .add(attention.scale.value_or(0))
      .add(attention.softcap)
      .add(static_cast<Index>(attention.sink.kind))
      .add(attention.head_map)
      .value();
}

std::uint64_t values_of(Sink sink, const Place& place) {
  if (sink.kind != Sink::Kind::learnable || sink.logits.data == nullptr || sink.logits.heads == 0)
    return Hash().value();
  const Index bytes = (sink.logits.offset(0, sink.logits.heads - 1) + 1) * size_of(sink.logits.dtype);
  std::vector<double> here(at(bytes) / sizeof(double) + 1);  // aligned for any dtype
  if (place.kind != DeviceKind::cpu) {
    const device::HostCopy copy{here.data(), sink.logits.data, bytes};
    device::to_host(place, {&copy, 1});
    sink.logits.data = here.data();
  }
  Hash hash;
  for (Index h = 0; h < sink.logits.heads; ++h) hash.add(sink_logit(sink, h));
  return hash.value();
}

Fingerprint of(const Place& place) {
  return {"where tensors lie (CPU or GPU)", static_cast<std::uint64_t>(place.kind)};
}

// The dtype of a tensor, 0 if it is left out. A rank may have no rows, so heads decide whether it is there.
template <class View>
Index dtype_of(const View& view) {
  return view.given() || view.heads > 0 ? 1 + static_cast<Index>(view.dtype) : 0;
}

template <class Args>
std::uint64_t kernel_of(Pass pass, const Args& args, std::string_view name) {
  return Hash().add(select_kernel(name, request_of(pass, args)).name).value();
}

template <class Args>
std::vector<Fingerprint> of_call(const Args& args) {
  return {{"dtype of q", static_cast<std::uint64_t>(args.q.dtype)},
          {"dim of q and v", Hash().add(args.q.dim).add(args.v.dim).value()},
          {"attention (scale, softcap, sink, head_map)", of(args.attention)},
          {"values of the sink", values_of(args.attention.sink, args.place)}};
}

using detail::CallSign;

std::uint32_t folded(std::uint64_t hash) { return static_cast<std::uint32_t>(hash ^ (hash >> 32)); }

// With the shapes of a call, whose outputs' dtypes and presence are hashed already.
template <class Args>
CallSign with_shapes(CallSign sign, const Args& args, Hash outputs, const SignedCallInfo& info) {
  const Attention& a = args.attention;
  const double dim = static_cast<double>(max_of(args.q.dim, 1));
  sign.parts[CallSign::shapes] = folded(outputs.add(std::uint64_t{sign.parts[CallSign::shapes]})
                                            .add(static_cast<Index>(args.q.dtype))
                                            .add(args.q.heads)
                                            .add(args.q.dim)
                                            .add(args.v.dim)
                                            .value());
  // As f32: a scale that is given and the same one that is left out are the same.
  sign.parts[CallSign::attention] = folded(Hash()
                                               .add(double{static_cast<float>(a.scale.value_or(1 / std::sqrt(dim)))})
                                               .add(a.softcap)
                                               .add(static_cast<Index>(a.sink.kind))
                                               .value());
  return with_call(sign, info);
}

}  // namespace

std::vector<Fingerprint> fingerprints(const Schedule& s) {
  return {{"packing", of(s.problem.packing())},
          {"mask", of(s.problem.mask())},
          {"layout", of(s.layouts)},
          {"schedule", of(s.options)},
          {"heads", heads_of(s)}};
}

std::vector<Fingerprint> fingerprints(const MicroSequences& micros, const Problem& problem) {
  const Range rows = micros.rows();
  Hash cuts;
  cuts.add(micros.micros()).add(micros.ranks()).add(micros.local()).add(rows.begin).add(rows.end);
  for (Index m = 0; m < micros.micros(); ++m) cuts.add(micros.rows(m).end);
  return {{"packing", of(problem.packing())}, {"mask", of(problem.mask())}, {"micro-sequences", cuts.value()}};
}

std::vector<Fingerprint> fingerprints(const ExecutorOptions& options) {
  return {{"deterministic", options.deterministic}, of(options.place)};
}

std::vector<Fingerprint> fingerprints(const KvBufferOptions& options) {
  return {{"rows of the buffer", static_cast<std::uint64_t>(options.rows)},
          {"heads", static_cast<std::uint64_t>(options.heads)},
          {"dim of k and v", Hash().add(options.dim_qk).add(options.dim_v).value()},
          {"dtype of k and v", static_cast<std::uint64_t>(options.dtype)},
          {"drop", options.drop},
          of(options.place)};
}

std::vector<Fingerprint> fingerprints(const KernelForwardArgs& args, std::string_view kernel) {
  std::vector<Fingerprint> all = of_call(args);
  // A schedule that swaps heads sends out and lse to other ranks as they are.
  all.push_back({"dtype of out and lse", Hash().add(dtype_of(args.out)).add(dtype_of(args.lse)).value()});
  all.push_back({"whether max_logit is asked for", args.max_logit.given()});
  all.push_back({"keys_per_split", static_cast<std::uint64_t>(args.keys_per_split)});
  all.push_back({"kernel", kernel_of(Pass::forward, args, kernel)});
  return all;
}

std::vector<Fingerprint> fingerprints(const KernelBackwardArgs& args, std::string_view kernel) {
  std::vector<Fingerprint> all = of_call(args);
  all.push_back(
      {"dtype of out, lse, dout and dq",
       Hash().add(dtype_of(args.out)).add(dtype_of(args.lse)).add(dtype_of(args.dout)).add(dtype_of(args.dq)).value()});
  all.push_back({"whether dsink is asked for", args.dsink.given()});
  all.push_back({"kernel", kernel_of(Pass::backward, args, kernel)});
  return all;
}

Fingerprint fingerprint(const Source* source) {
  return {"width of the source", static_cast<std::uint64_t>(source != nullptr ? source->rows.dim : 0)};
}

CallSign sign_of(const Schedule& s, const ExecutorOptions& options) {
  CallSign sign;
  sign.parts[CallSign::packing] = folded(of(s.problem.packing()));
  sign.parts[CallSign::mask] = folded(of(s.problem.mask()));
  sign.parts[CallSign::layout] = folded(of(s.layouts));
  Hash schedule;
  schedule.add(static_cast<Index>(s.options.kind)).add(options.deterministic);
  const std::uint64_t used = used_options(s.options);
  const std::span<const ScheduleOption> all = schedule_options();
  for (std::size_t n = 0; n < all.size(); ++n)
    if ((used >> n & 1) != 0) schedule.add(all[n].number(s.options));
  sign.parts[CallSign::schedule] = folded(schedule.value());
  sign.parts[CallSign::shapes] = folded(heads_of(s));
  return sign;
}

CallSign sign_of(const MicroSequences& micros, const Problem& problem, const KvBufferOptions& options) {
  const std::vector<Fingerprint> parts = fingerprints(micros, problem);
  CallSign sign;
  for (const std::size_t p : {CallSign::packing, CallSign::mask, CallSign::layout})
    sign.parts[p] = folded(parts[p].value);
  sign.parts[CallSign::schedule] = folded(Hash().add(options.rows).add(options.drop).value());
  sign.parts[CallSign::shapes] = folded(
      Hash().add(options.heads).add(options.dim_qk).add(options.dim_v).add(static_cast<Index>(options.dtype)).value());
  return sign;
}

CallSign with_call(CallSign sign, const SignedCallInfo& info) {
  sign.parts[CallSign::layer] = folded(Hash().add(info.layer).add(info.micro).value());
  return sign;
}

CallSign with_call(CallSign sign, const KernelForwardArgs& args, const SignedCallInfo& info) {
  Hash outputs;
  outputs.add(args.max_logit.given()).add(info.source);
  if (info.swapped) outputs.add(dtype_of(args.out)).add(dtype_of(args.lse));
  return with_shapes(sign, args, outputs, info);
}

CallSign with_call(CallSign sign, const KernelBackwardArgs& args, const SignedCallInfo& info) {
  Hash outputs;
  outputs.add(args.dsink.given()).add(info.source);
  if (info.swapped)
    outputs.add(dtype_of(args.out)).add(dtype_of(args.lse)).add(dtype_of(args.dout)).add(dtype_of(args.dq));
  return with_shapes(sign, args, outputs, info);
}

}  // namespace weft::run
