// An object that keeps workspaces belongs to one thread at a time: a call that comes while another is inside is
// refused.
#pragma once

#include <atomic>
#include <string_view>

#include "text.h"
#include "weft/error.h"

namespace weft::run {

class InUse {
 public:
  // The object is in use while this lives. `what` names it in the Error, for example "executor".
  class Call {
   public:
    Call(InUse& object, std::string_view what) : object_(object) {
      if (object.busy_.exchange(true, std::memory_order_acquire))
        throw Error(
            text("a call of this ", what, " began while another one, of another thread or its observer, is in it"),
            text("give each thread a communicator and ", what, " of its own, or let calls wait for each other"));
    }
    ~Call() { object_.busy_.store(false, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    InUse& object_;
  };

 private:
  std::atomic<bool> busy_ = false;
};

}  // namespace weft::run
