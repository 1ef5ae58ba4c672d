#include "run/agreement.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>

#include "comm/checked.h"
#include "index.h"
#include "text.h"

namespace weft::run {
namespace {

// What each rank sends to all others. It always has the same size, so that ranks in different calls can compare too.
struct Record {
  static constexpr std::size_t kParts = 24;

  std::uint64_t kind = 0, object = 0, layer = 0, micro = 0;  // layer and micro count from 1; 0: none
  std::uint64_t calls = 0;
  std::uint64_t forward = 0, forwards = 0, several = 0;  // of detail::Forwards (comm/checked.h)
  std::array<std::uint64_t, kParts> parts = {};
};

using Ranks = std::vector<Index>;

std::string list(const Ranks& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) names += text(i == 0 ? "" : ", ", ranks[i]);
  return names;
}

// In the order of CallKind.
constexpr std::array<std::string_view, 8> kCallNames = {"a new executor",
                                                        "a new K/V buffer",
                                                        "the begin of a sequence",
                                                        "the gather",
                                                        "the gather once more",
                                                        "the forward",
                                                        "the backward",
                                                        "the end"};

std::string name(const Record& r, bool with_object) {
  std::string words(r.kind < kCallNames.size() ? kCallNames[r.kind] : "something unknown");
  if (r.micro > 0) words += text(" of micro-sequence ", r.micro - 1);
  if (r.layer > 0) words += text(" of layer ", r.layer - 1);
  if (with_object) words += text(" (executor or buffer ", r.object, ")");
  return words;
}

// Ranks grouped by equal keys, the largest group last; of groups of one size, the one with the lowest rank.
template <class Key>
std::vector<Ranks> groups(const std::vector<Record>& all, const Key& key) {
  std::map<decltype(key(all[0])), Ranks> holders;
  for (std::size_t r = 0; r < all.size(); ++r) holders[key(all[r])].push_back(static_cast<Index>(r));
  std::vector<Ranks> sorted;
  for (auto& [value, ranks] : holders) sorted.push_back(std::move(ranks));
  std::sort(sorted.begin(), sorted.end(), [](const Ranks& a, const Ranks& b) {
    return a.size() != b.size() ? a.size() < b.size() : a.front() > b.front();
  });
  return sorted;
}

std::string each(const std::vector<Ranks>& all, const std::function<std::string(const Ranks&)>& what) {
  std::string words;
  for (const Ranks& ranks : all) words += text(words.empty() ? "" : ", ", what(ranks));
  return words;
}

const Record& first_of(const std::vector<Record>& all, const Ranks& ranks) { return all[at(ranks.front())]; }

constexpr const char* kInStep =
    "let every rank make the same calls in the same order: one has left out a call, or made one twice";

void check_kind(const std::vector<Record>& all) {
  const auto by_call = groups(all, [](const Record& r) { return std::array{r.kind, r.layer, r.micro, r.object}; });
  if (by_call.size() == 1) return;
  // The object's number is mentioned only if the calls differ in nothing else.
  const bool objects = groups(all, [](const Record& r) { return std::array{r.kind, r.layer, r.micro}; }).size() == 1;
  const auto words = [&](const Ranks& ranks) {
    return text(list(ranks), ranks.size() == 1 ? " is at " : " are at ", name(first_of(all, ranks), objects));
  };
  throw Error(text("call ", all[0].calls, ": ", each(by_call, words)), kInStep);
}

void check_parts(const std::vector<Record>& all, const std::vector<Fingerprint>& mine) {
  for (std::size_t p = 0; p < mine.size(); ++p) {
    const auto by_value = groups(all, [&](const Record& r) { return r.parts[p]; });
    if (by_value.size() == 1) continue;
    Ranks differ;
    for (std::size_t g = 0; g + 1 < by_value.size(); ++g)
      differ.insert(differ.end(), by_value[g].begin(), by_value[g].end());
    std::sort(differ.begin(), differ.end());
    throw Error(text(mine[p].part, ": ", list(differ), differ.size() == 1 ? " differs" : " differ", " from ",
                     list(by_value.back())),
                "give every rank the same problem, options and arguments");
  }
}

// Error unless out and lse of a backward were written by the same call on all ranks. If several calls of a rank wrote
// the same bits, one of them must be that call.
void check_forwards(const std::vector<Record>& all) {
  const auto record = [&](const Ranks& ranks) -> const Record& { return first_of(all, ranks); };
  std::uint64_t common = ~std::uint64_t{0};
  for (const Record& r : all) common &= r.forwards;
  std::vector<Ranks> of_one = groups(all, [](const Record& r) { return r.several != 0 ? 0 : r.forward; });
  std::erase_if(of_one, [&](const Ranks& ranks) { return record(ranks).several != 0 || record(ranks).forward == 0; });
  if (common != 0 && of_one.size() <= 1) return;
  std::vector<Ranks> by_call = groups(all, [](const Record& r) { return r.forward; });
  std::erase_if(by_call, [&](const Ranks& ranks) { return record(ranks).forward == 0; });
  const auto words = [&](const Ranks& ranks) { return text("call ", record(ranks).forward, " on ", list(ranks)); };
  throw Error(text(name(all[0], false), ": out and lse are those of ", each(by_call, words)),
              "give the backward what the forward of the same layer wrote, on every rank");
}

void check_calls(const std::vector<Record>& all) {
  const std::vector<Ranks> by_number = groups(all, [](const Record& r) { return r.calls; });
  if (by_number.size() == 1) return;
  const auto words = [&](const Ranks& ranks) { return text(first_of(all, ranks).calls, " on ", list(ranks)); };
  throw Error(text("calls made: ", each(by_number, words)), kInStep);
}

std::uint64_t results_of(const ConstTensorView& out, const ConstTensorView& lse, const Place& place) {
  std::vector<Block> blocks;
  append_blocks(out, {0, out.rows}, blocks);
  append_blocks(lse, {0, lse.rows}, blocks);
  return checksum(blocks, place);
}

}  // namespace

Agreement::Agreement(Communicator& ranks)
    : ranks_(ranks), checked_(make_checked(ranks)), object_(++ranks.calls().objects) {}

std::uint64_t Agreement::compare(const CollectiveCall& call, const std::vector<Fingerprint>& mine,
                                 const detail::Forwards& forwards) {
  if (call.layer < kNoLayer) throw Error(text("layer ", call.layer), "number layers from 0, or leave it out");
  if (mine.size() > Record::kParts) throw Error(text(mine.size(), " parts to compare"), "make Record::kParts larger");
  Record own{.kind = static_cast<std::uint64_t>(call.kind),
             .object = object_,
             .layer = static_cast<std::uint64_t>(call.layer + 1),
             .micro = static_cast<std::uint64_t>(call.micro + 1),
             .calls = ++ranks_.calls().made,
             .forward = forwards.last,
             .forwards = forwards.which,
             .several = forwards.several};
  for (std::size_t p = 0; p < mine.size(); ++p) own.parts[p] = mine[p].value;
  std::vector<Record> all(at(ranks_.ranks()));
  const auto block = [](Record& r) { return Block{.data = &r, .rows = 1, .bytes = sizeof(Record)}; };
  std::vector<Block> blocks;
  for (Record& r : all) blocks.push_back(block(r));
  checked_->all_gather(block(own), blocks).wait();
  check_kind(all);
  check_parts(all, mine);
  check_forwards(all);
  check_calls(all);
  return own.calls;
}

void Agreement::end(const CollectiveCall& call) { compare({CallKind::end, call.layer, call.micro}, {}); }

void Agreement::end(const CollectiveCall& call, std::uint64_t number, const ConstTensorView& out,
                    const ConstTensorView& lse, const Place& place) {
  // Before the others are told: this may fail, and then the call must fail on all ranks.
  if (out.data != nullptr && lse.data != nullptr) ranks_.calls().remember(results_of(out, lse, place), number);
  end(call);
}

detail::Forwards Agreement::forwards_of(const ConstTensorView& out, const ConstTensorView& lse,
                                        const Place& place) const {
  if (out.data == nullptr || lse.data == nullptr) return {};
  return ranks_.calls().forwards_of(results_of(out, lse, place));
}

}  // namespace weft::run
