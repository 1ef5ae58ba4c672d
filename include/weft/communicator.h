// Communicators move bytes between ranks and know nothing of attention.
//
// Every call is collective: all ranks of a communicator make the same calls in the same order, with empty lists where
// they have nothing to move, so messages need no tags. A call returns at once; its buffers belong to it until wait():
// neither the caller nor another call in flight touches them, except to send the same bytes. Ranks may wait for calls
// in different orders. A communicator belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/device.h"
#include "weft/dtype.h"
#include "weft/error.h"
#include "weft/slice.h"
#include "weft/tensor.h"
#include "weft/traffic.h"

namespace weft {

// Bytes in memory: rows x parts, each `bytes` long. Parts are the heads of a row if there are gaps between them.
struct Block {
  void* data = nullptr;  // only read where the block is sent
  Index rows = 0, parts = 1, bytes = 0;
  Index row_stride = 0, part_stride = 0;  // in bytes

  Index size() const { return rows * parts * bytes; }
};

// Appends rows of a tensor as blocks: one, or more where the rows cross an outer dimension.
WEFT_API void append_blocks(const ConstTensorView& view, Range rows, std::vector<Block>& blocks);

// What goes to, or comes from, a peer: the bytes of the blocks one after another. Both sides must name as many bytes,
// but may cut them into different blocks.
struct WEFT_API Message {
  enum class Combine { replace, add, add_f64 };  // add: f32 into f32, or f64 into f64

  Index peer = 0;
  std::vector<Block> blocks = {};
  // Of receives. Sums are made inside wait(), in the order of the list: a call that adds does not touch what it adds to
  // before, so several of them may add to one place, in the order in which they are waited for.
  Combine combine = Combine::replace;
  // Of receives: nobody else touches the place until wait(), so what is added may be added before that, still in the
  // order of the list. Saves ranks that reach each other's memory a copy of the message.
  bool at_once = false;

  Index size() const;
};

// Whether a receive is added to what is there.
constexpr bool adds(Message::Combine how) { return how != Message::Combine::replace; }
// How sums of f32 or f64 are added; Error for other types.
WEFT_API Message::Combine adding(DType dtype);

// How all_reduce combines numbers.
enum class Reduce { sum, max };

// A call ended because another rank failed, left, or did not come within the time limit.
class WEFT_API PeerError : public Error {
 public:
  // `consequence`: of a failure that another rank reports itself.
  PeerError(std::string problem, std::string remedy, bool consequence = false);
  ~PeerError() override;

  bool consequence() const noexcept { return consequence_; }
  // The same with the last calls of this rank (Communicator::flight_record) behind the problem.
  PeerError with_calls(const std::string& calls) const;
  bool has_calls() const noexcept { return has_calls_; }

 private:
  bool consequence_, has_calls_ = false;
};

namespace detail {
class Board;
class Calls;
class FlightRecorder;
class SignedCalls;
class SignedPass;
struct CallSign;
struct SignedPeers;
}  // namespace detail

// A call in flight.
class WEFT_API Request {
 public:
  // The transport's part of a call in flight.
  struct Pending {
    virtual ~Pending() = default;  // without wait(): cancels the call, after which nothing touches the buffers
    virtual void wait() = 0;
  };

  Request() = default;
  explicit Request(std::unique_ptr<Pending> pending) : pending_(std::move(pending)) {}
  // The recorder is told what becomes of the call.
  Request(std::unique_ptr<Pending> pending, std::shared_ptr<detail::FlightRecorder> recorder, Index call)
      : pending_(std::move(pending)), recorder_(std::move(recorder)), call_(call) {}

  bool in_flight() const { return pending_ != nullptr; }
  // What follows sees what was received, and may change what was sent. Error if a peer failed; once is enough.
  void wait();
  // Runs `then` at the end of wait().
  Request after(std::function<void()> then) &&;

 private:
  std::unique_ptr<Pending> pending_;
  std::shared_ptr<detail::FlightRecorder> recorder_;
  Index call_ = 0;
};

class DeviceCommunicator;

// The ranks that take part in a computation, and the calls between them. Transports derive from it.
class WEFT_API Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Index rank() const { return rank_; }
  Index ranks() const { return ranks_; }
  virtual std::string_view name() const = 0;  // threads, mpi, ...
  // Whether all_gather, reduce_scatter and all_to_all are the transport's own (ncclAllGather) where it has them, and
  // not made of messages. The same on all ranks.
  virtual bool has_collectives() const { return false; }
  // Seconds that a call waits for other ranks before it gives up with a PeerError.
  virtual double time_limit() const { return 300; }

  // All the others are made of this one. Messages from one rank to another are matched in the order of the lists; a
  // rank may send to itself.
  Request exchange(std::vector<Message> sends, std::vector<Message> receives);

  // `all`: where the block of each rank goes.
  Request all_gather(const Block& mine, std::span<const Block> all);
  // f32 or f64: `mine` becomes the sum of what each rank has for this one in parts[rank]; it must not lie in `parts`.
  // The sum is made in the order of ranks, unless the transport makes it itself (has_collectives, equal blocks of f32).
  Request reduce_scatter(std::span<const Block> parts, const Block& mine, DType dtype = DType::f32);
  // The same two with lists of blocks: what exchange(sends, receives) does, in one collective where the transport has
  // one. A message to and from each rank, in their order and all of equal size. all_gather: all sends have the same
  // blocks. reduce_scatter: all receives have the same blocks, whose contents are lost: the first replaces, the others
  // add. A transport's own sum has an order of its own.
  Request all_gather(std::vector<Message> sends, std::vector<Message> receives);
  Request reduce_scatter(std::vector<Message> sends, std::vector<Message> receives);
  // A block for each rank and from each rank, of any sizes, none included.
  Request all_to_all(std::span<const Block> to, std::span<const Block> from);
  Request send_receive(Index to, const Block& sent, Index from, const Block& received);
  // f32 or f64, in place, the same bits on every rank. For a few numbers: everyone sends to everyone.
  Request all_reduce(void* data, DType dtype, Index count, Reduce how);
  // Ranks of one color, ordered by (key, rank), become a communicator of their own. Counts its own traffic.
  std::unique_ptr<Communicator> split(Index color, Index key);
  // The same ranks for memory of a GPU. Collective; must not outlive this one, which counts its traffic. Error in a
  // build without CUDA.
  std::unique_ptr<DeviceCommunicator> on(const Place& place);

  // Error if calls on GPUs that had been started were given up since, because a rank failed, or if ranks differ in one
  // that has ended. Such calls are ordered in a stream and end there as if all were well; the next call says so too,
  // but after the last one only this does.
  virtual void check() const;
  // The last 64 calls of this rank, here and on GPUs, a line each, oldest first: number, pass and step, peers, bytes,
  // age and state.
  std::string flight_record() const;

  // What this rank's last pass is compared by, as text: ranks exchange it out of band when their messages do not meet.
  // Empty before the first pass.
  std::string fingerprint() const;
  // In words, how the pass of this rank differs from those of others, whose fingerprints are given; empty if it does
  // not, or if they are in another pass.
  std::string disagreement(std::span<const std::pair<Index, std::string>> others) const;

  const Traffic& traffic() const { return traffic_; }
  void reset_traffic() { traffic_ = {}; }
  // Ranks r of equal r / ranks_per_node share fast links: from now on bytes between nodes are counted too. Error unless
  // it divides the ranks; 1: one level, as at first.
  void set_node(Index ranks_per_node);

  detail::Calls& calls();  // for checked mode, which counts them
  // What ranks see of each other beside their calls, for transports of GPUs; null: nothing.
  virtual std::shared_ptr<detail::Board> board() const { return nullptr; }
  // What other ranks show of the passes they are in beside their messages, for errors; empty: the transport has no way
  // to.
  virtual std::vector<std::pair<Index, detail::CallSign>> shown_signs() const;

 protected:
  Communicator(Index rank, Index ranks) : rank_(rank), ranks_(ranks) {}
  // Calls are counted by another one.
  Communicator(Index rank, Index ranks, Communicator& counts) : rank_(rank), ranks_(ranks), counts_(&counts) {}

  // For a transport's own all_gather: the fingerprint that travels with the first one of a pass; no peers: none does.
  detail::SignedPeers sign_collective();
  // Of calls of this communicator and of those whose calls it counts.
  const std::shared_ptr<detail::FlightRecorder>& recorder() const;

 private:
  // Messages are checked: peers exist, blocks are not null where they have bytes.
  virtual std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) = 0;
  // The same where fingerprints of the pass travel to and from some peers, which wait() compares. Unless a transport
  // has a better way they are messages of their own, 32 bytes, before all others.
  virtual std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                         const detail::SignedPeers& peers);
  virtual bool carries_signs() const { return true; }
  // This rank begins a pass: others see it in their shown_signs().
  virtual void show_sign(const detail::CallSign&) {}
  // Collectives, if has_collectives(). Null: made of messages, on all ranks. Blocks of all_gather and of
  // reduce_scatter, which adds f32, are equal and not empty; those of all_to_all may have any sizes. Wherever the
  // blocks lie, all ranks make the same collective.
  virtual std::unique_ptr<Request::Pending> start_all_gather(const Block& mine, std::span<const Block> all);
  virtual std::unique_ptr<Request::Pending> start_reduce_scatter(std::span<const Block> parts, const Block& mine);
  virtual std::unique_ptr<Request::Pending> start_all_to_all(std::span<const Block> to, std::span<const Block> from);
  // The first two with lists of blocks: of all ranks one after another, equally many bytes each.
  virtual std::unique_ptr<Request::Pending> start_all_gather_lists(std::span<const Block> mine,
                                                                   std::span<const Block> all);
  virtual std::unique_ptr<Request::Pending> start_reduce_scatter_lists(std::span<const Block> parts,
                                                                       std::span<const Block> mine);
  virtual std::unique_ptr<Communicator> make_split(Index color, Index key) = 0;
  virtual std::unique_ptr<DeviceCommunicator> make_on(const Place& place);
  // start() takes memory of GPUs as it does that of CPUs.
  virtual bool reaches_gpus() const { return false; }
  // Numbers of f64 can be added where they arrive; on GPUs only those of f32 can.
  virtual bool adds_f64() const { return true; }

  template <class Start>
  Request start_recorded(const char* kind, std::span<const Message> sends, std::span<const Message> receives,
                         const Start& start);

  friend class detail::SignedPass;
  void begin_pass(const detail::CallSign& sign, std::uint32_t kind);

  Index rank_, ranks_;
  Communicator* counts_ = this;
  std::uint32_t passes_ = 0;                    // begun on this communicator
  std::shared_ptr<detail::SignedCalls> signs_;  // of the last pass; null before the first
  bool in_pass_ = false;
  Traffic traffic_;
  Index node_ = 1;                        // ranks of a node
  std::shared_ptr<detail::Calls> calls_;  // none before somebody asks
  mutable std::shared_ptr<detail::FlightRecorder> recorder_;
  std::shared_ptr<void> nccl_;  // the connection of GPUs, none before on()
};

// A communicator for memory of a GPU. Calls are ordered in a stream of the caller's: what it sends is what is there
// when the stream comes to the call, and wait() returns when the stream will wait for what was received, not when that
// has come.
class WEFT_API DeviceCommunicator : public Communicator {
 public:
  std::string_view name() const override { return host_.name(); }
  void use(void* stream) { place_.stream = stream; }  // a cudaStream_t, for the calls that follow

 protected:
  // For the ranks of a host communicator, which counts the traffic.
  DeviceCommunicator(Communicator& host, const Place& place)
      : Communicator(host.rank(), host.ranks(), host), host_(host), place_(place) {}
  const Place& place() const { return place_; }

 private:
  std::unique_ptr<Communicator> make_split(Index color, Index key) final;  // Error
  // Not as messages of their own, which would lie in memory of the host; a transport that has a way overrides this and
  // start_signed().
  bool carries_signs() const override { return false; }
  bool adds_f64() const final { return false; }

  Communicator& host_;
  Place place_;
};

// Ranks that are threads of this process: the embedded default.
struct ThreadRanks {
  double time_limit = 300;  // seconds that a rank waits for another before it gives up with an Error
  // A slower link, to see what would overlap: bytes per second into each rank (0: as fast as memory) and seconds a
  // call. A call that would take longer than the time limit is an Error.
  double bandwidth = 0, latency = 0;
  // Asked to stop, ranks that wait for others end with an Error; those that compute do when they next wait.
  std::stop_token stop = {};
};

// Runs body(communicator) on `ranks` threads. If one throws or returns while others wait for it, they end with an Error
// that names it; then the first failure is thrown here, "rank 2: ..." if it is an Error.
WEFT_API void run_ranks(Index ranks, const std::function<void(Communicator&)>& body, const ThreadRanks& how = {});

}  // namespace weft
