#include "comm/processes/communicator.h"

#include <chrono>
#include <numeric>
#include <utility>

#include "comm/blocks.h"
#include "comm/board.h"
#include "comm/split.h"
#include "index.h"
#include "text.h"

namespace weft::processes {
namespace {

using Clock = std::chrono::steady_clock;

// What a communicator and its calls share.
struct Group {
  std::shared_ptr<Sockets> sockets;
  std::shared_ptr<detail::Board> board;
  double time_limit = 0;
  std::uint64_t context = 0;   // tells the messages of this communicator from those of others over the same sockets
  std::vector<Index> members;  // ranks of the whole, which the sockets know
  Index rank = 0;
  bool whole = true;  // not a split

  std::string name(Index peer) const {
    if (whole) return text("rank ", peer);
    return text("rank ", peer, " of a split (", members[at(peer)], " of all)");
  }
};

Block whole_block(Bytes& bytes) { return {.data = bytes.data(), .rows = 1, .bytes = static_cast<Index>(bytes.size())}; }

class Exchange final : public Request::Pending {
 public:
  Exchange(std::shared_ptr<Group> group, std::uint64_t number, const std::vector<Message>& sends,
           std::vector<Message> receives)
      : group_(std::move(group)), call_{group_->context, number}, receives_(std::move(receives)) {
    for (const Message& m : sends) {
      Bytes bytes(at(m.size()));
      const Block to = whole_block(bytes);
      move_blocks(m.blocks, {&to, 1}, Message::Combine::replace);
      group_->sockets->send(group_->members[at(m.peer)], call_, std::move(bytes));
    }
    group_->sockets->progress(0);
  }

  ~Exchange() override {
    if (!done_) group_->sockets->abandon(call_);
  }

  void wait() override {
    if (done_) return;
    std::size_t next = 0;
    auto last_moved = Clock::now();
    for (;;) {
      for (; next < receives_.size() && take(receives_[next]); ++next) last_moved = Clock::now();
      if (next == receives_.size() && group_->sockets->all_sent()) break;
      constexpr int kMilliseconds = 50;
      if (group_->sockets->progress(kMilliseconds)) {
        last_moved = Clock::now();
      } else if (std::chrono::duration<double>(Clock::now() - last_moved).count() > group_->time_limit) {
        give_up(next);
      }
    }
    for (Index peer = 0; peer < static_cast<Index>(group_->members.size()); ++peer) {
      if (!group_->sockets->take(group_->members[at(peer)], call_)) continue;
      throw Error(text("call ", call_.number, ": ", group_->name(peer), " sends more messages to ",
                       group_->name(group_->rank), " than it receives"),
                  "name the same messages on both sides");
    }
    done_ = true;
  }

 private:
  // Returns false if the message is not there yet.
  bool take(const Message& m) {
    const Index peer = group_->members[at(m.peer)];
    std::optional<Bytes> got = group_->sockets->take(peer, call_);
    if (!got && group_->sockets->is_past(peer, call_)) refuse(m, "no message");
    if (!got && group_->sockets->is_closed(peer)) {
      throw PeerError(text(group_->name(m.peer), " ended while ", group_->name(group_->rank), " waited for it in call ",
                           call_.number),
                      "see what that rank did", true);
    }
    if (!got) return false;
    if (static_cast<Index>(got->size()) != m.size()) refuse(m, text(got->size(), " bytes"));
    const Block from = whole_block(*got);
    move_blocks({&from, 1}, m.blocks, m.combine);
    return true;
  }

  [[noreturn]] void refuse(const Message& m, const std::string& sent) const {
    throw Error(text("call ", call_.number, ": ", group_->name(m.peer), " sends ", sent, " to ",
                     group_->name(group_->rank), ", which receives ", m.size(), " bytes"),
                "let both sides name as many bytes, and all ranks make the same calls in the same order");
  }

  [[noreturn]] void give_up(std::size_t next) const {
    const std::string whom =
        next < receives_.size() ? group_->name(receives_[next].peer) : "ranks that take no messages";
    throw PeerError(text(group_->name(group_->rank), " waited ", group_->time_limit, " seconds in call ", call_.number,
                         " for ", whom),
                    "see what those ranks do, or raise ProcessRanks::time_limit");
  }

  std::shared_ptr<Group> group_;
  CallId call_;
  std::vector<Message> receives_;
  bool done_ = false;
};

class ProcessCommunicator final : public Communicator {
 public:
  explicit ProcessCommunicator(std::shared_ptr<Group> group)
      : Communicator(group->rank, static_cast<Index>(group->members.size())), group_(std::move(group)) {}

  std::string_view name() const override { return "processes"; }
  double time_limit() const override { return group_->time_limit; }
  std::shared_ptr<detail::Board> board() const override { return group_->board; }
  std::vector<detail::RankSign> shown_signs() const override { return group_->board->shown(); }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Exchange>(group_, calls_++, sends, std::move(receives));
  }

  void show_sign(const detail::CallSign& sign) override { group_->board->show(sign); }

  std::unique_ptr<Communicator> make_split(Index color, Index key) override {
    Index me = 0;
    const SplitChoice mine{color, key, rank()};
    const std::uint64_t number = calls_;  // the same on all ranks, so it can name the new communicators
    const std::vector<SplitChoice> all =  // not counted as traffic
        choices_of(
            gather_choices(mine, ranks(),
                           [this](auto sends, auto receives) { return start(std::move(sends), std::move(receives)); }),
            mine, me);
    auto part = std::make_shared<Group>(*group_);
    // Colors are told apart by their members: two parts of one split have no sockets in common.
    part->context = (group_->context * 1'000'003 + number + 1) * 0x9e3779b97f4a7c15;
    part->whole = false;
    part->members.clear();
    part->rank = me;
    for (const SplitChoice& c : all) part->members.push_back(group_->members[at(c.rank)]);
    part->board = group_->board->part(part->members, me);
    part->board->set_communicator(part->context | 1);
    return std::make_unique<ProcessCommunicator>(std::move(part));
  }

  std::shared_ptr<Group> group_;
  std::uint64_t calls_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(Index ranks, std::shared_ptr<Sockets> sockets,
                                                std::shared_ptr<detail::BoardMemory> board, double time_limit) {
  auto group = std::make_shared<Group>();
  group->rank = sockets->rank();
  group->sockets = std::move(sockets);
  group->time_limit = time_limit;
  group->members.resize(at(ranks));
  std::iota(group->members.begin(), group->members.end(), Index{0});
  group->board = std::make_shared<detail::Board>(std::move(board), group->members, group->rank);
  group->board->set_communicator(1);
  return std::make_unique<ProcessCommunicator>(std::move(group));
}

}  // namespace weft::processes
