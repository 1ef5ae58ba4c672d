// Ranks that are threads. A call posts its sends and receives on a board. Once all ranks that a rank receives from have
// posted, the copies to it are launched in its own stream, after the points that the senders' streams had reached when
// they posted. wait() meets the peers on the CPU, so that all copies are known, and makes the caller's stream wait for
// them: for data received, and for memory that others still read. Messages with at_once are added directly from the
// senders' memory.
#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "comm/cuda/transports.h"
#include "comm/flight.h"
#include "comm/sign.h"
#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {
namespace {

// A message that is received at once: not applied before all have come, because sums have a fixed order.
struct ImmediateReceive {
  const Message* to = nullptr;
  std::vector<Block> from = {};    // empty: the sender has not posted
  StreamArray<char> staging = {};  // copy of a message whose sender could not wait for the others
};

// What one rank does in one call. Guarded by the board's mutex.
struct Post {
  Index rank = 0;
  std::vector<Message> sends, receives;            // receives that add are redirected to staging memory
  int device = 0;                                  // this rank's GPU
  std::shared_ptr<PooledStream> stream;            // for copies to this rank
  PooledEvent ready;                               // the point that the caller's stream had reached
  std::set<Index> awaited;                         // ranks whose messages are still missing
  std::vector<std::shared_ptr<Post>> from;         // ranks that have posted and are to be copied from
  std::vector<Segment> segments;                   // copies from those ranks
  std::vector<ImmediateReceive> at_once;           // in the order of `receives`
  std::vector<std::weak_ptr<Post>> to;             // ranks that have posted and copy from this one
  std::vector<std::shared_ptr<PooledEvent>> done;  // copies to this rank, and copies that others made of its memory
  std::optional<std::string> fault;                // sends and receives do not match
  bool withdrawn = false;
};

}  // namespace

struct Board {
  std::mutex mutex;
  Index ranks = 0;
  std::map<Index, std::vector<std::shared_ptr<Post>>> calls;  // calls that not all ranks have posted
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

// Enables peer access from the current GPU to another one, once.
void enable_peer_access(int from, int to) {
  if (from == to) return;
  int can = 0;
  WEFT_CUDA(cudaDeviceCanAccessPeer(&can, to, from));
  if (can == 0)
    throw Error(text("GPU ", to, " cannot read memory of GPU ", from),
                "give each rank a process of its own, with NCCL");
  const cudaError_t result = cudaDeviceEnablePeerAccess(from, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) return clear_last_error(result);
  check(result, "cudaDeviceEnablePeerAccess");
}

// Messages to the same destination go in one launch.
void combine(const std::vector<ImmediateReceive>& all, cudaStream_t stream) {
  std::vector<std::vector<Segment>> lists;
  bool replace = false;
  const auto flush = [&] {
    if (lists.size() == 1 && replace)
      copy(lists.front(), stream);  // any dtype
    else
      sum_f32(lists, replace, stream);
    lists.clear();
  };
  for (const ImmediateReceive& part : all) {
    std::vector<Segment> next = segments(part.from, part.to->blocks);
    const bool replaces = part.to->combine == Message::Combine::replace;
    if (lists.empty() || replaces || !alike(lists.front(), next)) {
      flush();
      replace = replaces;
    }
    lists.push_back(std::move(next));
  }
  flush();
}

// Copies messages aside, so that their senders need not wait for ranks that have not posted.
void copy_to_staging(std::vector<ImmediateReceive>& all, cudaStream_t stream) {
  for (ImmediateReceive& part : all) {
    if (part.from.empty() || part.staging.size() > 0) continue;
    const Index size = part.to->size();
    part.staging = StreamArray<char>(at(size), stream);
    const Block whole{part.staging.get(), 1, 1, size, size, size};
    copy(segments(part.from, {&whole, 1}), stream);
    part.from = {whole};
  }
}

// Launches the copies to a rank that are known so far.
void copy_to(Post& to) {
  if (to.from.empty() || to.withdrawn) return;
  const std::vector<std::shared_ptr<Post>> sources = std::exchange(to.from, {});
  const std::vector<Segment> all = std::exchange(to.segments, {});
  for (const auto& from : sources)
    if (from->withdrawn) to.fault = text("rank ", from->rank, " gave up a call that rank ", to.rank, " waits in");
  if (to.fault) return;
  try {
    const DeviceGuard on(to.device);
    for (const auto& from : sources) enable_peer_access(from->device, to.device);
    const cudaStream_t stream = to.stream->get();
    WEFT_CUDA(cudaStreamWaitEvent(stream, to.ready.get()));
    for (const auto& from : sources)
      if (from.get() != &to) WEFT_CUDA(cudaStreamWaitEvent(stream, from->ready.get()));
    const auto done = std::make_shared<PooledEvent>();
    synchronize_on_failure(stream, [&] {  // without the event nobody could wait for the copies
      copy(all, stream);
      to.awaited.empty() ? combine(to.at_once, stream) : copy_to_staging(to.at_once, stream);
      WEFT_CUDA(cudaEventRecord(done->get(), stream));
    });
    if (to.awaited.empty()) to.at_once.clear();
    to.done.push_back(done);
    for (const auto& from : sources)
      if (from.get() != &to) from->done.push_back(done);
  } catch (const std::exception& e) {  // any rank's thread may run this, but the receiver must know
    to.fault = text("copies to rank ", to.rank, " could not be started (", e.what(), ")");
    throw;
  }
}

// Matches everything that `from` sends to `to`; both have posted.
void match(const std::shared_ptr<Post>& from, const std::shared_ptr<Post>& to) {
  const std::vector<const Message*> sends = between(from->sends, to->rank);
  const std::vector<const Message*> receives = between(to->receives, from->rank);
  for (std::size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
    const Index sent = i < sends.size() ? sends[i]->size() : 0, wanted = i < receives.size() ? receives[i]->size() : 0;
    if (sent != wanted) {
      from->fault = to->fault = text("rank ", from->rank, " sends ", sent, " bytes to rank ", to->rank,
                                     ", which receives ", wanted, " (message ", i, " between them)");
      return;
    }
    if (receives[i]->at_once) {
      const auto is = [&](const ImmediateReceive& part) { return part.to == receives[i]; };
      std::find_if(to->at_once.begin(), to->at_once.end(), is)->from = sends[i]->blocks;
      continue;
    }
    const std::vector<Segment> some = segments(sends[i]->blocks, receives[i]->blocks);
    to->segments.insert(to->segments.end(), some.begin(), some.end());
  }
  to->awaited.erase(from->rank);
  if (sends.empty()) return;
  to->from.push_back(from);
  if (from != to) from->to.push_back(to);
  if (to->awaited.empty()) copy_to(*to);
}

// Staging memory for receives that add, until wait().
class AddStaging {
 public:
  // Redirects those receives, one behind the other.
  void redirect(std::vector<Message>& receives, cudaStream_t stream) {
    Index bytes = 0;
    for (const Message& m : receives)
      if (adds(m)) bytes += padded(m);
    memory_ = StreamArray<char>(at(bytes), stream);
    char* next = memory_.get();
    for (Message& m : receives) {
      if (!adds(m)) continue;
      all_.push_back({m, {next, 1, 1, m.size(), m.size(), m.size()}});
      next += padded(m);
      m.blocks = {all_.back().block};
    }
  }
  void add(cudaStream_t stream) {
    for (const Entry& staging : all_) add_f32(segments({&staging.block, 1}, staging.to.blocks), stream);
    all_.clear();
    memory_ = {};
  }

 private:
  struct Entry {
    Message to;
    Block block;
  };
  static bool adds(const Message& m) { return m.combine == Message::Combine::add && !m.at_once && m.size() > 0; }
  static Index padded(const Message& m) {
    constexpr Index kAligned = 256;  // allows wide copies
    return ceil_div(m.size(), kAligned) * kAligned;
  }

  StreamArray<char> memory_;
  std::vector<Entry> all_;
};

class DeviceExchange final : public Request::Pending {
 public:
  // sign: sent to the peers if this call has the pass's first messages to them; pass: the same, in any call of a pass.
  DeviceExchange(const Communicator& host, std::shared_ptr<Board> board, Index number,
                 std::shared_ptr<PooledStream> stream, const Place& caller, std::vector<Message> sends,
                 std::vector<Message> receives, const detail::CallSign& sign, const detail::CallSign& pass,
                 const HostCall& host_call)
      : host_(host),
        board_(std::move(board)),
        caller_(static_cast<cudaStream_t>(caller.stream)),
        mine_(std::make_shared<Post>()),
        pass_(pass) {
    const Index rank = host.rank();
    std::set<Index> peers;
    for (const std::vector<Message>* list : {&sends, &receives})
      for (const Message& m : *list)
        if (m.peer != rank && m.size() > 0) peers.insert(m.peer);
    add_staging_.redirect(receives, caller_);
    for (const Message& m : receives)
      if (m.size() > 0) mine_->awaited.insert(m.peer);
    mine_->rank = rank;
    mine_->sends = std::move(sends);
    mine_->receives = std::move(receives);
    for (const Message& m : mine_->receives)
      if (m.at_once && m.size() > 0) mine_->at_once.push_back({.to = &m});
    mine_->device = caller.device;
    mine_->stream = std::move(stream);
    WEFT_CUDA(cudaEventRecord(mine_->ready.get(), caller_));
    try {
      post(number);
      meet(peers, sign, host_call);
    } catch (...) {  // no destructor runs
      withdraw();
      throw;
    }
  }

  ~DeviceExchange() override {
    if (!waited_) withdraw();
  }

  void wait() override {
    try {
      meeting_->wait();
      check_fault();
    } catch (const Error& e) {  // sizes that do not fit, or a rank that has left, are only the consequence
      compare_signs(e.problem());
      throw;
    }
    compare_signs({});
    const DeviceGuard on(mine_->device);
    const std::lock_guard lock(board_->mutex);
    // Ranks that receive from this one may still miss others: their copies so far must be launched now.
    for (const std::weak_ptr<Post>& receiver : mine_->to)
      if (const auto to = receiver.lock())
        if (std::find(to->from.begin(), to->from.end(), mine_) != to->from.end()) copy_to(*to);
    for (const auto& done : mine_->done) WEFT_CUDA(cudaStreamWaitEvent(caller_, done->get()));
    waited_ = true;
    add_staging_.add(caller_);
  }

 private:
  // A peer's post is on the board before its message arrives, which is the fingerprint of the pass if this call has
  // one.
  void meet(const std::set<Index>& peers, const detail::CallSign& sign, const HostCall& host_call) {
    std::vector<Message> to, from;
    sign_ = sign;
    for (const Index peer : peers) met_.emplace_back(peer, detail::CallSign{});
    for (detail::RankSign& peer : met_) {
      to.push_back({peer.first, {block_of(sign_)}});
      from.push_back({peer.first, {block_of(peer.second)}});
    }
    meeting_ = host_call(std::move(to), std::move(from));
  }

  void check_fault() const {
    const std::lock_guard lock(board_->mutex);
    if (mine_->fault)
      throw Error(*mine_->fault,
                  "let both sides name as many bytes, and all ranks make the same calls in the same order");
  }

  // wrong: what went wrong; then also those that the peers show of their passes, since messages that do not fit bring
  // none.
  void compare_signs(const std::string& wrong) const {
    std::vector<detail::RankSign> known;
    for (const detail::RankSign& peer : met_)
      if (peer.second.given()) known.push_back(peer);
    std::optional<std::string> found;
    if (sign_.given()) found = detail::disagreement(mine_->rank, sign_, known);
    if (!found && !wrong.empty() && pass_.given())
      found = detail::disagreement_in_pass(mine_->rank, pass_, host_.shown_signs());
    if (found) throw detail::disagreement_error(*found, wrong);
  }

  // After this nobody touches the caller's memory.
  void withdraw() noexcept {
    const std::lock_guard lock(board_->mutex);
    mine_->withdrawn = true;
    mine_->from.clear();  // breaks reference cycles
    for (const auto& done : mine_->done) clear_last_error(cudaEventSynchronize(done->get()));
  }

  static Block block_of(detail::CallSign& sign) {
    constexpr Index kSize = sizeof(detail::CallSign);
    return {&sign, 1, 1, kSize, kSize, kSize};
  }

  void post(Index number) {
    const std::lock_guard lock(board_->mutex);
    std::vector<std::shared_ptr<Post>>& board = board_->calls[number];
    board.resize(at(board_->ranks));
    board[at(mine_->rank)] = mine_;
    const std::vector<std::shared_ptr<Post>> all = board;
    // Before any copy, which may fail.
    if (std::none_of(all.begin(), all.end(), [](const auto& post) { return post == nullptr; }))
      board_->calls.erase(number);
    for (const std::shared_ptr<Post>& other : all) {
      if (other == nullptr) continue;
      match(other, mine_);
      if (other != mine_) match(mine_, other);
    }
  }

  const Communicator& host_;
  std::shared_ptr<Board> board_;
  cudaStream_t caller_;
  std::shared_ptr<Post> mine_;
  AddStaging add_staging_;
  detail::CallSign pass_, sign_;       // of the pass, and what of it is sent
  std::vector<detail::RankSign> met_;  // peers, and what they sent
  std::unique_ptr<Request::Pending> meeting_;
  bool waited_ = false;
};

class DeviceThreads final : public DeviceCommunicator {
 public:
  DeviceThreads(Communicator& ranks, std::shared_ptr<Board> board, const Place& place, HostCall host_call)
      : DeviceCommunicator(ranks, place), host_(ranks), board_(std::move(board)), host_call_(std::move(host_call)) {
    const DeviceGuard on(place.device);
    stream_ = std::make_shared<PooledStream>(true);  // high priority, because the next step waits for these copies
  }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return start_signed(std::move(sends), std::move(receives), {});
  }
  std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                 const detail::SignedPeers& peers) override {
    const DeviceGuard on(place().device);
    return std::make_unique<DeviceExchange>(host_, board_, calls_++, stream_, place(), std::move(sends),
                                            std::move(receives), peers.mine, recorder()->sign(), host_call_);
  }
  bool carries_signs() const override { return true; }

  const Communicator& host_;
  std::shared_ptr<Board> board_;
  std::shared_ptr<PooledStream> stream_;
  HostCall host_call_;
  Index calls_ = 0;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& ranks, std::shared_ptr<Board> board,
                                                        const Place& place, HostCall host_call) {
  return std::make_unique<DeviceThreads>(ranks, std::move(board), place, std::move(host_call));
}

}  // namespace weft::cuda
