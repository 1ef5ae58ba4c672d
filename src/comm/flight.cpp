#include "comm/flight.h"

#include <algorithm>
#include <iomanip>

#include <unistd.h>

#include "text.h"

namespace weft {

PeerError::PeerError(std::string problem, std::string remedy, bool consequence)
    : Error(std::move(problem), std::move(remedy)), consequence_(consequence) {}
PeerError::~PeerError() = default;

PeerError PeerError::with_calls(const std::string& calls) const {
  if (has_calls_ || calls.empty()) return *this;
  PeerError with(text(problem(), " (last calls: ", calls, ")"), remedy(), consequence_);
  with.has_calls_ = true;
  return with;
}

namespace detail {
namespace {

using Clock = std::chrono::steady_clock;

struct Label {
  const char* pass = nullptr;
  Index step = -1;
};
thread_local Label current;

RecordedCall::Peers peers_of(Index self, std::span<const Message> messages) {
  RecordedCall::Peers peers;
  for (const Message& m : messages) {
    if (m.peer == self) continue;
    const auto named = static_cast<std::size_t>(peers.count);
    const auto end = peers.first.begin() + static_cast<std::ptrdiff_t>(std::min(named, RecordedCall::Peers::kNamed));
    peers.bytes += m.size();
    if (std::find(peers.first.begin(), end, m.peer) != end) continue;
    if (named < RecordedCall::Peers::kNamed) peers.first[named] = m.peer;
    ++peers.count;
  }
  return peers;
}

// "1+3", "0+1+2+3+.."
std::string ranks_text(const RecordedCall::Peers& peers) {
  std::string words;
  const auto named = std::min(static_cast<std::size_t>(peers.count), RecordedCall::Peers::kNamed);
  for (std::size_t i = 0; i < named; ++i) words += text(i == 0 ? "" : "+", peers.first[i]);
  return named < static_cast<std::size_t>(peers.count) ? words + "+.." : words;
}

std::string peers_text(const char* way, const RecordedCall::Peers& peers) {
  return peers.count == 0 ? "" : text(", ", peers.bytes, " bytes ", way, " ", ranks_text(peers));
}

constexpr std::array kStates{"posted", "waiting", "in the stream", "done", "failed"};

std::string call_text(const RecordedCall& call, Clock::time_point now) {
  const auto seconds = [](Clock::duration d) {
    return text(std::fixed, std::setprecision(3), std::chrono::duration<double>(d).count(), " s");
  };
  const bool over = call.state == RecordedCall::State::done || call.state == RecordedCall::State::failed;
  const std::string step = step_text(call.pass, call.step);
  return text("#", call.number, " ", call.kind, step.empty() ? "" : " of ", step, peers_text("to", call.to),
              peers_text("from", call.from), ", ", kStates[static_cast<std::size_t>(call.state)],
              over ? " after " : " for ", seconds((over ? call.changed : now) - call.posted));
}

// `time`: of `now`, in seconds since 1970.
std::string call_json(const RecordedCall& call, Clock::time_point now, double time) {
  constexpr std::array kNames{"posted", "waiting", "queued", "done", "failed"};
  const bool over = call.state == RecordedCall::State::done || call.state == RecordedCall::State::failed;
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  return text(std::fixed, std::setprecision(6), "{\"number\":", call.number, ",\"kind\":\"", call.kind,
              "\",\"pass\":\"", call.pass == nullptr ? "" : call.pass, "\",\"step\":", call.step, ",\"to\":\"",
              ranks_text(call.to), "\",\"to_bytes\":", call.to.bytes, ",\"from\":\"", ranks_text(call.from),
              "\",\"from_bytes\":", call.from.bytes, ",\"begun\":", time - seconds(now - call.posted),
              ",\"seconds\":", seconds((over ? call.changed : now) - call.posted), ",\"state\":\"",
              kNames[static_cast<std::size_t>(call.state)], "\"}");
}

}  // namespace

PassLabel::PassLabel(const char* pass) { current = {pass, -1}; }
PassLabel::~PassLabel() { current = {}; }
void label_step(Index step) { current.step = step; }

std::string step_text(const char* pass, Index step) {
  if (pass == nullptr) return "";
  return step < 0 ? pass : text(pass, " step ", step);
}

Index FlightRecorder::begin(const char* kind, Index self, std::span<const Message> sends,
                            std::span<const Message> receives) {
  RecordedCall call{.number = 0,
                    .kind = kind,
                    .pass = current.pass,
                    .step = current.step,
                    .to = peers_of(self, sends),
                    .from = peers_of(self, receives)};
  call.posted = call.changed = Clock::now();
  const std::lock_guard lock(mutex_);
  call.number = next_++;
  at_(call.number) = call;
  return call.number;
}

void FlightRecorder::cancel(Index call) {
  const std::lock_guard lock(mutex_);
  if (call + 1 != next_) return;
  at_(call) = {};
  --next_;
}

void FlightRecorder::set(Index call, RecordedCall::State state) {
  const auto now = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    RecordedCall& entry = at_(call);
    // A call in a stream may be done before anybody waits for it.
    if (entry.number != call || (entry.state == RecordedCall::State::done && state != RecordedCall::State::failed))
      return;
    entry.state = state;
    entry.changed = now;
  }
  if (state == RecordedCall::State::failed) tell_of_failure();
}

void FlightRecorder::end_wait(Index call) {
  {
    const std::lock_guard lock(mutex_);
    const RecordedCall& entry = at_(call);
    if (entry.number != call || entry.state != RecordedCall::State::waiting) return;
  }
  set(call, RecordedCall::State::done);
}

RecordedCall FlightRecorder::last() const {
  const std::lock_guard lock(mutex_);
  return next_ == 0 ? RecordedCall{} : at_(next_ - 1);
}

void FlightRecorder::set_sign(const CallSign& sign) {
  const std::lock_guard lock(mutex_);
  sign_ = sign;
}

CallSign FlightRecorder::sign() const {
  const std::lock_guard lock(mutex_);
  return sign_;
}

std::string FlightRecorder::text() const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  std::string lines;
  for (Index call = std::max<Index>(0, next_ - kCalls); call < next_; ++call)
    if (at_(call).number == call) lines += call_text(at_(call), now) + "\n";
  return lines;
}

std::string FlightRecorder::json() const {
  const auto now = Clock::now();
  const double time = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::lock_guard lock(mutex_);
  std::string calls;
  for (Index call = std::max<Index>(0, next_ - kCalls); call < next_; ++call)
    if (at_(call).number == call) calls += weft::text(calls.empty() ? "" : ",", call_json(at_(call), now, time));
  std::string name = name_;
  std::replace_if(name.begin(), name.end(), [](char c) { return c < ' ' || c > '~' || c == '"' || c == '\\'; }, '?');
  return weft::text(std::fixed, std::setprecision(6), "{\"weft_flight\":1,\"rank\":", rank_, ",\"ranks\":", ranks_,
                    ",\"comm\":\"", name, "\",\"pid\":", ::getpid(), ",\"time\":", time, ",\"calls\":[", calls, "]}");
}

std::string FlightRecorder::last_calls(Index most) const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  std::string words;
  for (Index call = std::max<Index>(0, next_ - std::min(most, kCalls)); call < next_; ++call)
    if (at_(call).number == call) words += (words.empty() ? "" : "; ") + call_text(at_(call), now);
  return words;
}

std::string FlightRecorder::line(Index call) const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  return at_(call).number == call ? call_text(at_(call), now) : "";
}

}  // namespace detail
}  // namespace weft
