#include "comm/processes/sockets.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace weft::processes {
namespace {

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Sockets::Sockets(Index rank, std::vector<int> descriptors) : rank_(rank), peers_(descriptors.size()) {
  for (std::size_t i = 0; i < descriptors.size(); ++i) peers_[i].descriptor = descriptors[i];
}

Sockets::~Sockets() {
  for (Peer& peer : peers_) close(peer);
}

void Sockets::close(Peer& peer) {
  peer.closed = true;
  peer.outgoing.clear();
  if (peer.descriptor >= 0) ::close(peer.descriptor);
  peer.descriptor = -1;
}

void Sockets::send(Index peer, CallId call, Bytes message) {
  Peer& to = peers_[at_(peer)];
  if (peer == rank_) {
    to.arrived.push_back({call, std::move(message)});
    return;
  }
  if (to.closed) return;  // whoever waits for this peer says so
  const Header header{call, message.size()};
  Bytes framed(sizeof(Header));
  std::memcpy(framed.data(), &header, sizeof(Header));
  to.outgoing.push_back(std::move(framed));
  if (!message.empty()) to.outgoing.push_back(std::move(message));
}

std::optional<Bytes> Sockets::take(Index peer, CallId call) {
  std::deque<Arrived>& arrived = peers_[at_(peer)].arrived;
  const auto found = std::find_if(arrived.begin(), arrived.end(), [&](const Arrived& a) { return a.call == call; });
  if (found == arrived.end()) return std::nullopt;
  std::optional<Bytes> message = std::move(found->message);
  arrived.erase(found);
  return message;
}

bool Sockets::is_past(Index peer, CallId call) const {
  const std::deque<Arrived>& arrived = peers_[at_(peer)].arrived;
  return std::any_of(arrived.begin(), arrived.end(),
                     [&](const Arrived& a) { return a.call.context == call.context && a.call.number > call.number; });
}

bool Sockets::all_sent() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.outgoing.empty(); });
}

void Sockets::abandon(CallId call) {
  abandoned_.insert(call);
  for (Peer& peer : peers_) std::erase_if(peer.arrived, [&](const Arrived& a) { return a.call == call; });
}

bool Sockets::progress(int milliseconds) {
  std::vector<pollfd> polled;
  std::vector<Peer*> of;
  for (Peer& peer : peers_) {
    if (peer.descriptor < 0) continue;
    const short writes = peer.outgoing.empty() ? 0 : POLLOUT;
    polled.push_back({peer.descriptor, static_cast<short>(POLLIN | writes), 0});
    of.push_back(&peer);
  }
  if (::poll(polled.data(), polled.size(), milliseconds) <= 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < polled.size(); ++i) {
    if ((polled[i].revents & POLLOUT) != 0 && write(*of[i])) moved = true;
    if ((polled[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !of[i]->closed && read(*of[i])) moved = true;
  }
  return moved;
}

bool Sockets::write(Peer& peer) {
  bool moved = false;
  while (!peer.outgoing.empty()) {
    const Bytes& next = peer.outgoing.front();
    const ssize_t n =
        ::send(peer.descriptor, next.data() + peer.sent, next.size() - peer.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (!would_block()) peer.outgoing.clear(), peer.sent = 0;  // what it sent before it ended may still be read
      return moved;
    }
    moved = true;
    peer.sent += static_cast<std::size_t>(n);
    if (peer.sent < next.size()) return true;
    peer.outgoing.pop_front();
    peer.sent = 0;
  }
  return moved;
}

bool Sockets::read(Peer& peer) {
  bool moved = false;
  while (!peer.closed && read_once(peer)) moved = true;
  return moved;  // that a peer has ended is no progress: others may wait for a third
}

bool Sockets::read_once(Peer& peer) {
  const bool in_header = peer.header_got < sizeof(Header);
  char* to = in_header ? reinterpret_cast<char*>(&peer.header) + peer.header_got
                       : reinterpret_cast<char*>(peer.incoming.data()) + peer.got;
  const std::size_t left = in_header ? sizeof(Header) - peer.header_got : peer.incoming.size() - peer.got;
  if (left > 0) {
    const ssize_t n = ::recv(peer.descriptor, to, left, MSG_DONTWAIT);
    if (n < 0 && would_block()) return false;
    if (n <= 0) {
      close(peer);
      return false;
    }
    (in_header ? peer.header_got : peer.got) += static_cast<std::size_t>(n);
    if (in_header && peer.header_got == sizeof(Header)) peer.incoming.resize(peer.header.bytes);
  }
  if (peer.header_got == sizeof(Header) && peer.got == peer.incoming.size()) {
    if (!abandoned_.contains(peer.header.call))
      peer.arrived.push_back({peer.header.call, std::exchange(peer.incoming, {})});
    peer.incoming.clear();
    peer.header_got = peer.got = 0;
  }
  return true;
}

}  // namespace weft::processes
