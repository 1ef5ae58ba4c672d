// Ranks of another communicator as a transport that knows nothing of GPUs: what MPI or a process group is.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "weft/communicator.h"
#include "weft/error.h"

namespace weft::test {

class PlainRanks : public Communicator {
 public:
  explicit PlainRanks(Communicator& ranks) : Communicator(ranks.rank(), ranks.ranks()), ranks_(ranks) {}
  std::string_view name() const override { return "plain"; }
  double time_limit() const override { return ranks_.time_limit(); }
  Index exchanges = 0;  // that were started

 protected:
  // The other communicator's call as this one's.
  static std::unique_ptr<Request::Pending> forwarded(Request request) {
    struct Forwarded final : Request::Pending {
      explicit Forwarded(Request r) : request(std::move(r)) {}
      void wait() override { request.wait(); }
      Request request;
    };
    return std::make_unique<Forwarded>(std::move(request));
  }
  Communicator& inner() { return ranks_; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    ++exchanges;
    return forwarded(ranks_.exchange(std::move(sends), std::move(receives)));
  }
  std::unique_ptr<Communicator> make_split(Index, Index) override { throw Error("no split here", "use another"); }

  Communicator& ranks_;
};

}  // namespace weft::test
