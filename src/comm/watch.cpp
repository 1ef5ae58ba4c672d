#include "comm/watch.h"

#include <utility>

#include "text.h"

namespace weft::detail {
namespace {

// How often it looks at calls in the queue, and gives a sign of life without any.
constexpr auto kTick = std::chrono::milliseconds(10), kIdle = std::chrono::milliseconds(50);

}  // namespace

Watch::Watch(Connection connection) : connection_(std::move(connection)), thread_([this] { run(); }) {}

Watch::~Watch() { finish(); }

void Watch::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishes_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

RecordedCall Watch::post(std::span<const Message> sends, std::span<const Message> receives) {
  check();
  const RecordedCall call = connection_.recorder->last();
  const std::lock_guard lock(mutex_);
  if (connection_.board != nullptr) connection_.board->post(call, sends, receives);
  return call;
}

void Watch::add(std::shared_ptr<QueuedCall> call) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(call));
  }
  changed_.notify_all();
}

bool Watch::works() const {
  const std::lock_guard lock(mutex_);
  return !failure_;
}

void Watch::check() const {
  const std::lock_guard lock(mutex_);
  if (!failure_) return;
  throw PeerError(failure_->problem,
                  "see to that rank; what was received since cannot be used, and calls on GPUs need a new communicator",
                  failure_->consequence);
}

void Watch::check_ended() {
  {
    std::unique_lock lock(mutex_);
    if (const std::optional<Trouble> found = drop_ended()) give_up(lock, *found);
  }
  check();
}

void Watch::look(Index call, double waited, const std::optional<std::string>& fault) {
  std::unique_lock lock(mutex_);
  if (const std::optional<Trouble> found = trouble(call, waited, fault)) give_up(lock, *found);
}

// With the lock held. What keeps a call, in which this rank has waited so long, from ending.
std::optional<Trouble> Watch::trouble(Index call, double waited, const std::optional<std::string>& fault) {
  Board* board = connection_.board.get();
  const double limit = connection_.time_limit;
  if (board != nullptr)
    if (auto found = board->trouble(call, waited, limit)) return found;
  const std::string where = call < 0 ? "the start of the connection" : weft::text("call ", call);
  // A transport tells of a lost peer at once and does not name it; the board does when the process has ended.
  constexpr auto kUntilKnown = std::chrono::seconds(2);
  if (fault && !faulty_since_) faulty_since_ = Clock::now();
  if (fault && (board == nullptr || Clock::now() - *faulty_since_ > kUntilKnown))
    return Trouble{weft::text("rank ", connection_.rank, " in ", where, ": ", *fault)};
  if (waited > limit)
    return Trouble{weft::text("rank ", connection_.rank, " waited ", limit, " seconds in ", where,
                              " for ranks of which nothing is known")};
  return std::nullopt;
}

// With the lock held. A call may end although ranks did not agree on it.
std::optional<Trouble> Watch::drop_ended() {
  while (!queue_.empty() && queue_.front()->ended()) {
    if (connection_.board != nullptr)
      if (auto found = connection_.board->mismatch(queue_.front()->record.number)) return found;
    if (const auto found = queue_.front()->disagreement())
      return Trouble{weft::text("call ", queue_.front()->record.number, ": ", *found)};
    connection_.recorder->set(queue_.front()->record.number, RecordedCall::State::done);
    queue_.pop_front();
    since_.reset();
  }
  if (!queue_.empty() && !since_ && queue_.front()->begun()) since_ = Clock::now();
  return std::nullopt;
}

void Watch::give_up(std::unique_lock<std::mutex>& lock, const Trouble& found) {
  if (failure_) return;
  failure_ = found;
  if (connection_.board != nullptr) connection_.board->fail(found);
  for (const auto& call : queue_) connection_.recorder->set(call->record.number, RecordedCall::State::failed);
  const auto given_up = std::exchange(queue_, {});  // their memory may be in use until the abort
  lock.unlock();
  if (connection_.abort != nullptr) connection_.abort();
  lock.lock();
}

void Watch::run() {
  if (connection_.begin != nullptr) connection_.begin();
  std::unique_lock lock(mutex_);
  for (;;) {
    if (connection_.board != nullptr) connection_.board->beat();
    std::optional<Trouble> found = drop_ended();
    if (failure_) queue_.clear();
    if (finishes_ && queue_.empty()) return;
    if (!queue_.empty() && !found) {
      const std::optional<std::string> fault = connection_.fault == nullptr ? std::nullopt : connection_.fault();
      const double waited = since_ ? std::chrono::duration<double>(Clock::now() - *since_).count() : 0;
      found = trouble(queue_.front()->record.number, waited, fault);
    }
    if (found) {
      give_up(lock, *found);
      continue;
    }
    changed_.wait_for(lock, queue_.empty() ? kIdle : kTick);
  }
}

}  // namespace weft::detail
