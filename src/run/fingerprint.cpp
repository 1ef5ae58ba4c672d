#include "run/fingerprint.h"

#include <algorithm>
#include <bit>
#include <map>

#include "text.h"
#include "weft/error.h"

namespace weft::run {
namespace {

class Hash {
 public:
  Hash& add(std::uint64_t x) {
    // splitmix64's finish: every bit of x moves every bit of the sum
    value_ += x + 0x9e3779b97f4a7c15u;
    value_ = (value_ ^ (value_ >> 30)) * 0xbf58476d1ce4e5b9u;
    value_ = (value_ ^ (value_ >> 27)) * 0x94d049bb133111ebu;
    value_ ^= value_ >> 31;
    return *this;
  }
  Hash& add(Index x) { return add(static_cast<std::uint64_t>(x)); }
  Hash& add(double x) { return add(std::bit_cast<std::uint64_t>(x)); }
  Hash& add(bool x) { return add(std::uint64_t{x}); }
  Hash& add(std::span<const Index> list) {
    add(static_cast<Index>(list.size()));
    for (const Index x : list) add(x);
    return *this;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

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

void add(Hash& hash, const Layout& layout) {
  hash.add(static_cast<Index>(layout.kind())).add(layout.ranks()).add(layout.rows());
  if (layout.kind() != LayoutKind::explicit_runs) return;  // the others follow from the problem
  for (Index rank = 0; rank < layout.ranks(); ++rank)
    for (const weft::Run& run : layout.runs(rank).runs())
      hash.add(rank).add(run.row).add(run.token).add(run.count).add(run.stride);
}

std::uint64_t of(const Layouts& layouts) {
  Hash hash;
  add(hash, layouts.q);
  add(hash, layouts.k);
  return hash.value();
}

std::uint64_t of(const ScheduleOptions& options) {
  return Hash()
      .add(static_cast<Index>(options.kind))
      .add(static_cast<Index>(options.key_order))
      .add(options.head_groups)
      .add(options.inside)
      .add(static_cast<Index>(options.across))
      .add(options.stages)
      .add(options.abreast)
      .value();
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

std::vector<Fingerprint> of_call(Pass pass, const ConstTensorView& q, const ConstTensorView& v, const Attention& a,
                                 bool asked, Index part_keys) {
  return {{"pass", static_cast<std::uint64_t>(pass)},
          {"dtype of q", static_cast<std::uint64_t>(q.dtype)},
          {"dim of q and v", Hash().add(q.dim).add(v.dim).value()},
          {pass == Pass::forward ? "whether max_logit is asked for" : "whether dsink is asked for", asked},
          {"attention (scale, softcap, sink, head_map)", of(a)},
          {"part_keys", static_cast<std::uint64_t>(part_keys)}};  // of a forward; as many numbers for each pass
}

std::string list(const std::vector<Index>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) names += text(i == 0 ? "" : ", ", ranks[i]);
  return names;
}

}  // namespace

std::vector<Fingerprint> fingerprints(const Schedule& s) {
  return {{"packing", of(s.problem.packing())},
          {"mask", of(s.problem.mask())},
          {"layout", of(s.layouts)},
          {"schedule", of(s.options)},
          {"heads", Hash().add(s.heads_q).add(s.heads_k).add(std::span<const Index>(s.head_map)).value()}};
}

std::vector<Fingerprint> fingerprints(const ForwardArgs& args) {
  return of_call(Pass::forward, args.q, args.v, args.attention, args.max_logit.given(), args.part_keys);
}

std::vector<Fingerprint> fingerprints(const BackwardArgs& args) {
  return of_call(Pass::backward, args.q, args.v, args.attention, args.dsink.given(), 0);
}

void meet(Communicator& communicator) { compare(communicator, {{"end of the pass", 1}}); }

void compare(Communicator& communicator, const std::vector<Fingerprint>& mine) {
  const auto parts = mine.size();
  const auto ranks = static_cast<std::size_t>(communicator.ranks());
  std::vector<std::uint64_t> own, all(parts * ranks);
  for (const Fingerprint& f : mine) own.push_back(f.value);
  const auto block = [&](std::uint64_t* data) {
    const Index bytes = static_cast<Index>(parts * sizeof(std::uint64_t));
    return Block{.data = data, .rows = 1, .bytes = bytes};
  };
  std::vector<Block> blocks;
  for (std::size_t r = 0; r < ranks; ++r) blocks.push_back(block(all.data() + r * parts));
  communicator.all_gather(block(own.data()), blocks).wait();
  for (std::size_t p = 0; p < parts; ++p) {
    std::map<std::uint64_t, std::vector<Index>> holders;
    for (std::size_t r = 0; r < ranks; ++r) holders[all[r * parts + p]].push_back(static_cast<Index>(r));
    if (holders.size() == 1) continue;
    // What most have counts as right; of equals, what the lowest rank has.
    const std::vector<Index>* most = nullptr;
    for (const auto& [value, who] : holders) {
      if (most == nullptr || who.size() > most->size() || (who.size() == most->size() && who.front() < most->front()))
        most = &who;
    }
    std::vector<Index> differ;
    for (const auto& [value, who] : holders)
      if (&who != most) differ.insert(differ.end(), who.begin(), who.end());
    std::sort(differ.begin(), differ.end());
    throw Error(
        text(mine[p].part, ": ", list(differ), differ.size() == 1 ? " differs" : " differ", " from ", list(*most)),
        "give every rank the same problem, options and arguments");
  }
}

}  // namespace weft::run
