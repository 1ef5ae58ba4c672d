// The flight recorder: the last calls of a rank, for the errors of calls that others did not answer. Costs a clock read
// when a call starts, begins to wait and ends.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "comm/sign.h"
#include "weft/communicator.h"

namespace weft::detail {

// While it lives, calls that this thread starts belong to a pass; first to no step of it. `pass` must be a literal.
class PassLabel {
 public:
  explicit PassLabel(const char* pass);
  ~PassLabel();
  PassLabel(const PassLabel&) = delete;
  PassLabel& operator=(const PassLabel&) = delete;
};
// Calls that this thread starts from now on belong to a step of the pass.
void label_step(Index step);

struct RecordedCall {
  // queued: wait() has returned and a stream of a GPU waits in its place.
  enum class State { posted, waiting, queued, done, failed };
  struct Peers {
    static constexpr std::size_t kNamed = 4;
    std::array<Index, kNamed> first = {};
    Index count = 0, bytes = 0;
  };

  Index number = -1;
  const char* kind = "";       // exchange, all_gather, ...
  const char* pass = nullptr;  // of PassLabel
  Index step = -1;             // -1: none
  Peers to = {}, from = {};    // other ranks
  std::chrono::steady_clock::time_point posted = {}, changed = {};
  State state = State::posted;
};

// "forward step 3", "forward", or nothing.
std::string step_text(const char* pass, Index step);

class FlightRecorder {
 public:
  static constexpr Index kCalls = 64;

  FlightRecorder() = default;
  // Of a communicator, as json() names it.
  FlightRecorder(Index rank, Index ranks, std::string_view name) : rank_(rank), ranks_(ranks), name_(name) {}

  // Returns the number of the call; the first has number 0.
  Index begin(const char* kind, Index self, std::span<const Message> sends, std::span<const Message> receives);
  // The last call was not made after all.
  void cancel(Index call);
  void set(Index call, RecordedCall::State state);
  // A call that was waited for is done, unless it was queued in a stream.
  void end_wait(Index call);
  // The last call, or an empty record if there was none.
  RecordedCall last() const;
  // Of the pass that began last.
  void set_sign(const CallSign& sign);
  CallSign sign() const;

  std::string text() const;                  // a line a call
  std::string json() const;                  // one line with all of them, as weft/flight.h says
  std::string last_calls(Index most) const;  // one line, for an error
  std::string line(Index call) const;        // of one call; empty if it is too long ago

 private:
  RecordedCall& at_(Index call) { return calls_[static_cast<std::size_t>(call % kCalls)]; }
  const RecordedCall& at_(Index call) const { return calls_[static_cast<std::size_t>(call % kCalls)]; }

  Index rank_ = 0, ranks_ = 1;
  std::string name_;
  mutable std::mutex mutex_;  // transports end calls in threads of their own
  std::array<RecordedCall, kCalls> calls_;
  Index next_ = 0;
  CallSign sign_;
};

// A recorder that flight_records() knows as long as it lives.
std::shared_ptr<FlightRecorder> make_recorder(Index rank, Index ranks, std::string_view name);
// A call has failed: writes the file of keep_flight_file, if there is one and this is the first.
void tell_of_failure() noexcept;

}  // namespace weft::detail
