#include "comm/faulty.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <random>
#include <thread>

#include "comm/message_memory.h"
#include "index.h"
#include "text.h"

namespace weft {

namespace {

using Kind = Fault::Kind;
using Random = std::mt19937_64;

constexpr std::array kKinds{Kind::delay, Kind::reorder, Kind::truncate, Kind::corrupt,
                            Kind::drop,  Kind::lose,    Kind::fail};
constexpr std::array<std::string_view, kKinds.size()> kNames{"delay", "reorder", "truncate", "corrupt",
                                                             "drop",  "lose",    "fail"};

Index below(Random& random, Index end) { return static_cast<Index>(random() % static_cast<std::uint64_t>(end)); }

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Changes every byte of a range.
void flip(unsigned char* bytes, Index begin, Index end, Random& random) {
  for (Index i = begin; i < end; ++i) bytes[i] = static_cast<unsigned char>(bytes[i] ^ (1 + below(random, 255)));
}

struct Call;

// What a communicator and its calls share.
struct Shared {
  std::vector<const Fault*> at(Index call) const {
    std::vector<const Fault*> found;
    for (const Fault& fault : faults)
      if (fault.rank == rank && fault.call == call) found.push_back(&fault);
    return found;
  }

  std::vector<Fault> faults;
  Index rank = 0;
  std::vector<Call*> in_flight = {};  // in the order in which they were started
};

// One call with messages at `place`. Sums are added here, in wait(), so that the inner calls may end in any order.
struct Call final : Request::Pending {
  Call(std::shared_ptr<Shared> of, Index number, Communicator& inner, const Place& place, std::vector<Message> sends,
       std::vector<Message> receives);
  ~Call() override { std::erase(plan->in_flight, this); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void wait() override;
  bool has(Kind kind) const {
    return std::any_of(faults.begin(), faults.end(), [&](const Fault* f) { return f->kind == kind; });
  }
  void sleep_if(bool late) const;
  void spoil(std::vector<Message>& sends);
  void change(Message& message, Kind kind, Random& random);
  std::vector<Message> with_scratch();

  std::shared_ptr<Shared> plan;
  Index number;
  std::vector<const Fault*> faults;
  std::vector<Message> receives;
  std::unique_ptr<MessageMemory> memory;  // of copies that are sent in place of the caller's memory, and of scratch
  std::vector<Block> scratch;             // for each receive that adds
  Request request;                        // last, so that it is destroyed before the memory that it uses
};

Call::Call(std::shared_ptr<Shared> of, Index call, Communicator& inner, const Place& place, std::vector<Message> sends,
           std::vector<Message> wanted)
    : plan(std::move(of)), number(call), faults(plan->at(call)), receives(std::move(wanted)), memory(memory_of(place)) {
  sleep_if(false);
  spoil(sends);
  std::vector<Message> in = with_scratch();
  if (!has(Kind::lose)) request = inner.exchange(std::move(sends), std::move(in));
  plan->in_flight.push_back(this);
}

// Half of the delays are of the start, half of the wait.
void Call::sleep_if(bool late) const {
  for (const Fault* f : faults)
    if (f->kind == Kind::delay && (f->seed % 2 == 1) == late) sleep(f->seconds);
}

void Call::spoil(std::vector<Message>& sends) {
  for (const Fault* f : faults) {
    Random random(f->seed);
    std::vector<std::size_t> others;  // a rank's messages to itself are not sent
    for (std::size_t i = 0; i < sends.size(); ++i)
      if (sends[i].peer != plan->rank && sends[i].size() > 0) others.push_back(i);
    if (others.empty()) continue;
    const std::size_t chosen = others[at(below(random, static_cast<Index>(others.size())))];
    if (f->kind == Kind::drop) {
      sends.erase(sends.begin() + static_cast<std::ptrdiff_t>(chosen));
    } else if (f->kind == Kind::truncate || f->kind == Kind::corrupt) {
      change(sends[chosen], f->kind, random);
    }
  }
}

void Call::change(Message& message, Kind kind, Random& random) {
  const Index size = message.size();
  Block copy = memory->take(size);
  memory->move(message.blocks, {&copy, 1}, Message::Combine::replace);
  std::vector<unsigned char> bytes(at(size));
  memory->read(copy, bytes.data());
  Index sent = size;
  if (kind == Kind::corrupt) {
    const Index first = below(random, size);
    flip(bytes.data(), first, min_of(size, first + 1 + below(random, 8)), random);
  } else if (const Index kept = below(random, size); below(random, 2) == 0) {
    sent = kept;
  } else {  // of the right length, but with another end
    flip(bytes.data(), kept, size, random);
  }
  memory->write(bytes.data(), copy);
  copy.bytes = copy.row_stride = copy.part_stride = sent;
  message.blocks = {copy};
}

std::vector<Message> Call::with_scratch() {
  std::vector<Message> in = receives;
  scratch.resize(receives.size());
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!adds(in[i].combine)) continue;
    scratch[i] = memory->take(in[i].size());
    in[i].blocks = {scratch[i]};
    in[i].combine = Message::Combine::replace;
  }
  return in;
}

void Call::wait() {
  sleep_if(true);
  if (has(Kind::fail)) throw Error(text("a planted failure in call ", number), "there is none: it was asked for");
  if (has(Kind::reorder)) {
    const std::vector<Call*> calls = plan->in_flight;  // the last one is waited for first
    for (auto later = calls.rbegin(); later != calls.rend(); ++later) (*later)->request.wait();
  }
  request.wait();
  for (std::size_t i = 0; i < receives.size(); ++i) {
    Message& m = receives[i];
    if (adds(m.combine)) memory->move({&scratch[i], 1}, m.blocks, m.combine);
  }
}

// The same for memory of a GPU.
class FaultyOnDevice final : public DeviceCommunicator {
 public:
  FaultyOnDevice(Communicator& faulty, std::unique_ptr<DeviceCommunicator> inner, const Place& place,
                 std::shared_ptr<Shared> plan, Index& calls)
      : DeviceCommunicator(faulty, place), inner_(std::move(inner)), plan_(std::move(plan)), calls_(calls) {}

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    inner_->use(place().stream);
    return std::make_unique<Call>(plan_, calls_++, *inner_, place(), std::move(sends), std::move(receives));
  }

  std::unique_ptr<DeviceCommunicator> inner_;
  std::shared_ptr<Shared> plan_;
  Index& calls_;
};

class Faulty final : public Communicator {
 public:
  Faulty(Communicator& inner, std::vector<Fault> faults, Index* calls)
      : Communicator(inner.rank(), inner.ranks()),
        inner_(inner),
        plan_(std::make_shared<Shared>(Shared{std::move(faults), inner.rank()})),
        calls_(calls == nullptr ? own_calls_ : *calls) {}
  Faulty(std::unique_ptr<Communicator> inner, std::vector<Fault> faults) : Faulty(*inner, std::move(faults), nullptr) {
    owned_ = std::move(inner);
  }

  std::string_view name() const override { return inner_.name(); }
  double time_limit() const override { return inner_.time_limit(); }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Call>(plan_, calls_++, inner_, Place{}, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override {
    return std::make_unique<Faulty>(inner_.split(color, key), plan_->faults);
  }
  std::unique_ptr<DeviceCommunicator> make_on(const Place& place) override {
    return std::make_unique<FaultyOnDevice>(*this, inner_.on(place), place, plan_, calls_);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
  std::shared_ptr<Shared> plan_;
  Index own_calls_ = 0;
  Index& calls_;
};

}  // namespace

std::span<const Fault::Kind> fault_kinds() { return kKinds; }
std::string_view name(Fault::Kind kind) { return kNames[static_cast<std::size_t>(kind)]; }

Fault make_fault(Fault::Kind kind, std::uint64_t seed, Index ranks, Index calls, double seconds) {
  Random random(seed);
  const Index rank = below(random, ranks), call = below(random, calls);
  return {.kind = kind, .rank = rank, .call = call, .seconds = seconds, .seed = random()};
}

std::unique_ptr<Communicator> make_faulty(Communicator& inner, std::vector<Fault> plan, Index* calls) {
  return std::make_unique<Faulty>(inner, std::move(plan), calls);
}

}  // namespace weft
