// Ranks over MPI. A message is one or more MPI messages whose tag is the number of the call; MPI matches them in the
// order they were sent. They go straight from and to the caller's memory, except those that are added: they arrive in
// scratch memory, and wait() adds them.
#include <algorithm>
#include <cstddef>
#include <deque>
#include <exception>
#include <string>

#include <mpi.h>

#include "comm/blocks.h"
#include "comm/mpi/session.h"
#include "comm/mpi/transfers.h"
#include "comm/sign.h"
#include "comm/split.h"
#include "index.h"
#include "text.h"
#include "weft/mpi.h"

namespace weft {

namespace mpi {
namespace {

// What a communicator and its calls share.
struct Link {
  ~Link() {
    // MPI_Comm_free is collective: not while an exception unwinds, when other ranks may be elsewhere, nor if MPI cannot
    // be called any more. The communicator then ends with the process.
    if (comm != MPI_COMM_NULL && running() && !lost() && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm);
  }

  std::string name(Index peer) const {
    if (whole) return text("rank ", peer);
    return text("rank ", peer, " of a split (", members[at(peer)], " of all)");
  }
  int tag(Index call) const { return static_cast<int>(call % last_tag); }

  MPI_Comm comm = MPI_COMM_NULL;
  MpiOptions options;
  bool whole = true;           // not a split
  std::vector<Index> members;  // ranks of the whole
  Index rank = 0;
  Index last_tag = 32767;  // the least that MPI guarantees
};

// Takes ownership of `comm`.
std::shared_ptr<Link> make_link(MPI_Comm comm, const MpiOptions& options) {
  auto link = std::make_shared<Link>();
  link->comm = comm;
  link->options = options;
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0, ranks = 0, found = 0;
  int* last = nullptr;
  check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &ranks), "MPI_Comm_size");
  check(MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&last), &found), "MPI_Comm_get_attr");
  link->rank = rank;
  if (found != 0) link->last_tag = *last;
  for (Index i = 0; i < ranks; ++i) link->members.push_back(i);
  return link;
}

class Exchange final : public Request::Pending {
 public:
  Exchange(std::shared_ptr<Link> link, Index number, std::vector<Message> sends, std::vector<Message> receives);

  void wait() override;

 private:
  void post_receives();
  void finish_receives();
  void take_own(const Message& to, std::size_t& next) const;
  [[noreturn]] void refuse(const Transfers::Mismatch& wrong) const;
  [[noreturn]] void give_up() const;

  std::shared_ptr<Link> link_;
  Index number_;
  std::vector<Message> sends_, receives_;
  std::vector<const float*> arrived_;  // scratch of each receive; null where it goes to its destination
  Transfers transfers_;                // last, so that it is destroyed before the memory that it uses
};

Exchange::Exchange(std::shared_ptr<Link> link, Index number, std::vector<Message> sends, std::vector<Message> receives)
    : link_(std::move(link)),
      number_(number),
      sends_(std::move(sends)),
      receives_(std::move(receives)),
      arrived_(receives_.size()),
      transfers_(link_->comm, link_->tag(number), link_->options) {
  require_not_lost();
  post_receives();
  for (std::size_t i = 0; i < sends_.size(); ++i)
    if (sends_[i].peer != link_->rank) transfers_.post(Transfers::Way::send, i, sends_[i].peer, sends_[i].blocks);
}

void Exchange::post_receives() {
  bool added = false;  // a later message may replace the same bytes, so it has to go through scratch too
  for (std::size_t i = 0; i < receives_.size(); ++i) {
    const Message& m = receives_[i];
    added = added || adds(m.combine);
    if (m.peer == link_->rank) continue;
    if (!added) {
      transfers_.post(Transfers::Way::receive, i, m.peer, m.blocks);
      continue;
    }
    const auto floats = at(m.size()) / sizeof(float) + 1;  // replacing, bytes may be left over
    float* scratch = transfers_.keep(std::make_unique_for_overwrite<float[]>(floats)).get();
    const Block block{.data = scratch, .rows = 1, .bytes = m.size(), .row_stride = m.size(), .part_stride = m.size()};
    arrived_[i] = scratch;
    transfers_.post(Transfers::Way::receive, i, m.peer, {block});
  }
}

void Exchange::wait() {
  require_not_lost();
  if (!transfers_.wrong().empty()) refuse(transfers_.wrong().front());
  Patience patience(link_->options.time_limit);
  while (!transfers_.done()) {
    const bool moved = Transfers::advance_all();
    if (!transfers_.wrong().empty()) refuse(transfers_.wrong().front());
    if (moved) {
      patience.renew();
    } else if (patience.over()) {
      give_up();
    } else {
      patience.pause();
    }
  }
  finish_receives();
}

void Exchange::finish_receives() {
  std::size_t next_own = 0;
  for (std::size_t i = 0; i < receives_.size(); ++i) {
    const Message& m = receives_[i];
    if (m.peer == link_->rank) {
      take_own(m, next_own);
    } else if (arrived_[i] != nullptr) {
      const Block from{.data = const_cast<float*>(arrived_[i]), .rows = 1, .bytes = m.size()};
      move_blocks({&from, 1}, m.blocks, m.combine);
    }
  }
  const bool unwanted = std::any_of(sends_.begin() + static_cast<std::ptrdiff_t>(next_own), sends_.end(),
                                    [&](const Message& m) { return m.peer == link_->rank; });
  if (!unwanted) return;
  throw Error(text("call ", number_, ": ", link_->name(link_->rank), " sends more messages to itself than it receives"),
              "name the same messages on both sides");
}

// Copies the next message that this rank sends to itself.
void Exchange::take_own(const Message& to, std::size_t& next) const {
  while (next < sends_.size() && sends_[next].peer != link_->rank) ++next;
  const std::string self = link_->name(link_->rank);
  if (next == sends_.size()) {
    throw Error(text("call ", number_, ": ", self,
                     " receives more messages from itself than it sends; the next one has ", to.size(), " bytes"),
                "name the same messages on both sides");
  }
  const Message& from = sends_[next++];
  if (from.size() != to.size()) {
    throw Error(text("call ", number_, ": ", self, " sends ", from.size(), " bytes to itself and receives ", to.size()),
                "name as many bytes on both sides");
  }
  const auto holds = [&](const Block& block) { return holds_numbers(block, to.combine); };
  if (!std::all_of(from.blocks.begin(), from.blocks.end(), holds)) {
    throw Error(
        text("call ", number_, ": ", self, " adds what it sends itself from blocks not cut and aligned to ",
             number_size(to.combine) == 8 ? "f64" : "f32"),
        text("align the blocks that are sent, their sizes and their strides to ", number_size(to.combine), " bytes"));
  }
  move_blocks(from.blocks, to.blocks, to.combine);
}

void Exchange::refuse(const Transfers::Mismatch& wrong) const {
  const Index size = receives_[wrong.message].size();
  const char* in_piece = size > link_->options.largest ? " in a piece of it" : "";
  throw Error(text("call ", number_, ": ", link_->name(wrong.peer), " sends ", wrong.got, " bytes to ",
                   link_->name(link_->rank), ", which receives ", wrong.expected, in_piece, " (receive ", wrong.message,
                   " of ", receives_.size(), ", ", size, " bytes)"),
              "let both sides name as many bytes, and all ranks make the same calls in the same order");
}

void Exchange::give_up() const {
  std::string names;
  for (const Index peer : transfers_.peers_left()) names += text(names.empty() ? "" : ", ", link_->name(peer));
  throw PeerError(text(link_->name(link_->rank), " waited ", link_->options.time_limit, " seconds in call ", number_,
                       " for ", names),
                  "see what those ranks do, or raise MpiOptions::time_limit");
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<Link> link)
      : Communicator(link->rank, static_cast<Index>(link->members.size())), link_(std::move(link)) {}

  std::string_view name() const override { return "mpi"; }
  double time_limit() const override { return link_->options.time_limit; }
  std::vector<detail::RankSign> shown_signs() const override;

 private:
  void show_sign(const detail::CallSign& sign) override { sign_ = sign; }
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Exchange>(link_, calls_++, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override;
  bool reaches_gpus() const override { return cuda_aware(); }

  std::shared_ptr<Link> link_;
  Index calls_ = 0;
  detail::CallSign sign_;  // of the last pass
};

// Asked for an error alone. Ranks that wait for each other in vain give up at about the same time, and tell all others
// then, in messages with a tag that no call has; those that are elsewhere do not answer.
std::vector<detail::RankSign> MpiCommunicator::shown_signs() const {
  constexpr double kSeconds = 1;
  constexpr int kSize = sizeof(detail::CallSign);
  std::vector<detail::RankSign> known;
  if (!running() || lost()) return known;
  const int tag = static_cast<int>(link_->last_tag);
  static std::deque<detail::CallSign> sent;  // until the process ends, which is about to happen
  for (int peer = 0; peer < static_cast<int>(ranks()); ++peer) {
    if (peer == rank()) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    mpi::check(MPI_Isend(&sent.emplace_back(sign_), kSize, MPI_BYTE, peer, tag, link_->comm, &request), "MPI_Isend");
    MPI_Request_free(&request);
  }
  const Patience patience(kSeconds);
  while (static_cast<Index>(known.size()) + 1 < ranks() && !patience.over()) {
    int there = 0;
    MPI_Status status;
    mpi::check(MPI_Iprobe(MPI_ANY_SOURCE, tag, link_->comm, &there, &status), "MPI_Iprobe");
    if (there == 0) {
      if (!Transfers::advance_all()) patience.pause();  // others may wait for what this rank sends them
      continue;
    }
    detail::RankSign& one = known.emplace_back(status.MPI_SOURCE, detail::CallSign{});
    mpi::check(MPI_Recv(&one.second, kSize, MPI_BYTE, status.MPI_SOURCE, tag, link_->comm, MPI_STATUS_IGNORE),
               "MPI_Recv");
  }
  return known;
}

// MPI's colors and keys are ints, so it is given positions in the sorted list of all choices instead.
std::unique_ptr<Communicator> MpiCommunicator::make_split(Index color, Index key) {
  const SplitChoice mine{color, key, rank()};
  std::vector<SplitChoice> all =  // not counted as traffic
      gather_choices(mine, ranks(),
                     [this](auto sends, auto receives) { return start(std::move(sends), std::move(receives)); });
  const auto place = std::find(all.begin(), all.end(), mine) - all.begin();
  const auto group = std::find_if(all.begin(), all.end(), [&](const SplitChoice& c) { return c.color == color; });

  MPI_Comm part = MPI_COMM_NULL;
  mpi::check(MPI_Comm_split(link_->comm, static_cast<int>(group - all.begin()), static_cast<int>(place), &part),
             "MPI_Comm_split");
  const std::shared_ptr<Link> link = make_link(part, link_->options);
  link->whole = false;
  Index me = 0;
  all = choices_of(std::move(all), mine, me);
  for (std::size_t i = 0; i < all.size(); ++i) link->members[i] = link_->members[at(all[i].rank)];
  return std::make_unique<MpiCommunicator>(link);
}

void check_options(const MpiOptions& options) {
  constexpr Index kMost = Index{1} << 30;  // a power of two that an int can count
  if (!(options.time_limit > 0)) {
    throw Error(text("a time limit of ", options.time_limit, " seconds"), "give more than 0");
  }
  if (options.largest < 1 || options.largest > kMost) {
    throw Error(text("MPI messages of ", options.largest, " bytes at most"), text("give 1 to ", kMost));
  }
}

std::unique_ptr<Communicator> duplicate(MPI_Comm comm, const MpiOptions& options) {
  check_options(options);
  require_not_lost();
  MPI_Comm own = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &own), "MPI_Comm_dup");
  return std::make_unique<MpiCommunicator>(make_link(own, options));
}

void require_running() {
  if (!running()) throw Error("MPI is not initialised, or finalised already", "make an MpiSession first, and keep it");
}

}  // namespace
}  // namespace mpi

std::unique_ptr<Communicator> mpi_world(const MpiOptions& options) {
  mpi::require_running();
  return mpi::duplicate(MPI_COMM_WORLD, options);
}

std::unique_ptr<Communicator> mpi_communicator(int fortran_handle, const MpiOptions& options) {
  mpi::require_running();
  return mpi::duplicate(MPI_Comm_f2c(fortran_handle), options);
}

}  // namespace weft
