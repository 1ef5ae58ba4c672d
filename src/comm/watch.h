// Watches calls that were handed to a queue which nobody waits for (a stream of a GPU): a thread sees them end, and
// gives the connection up if a rank ends, gives up, names other sizes or does not come within the time limit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/board.h"
#include "comm/flight.h"
#include "weft/communicator.h"

namespace weft::detail {

// A call in the queue.
struct QueuedCall {
  explicit QueuedCall(const RecordedCall& call) : record(call) {}
  virtual ~QueuedCall() = default;
  virtual bool begun() = 0;  // the queue has come to it
  virtual bool ended() = 0;
  // Of a call that has ended: in words, how ranks differ whose fingerprints came with it.
  virtual std::optional<std::string> disagreement() { return std::nullopt; }

  const RecordedCall record;
};

class Watch {
 public:
  struct Connection {
    Index rank = 0;
    double time_limit = 300;
    std::shared_ptr<FlightRecorder> recorder;
    std::unique_ptr<Board> board = nullptr;  // null: nothing is known of the others
    // Called by the thread: before anything else; what the transport says is wrong, if it does; and, once, to end all
    // calls in the queue.
    std::function<void()> begin = nullptr;
    std::function<std::optional<std::string>()> fault = nullptr;
    std::function<void()> abort = nullptr;
  };

  explicit Watch(Connection connection);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Returns when all calls have ended or were given up; then nothing is watched any more.
  void finish();

  // The call that was recorded last begins: the others see it.
  RecordedCall post(std::span<const Message> sends, std::span<const Message> receives);
  void add(std::shared_ptr<QueuedCall> call);
  // PeerError if the connection was given up.
  void check() const;
  // The same after a look at the calls that have ended by now.
  void check_ended();
  bool works() const;
  // For waits outside the queue: gives the connection up if there is a reason to, after so many seconds in a call.
  // call -1: the start of the connection.
  void look(Index call, double waited, const std::optional<std::string>& fault);

 private:
  using Clock = std::chrono::steady_clock;
  std::optional<Trouble> trouble(Index call, double waited, const std::optional<std::string>& fault);
  std::optional<Trouble> drop_ended();
  void give_up(std::unique_lock<std::mutex>& lock, const Trouble& trouble);
  void run();

  Connection connection_;
  mutable std::mutex mutex_;  // guards what follows, and the board
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedCall>> queue_;
  std::optional<Clock::time_point> since_;         // when the first of them was seen to have begun
  std::optional<Clock::time_point> faulty_since_;  // when the transport first said that something is wrong
  std::optional<Trouble> failure_;
  bool finishes_ = false;
  std::thread thread_;
};

}  // namespace weft::detail
