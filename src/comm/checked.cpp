#include "comm/checked.h"

#include <cstddef>
#include <cstdint>

#include "comm/message_memory.h"
#include "index.h"
#include "text.h"

namespace weft {

std::uint64_t checksum(std::span<const Block> blocks, const Place& place) {
  const std::unique_ptr<MessageMemory> memory = memory_of(place);
  std::uint64_t sum = 0;
  const Block here = memory->take(sizeof(sum));
  memory->sum(blocks, here.data);
  memory->read(here, &sum);
  return sum;
}

namespace {

// What is sent behind each message.
struct Seal {
  std::uint64_t call = 0, route = 0, size = 0, sum = 0;

  friend bool operator==(const Seal&, const Seal&) = default;
};

// What came behind a message, and the checksum of what came before it.
struct Arrived {
  Seal seal;
  std::uint64_t sum = 0;
};

class CheckedExchange final : public Request::Pending {
 public:
  // Messages lie at `place`.
  CheckedExchange(Communicator& inner, const Place& place, std::uint64_t call, std::vector<Message> sends,
                  std::vector<Message> receives)
      : inner_(inner),
        on_gpu_(place.kind != DeviceKind::cpu),
        memory_(memory_of(place)),
        call_(call),
        receives_(std::move(receives)),
        scratch_(receives_.size()),
        arrived_(memory_->take(static_cast<Index>(receives_.size() * sizeof(Arrived)))) {
    seal(sends);
    std::vector<Message> sealed = receives_;
    for (std::size_t i = 0; i < sealed.size(); ++i) {
      if (adds(sealed[i].combine)) {  // is added only after its checksum was compared
        scratch_[i] = memory_->take(sealed[i].size());
        sealed[i].blocks = {scratch_[i]};
        sealed[i].combine = Message::Combine::replace;
      }
      sealed[i].blocks.push_back(seal_at(arrived_, i * sizeof(Arrived)));
    }
    in_flight_ = inner.exchange(std::move(sends), std::move(sealed));
  }

  void wait() override {
    in_flight_.wait();
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const std::span<const Block> came = adds(receives_[i].combine) ? std::span(&scratch_[i], 1) : receives_[i].blocks;
      memory_->sum(came, byte(arrived_, i * sizeof(Arrived) + offsetof(Arrived, sum)));
    }
    std::vector<Arrived> arrived(receives_.size());
    memory_->read(arrived_, arrived.data());
    if (on_gpu_) inner_.check();  // a call that was given up ends in the stream as if all were well
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const Message& m = receives_[i];
      const Seal want{call_, route(m.peer, inner_.rank()), static_cast<std::uint64_t>(m.size()), arrived[i].sum};
      if (!(arrived[i].seal == want)) refuse(m, arrived[i].seal, want);
      if (adds(m.combine)) memory_->move({&scratch_[i], 1}, m.blocks, m.combine);
    }
  }

 private:
  static std::uint64_t route(Index from, Index to) {
    return static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint64_t>(to);
  }
  static char* byte(const Block& block, std::size_t offset) { return static_cast<char*>(block.data) + offset; }
  static Block seal_at(const Block& block, std::size_t offset) {
    return {.data = byte(block, offset), .rows = 1, .bytes = sizeof(Seal)};
  }

  // Behind each message goes its seal.
  void seal(std::vector<Message>& sends) {
    std::vector<Seal> seals;
    for (const Message& m : sends)
      seals.push_back({call_, route(inner_.rank(), m.peer), static_cast<std::uint64_t>(m.size()), 0});
    const Block sent = memory_->take(static_cast<Index>(seals.size() * sizeof(Seal)));
    memory_->write(seals.data(), sent);
    for (std::size_t i = 0; i < sends.size(); ++i) {
      memory_->sum(sends[i].blocks, byte(sent, i * sizeof(Seal) + offsetof(Seal, sum)));
      sends[i].blocks.push_back(seal_at(sent, i * sizeof(Seal)));
    }
  }

  [[noreturn]] void refuse(const Message& m, const Seal& got, const Seal& want) const {
    const char* what = "other bytes than were sent";
    if (got.call != want.call)
      what = "the message of another call";
    else if (got.route != want.route)
      what = "a message meant for another rank";
    else if (got.size != want.size)
      what = "a message of another size";
    throw Error(text("call ", call_, ": rank ", inner_.rank(), " received ", what, " from rank ", m.peer),
                "the transport between them is at fault; nothing of this pass can be trusted");
  }

  Communicator& inner_;
  bool on_gpu_;
  std::unique_ptr<MessageMemory> memory_;
  std::uint64_t call_;
  std::vector<Message> receives_;
  std::vector<Block> scratch_;  // of each receive that adds
  Block arrived_;
  Request in_flight_;  // last, so that it is destroyed before the memory that it uses
};

// The same for memory of a GPU. Each wait() waits for the GPU, because sums are compared on the host.
class CheckedOnDevice final : public DeviceCommunicator {
 public:
  // `inner`: the ranks without checks.
  CheckedOnDevice(Communicator& checked, Communicator& inner, const Place& place)
      : DeviceCommunicator(checked, place), ranks_(inner), inner_(inner.on(place)) {}

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    inner_->use(place().stream);
    return std::make_unique<CheckedExchange>(*inner_, place(), ++ranks_.calls().exchanges, std::move(sends),
                                             std::move(receives));
  }

  Communicator& ranks_;
  std::unique_ptr<DeviceCommunicator> inner_;
};

class Checked final : public Communicator {
 public:
  explicit Checked(Communicator& inner) : Communicator(inner.rank(), inner.ranks()), inner_(inner) {}
  Checked(std::unique_ptr<Communicator> inner, int)
      : Communicator(inner->rank(), inner->ranks()), owned_(std::move(inner)), inner_(*owned_) {}

  std::string_view name() const override { return inner_.name(); }
  double time_limit() const override { return inner_.time_limit(); }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<CheckedExchange>(inner_, Place{}, ++inner_.calls().exchanges, std::move(sends),
                                             std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override {
    return std::make_unique<Checked>(inner_.split(color, key), 0);
  }
  std::unique_ptr<DeviceCommunicator> make_on(const Place& place) override {
    return std::make_unique<CheckedOnDevice>(*this, inner_, place);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
};

}  // namespace

std::unique_ptr<Communicator> make_checked(Communicator& inner) { return std::make_unique<Checked>(inner); }

}  // namespace weft
