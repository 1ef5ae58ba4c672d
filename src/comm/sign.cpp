#include "comm/sign.h"

#include <algorithm>
#include <charconv>

#include "comm/flight.h"
#include "index.h"
#include "text.h"

namespace weft::detail {
namespace {

using Ranks = std::vector<Index>;

// In the order of CallSign::Part.
constexpr std::array<const char*, CallSign::kParts> kPartNames = {"the packing (cu_seqlens, lengths)",
                                                                  "the mask",
                                                                  "the layout",
                                                                  "the schedule and its options",
                                                                  "shapes (heads, dims, dtypes, which outputs)",
                                                                  "the attention (scale, softcap, sink)",
                                                                  "the number of the layer or micro-sequence",
                                                                  "the call"};
constexpr std::array kPassNames{"forward", "backward", "gather", "gather once more"};

std::string ranks_text(const Ranks& ranks) {
  std::string words = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) words += text(i == 0 ? "" : ", ", ranks[i]);
  return words;
}

// "pass 12, a forward"
std::string pass_text(const CallSign& sign) {
  return text("pass ", sign.number(), ", a ", kPassNames[sign.parts[CallSign::pass] % CallSign::kKinds]);
}

std::string differing_parts(const CallSign& a, const CallSign& b) {
  std::string words;
  for (std::size_t p = 0; p < CallSign::kParts; ++p)
    if (a.parts[p] != b.parts[p]) words += text(words.empty() ? "" : ", ", kPartNames[p]);
  return words;
}

}  // namespace

std::optional<std::string> disagreement(Index self, const CallSign& mine, std::span<const RankSign> others) {
  const auto odd = std::find_if(others.begin(), others.end(), [&](const RankSign& o) { return o.second != mine; });
  if (odd == others.end()) return std::nullopt;
  Ranks like_me{self}, like_odd;
  for (const RankSign& other : others) {
    Ranks* to = other.second == mine ? &like_me : other.second == odd->second ? &like_odd : nullptr;
    if (to != nullptr && std::find(to->begin(), to->end(), other.first) == to->end()) to->push_back(other.first);
  }
  std::sort(like_me.begin(), like_me.end());
  std::sort(like_odd.begin(), like_odd.end());
  const bool i_am_odd = like_me.size() < like_odd.size();
  const Ranks &few = i_am_odd ? like_me : like_odd, &many = i_am_odd ? like_odd : like_me;
  const CallSign &of_few = i_am_odd ? mine : odd->second, &of_many = i_am_odd ? odd->second : mine;
  if (mine.parts[CallSign::pass] != odd->second.parts[CallSign::pass])  // then the rest may differ rightly
    return text(ranks_text(few), few.size() == 1 ? " is in " : " are in ", pass_text(of_few), ", and ",
                ranks_text(many), " in ", pass_text(of_many));
  const std::string what = differing_parts(mine, odd->second);
  if (few.size() == 1 && many.size() == 1)
    return text("ranks ", min_of(few[0], many[0]), " and ", max_of(few[0], many[0]), " differ in ", what);
  return text(ranks_text(few), few.size() == 1 ? " differs from " : " differ from ", ranks_text(many), " in ", what);
}

std::optional<std::string> disagreement_in_pass(Index self, const CallSign& mine, std::span<const RankSign> others) {
  std::vector<RankSign> here;
  for (const RankSign& o : others)
    if (o.second.number() == mine.number()) here.push_back(o);
  return disagreement(self, mine, here);
}

Error disagreement_error(const std::string& disagreement, const std::string& beside) {
  return {beside.empty() ? disagreement : text(disagreement, " (", beside, ")"),
          "give every rank the same problem, options and arguments, and let all make the same calls in the same order; "
          "what this pass has written cannot be used"};
}

std::string to_text(const CallSign& sign) {
  std::string words;
  for (const std::uint32_t part : sign.parts) words += text(words.empty() ? "" : ":", part);
  return words;
}

std::optional<CallSign> sign_from_text(const std::string& words) {
  CallSign sign;
  const char *next = words.data(), *end = next + words.size();
  for (std::size_t p = 0; p < CallSign::kParts; ++p) {
    if (p > 0 && (next == end || *next++ != ':')) return std::nullopt;
    const auto [rest, error] = std::from_chars(next, end, sign.parts[p]);
    if (error != std::errc()) return std::nullopt;
    next = rest;
  }
  return next == end && sign.given() ? std::optional(sign) : std::nullopt;
}

void SignedCalls::collect(Index self, std::span<const Message> messages, std::uint32_t Met::* seen, Ranks& into) {
  const std::uint32_t pass = peers_.mine.number();
  into.clear();
  for (const Message& m : messages) {
    Met& met = met_[at(m.peer)];
    if (m.peer == self || met.pass == pass || met.*seen == pass || m.size() == 0) continue;
    met.*seen = pass;
    into.push_back(m.peer);
  }
}

const SignedPeers& SignedCalls::meet(Index self, std::span<const Message> sends, std::span<const Message> receives) {
  collect(self, sends, &Met::to, peers_.to);
  collect(self, receives, &Met::from, peers_.from);
  for (const Ranks* ranks : {&peers_.to, &peers_.from})
    for (const Index peer : *ranks) met_[at(peer)].pass = peers_.mine.number();
  return peers_;
}

const SignedPeers& SignedCalls::meet_all() {
  peers_.to.clear();
  if (std::exchange(met_all_, peers_.mine.number()) != peers_.mine.number()) {
    for (std::size_t peer = 0; peer < met_.size(); ++peer) {
      peers_.to.push_back(static_cast<Index>(peer));
      met_[peer].pass = peers_.mine.number();
    }
  }
  peers_.from = peers_.to;
  return peers_;
}

SignedPass::SignedPass(Communicator& communicator, const CallSign& sign, PassKind kind) : communicator_(communicator) {
  communicator.begin_pass(sign, static_cast<std::uint32_t>(kind));
}

SignedPass::~SignedPass() { communicator_.in_pass_ = false; }

}  // namespace weft::detail

namespace weft {
namespace {

// A call of a transport of the host's memory; fingerprints are messages of their own, before all others.
class SignedCall final : public Request::Pending {
 public:
  SignedCall(const Communicator& communicator, const detail::SignedPeers& peers)
      : communicator_(communicator), peers_(peers), came_(peers.from.size()) {}

  void add_to(std::vector<Message>& sends, std::vector<Message>& receives) {
    const auto block = [](detail::CallSign& sign) {
      constexpr Index kSize = sizeof(detail::CallSign);
      return Block{&sign, 1, 1, kSize, kSize, kSize};
    };
    std::vector<Message> to, from;
    for (const Index peer : peers_.to) to.push_back({peer, {block(peers_.mine)}});
    for (std::size_t i = 0; i < came_.size(); ++i) from.push_back({peers_.from[i], {block(came_[i])}});
    sends.insert(sends.begin(), std::make_move_iterator(to.begin()), std::make_move_iterator(to.end()));
    receives.insert(receives.begin(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  }
  void begin(std::unique_ptr<Request::Pending> inner) { inner_ = std::move(inner); }

  void wait() override {
    try {
      inner_->wait();
    } catch (const Error& e) {  // sizes that do not fit are only the consequence
      auto found = detail::disagreement(communicator_.rank(), peers_.mine, arrived());
      if (!found) found = detail::disagreement_in_pass(communicator_.rank(), peers_.mine, communicator_.shown_signs());
      if (found) throw detail::disagreement_error(*found, e.problem());
      throw;
    }
    if (const auto found = detail::disagreement(communicator_.rank(), peers_.mine, arrived()))
      throw detail::disagreement_error(*found);
  }

 private:
  std::vector<detail::RankSign> arrived() const {
    std::vector<detail::RankSign> known;
    for (std::size_t i = 0; i < came_.size(); ++i)
      if (came_[i].given()) known.emplace_back(peers_.from[i], came_[i]);
    return known;
  }

  const Communicator& communicator_;
  detail::SignedPeers peers_;
  std::vector<detail::CallSign> came_;
  std::unique_ptr<Request::Pending> inner_;  // destroyed first, because it may use the others' memory
};

}  // namespace

void Communicator::begin_pass(const detail::CallSign& sign, std::uint32_t kind) {
  if (ranks_ == 1) return;
  detail::CallSign numbered = sign;
  numbered.parts[detail::CallSign::pass] = ++counts_->passes_ * detail::CallSign::kKinds + kind;
  if (signs_ == nullptr) signs_ = std::make_shared<detail::SignedCalls>(ranks_);
  signs_->begin(numbered);
  in_pass_ = true;
  recorder()->set_sign(numbered);
  counts_->show_sign(numbered);
}

std::unique_ptr<Request::Pending> detail::signed_call(const Communicator& communicator, const SignedPeers& peers,
                                                      std::vector<Message> sends, std::vector<Message> receives,
                                                      const StartCall& start) {
  auto call = std::make_unique<SignedCall>(communicator, peers);
  call->add_to(sends, receives);
  call->begin(start(std::move(sends), std::move(receives)));
  return call;
}

std::unique_ptr<Request::Pending> Communicator::start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                             const detail::SignedPeers& peers) {
  return detail::signed_call(
      *this, peers, std::move(sends), std::move(receives),
      [this](std::vector<Message> to, std::vector<Message> from) { return start(std::move(to), std::move(from)); });
}

detail::SignedPeers Communicator::sign_collective() { return in_pass_ ? signs_->meet_all() : detail::SignedPeers{}; }

std::vector<std::pair<Index, detail::CallSign>> Communicator::shown_signs() const { return {}; }

std::string Communicator::fingerprint() const {
  const detail::CallSign sign = recorder()->sign();
  return sign.given() ? detail::to_text(sign) : "";
}

std::string Communicator::disagreement(std::span<const std::pair<Index, std::string>> others) const {
  std::vector<detail::RankSign> known;
  for (const auto& [rank, words] : others)
    if (const auto sign = detail::sign_from_text(words)) known.emplace_back(rank, *sign);
  const detail::CallSign mine = recorder()->sign();
  if (!mine.given()) return "";
  return detail::disagreement_in_pass(rank_, mine, known).value_or("");
}

}  // namespace weft
