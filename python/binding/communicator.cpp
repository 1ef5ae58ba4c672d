#include "communicator.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#ifdef WEFT_WITH_CUDA
#include "comm/cuda/transports.h"
#endif
#include "gil.h"
#include "index.h"
#include "module.h"
#include "pending.h"
#include "tensor.h"
#include "text.h"
#include "weft/error.h"
#include "weft/flight.h"

namespace weft::python {
namespace {

using namespace nb::literals;

#ifdef WEFT_WITH_CUDA
nb::object on_gpu(void* data, Index bytes, int device) {
  const std::size_t shape[] = {at(bytes)};
  return nb::cast(nb::ndarray<nb::array_api, std::uint8_t>(data, 1, shape, nb::none(), nullptr,
                                                           nb::dtype<std::uint8_t>(), nb::device::cuda::value, device));
}

// An exchange of no messages.
struct Alone final : Request::Pending {
  void wait() override {}
};
#endif

class PythonCommunicator : public Communicator {
 public:
  // `members`: ranks of the transport.
  PythonCommunicator(Index rank, std::vector<Index> members, std::string name, nb::object transport, bool reaches_gpus)
      : Communicator(rank, static_cast<Index>(members.size())),
        members_(std::move(members)),
        name_(std::move(name)),
        transport_(std::move(transport)),
        reaches_gpus_(reaches_gpus) {}
  ~PythonCommunicator() override {
    const AcquireGil gil;
    transport_.reset();
  }

  static std::unique_ptr<Communicator> make(Index rank, std::vector<Index> members, std::string name,
                                            nb::object transport, bool reaches_gpus);
  std::string_view name() const override { return name_; }
  double time_limit() const override {
    const AcquireGil gil;
    return nb::hasattr(transport_, "time_limit") ? nb::cast<double>(transport_.attr("time_limit")) : 300;
  }
  void check() const override {
    const AcquireGil gil;
    if (nb::hasattr(transport_, "check")) call_python(transport_.attr("check"));
  }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    for (auto* list : {&sends, &receives})
      for (Message& m : *list) m.peer = members_[at(m.peer)];
    return std::make_unique<PythonPending>(transport_, members_[at(rank())], std::move(sends), std::move(receives));
  }

  std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                 const detail::SignedPeers& peers) override {
    return std::make_unique<SignedPending>(
        detail::signed_call(*this, peers, std::move(sends), std::move(receives),
                            [this](std::vector<Message> to, std::vector<Message> from) {
                              return start(std::move(to), std::move(from));
                            }),
        transport_, members_);
  }

  // Ranks of one color use the same transport: both ends of a pair make the same calls in the same order.
  std::unique_ptr<Communicator> make_split(Index color, Index key) override {
    struct Entry {
      Index color, key, rank;
    };
    std::vector<Entry> all(at(ranks()));
    Entry mine{color, key, rank()};
    std::vector<Block> places;
    constexpr Index kSize = sizeof(Entry);
    for (Entry& e : all) places.push_back({&e, 1, 1, kSize, kSize, kSize});
    all_gather({&mine, 1, 1, kSize, kSize, kSize}, places).wait();
    std::erase_if(all, [&](const Entry& e) { return e.color != color; });
    std::sort(all.begin(), all.end(),
              [](const Entry& a, const Entry& b) { return std::pair(a.key, a.rank) < std::pair(b.key, b.rank); });
    std::vector<Index> members;
    Index me = 0;
    for (const Entry& e : all) {
      if (e.rank == rank()) me = static_cast<Index>(members.size());
      members.push_back(members_[at(e.rank)]);
    }
    const AcquireGil gil;
    return make(me, std::move(members), name_, transport_, reaches_gpus_);
  }

 protected:
  std::vector<Index> members_;
  std::string name_;
  nb::object transport_;
  bool reaches_gpus_;
};

#ifdef WEFT_WITH_CUDA
class PythonGpuCommunicator final : public PythonCommunicator {
  using PythonCommunicator::PythonCommunicator;

  std::unique_ptr<DeviceCommunicator> make_on(const Place& place) override {
    const AcquireGil gil;
    const Index all = nb::cast<Index>(transport_.attr("ranks"));
    if (ranks() < all)  // NCCL begins with all ranks of a group, or hangs
      throw Error(text("a split of a process group (", ranks(), " of ", all, " ranks) on GPUs"),
                  "make a group of those ranks: torch.distributed.new_group");
    if (ranks() > 1) call_python(transport_.attr("meet_on_gpu"), nb::int_(place.device));
    return cuda::make_packed(
        *this, place, signs_, [this](const Place& on, auto sends, auto receives) { return carry(on, sends, receives); },
        collectives());
  }

  void check() const override {
    signs_->check();
    PythonCommunicator::check();
  }

  void tell(const std::string& disagreement) const {
    const AcquireGil gil;
    if (nb::hasattr(transport_, "disagree")) call_python(transport_.attr("disagree"), nb::str(disagreement.c_str()));
  }

  // torch's own, which NCCL moves better than messages: a row enters a node once.
  cuda::CarryCollectives collectives() const {
    if (ranks() < 2 || !nb::hasattr(transport_, "collective_on_gpu")) return {};
    const Index n = ranks();
    for (Index r = 0; r < n; ++r)
      if (members_[at(r)] != r) return {};  // a split in another order, and torch's own are in the order of the group
    return {.all_gather =
                [this, n](const Place& on, const void* mine, void* all, Index bytes, const cuda::GatheredSigns& signs) {
                  return collective("all_gather", on, mine, {bytes}, all, std::vector<Index>(at(n), bytes), signs);
                },
            .reduce_scatter =
                [this, n](const Place& on, const float* parts, float* mine, Index count) {
                  const Index bytes = count * Index{sizeof(float)};
                  return collective("reduce_scatter", on, parts, std::vector<Index>(at(n), bytes), mine, {bytes});
                },
            .all_to_all =
                [this](const Place& on, const void* to, std::span<const Index> to_bytes, void* from,
                       std::span<const Index> from_bytes) {
                  return collective("all_to_all", on, to, {to_bytes.begin(), to_bytes.end()}, from,
                                    {from_bytes.begin(), from_bytes.end()});
                }};
  }

  std::unique_ptr<Request::Pending> collective(const char* kind, const Place& place, const void* sent,
                                               const std::vector<Index>& sent_bytes, void* received,
                                               const std::vector<Index>& received_bytes,
                                               const cuda::GatheredSigns& signs = {}) const {
    const AcquireGil gil;
    nb::object with = nb::none();
    if (signs.mine != nullptr)
      with = nb::make_tuple(on_gpu(signs.mine, signs.bytes, place.device),
                            on_gpu(signs.all, ranks() * signs.bytes, place.device));
    const auto list = [](const std::vector<Index>& sizes) {
      nb::list out;
      for (const Index size : sizes) out.append(size);
      return out;
    };
    const Index out = std::accumulate(sent_bytes.begin(), sent_bytes.end(), Index{0}),
                in = std::accumulate(received_bytes.begin(), received_bytes.end(), Index{0});
    return std::make_unique<Handle>(call_python(
        transport_.attr("collective_on_gpu"), nb::str(kind), on_gpu(const_cast<void*>(sent), out, place.device),
        list(sent_bytes), on_gpu(received, in, place.device), list(received_bytes), nb::int_(place.device),
        nb::int_(reinterpret_cast<std::uintptr_t>(place.stream)), with));
  }

  std::unique_ptr<Request::Pending> carry(const Place& place, std::span<const cuda::Parcel> sends,
                                          std::span<const cuda::Parcel> receives) const {
    if (sends.empty() && receives.empty()) return std::make_unique<Alone>();
    const AcquireGil gil;
    nb::list to, from;
    for (const cuda::Parcel& p : sends)
      to.append(nb::make_tuple(members_[at(p.peer)], on_gpu(p.data, p.bytes, place.device)));
    for (const cuda::Parcel& p : receives)
      from.append(nb::make_tuple(members_[at(p.peer)], on_gpu(p.data, p.bytes, place.device)));
    return std::make_unique<Handle>(call_python(transport_.attr("exchange_on_gpu"), to, from, nb::int_(place.device),
                                                nb::int_(reinterpret_cast<std::uintptr_t>(place.stream))));
  }

  std::shared_ptr<detail::SignsInFlight> signs_ =
      std::make_shared<detail::SignsInFlight>([this](const std::string& words) { tell(words); });
};
#endif

std::unique_ptr<Communicator> PythonCommunicator::make(Index rank, std::vector<Index> members, std::string name,
                                                       nb::object transport, bool reaches_gpus) {
#ifdef WEFT_WITH_CUDA
  if (reaches_gpus)
    return std::make_unique<PythonGpuCommunicator>(rank, std::move(members), std::move(name), std::move(transport),
                                                   true);
#endif
  return std::make_unique<PythonCommunicator>(rank, std::move(members), std::move(name), std::move(transport),
                                              reaches_gpus);
}

std::unique_ptr<Comm> held(std::unique_ptr<Communicator> communicator) {
  auto comm = std::make_unique<Comm>(*communicator);
  comm->own = std::move(communicator);
  return comm;
}

// Python's `with communicator.turn():`.
struct HeldTurn {
  explicit HeldTurn(Comm& c) : comm(c) {}
  Comm& comm;  // kept alive by Python
  std::optional<InTurn> taken = {};
};

Block block_of(const Array& array, std::string_view name, Use use) {
  const RowTensor rows = rows_view(array, name, Format::thd, use);
  const Index stride = rows.row_stride == 0 ? rows.row_bytes : rows.row_stride;
  return {rows.data, rows.rows, 1, rows.row_bytes, stride, rows.row_bytes};
}

using Mail = std::vector<std::pair<Index, Array>>;

std::vector<Message> messages_of(const Mail& mail, const Place& place, Use use) {
  std::vector<Message> out;
  for (const auto& [peer, array] : mail) {
    const Place here = place_of({{"what is exchanged", array}}, 0);
    if (here.kind != place.kind || here.device != place.device)
      throw Error("arrays of one exchange lie on several devices", "make one exchange for each device");
    out.push_back({.peer = peer, .blocks = {block_of(array, "what is exchanged", use)}});
  }
  return out;
}

}  // namespace

Communicator& Comm::get() const {
  if (ended_or_not == nullptr)
    throw Error("the ranks of this communicator have ended",
                "use it, and call backward, inside the function given to weft.spawn");
  return *ended_or_not;
}

void Turns::take() {
  const std::thread::id self = std::this_thread::get_id();
  std::unique_lock lock(mutex_);
  if (depth_ > 0 && taken_by_ != self) {
    if (ranks_ > 1)
      throw Error(text("two threads are in calls over one communicator of ", ranks_, " ranks at the same time"),
                  "ranks must make the same calls in the same order: give each thread a group of its own, or let one "
                  "call follow another");
    free_.wait(lock, [&] { return depth_ == 0; });
  }
  taken_by_ = self;
  ++depth_;
}

void Turns::give_back() {
  {
    const std::lock_guard lock(mutex_);
    if (--depth_ > 0) return;
  }
  free_.notify_all();
}

void Turns::wait_until_free() {
  std::unique_lock lock(mutex_);
  free_.wait(lock, [&] { return depth_ == 0; });
}

std::unique_ptr<Comm> make_python_communicator(Index rank, Index ranks, std::string name, nb::object transport,
                                               bool reaches_gpus) {
  if (ranks < 1 || rank < 0 || rank >= ranks)
    throw Error(text("there is no rank ", rank, " of ", ranks), "give 0 <= rank < ranks");
  constexpr Index kMost = Index{1} << 20;  // as in a layout
  if (ranks > kMost) throw Error(text(ranks, " ranks"), text("use at most ", kMost));
  std::vector<Index> members;
  for (Index r = 0; r < ranks; ++r) members.push_back(r);
  return held(PythonCommunicator::make(rank, std::move(members), std::move(name), std::move(transport), reaches_gpus));
}

void bind_communicator(nb::module_& m) {
  nb::class_<Comm>(m, "Communicator", "Moves bytes between ranks. weft.spawn and weft.torch make them.")
      .def_prop_ro("rank", [](const Comm& c) { return c.get().rank(); })
      .def_prop_ro("ranks", [](const Comm& c) { return c.get().ranks(); })
      .def_prop_ro("name", [](const Comm& c) { return std::string(c.get().name()); })
      .def(
          "barrier",
          [](Comm& c) {
            double nothing = 0;
            const ReleaseGil others_run;
            const InTurn turn(c);
            c.get().all_reduce(&nothing, DType::f64, 1, Reduce::sum).wait();
          },
          "Returns when every rank has called it.")
      .def(
          "check",
          [](Comm& c) {
            const ReleaseGil others_run;
            const InTurn turn(c);
            c.get().check();
          },
          "Error if calls on GPUs that had been started were given up since, or if ranks differ in one that has ended. "
          "Every later call says so too; after the last one, and behind torch.cuda.synchronize(), this does.")
      .def(
          "split",
          [](Comm& c, Index color, Index key) {
            const ReleaseGil others_run;
            const InTurn turn(c);
            auto split = held(c.get().split(color, key));
            // Messages of a transport are numbered in the order of all calls over it.
            if (dynamic_cast<const PythonCommunicator*>(&c.get()) != nullptr) split->turns = c.turns;
            return split;
          },
          "color"_a, "key"_a, "Ranks of one color, ordered by (key, rank), become a communicator of their own.")
      .def(
          "all_gather",
          [](Comm& c, const Array& mine, const std::vector<Array>& all, std::uintptr_t stream) {
            if (static_cast<Index>(all.size()) != c.get().ranks())
              throw Error(text(all.size(), " arrays for ", c.get().ranks(), " ranks"), "give one a rank");
            const Block from = block_of(mine, "this rank's array", Use::read);
            std::vector<Block> to;
            for (const Array& array : all) {
              place_of({{"this rank's array", mine}, {"what is gathered", array}}, 0);
              to.push_back(block_of(array, "what is gathered", Use::write));
            }
            const Place place = place_of({{"this rank's array", mine}}, stream);
            const ReleaseGil others_run;
            const InTurn turn(c);
            if (place.kind == DeviceKind::cpu) return c.get().all_gather(from, to).wait();
            c.get().on(place)->all_gather(from, to).wait();
          },
          "mine"_a, "all"_a, "stream"_a = 0, "Every rank's array, of any dtype, into one array a rank.")
      .def(
          "exchange",
          [](Comm& c, const Mail& sends, const Mail& receives, std::uintptr_t stream, Index times) {
            if (times < 1) throw Error(text(times, " times"), "exchange once or more often");
            Place place{};
            for (const auto* some : {&sends, &receives})
              if (!some->empty()) place = place_of({{"what is exchanged", some->front().second}}, stream);
            const auto out = messages_of(sends, place, Use::read), in = messages_of(receives, place, Use::write);
            const ReleaseGil others_run;
            const InTurn turn(c);
            const auto gpu = place.kind == DeviceKind::cpu ? nullptr : c.get().on(place);
            Communicator& over = gpu ? *gpu : c.get();
            for (Index n = 0; n < times; ++n) over.exchange(out, in).wait();
          },
          "sends"_a, "receives"_a, "stream"_a = 0, "times"_a = 1,
          "Sends arrays to ranks and receives others, lists of (rank, array), and waits; so many times, one after "
          "another. "
          "All ranks call it, those on GPUs with something to send or to receive.")
      .def(
          "turn", [](Comm& c) { return std::make_unique<HeldTurn>(c); }, nb::keep_alive<0, 1>(),
          "A context manager: several calls that no other thread's calls may come between.")
      .def_prop_ro("bytes_sent", [](const Comm& c) { return c.get().traffic().bytes_sent; })
      .def_prop_ro("bytes_received", [](const Comm& c) { return c.get().traffic().bytes_received; })
      .def_prop_ro("messages_sent", [](const Comm& c) { return c.get().traffic().messages_sent; })
      .def(
          "flight_record", [](const Comm& c) { return c.get().flight_record(); },
          "The last 64 calls of this rank, a line each, oldest first: number, pass and step, peers, bytes, age, state.")
      .def(
          "fingerprint", [](const Comm& c) { return c.get().fingerprint(); },
          "What this rank's last pass is compared by, as text; empty before the first pass.")
      .def(
          "disagreement",
          [](const Comm& c, const std::vector<std::pair<Index, std::string>>& others) {
            return c.get().disagreement(others);
          },
          "others"_a,
          "In words, how this rank's pass differs from those of other ranks, (rank, fingerprint) each; empty if it "
          "does "
          "not, or if they are in another pass.")
      .def("reset_traffic", [](Comm& c) { c.get().reset_traffic(); }, "Counts bytes and messages from 0 again.");
  nb::class_<HeldTurn>(m, "Turn", "with communicator.turn(): calls over it belong to this thread.")
      .def(
          "__enter__", [](HeldTurn& t) { t.taken.emplace(t.comm); }, nb::call_guard<ReleaseGil>())
      .def("__exit__", [](HeldTurn& t, const nb::args&) { t.taken.reset(); });
  m.def("flight_records", &flight_records, nb::call_guard<ReleaseGil>(),
        "The last 64 calls of each communicator of this process, an object of JSON a line.");
  m.def(
      "keep_flight_file",
      [](std::string path, bool on_failure, int signal) {
        keep_flight_file({.path = std::move(path), .on_failure = on_failure, .signal = signal});
      },
      "path"_a, "on_failure"_a = true, "signal"_a = 0, nb::call_guard<ReleaseGil>(),
      "Writes flight_records() there when a call fails for the first time, and at every signal; \"\": nothing any "
      "more.");
  m.def("python_communicator", &make_python_communicator, "rank"_a, "ranks"_a, "name"_a, "transport"_a,
        "reaches_gpus"_a = false);
}

}  // namespace weft::python
