// Checked ranks tell each other what they are about to do, and with what, before they do it.
#pragma once

#include <memory>

#include "comm/calls.h"
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
  Index layer = kNoLayer, micro = -1;  // -1: there are none
};

// Of one executor or buffer; its number is that of the ranks' communicator, so that two of them are told apart.
class Agreement {
 public:
  // Lives no longer than `ranks`. Every rank makes the same ones in the same order.
  explicit Agreement(Communicator& ranks);

  // Messages carry checksums.
  Communicator& communicator() const { return *checked_; }

  // Collective. Error, the same on every rank, that says which ranks do something else than most, or with what other
  // arguments. Gives the number of this call. `forwards`: those whose results a backward is given.
  std::uint64_t compare(const CollectiveCall& call, const std::vector<Fingerprint>& mine,
                        const detail::Forwards& forwards = {});
  // Collective: returns when every rank has come here. The results of a forward are kept in mind for its backward.
  void end(const CollectiveCall& call);
  void end(const CollectiveCall& call, std::uint64_t number, const ConstTensorView& out, const ConstTensorView& lse);
  // The forwards that gave these results on this rank.
  detail::Forwards forwards_of(const ConstTensorView& out, const ConstTensorView& lse) const;

 private:
  Communicator& ranks_;
  std::unique_ptr<Communicator> checked_;
  std::uint64_t object_;
};

}  // namespace weft::run
