// What the ranks of a pass must agree on, as eight numbers that travel with its first message between two ranks. The
// receiver compares them with its own: ranks that were given different problems, options or calls are told, always.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "weft/communicator.h"

namespace weft::detail {

// The kinds of pass that are counted.
enum class PassKind : std::uint32_t { forward, backward, gather, gather_again };

struct CallSign {
  // The hashes of fingerprint.h, and which pass it is: its number among those of the communicator, from 1, times 4 plus
  // PassKind.
  enum Part : std::size_t { packing, mask, layout, schedule, shapes, attention, layer, pass };
  static constexpr std::size_t kParts = 8;
  static constexpr std::uint32_t kKinds = 4;  // of PassKind

  std::array<std::uint32_t, kParts> parts = {};

  bool given() const { return parts[pass] != 0; }
  std::uint32_t number() const { return parts[pass] / kKinds; }
  friend bool operator==(const CallSign&, const CallSign&) = default;
};

// Of another rank.
using RankSign = std::pair<Index, CallSign>;

// "ranks 0 and 1 differ in the mask"; none if all are alike. Ranks that are fewer are named first.
std::optional<std::string> disagreement(Index self, const CallSign& mine, std::span<const RankSign> others);
// Of those of the same pass alone: a rank that is elsewhere may only be late.
std::optional<std::string> disagreement_in_pass(Index self, const CallSign& mine, std::span<const RankSign> others);
Error disagreement_error(const std::string& disagreement, const std::string& beside = {});

// As text, for ranks that tell each other out of band, and back; from_text of anything else gives none.
std::string to_text(const CallSign& sign);
std::optional<CallSign> sign_from_text(const std::string& text);

// The peers of one call to or from which the first message of the pass goes, whose fingerprint travels with it.
struct SignedPeers {
  CallSign mine;
  std::vector<Index> to, from;

  bool empty() const { return to.empty() && from.empty(); }
};

// What a communicator knows of the pass that it is in. It is the same object in all passes, so that one costs no
// memory.
class SignedCalls {
 public:
  explicit SignedCalls(Index ranks) : met_(static_cast<std::size_t>(ranks)) {}

  void begin(const CallSign& sign) { peers_.mine = sign; }
  // Those whose first message of the pass is in this call; until the next call asks. Both ends of a message call a peer
  // met after the same call, so they agree on which message is the first.
  const SignedPeers& meet(Index self, std::span<const Message> sends, std::span<const Message> receives);
  // The first collective of a pass between all ranks, itself included, whatever messages went before; none for later
  // ones.
  const SignedPeers& meet_all();

 private:
  // The last pass in which a message went to or from a rank, and in which it was in either list.
  struct Met {
    std::uint32_t pass = 0, to = 0, from = 0;
  };
  void collect(Index self, std::span<const Message> messages, std::uint32_t Met::* seen, std::vector<Index>& into);

  SignedPeers peers_;
  std::uint32_t met_all_ = 0;  // the last pass with a collective
  std::vector<Met> met_;       // [ranks]
};

// A call of a transport of the host's memory: fingerprints are messages of their own, before all others, and wait()
// compares them, also where the rest does not fit. `start` is given all messages.
using StartCall = std::function<std::unique_ptr<Request::Pending>(std::vector<Message>, std::vector<Message>)>;
std::unique_ptr<Request::Pending> signed_call(const Communicator& communicator, const SignedPeers& peers,
                                              std::vector<Message> sends, std::vector<Message> receives,
                                              const StartCall& start);

// While it lives, calls of the communicator belong to one pass, whose fingerprint they carry. All ranks make the same
// passes in the same order.
class SignedPass {
 public:
  SignedPass(Communicator& communicator, const CallSign& sign, PassKind kind);
  ~SignedPass();
  SignedPass(const SignedPass&) = delete;
  SignedPass& operator=(const SignedPass&) = delete;

 private:
  Communicator& communicator_;
};

}  // namespace weft::detail
