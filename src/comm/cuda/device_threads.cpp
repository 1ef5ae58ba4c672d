// A call puts what it sends and receives on the board. Whoever of two ranks comes second has the copies between them
// made, each in the receiver's own stream: after the points that both ranks' streams had come to when they made the
// call. wait() meets the peers on the CPU, so that all copies are known, and lets the caller's stream wait for those of
// the call: for what comes, and for what others still read.
#include "comm/cuda/device_threads.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "cuda/check.h"
#include "cuda/kept.h"
#include "cuda/memory.h"
#include "cuda/on_device.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cuda {
namespace {

// What one rank does in one call. Guarded by the board's mutex.
struct Post {
  std::vector<Message> sends, receives;      // what is added to is received aside first
  int device = 0;                            // this rank's
  std::shared_ptr<Stream> stream;            // of copies to this rank
  Event ready;                               // where the caller's stream had come to
  std::vector<std::shared_ptr<Event>> done;  // copies to this rank, and those that others made of its memory
  std::optional<std::string> fault;          // the two sides do not fit
  bool withdrawn = false;
};

}  // namespace

struct Board {
  std::mutex mutex;
  Index ranks = 0;
  std::map<Index, std::vector<std::shared_ptr<Post>>> calls;  // that not all ranks have made
};

std::shared_ptr<Board> make_board(Index ranks) {
  auto board = std::make_shared<Board>();
  board->ranks = ranks;
  return board;
}

namespace {

std::vector<const Message*> between(const std::vector<Message>& list, Index peer) {
  std::vector<const Message*> some;
  for (const Message& m : list)
    if (m.peer == peer && m.size() > 0) some.push_back(&m);
  return some;
}

// Everything that `from` sends to `to`.
void copy_between(Post& from, Index from_rank, Post& to, Index to_rank) {
  const std::vector<const Message*> sends = between(from.sends, to_rank), receives = between(to.receives, from_rank);
  if (from.withdrawn || to.withdrawn || (sends.empty() && receives.empty())) return;
  std::vector<Segment> all;
  for (std::size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
    const Index sent = i < sends.size() ? sends[i]->size() : 0, wanted = i < receives.size() ? receives[i]->size() : 0;
    if (sent != wanted) {
      from.fault = to.fault = text("rank ", from_rank, " sends ", sent, " bytes to rank ", to_rank, ", which receives ",
                                   wanted, " (message ", i, " between them)");
      return;
    }
    const std::vector<Segment> some = segments(sends[i]->blocks, receives[i]->blocks);
    all.insert(all.end(), some.begin(), some.end());
  }
  const OnDevice on(to.device);
  const cudaStream_t stream = to.stream->get();
  WEFT_CUDA(cudaStreamWaitEvent(stream, from.ready.get()));
  WEFT_CUDA(cudaStreamWaitEvent(stream, to.ready.get()));
  copy(all, stream);
  const auto done = std::make_shared<Event>();
  WEFT_CUDA(cudaEventRecord(done->get(), stream));
  from.done.push_back(done);
  if (&from != &to) to.done.push_back(done);
}

// A receive that adds, put aside until wait().
struct Aside {
  Message to;
  StreamArray<char> memory;

  Block block() const { return {memory.get(), 1, 1, to.size(), to.size(), to.size()}; }
};

class DeviceExchange final : public Request::Pending {
 public:
  DeviceExchange(std::shared_ptr<Board> board, Index number, Index rank, std::shared_ptr<Stream> stream,
                 const Place& caller, std::vector<Message> sends, std::vector<Message> receives,
                 const HostCall& host_call)
      : board_(std::move(board)), caller_(static_cast<cudaStream_t>(caller.stream)), mine_(std::make_shared<Post>()) {
    std::set<Index> peers;
    for (const std::vector<Message>* list : {&sends, &receives})
      for (const Message& m : *list)
        if (m.peer != rank && m.size() > 0) peers.insert(m.peer);
    for (Message& m : receives) {
      if (m.combine == Message::Combine::replace || m.size() == 0) continue;
      Aside aside{m, StreamArray<char>(static_cast<std::size_t>(m.size()), caller_)};
      m.blocks = {aside.block()};
      asides_.push_back(std::move(aside));
    }
    mine_->sends = std::move(sends);
    mine_->receives = std::move(receives);
    mine_->device = caller.device;
    mine_->stream = std::move(stream);
    WEFT_CUDA(cudaEventRecord(mine_->ready.get(), caller_));
    post(number, rank);
    // The peers meet: what each has put on the board is there when it has come.
    std::vector<Message> to, from;
    tokens_.resize(peers.size() + 1);
    for (const Index peer : peers) {
      to.push_back({peer, {token(tokens_.front())}});
      from.push_back({peer, {token(tokens_[from.size() + 1])}});
    }
    meeting_ = host_call(std::move(to), std::move(from));
  }

  ~DeviceExchange() override {
    if (waited_) return;
    const std::lock_guard lock(board_->mutex);
    mine_->withdrawn = true;
    for (const auto& done : mine_->done) cudaEventSynchronize(done->get());  // nobody touches the memory afterwards
  }

  void wait() override {
    meeting_->wait();
    const OnDevice on(mine_->device);
    const std::lock_guard lock(board_->mutex);
    if (mine_->fault)
      throw Error(*mine_->fault,
                  "let both sides name as many bytes, and all ranks make the same calls in the same order");
    for (const auto& done : mine_->done) WEFT_CUDA(cudaStreamWaitEvent(caller_, done->get()));
    waited_ = true;
    for (Aside& aside : asides_) {
      const Block from = aside.block();
      add_f32(segments({&from, 1}, aside.to.blocks), caller_);
    }
    asides_.clear();
  }

 private:
  static Block token(char& byte) { return {&byte, 1, 1, 1, 1, 1}; }

  void post(Index number, Index rank) {
    const std::lock_guard lock(board_->mutex);
    std::vector<std::shared_ptr<Post>>& all = board_->calls[number];
    all.resize(slot(board_->ranks));
    all[slot(rank)] = mine_;
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
      if (all[peer] == nullptr) continue;
      copy_between(*mine_, rank, *all[peer], static_cast<Index>(peer));
      if (static_cast<Index>(peer) != rank) copy_between(*all[peer], static_cast<Index>(peer), *mine_, rank);
    }
    if (std::all_of(all.begin(), all.end(), [](const auto& post) { return post != nullptr; }))
      board_->calls.erase(number);
  }

  std::shared_ptr<Board> board_;
  cudaStream_t caller_;
  std::shared_ptr<Post> mine_;
  std::vector<Aside> asides_;
  std::vector<char> tokens_;  // the one that is sent, those that come
  std::unique_ptr<Request::Pending> meeting_;
  bool waited_ = false;
};

class DeviceThreads final : public DeviceCommunicator {
 public:
  DeviceThreads(Communicator& ranks, std::shared_ptr<Board> board, const Place& place, HostCall host_call)
      : DeviceCommunicator(ranks.rank(), ranks.ranks(), ranks),
        board_(std::move(board)),
        place_(place),
        host_call_(std::move(host_call)) {
    const OnDevice on(place.device);
    stream_ = std::make_shared<Stream>(true);  // the next step waits for what it brings
  }

  std::string_view name() const override { return "threads"; }
  void use(void* stream) override { place_.stream = stream; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const OnDevice on(place_.device);
    return std::make_unique<DeviceExchange>(board_, calls_++, rank(), stream_, place_, std::move(sends),
                                            std::move(receives), host_call_);
  }
  std::unique_ptr<Communicator> make_split(Index, Index) override {
    throw Error("a communicator on a GPU cannot be split", "split the one that it was made of, and call on() then");
  }

  std::shared_ptr<Board> board_;
  std::shared_ptr<Stream> stream_;
  Place place_;  // with the caller's stream
  HostCall host_call_;
  Index calls_ = 0;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& ranks, std::shared_ptr<Board> board,
                                                        const Place& place, HostCall host_call) {
  return std::make_unique<DeviceThreads>(ranks, std::move(board), place, std::move(host_call));
}

}  // namespace weft::cuda
