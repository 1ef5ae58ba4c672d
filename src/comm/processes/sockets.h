// Messages between processes over stream sockets, one to each peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "weft/slice.h"

namespace weft::processes {

using Bytes = std::vector<std::byte>;

// Which call of which communicator (the whole, or a split) a message belongs to.
struct CallId {
  std::uint64_t context = 0, number = 0;
  friend auto operator<=>(const CallId&, const CallId&) = default;
};

// One rank's sockets. Messages are copied into queues when they are sent and when they arrive, so nothing here refers
// to memory of callers.
class Sockets {
 public:
  // Owns the file descriptors, one for each rank; that of this rank is not used.
  Sockets(Index rank, std::vector<int> descriptors);
  ~Sockets();
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  Index rank() const { return rank_; }
  void send(Index peer, CallId call, Bytes message);
  // The next message of this call from a peer, if it has arrived.
  std::optional<Bytes> take(Index peer, CallId call);
  // The peer has sent a message of a later call of the same communicator, so none of this call will come.
  bool is_past(Index peer, CallId call) const;
  bool is_closed(Index peer) const { return peers_[at_(peer)].closed; }
  bool all_sent() const;
  // Moves what can be moved, waiting up to `milliseconds` for something to move; returns whether anything did.
  bool progress(int milliseconds);
  // Messages of this call that nobody will take are dropped, now and when they arrive.
  void abandon(CallId call);

 private:
  struct Header {
    CallId call;
    std::uint64_t bytes = 0;
  };
  struct Arrived {
    CallId call;
    Bytes message;
  };
  struct Peer {
    int descriptor = -1;
    bool closed = false;
    std::deque<Bytes> outgoing;  // with headers
    std::size_t sent = 0;        // bytes of the first one
    Header header;               // of the message that arrives now
    std::size_t header_got = 0, got = 0;
    Bytes incoming;
    std::deque<Arrived> arrived;
  };

  static std::size_t at_(Index peer) { return static_cast<std::size_t>(peer); }
  void close(Peer& peer);
  bool write(Peer& peer);
  bool read(Peer& peer);
  bool read_once(Peer& peer);

  Index rank_;
  std::vector<Peer> peers_;
  std::set<CallId> abandoned_;
};

}  // namespace weft::processes
