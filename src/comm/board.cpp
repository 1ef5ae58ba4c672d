#include "comm/board.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <new>

#include <sys/mman.h>

#include "index.h"
#include "text.h"

namespace weft::detail {
namespace {

using Word = BoardMemory::Word;

// Words of a connection of a rank: context, number of calls started, whether it failed, the reason, and the last calls.
constexpr Index kContext = 0, kPosted = 1, kFailed = 2, kWhy = 3, kWhyWords = 64, kCallsAt = kWhy + kWhyWords;
// Words of a call: place among the connection's calls + 1, eight letters of the pass, step, then bytes to and from each
// rank of the whole.
constexpr Index kNumber = 0, kPass = 1, kStep = 2, kTo = 3;

Index call_words(Index ranks) { return kTo + 2 * ranks; }

// `place`: among the calls of the connection.
Word* call_at(Word* link, Index place, Index ranks) {
  return link + kCallsAt + place % FlightRecorder::kCalls * call_words(ranks);
}

std::string seconds_text(double seconds) { return text(std::fixed, std::setprecision(1), seconds, " s"); }

void write_text(Word* words, const std::string& from) {
  for (Index i = 0; i < kWhyWords; ++i) {
    std::uint64_t word = 0;
    const std::size_t begin = at(i) * sizeof word;
    if (begin < from.size()) std::memcpy(&word, from.data() + begin, std::min(sizeof word, from.size() - begin));
    words[i] = word;
  }
}

std::string read_text(const Word* words, Index count) {
  std::string all;
  for (Index i = 0; i < count; ++i) {
    const std::uint64_t word = words[i];
    char letters[sizeof word + 1] = {};
    std::memcpy(letters, &word, sizeof word);
    all += letters;
    if (std::strlen(letters) < sizeof word) break;
  }
  return all;
}

}  // namespace

BoardMemory::BoardMemory(Index ranks)
    : ranks_(ranks),
      link_words_(kCallsAt + FlightRecorder::kCalls * call_words(ranks)),
      bytes_(at(ranks * (kRankWords + kLinks * link_words_)) * sizeof(Word)) {
  // Zeros; pages that nobody writes take no memory.
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  words_ = static_cast<Word*>(memory);
}

BoardMemory::~BoardMemory() { ::munmap(static_cast<void*>(words_), bytes_); }

Board::Board(std::shared_ptr<BoardMemory> memory, std::vector<Index> members, Index self)
    : memory_(std::move(memory)), members_(std::move(members)), self_(self), seen_(members_.size()) {}

Board::~Board() {
  if (mine_ != nullptr && mine_[kFailed] == 0) mine_[kContext] = 0;  // a failure stays to be seen
}

std::unique_ptr<Board> Board::connection(std::uint64_t context, Index first) const {
  auto made = std::make_unique<Board>(memory_, members_, self_);
  made->context_ = context;
  made->first_ = first;
  made->communicator_ = communicator_;
  const Index rank = members_[at(self_)];
  for (const bool reuse : {false, true}) {  // a place of a failed connection only if there is no other
    for (Index i = 0; i < BoardMemory::kLinks && made->mine_ == nullptr; ++i) {
      Word* link = memory_->link(rank, i);
      if (link[kContext] != 0 && !(reuse && link[kFailed] != 0)) continue;
      link[kContext] = 0;
      link[kPosted] = link[kFailed] = 0;
      for (Index call = 0; call < FlightRecorder::kCalls; ++call) call_at(link, call, memory_->ranks())[kNumber] = 0;
      link[kContext] = context;
      made->mine_ = link;
    }
  }
  return made;
}

std::unique_ptr<Board> Board::part(std::vector<Index> members, Index self) const {
  return std::make_unique<Board>(memory_, std::move(members), self);
}

void Board::beat() { ++memory_->beats(members_[at(self_)]); }

// A place is empty while it is written.
void Board::show(const CallSign& sign) {
  Word* to = memory_->shown(members_[at(self_)], sign.number());
  to[0] = 0;
  for (std::size_t p = 0; p < CallSign::kParts; ++p) to[1 + p] = sign.parts[p];
  to[0] = communicator_;
}

void Board::append_shown(Index member, std::vector<RankSign>& to) const {
  for (Index place = 0; place < BoardMemory::kShown; ++place) {
    Word* from = memory_->shown(members_[at(member)], place);
    CallSign sign;
    if (from[0] != communicator_) continue;
    for (std::size_t p = 0; p < CallSign::kParts; ++p) sign.parts[p] = static_cast<std::uint32_t>(from[1 + p].load());
    if (from[0] == communicator_) to.emplace_back(member, sign);
  }
}

std::vector<RankSign> Board::shown() const {
  std::vector<RankSign> all;
  for (Index peer = 0; peer < static_cast<Index>(members_.size()); ++peer)
    if (peer != self_) append_shown(peer, all);
  return all;
}

std::string Board::why_they_differ() const {
  std::vector<RankSign> mine;
  append_shown(self_, mine);
  const std::vector<RankSign> others = shown();
  for (const RankSign& own : mine)
    if (const auto found = disagreement_in_pass(self_, own.second, others)) return text("; ", *found);
  return "";
}

void Board::post(const RecordedCall& call, std::span<const Message> sends, std::span<const Message> receives) {
  if (mine_ == nullptr) return;
  const Index ranks = memory_->ranks();
  const auto number = static_cast<std::uint64_t>(place(call.number) + 1);
  Word* posted = call_at(mine_, place(call.number), ranks);
  posted[kNumber] = 0;
  std::uint64_t pass = 0;
  if (call.pass != nullptr) std::memcpy(&pass, call.pass, std::min(sizeof pass, std::strlen(call.pass)));
  posted[kPass] = pass;
  posted[kStep] = static_cast<std::uint64_t>(call.step);
  for (Index i = 0; i < 2 * ranks; ++i) posted[kTo + i].store(0, std::memory_order_relaxed);
  for (const Message& m : sends) posted[kTo + members_[at(m.peer)]] += static_cast<std::uint64_t>(m.size());
  for (const Message& m : receives) posted[kTo + ranks + members_[at(m.peer)]] += static_cast<std::uint64_t>(m.size());
  posted[kNumber] = number;
  mine_[kPosted] = number;
}

void Board::fail(const Trouble& why) {
  if (mine_ == nullptr || mine_[kFailed] != 0) return;
  write_text(mine_ + kWhy, why.cause.empty() ? why.problem : why.cause);
  mine_[kFailed] = 1;
}

Word* Board::link_of(Index peer) const {
  for (Index i = 0; i < BoardMemory::kLinks; ++i)
    if (Word* link = memory_->link(members_[at(peer)], i); link[kContext] == context_) return link;
  return nullptr;
}

// "call 7 (forward step 2)", by this rank's number, as the connection's owner has posted it.
std::string Board::call_name(Word* link, Index call) const {
  if (link == nullptr) return text("call ", call);
  Word* posted = call_at(link, place(call), memory_->ranks());
  if (posted[kNumber] != static_cast<std::uint64_t>(place(call) + 1)) return text("call ", call);
  const std::string pass = read_text(posted + kPass, 1);
  if (pass.empty()) return text("call ", call);
  return text("call ", call, " (", step_text(pass.c_str(), static_cast<Index>(posted[kStep].load())), ")");
}

std::string Board::waits(Index call) const {
  return text("rank ", self_, " waits in ", call < 0 ? "the start of NCCL" : call_name(mine_, call));
}

std::optional<Trouble> Board::ended(Index peer, Index call) const {
  const auto end = static_cast<BoardMemory::End>(memory_->end(members_[at(peer)]).load());
  Word* theirs = link_of(peer);
  if (theirs != nullptr && theirs[kFailed] != 0) {
    const std::string cause = read_text(theirs + kWhy, kWhyWords);
    return Trouble{text("rank ", peer, " gave up while ", waits(call), ": ", cause), true, cause};
  }
  if (end == BoardMemory::End::failed)
    return Trouble{text("rank ", peer, " has failed or died while ", waits(call)), true};
  const bool will_not_come =
      theirs == nullptr || theirs[kPosted] <= static_cast<std::uint64_t>(std::max<Index>(place(call), 0));
  if (end == BoardMemory::End::well && will_not_come)
    return Trouble{text("rank ", peer, " has ended while ", waits(call)), true};
  return std::nullopt;
}

std::optional<Trouble> Board::mismatch_with(Index peer, Index call) const {
  Word* theirs = link_of(peer);
  if (call < 0 || mine_ == nullptr || theirs == nullptr) return std::nullopt;
  const Index ranks = memory_->ranks();
  Word *here = call_at(mine_, place(call), ranks), *there = call_at(theirs, place(call), ranks);
  const auto number = static_cast<std::uint64_t>(place(call) + 1);
  if (here[kNumber] != number || there[kNumber] != number) return std::nullopt;
  const Index me = members_[at(self_)], other = members_[at(peer)];
  const std::uint64_t sent = here[kTo + other], wanted = there[kTo + ranks + me];
  const std::uint64_t coming = there[kTo + me], taken = here[kTo + ranks + other];
  const std::string name = call_name(mine_, call);
  if (there[kNumber] != number) return std::nullopt;  // overwritten meanwhile
  const auto words = [&](Index from, std::uint64_t bytes, Index to, std::uint64_t takes) {
    return Trouble{text(name, ": rank ", from, " sends ", bytes, " bytes to rank ", to, ", which receives ", takes,
                        ": they were given different problems, options or tensors", why_they_differ())};
  };
  if (sent != wanted) return words(self_, sent, peer, wanted);
  if (coming != taken) return words(peer, coming, self_, taken);
  return std::nullopt;
}

Trouble Board::over(Index call, double limit) const {
  std::string silent, behind;
  const auto now = Clock::now();
  const double longest = std::min(limit / 2, 5.0);  // without a sign of life; they come every 50 ms
  for (Index peer = 0; peer < static_cast<Index>(members_.size()); ++peer) {
    if (peer == self_) continue;
    const double quiet = std::chrono::duration<double>(now - seen_[at(peer)].since).count();
    Word* theirs = link_of(peer);
    const auto posted = theirs == nullptr ? Index{0} : static_cast<Index>(theirs[kPosted].load());
    if (quiet > longest) {
      silent += text(silent.empty() ? "" : ", ", "rank ", peer, ", which has given no sign of life for ",
                     seconds_text(quiet));
    } else if (theirs == nullptr || posted <= place(call)) {
      behind += text(behind.empty() ? "" : ", ", "rank ", peer, ", which ",
                     theirs == nullptr ? "is not there"
                     : posted == 0     ? "has made no call yet"
                                       : "has come to " + call_name(theirs, first_ + posted - 1));
    }
  }
  const std::string whom = !silent.empty() ? silent : !behind.empty() ? behind : "ranks that have all started it";
  return {text(waits(call), " for ", seconds_text(limit), ", for ", whom, why_they_differ())};
}

std::optional<Trouble> Board::mismatch(Index call) const {
  for (Index peer = 0; peer < static_cast<Index>(members_.size()); ++peer)
    if (peer != self_)
      if (std::optional<Trouble> found = mismatch_with(peer, call)) return found;
  return std::nullopt;
}

std::optional<Trouble> Board::trouble(Index call, double waited, double limit) {
  for (Index peer = 0; peer < static_cast<Index>(members_.size()); ++peer) {
    Seen& seen = seen_[at(peer)];
    const std::uint64_t beats = memory_->beats(members_[at(peer)]);
    if (beats != seen.beats) seen = {beats, Clock::now()};
  }
  // First, because it names the cause where others have already given up because of it.
  if (std::optional<Trouble> found = mismatch(call)) return found;
  for (Index peer = 0; peer < static_cast<Index>(members_.size()); ++peer)
    if (peer != self_)
      if (std::optional<Trouble> found = ended(peer, call)) return found;
  if (waited > limit) return over(call, limit);
  return std::nullopt;
}

}  // namespace weft::detail
