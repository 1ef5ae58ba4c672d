#include "weft/communicator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>

#include "comm/blocks.h"
#include "comm/checked.h"
#include "comm/flight.h"
#include "comm/sign.h"
#ifdef WEFT_WITH_CUDA
#include "comm/cuda/transports.h"
#endif
#include "index.h"
#include "text.h"

namespace weft {

namespace {

// The block of rows of one outer step, or of all rows where there is no outer dimension.
Block block_of(const ConstTensorView& view, Index first, Index rows) {
  const Index size = size_of(view.dtype);
  // A block that is received was made from a tensor that the caller may write; here that is not known.
  char* data = static_cast<char*>(const_cast<void*>(view.data)) + view.row_offset(first) * size;
  return merged({data, rows, view.heads, view.dim * size, view.row_stride * size, view.head_stride * size});
}

// Runs a function after another call, whose buffers the function may own.
class Then final : public Request::Pending {
 public:
  Then(std::unique_ptr<Pending> first, std::function<void()> then) : then_(std::move(then)), first_(std::move(first)) {}
  void wait() override {
    if (first_ != nullptr) first_->wait();
    first_.reset();
    then_();
  }

 private:
  std::function<void()> then_;
  std::unique_ptr<Pending> first_;  // destroyed before `then_`, which may own its buffers
};

std::string block_text(const Block& block) {
  return text(block.rows, " rows x ", block.parts, " parts x ", block.bytes, " bytes");
}

bool sizes_fit(const Block& block) {
  if (block.rows < 0 || block.parts < 0 || block.bytes < 0) return false;
  if (block.rows == 0 || block.parts == 0) return true;
  return block.rows <= kUnlimited / block.parts && block.bytes <= kUnlimited / (block.rows * block.parts);
}

void check_block(const Block& block, const std::string& where, Message::Combine how) {
  if (!sizes_fit(block)) {
    throw Error(text(where, ": a block of ", block_text(block)), "give sizes of at least 0 and 2^60 bytes at most");
  }
  if (block.data == nullptr && block.size() > 0) {
    throw Error(text(where, ": a block of ", block_text(block), " at a null pointer"), "point it at its bytes");
  }
  if (!holds_numbers(block, how)) {
    throw Error(text(where, ": a block of ", block_text(block), " (strides ", block.row_stride, ", ", block.part_stride,
                     ") to add to, which is not cut and aligned to ", number_size(how) == 8 ? "f64" : "f32"),
                text("align it, its sizes and its strides to ", number_size(how), " bytes"));
  }
}

void check_messages(std::span<const Message> messages, const char* kind, Index ranks) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    const std::string where = text(kind, " ", i, " of ", messages.size());
    if (message.peer < 0 || message.peer >= ranks) {
      throw Error(text(where, " names rank ", message.peer, " of ", ranks), text("name one of 0 .. ", ranks - 1));
    }
    for (const Block& block : message.blocks) check_block(block, where, message.combine);
  }
}

// Counts messages and bytes to or from other ranks, and the bytes to or from other nodes.
void count(std::span<const Message> messages, Index self, Index node, Index& number, Index& bytes, Index& between) {
  for (const Message& message : messages) {
    if (message.peer == self) continue;
    ++number;
    bytes += message.size();
    if (node > 1 && message.peer / node != self / node) between += message.size();
  }
}

void check_count(const char* what, std::size_t count, Index ranks) {
  if (static_cast<Index>(count) == ranks) return;
  throw Error(text(what, " has ", count, " blocks and there are ", ranks, " ranks"), "give a block for each rank");
}

// Error unless there is a message to and from each rank, in their order, all of one size.
void check_equal(const char* what, std::span<const Message> sends, std::span<const Message> receives, Index ranks) {
  for (const std::span<const Message> messages : {sends, receives}) {
    check_count(what, messages.size(), ranks);
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      const Message& m = messages[rank];
      if (m.peer == static_cast<Index>(rank) && m.size() == sends[0].size()) continue;
      throw Error(text(what, ": message ", rank, " is that of rank ", m.peer, " and has ", m.size(),
                       " bytes; the first has ", sends[0].size()),
                  "give a message for each rank, in their order, of equal size");
    }
  }
}

std::vector<Block> blocks_of(std::span<const Message> messages) {
  std::vector<Block> all;
  for (const Message& m : messages) all.insert(all.end(), m.blocks.begin(), m.blocks.end());
  return all;
}

// Both sides of a collective leave out empty messages.
void append(std::vector<Message>& messages, Index peer, const Block& block,
            Message::Combine how = Message::Combine::replace) {
  if (block.size() != 0) messages.push_back({peer, {block}, how});
}

// What is the same on all ranks of a call that they agree on: the sizes of what each rank has or gets.
bool are_equal(std::span<const Block> blocks) {
  const Index size = blocks[0].size();
  return size > 0 && std::all_of(blocks.begin(), blocks.end(), [&](const Block& b) { return b.size() == size; });
}

// The error of a call that failed for want of a peer: with pass, step and bytes of that call, and the last calls.
PeerError failed(detail::FlightRecorder& recorder, Index call, const PeerError& e) {
  const std::string calls = recorder.last_calls(4), line = recorder.line(call);
  recorder.set(call, detail::RecordedCall::State::failed);
  if (e.has_calls() || line.empty()) return e.with_calls(calls);
  return PeerError(text(e.problem(), ": ", line), e.remedy(), e.consequence()).with_calls(calls);
}

template <class T>
void reduce(T& into, T value, Reduce how) {
  if (how == Reduce::sum) {
    into += value;
  } else if (value > into || std::isnan(value)) {  // a NaN anywhere shows
    into = value;
  }
}

template <class T>
void reduce_ranks(const T* all, T* into, Index ranks, Index count, Reduce how) {
  for (Index i = 0; i < count; ++i) into[i] = all[i];
  for (Index rank = 1; rank < ranks; ++rank) {
    for (Index i = 0; i < count; ++i) reduce(into[i], all[rank * count + i], how);
  }
}

template <class T>
Request all_reduce_of(Communicator& communicator, T* data, Index count, Reduce how) {
  const Index ranks = communicator.ranks(), bytes = count * Index{sizeof(T)};
  auto all = std::make_shared<std::vector<T>>(at(ranks * count));
  std::vector<Block> to;
  for (Index rank = 0; rank < ranks; ++rank)
    to.push_back({.data = all->data() + rank * count, .rows = 1, .bytes = bytes});
  return communicator.all_gather({.data = data, .rows = 1, .bytes = bytes}, to).after([=] {
    reduce_ranks(all->data(), data, ranks, count, how);
  });
}

}  // namespace

void append_blocks(const ConstTensorView& view, Range rows, std::vector<Block>& blocks) {
  if (rows.size() == 0 || view.dim == 0) return;
  if (rows.begin < 0 || rows.end > view.rows) {
    throw Error(text("rows [", rows.begin, ", ", rows.end, ") asked of a tensor of ", view.rows, " rows"),
                text("ask for rows of [0, ", view.rows, ")"));
  }
  for (Index row = rows.begin; row < rows.end;) {
    const Index end = view.inner == 0 ? rows.end : min_of(rows.end, (row / view.inner + 1) * view.inner);
    blocks.push_back(block_of(view, row, end - row));
    row = end;
  }
}

Index Message::size() const {
  Index bytes = 0;
  for (const Block& block : blocks) bytes += block.size();
  return bytes;
}

Message::Combine adding(DType dtype) {
  if (dtype == DType::f32) return Message::Combine::add;
  if (dtype == DType::f64) return Message::Combine::add_f64;
  throw Error(text("sums of ", weft::name(dtype), " between ranks"), "add f32 or f64, and round at the end");
}

Traffic& Traffic::operator+=(const Traffic& other) {
  bytes_sent += other.bytes_sent;
  bytes_received += other.bytes_received;
  messages_sent += other.messages_sent;
  messages_received += other.messages_received;
  bytes_sent_between += other.bytes_sent_between;
  bytes_received_between += other.bytes_received_between;
  return *this;
}

void Request::wait() {
  // Moved out, so that the call is over and withdrawn even if wait() throws.
  const std::unique_ptr<Pending> pending = std::move(pending_);
  if (pending == nullptr) return;
  if (recorder_ == nullptr) return pending->wait();
  recorder_->set(call_, detail::RecordedCall::State::waiting);
  try {
    pending->wait();
    recorder_->end_wait(call_);
  } catch (const PeerError& e) {
    throw failed(*recorder_, call_, e);
  } catch (...) {
    recorder_->set(call_, detail::RecordedCall::State::failed);
    throw;
  }
}

Request Request::after(std::function<void()> then) && {
  return Request(std::make_unique<Then>(std::move(pending_), std::move(then)), std::move(recorder_), call_);
}

Communicator::~Communicator() = default;

detail::Calls& Communicator::calls() {
  if (calls_ == nullptr) calls_ = std::make_shared<detail::Calls>();
  return *calls_;
}

const std::shared_ptr<detail::FlightRecorder>& Communicator::recorder() const {
  if (counts_->recorder_ == nullptr)
    counts_->recorder_ = detail::make_recorder(counts_->rank_, counts_->ranks_, counts_->name());
  return counts_->recorder_;
}

std::string Communicator::flight_record() const { return recorder()->text(); }

void Communicator::check() const {
#ifdef WEFT_WITH_NCCL
  if (counts_->nccl_ != nullptr) cuda::check(*std::static_pointer_cast<cuda::NcclConnection>(counts_->nccl_));
#endif
}

// Counts and records a call. `start` may give null: then there is none.
template <class Start>
Request Communicator::start_recorded(const char* kind, std::span<const Message> sends,
                                     std::span<const Message> receives, const Start& start) {
  Traffic traffic;
  const Index node = counts_->node_;
  count(sends, rank_, node, traffic.messages_sent, traffic.bytes_sent, traffic.bytes_sent_between);
  count(receives, rank_, node, traffic.messages_received, traffic.bytes_received, traffic.bytes_received_between);
  const std::shared_ptr<detail::FlightRecorder>& record = recorder();
  const Index call = record->begin(kind, rank_, sends, receives);
  try {
    std::unique_ptr<Request::Pending> pending = start();
    if (pending == nullptr) {
      record->cancel(call);
      return {};
    }
    counts_->traffic_ += traffic;
    return Request(std::move(pending), record, call);
  } catch (const PeerError& e) {
    throw failed(*record, call, e);
  } catch (...) {
    record->set(call, detail::RecordedCall::State::failed);
    throw;
  }
}

Request Communicator::exchange(std::vector<Message> sends, std::vector<Message> receives) {
  check_messages(sends, "send", ranks_);
  check_messages(receives, "receive", ranks_);
  if (!adds_f64())
    for (const Message& m : receives)
      if (m.combine == Message::Combine::add_f64)
        throw Error(text("communicator ", name(), " is to add f64 on a GPU"),
                    "add f32 there, or use tensors on the CPU");
  return start_recorded("exchange", sends, receives, [&] {
    if (!in_pass_ || !carries_signs()) return start(std::move(sends), std::move(receives));
    const detail::SignedPeers& signs = signs_->meet(rank_, sends, receives);
    return signs.empty() ? start(std::move(sends), std::move(receives))
                         : start_signed(std::move(sends), std::move(receives), signs);
  });
}

std::unique_ptr<Request::Pending> Communicator::start_all_gather(const Block&, std::span<const Block>) {
  return nullptr;
}
std::unique_ptr<Request::Pending> Communicator::start_reduce_scatter(std::span<const Block>, const Block&) {
  return nullptr;
}
std::unique_ptr<Request::Pending> Communicator::start_all_to_all(std::span<const Block>, std::span<const Block>) {
  return nullptr;
}

std::unique_ptr<Request::Pending> Communicator::start_all_gather_lists(std::span<const Block>, std::span<const Block>) {
  return nullptr;
}
std::unique_ptr<Request::Pending> Communicator::start_reduce_scatter_lists(std::span<const Block>,
                                                                           std::span<const Block>) {
  return nullptr;
}

void Communicator::set_node(Index ranks_per_node) {
  if (ranks_per_node < 1 || ranks_ % ranks_per_node != 0)
    throw Error(text("nodes of ", ranks_per_node, " ranks do not divide ", ranks_, " ranks"),
                "give a number of ranks that divides them");
  node_ = ranks_per_node;
}

Request Communicator::all_gather(const Block& mine, std::span<const Block> all) {
  check_count("all_gather: all", all.size(), ranks_);
  std::vector<Message> sends, receives;
  for (Index peer = 0; peer < ranks_; ++peer) {
    append(sends, peer, mine);
    append(receives, peer, all[at(peer)]);
  }
  if (has_collectives() && are_equal(all) && mine.size() == all[0].size()) {
    check_messages(sends, "all_gather: mine, send", ranks_);
    check_messages(receives, "all_gather: receive", ranks_);
    Request request = start_recorded("all_gather", sends, receives, [&] { return start_all_gather(mine, all); });
    if (request.in_flight()) return request;
  }
  return exchange(std::move(sends), std::move(receives));
}

Request Communicator::reduce_scatter(std::span<const Block> parts, const Block& mine, DType dtype) {
  const Message::Combine add = adding(dtype);
  check_count("reduce_scatter: parts", parts.size(), ranks_);
  check_block(mine, "reduce_scatter: mine", add);
  std::vector<Message> sends, receives;
  for (Index peer = 0; peer < ranks_; ++peer) {
    check_block(parts[at(peer)], text("reduce_scatter: part ", peer), add);
    append(sends, peer, parts[at(peer)]);
    append(receives, peer, mine, peer == 0 ? Message::Combine::replace : add);
  }
  if (has_collectives() && dtype == DType::f32 && are_equal(parts) && mine.size() == parts[0].size()) {
    check_messages(sends, "reduce_scatter: part", ranks_);
    check_messages(receives, "reduce_scatter: receive", ranks_);
    Request request =
        start_recorded("reduce_scatter", sends, receives, [&] { return start_reduce_scatter(parts, mine); });
    if (request.in_flight()) return request;
  }
  for (Message& m : receives) m.at_once = true;
  return exchange(std::move(sends), std::move(receives));
}

Request Communicator::all_gather(std::vector<Message> sends, std::vector<Message> receives) {
  check_equal("all_gather", sends, receives, ranks_);
  if (has_collectives() && sends[0].size() > 0) {
    check_messages(sends, "all_gather: send", ranks_);
    check_messages(receives, "all_gather: receive", ranks_);
    Request request = start_recorded("all_gather", sends, receives,
                                     [&] { return start_all_gather_lists(sends[0].blocks, blocks_of(receives)); });
    if (request.in_flight()) return request;
  }
  return exchange(std::move(sends), std::move(receives));
}

Request Communicator::reduce_scatter(std::vector<Message> sends, std::vector<Message> receives) {
  check_equal("reduce_scatter", sends, receives, ranks_);
  if (has_collectives() && sends[0].size() > 0 && receives.back().combine == Message::Combine::add) {
    check_messages(sends, "reduce_scatter: send", ranks_);
    check_messages(receives, "reduce_scatter: receive", ranks_);
    Request request = start_recorded("reduce_scatter", sends, receives,
                                     [&] { return start_reduce_scatter_lists(blocks_of(sends), receives[0].blocks); });
    if (request.in_flight()) return request;
  }
  return exchange(std::move(sends), std::move(receives));
}

Request Communicator::all_to_all(std::span<const Block> to, std::span<const Block> from) {
  check_count("all_to_all: to", to.size(), ranks_);
  check_count("all_to_all: from", from.size(), ranks_);
  std::vector<Message> sends, receives;
  for (Index peer = 0; peer < ranks_; ++peer) {
    append(sends, peer, to[at(peer)]);
    append(receives, peer, from[at(peer)]);
  }
  if (has_collectives()) {
    check_messages(sends, "all_to_all: to", ranks_);
    check_messages(receives, "all_to_all: from", ranks_);
    Request request = start_recorded("all_to_all", sends, receives, [&] { return start_all_to_all(to, from); });
    if (request.in_flight()) return request;
  }
  return exchange(std::move(sends), std::move(receives));
}

Request Communicator::send_receive(Index to, const Block& sent, Index from, const Block& received) {
  return exchange({{to, {sent}}}, {{from, {received}}});
}

Request Communicator::all_reduce(void* data, DType dtype, Index count, Reduce how) {
  if (count < 0) throw Error(text("all_reduce of ", count, " numbers"), "give a count of at least 0");
  if (dtype == DType::f32) return all_reduce_of(*this, static_cast<float*>(data), count, how);
  if (dtype == DType::f64) return all_reduce_of(*this, static_cast<double*>(data), count, how);
  throw Error(text("all_reduce of ", weft::name(dtype)), "give f32 or f64");
}

std::unique_ptr<Communicator> DeviceCommunicator::make_split(Index, Index) {
  throw Error("a communicator on a GPU cannot be split", "split the one that it was made of, and call on() then");
}

std::unique_ptr<Communicator> Communicator::split(Index color, Index key) { return make_split(color, key); }

std::unique_ptr<DeviceCommunicator> Communicator::on(const Place& place) {
  if (place.kind == DeviceKind::cpu) throw Error("a communicator on a GPU was asked for the CPU", "use this one");
  return make_on(place);
}

#ifdef WEFT_WITH_CUDA
std::unique_ptr<DeviceCommunicator> Communicator::make_on(const Place& place) {
  const cuda::HostCall host_call = [this](std::vector<Message> sends, std::vector<Message> receives) {
    return start(std::move(sends), std::move(receives));
  };
#ifdef WEFT_WITH_NCCL
  auto connection = std::static_pointer_cast<cuda::NcclConnection>(nccl_);
  const cuda::Meeting met = cuda::meet(*this, place, cuda::connects(connection, place), host_call);
  if (!met.share_a_gpu) {
    if (!met.connected) nccl_ = connection = cuda::connect_nccl(*this, place, host_call, board(), recorder());
    return cuda::make_nccl(*this, place, connection);
  }
#endif
  return cuda::make_staged(*this, place, reaches_gpus() ? cuda::Staging::device : cuda::Staging::host, host_call);
}
#else
std::unique_ptr<DeviceCommunicator> Communicator::make_on(const Place&) {
  throw Error(text("communicator ", name(), " in a build of Weft without CUDA, and the tensors lie on a GPU"),
              "build it with -DWEFT_CUDA=ON, or use tensors on the CPU");
}
#endif

}  // namespace weft
