// Checked mode: before each call, ranks compare what they are about to do and with which arguments.
#pragma once

#include <memory>

#include "comm/checked.h"
#include "run/fingerprint.h"
#include "weft/communicator.h"

namespace weft::run {

enum class CallKind {
  make_executor,
  make_buffer,
  begin,
  gather,
  gather_again,
  forward,
  backward,
  end,  // of a forward or a backward
};

struct CollectiveCall {
  CallKind kind = CallKind::forward;
  Index layer = kNoLayer, micro = -1;  // -1: the call has none
};

// Compares the calls of one executor or buffer. Objects are numbered in the order of making, so that a call of one is
// not taken for a call of another.
class Agreement {
 public:
  // `ranks` must outlive it. Every rank makes the same objects in the same order.
  explicit Agreement(Communicator& ranks);

  // The same ranks; its messages carry checksums, and so do those of its on(place).
  Communicator& communicator() const { return *checked_; }

  // Collective. Error, the same on every rank, that names the ranks whose call or arguments differ from most. Returns
  // the number of this call. `forwards`: the forwards whose results a backward is given.
  std::uint64_t compare(const CollectiveCall& call, const std::vector<Fingerprint>& mine,
                        const detail::Forwards& forwards = {});
  // Collective: returns when every rank has reached it. A checksum of a forward's results is stored for its backward.
  void end(const CollectiveCall& call);
  void end(const CollectiveCall& call, std::uint64_t number, const ConstTensorView& out, const ConstTensorView& lse,
           const Place& place);
  // The forwards of this rank that wrote these results.
  detail::Forwards forwards_of(const ConstTensorView& out, const ConstTensorView& lse, const Place& place) const;

 private:
  Communicator& ranks_;
  std::unique_ptr<Communicator> checked_;
  std::uint64_t object_;
};

}  // namespace weft::run
