// A message in one contiguous piece of GPU memory, as NCCL and process groups move it.
#pragma once

#include <utility>
#include <vector>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "cuda/handle_pool.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {

struct PackedMessage {
  Message message;
  StreamArray<char> own;  // empty if the message is contiguous where it lies
  void* data = nullptr;

  // in_place: use the caller's memory if it is contiguous.
  PackedMessage(Message given, bool in_place, cudaStream_t stream) : message(std::move(given)) {
    if (in_place && message.blocks.size() == 1) {
      const Block one = merged(message.blocks.front());
      if (one.rows == 1 && one.parts == 1) data = one.data;
    }
    if (data != nullptr) return;
    own = StreamArray<char>(at(message.size()), stream);
    data = own.get();
  }
  bool is_in_place() const { return own.get() == nullptr; }
  Block block() const { return {data, 1, 1, message.size(), message.size(), message.size()}; }
};

// Takes memory of the stream's for messages to be sent that are not contiguous. Messages without bytes are left out.
inline std::vector<PackedMessage> room_for_sends(std::vector<Message> sends, cudaStream_t stream) {
  std::vector<PackedMessage> room;
  for (Message& m : sends)
    if (m.size() > 0) room.emplace_back(std::move(m), true, stream);
  return room;
}

inline void pack(const std::vector<PackedMessage>& sends, cudaStream_t stream) {
  for (const PackedMessage& p : sends) {
    const Block whole = p.block();
    if (!p.is_in_place()) copy(segments(p.message.blocks, {&whole, 1}), stream);
  }
}

// Copies `from` to where the message belongs, or adds it there.
inline void unpack(const Message& to, std::span<const Block> from, cudaStream_t stream) {
  const std::vector<Segment> all = segments(from, to.blocks);
  to.combine == Message::Combine::add ? add_f32(all, stream) : copy(all, stream);
}

// The next message from `next` on that the rank sends to itself: what `to` receives.
inline Block sent_to_self(const std::vector<PackedMessage>& sends, Index rank, const Message& to, std::size_t& next) {
  while (next < sends.size() && sends[next].message.peer != rank) ++next;
  if (next == sends.size() || sends[next].message.size() != to.size())
    throw Error(text("rank ", rank, " receives ", to.size(), " bytes from itself that it does not send"),
                "let both sides name the same messages");
  return sends[next++].block();
}

}  // namespace weft::cuda
