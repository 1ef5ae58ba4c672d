// Fingerprints that travel in the order of a queue which nobody waits for (a stream of a GPU): the calls that follow
// look at those that have come.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/sign.h"

namespace weft::detail {

class SignsInFlight {
 public:
  // Of one call.
  struct Arriving {
    virtual ~Arriving() = default;
    virtual bool came() = 0;  // the queue has come past them
    virtual std::optional<std::string> disagreement() const = 0;
    virtual void abandon() noexcept = 0;  // leaves their memory to whoever may still write to it
  };
  // Is told in which words ranks differ, before the Error that says so. May throw another one: a queue that was given
  // up, because a rank is lost, leaves what an earlier pass has sent in place of what should have come.
  using Tell = std::function<void(const std::string& disagreement)>;

  explicit SignsInFlight(Tell tell = nullptr) : tell_(std::move(tell)) {}
  ~SignsInFlight() {
    for (const auto& signs : all_)
      if (!signs->came()) signs->abandon();
  }
  SignsInFlight(const SignsInFlight&) = delete;
  SignsInFlight& operator=(const SignsInFlight&) = delete;

  void add(std::unique_ptr<Arriving> signs) { all_.push_back(std::move(signs)); }
  // Error if ranks differ in what has come by now.
  void check() {
    while (!all_.empty() && all_.front()->came()) {
      const std::unique_ptr<Arriving> signs = std::move(all_.front());
      all_.pop_front();
      const std::optional<std::string> found = signs->disagreement();
      if (!found) continue;
      if (tell_ != nullptr) tell_(*found);
      throw disagreement_error(*found);
    }
  }

 private:
  Tell tell_;
  std::deque<std::unique_ptr<Arriving>> all_;
};

}  // namespace weft::detail
