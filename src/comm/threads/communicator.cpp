// The communicator of a rank that is a thread.
#include <string_view>

#include "comm/split.h"
#include "comm/threads/exchange.h"

namespace weft::threads {

namespace {

class ThreadCommunicator final : public Communicator {
 public:
  explicit ThreadCommunicator(Member self)
      : Communicator(self.rank, static_cast<Index>(self.group->members.size())), self_(std::move(self)) {}

  std::string_view name() const override { return "threads"; }
  double time_limit() const override { return self_.world->how.time_limit; }
  std::vector<detail::RankSign> shown_signs() const override { return self_.shown_signs(); }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Exchange>(self_, calls_++, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                 const detail::SignedPeers& peers) override {
    return std::make_unique<Exchange>(self_, calls_++, std::move(sends), std::move(receives), peers.mine);
  }
  void show_sign(const detail::CallSign& sign) override {
    const Lock lock(self_.group->shown_mutex);
    if (self_.group->shown.empty()) self_.group->shown.resize(self_.group->members.size());
    self_.group->shown[at(rank())][sign.number() % Group::kShown] = sign;
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override;
#ifdef WEFT_WITH_CUDA
  std::unique_ptr<DeviceCommunicator> make_on(const Place& place) override;
#endif

  Member self_;
  Index calls_ = 0;
};

std::unique_ptr<Communicator> ThreadCommunicator::make_split(Index color, Index key) {
  const SplitChoice mine{color, key, rank()};
  const Index number = calls_;
  Index me = 0;
  const std::vector<SplitChoice> all =  // not counted as traffic
      choices_of(
          gather_choices(mine, ranks(),
                         [this](auto sends, auto receives) { return start(std::move(sends), std::move(receives)); }),
          mine, me);

  const Lock lock(self_.world->mutex);
  Group::Split& split = self_.group->splits[{number, color}];
  if (split.group == nullptr) {  // the first rank makes it for all
    split.group = std::make_shared<Group>();
    for (const SplitChoice& choice : all) split.group->members.push_back(self_.world_rank(choice.rank));
    split.missing = static_cast<Index>(all.size());
  }
  Member member{self_.world, split.group, me};
  if (--split.missing == 0) self_.group->splits.erase({number, color});
  return std::make_unique<ThreadCommunicator>(std::move(member));
}

#ifdef WEFT_WITH_CUDA
std::unique_ptr<DeviceCommunicator> ThreadCommunicator::make_on(const Place& place) {
  // calls_ is the same on all ranks here, and no number is used twice: it names the board.
  const Index number = calls_++;
  std::shared_ptr<cuda::Board> board;
  {
    const Lock lock(self_.world->mutex);
    Group::Boards& shared = self_.group->boards[number];
    if (shared.board == nullptr) shared = {cuda::make_board(ranks()), ranks()};  // the first rank makes it for all
    board = shared.board;
    if (--shared.missing == 0) self_.group->boards.erase(number);
  }
  return cuda::make_device_threads(*this, std::move(board), place,
                                   [this](std::vector<Message> sends, std::vector<Message> receives) {
                                     return start(std::move(sends), std::move(receives));
                                   });
}
#endif

}  // namespace

std::unique_ptr<Communicator> make_communicator(Member self) {
  return std::make_unique<ThreadCommunicator>(std::move(self));
}

}  // namespace weft::threads
