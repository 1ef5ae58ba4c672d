// Communicators for memory of GPUs, one for each way in which ranks reach each other. The host communicator that they
// are made from gives rank and size.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/signs_in_flight.h"
#include "weft/communicator.h"

namespace weft::cuda {

// An exchange between the CPUs of the same ranks, not counted as traffic.
using HostCall = std::function<std::unique_ptr<Request::Pending>(std::vector<Message>, std::vector<Message>)>;

// Ranks that are threads and share a GPU, or have one each: the GPU copies directly between the ranks' memory, in a
// stream of the receiver that has no other work. All ranks post their sends and receives on one board.
struct Board;
std::shared_ptr<Board> make_board(Index ranks);
std::unique_ptr<DeviceCommunicator> make_device_threads(Communicator& ranks, std::shared_ptr<Board> board,
                                                        const Place& place, HostCall host_call);

// A communicator without streams (MPI, a process group): a call packs its sends, the CPU waits for that, and the other
// communicator moves them; wait() unpacks what came. So the CPU does not run ahead of the GPU, but messages still
// overlap with compute. Messages are staged in host memory or, if the other communicator can access it (a CUDA-aware
// MPI), on the GPU.
enum class Staging { host, device };
std::unique_ptr<DeviceCommunicator> make_staged(Communicator& ranks, const Place& place, Staging staging,
                                                HostCall host_call);

// A transport that is stream-ordered but moves one contiguous buffer per message: a process group of PyTorch. Other
// messages are packed and unpacked in the caller's stream; the CPU waits for nothing.
struct Parcel {
  Index peer = 0;
  void* data = nullptr;
  Index bytes = 0;
};
// Starts the transfers in the order of the place's stream; wait() makes that stream wait for what is received. Without
// wait() the destructor does the same, because the memory is freed in stream order.
using Carry = std::function<std::unique_ptr<Request::Pending>(const Place& place, std::span<const Parcel> sends,
                                                              std::span<const Parcel> receives)>;
// A fingerprint of each rank that an all_gather brings along, in memory of the host that the GPU reaches; null: none.
struct GatheredSigns {
  void *mine = nullptr, *all = nullptr;
  Index bytes = 0;  // of each rank
};
// Collectives of the same transport over contiguous buffers in the order of ranks, stream-ordered like Carry; those
// that are null are made of messages.
struct CarryCollectives {
  // `bytes` of each rank, and in the same launch the fingerprints, if there are any.
  std::function<std::unique_ptr<Request::Pending>(const Place& place, const void* mine, void* all, Index bytes,
                                                  const GatheredSigns& signs)>
      all_gather = nullptr;
  // `count` numbers of each rank.
  std::function<std::unique_ptr<Request::Pending>(const Place& place, const float* parts, float* mine, Index count)>
      reduce_scatter = nullptr;
  // Bytes to and from each rank.
  std::function<std::unique_ptr<Request::Pending>(const Place& place, const void* to, std::span<const Index> to_bytes,
                                                  void* from, std::span<const Index> from_bytes)>
      all_to_all = nullptr;
};
// `signs`: of all communicators over the same ranks, so that any call sees what came with those of the others; null:
// calls bring no fingerprints along.
std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place,
                                                std::shared_ptr<detail::SignsInFlight> signs, Carry carry,
                                                CarryCollectives collectives = {});

// NCCL, for ranks that have a GPU each, which is the place's device. All communicators that are made of one host
// communicator share one connection, because to make one takes seconds on many ranks.
class NcclConnection;
// Collective. `board`: what the ranks see of each other, or null.
std::shared_ptr<NcclConnection> connect_nccl(const Communicator& ranks, const Place& place, const HostCall& host_call,
                                             const std::shared_ptr<detail::Board>& board,
                                             const std::shared_ptr<detail::FlightRecorder>& recorder);
bool connects(const std::shared_ptr<NcclConnection>& connection, const Place& place);
// PeerError if calls over it were given up.
void check(const NcclConnection& connection);
std::unique_ptr<DeviceCommunicator> make_nccl(Communicator& ranks, const Place& place,
                                              std::shared_ptr<NcclConnection> connection);

// What the ranks tell each other before they choose a transport.
struct Meeting {
  bool share_a_gpu = false;  // two ranks have the same GPU, which NCCL does not support
  bool connected = false;    // every rank has a connection of its device
};
// Collective.
Meeting meet(const Communicator& ranks, const Place& place, bool connected, const HostCall& host_call);

}  // namespace weft::cuda
