// Calls of a transport in Python that are in flight.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/ndarray.h>

#include "comm/letter.h"
#include "gil.h"
#include "index.h"
#include "text.h"
#include "weft/communicator.h"
#include "weft/error.h"

namespace weft::python {

inline nb::object as_bytes(const Packed& packed) {
  const std::size_t shape[] = {at(packed.size)};
  return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(packed.data, 1, shape, nb::none()));
}

// Sends and receives of a transport that are in flight.
class Handle final : public Request::Pending {
 public:
  explicit Handle(nb::object handle) : handle_(std::move(handle)) {}
  Handle(const Handle&) = delete;
  ~Handle() override {
    const AcquireGil gil;
    if (!done_) {
      try {
        call_python(handle_.attr("abandon"));
      } catch (nb::python_error& e) {
        e.discard_as_unraisable("giving up an exchange");
      }
    }
    handle_.reset();
  }

  void wait() override {
    const AcquireGil gil;
    call_python(handle_.attr("wait"));
    done_ = true;
  }

 private:
  nb::object handle_;
  bool done_ = false;
};

// Deques, because pointers to their elements must stay valid.
class PythonPending final : public Request::Pending {
 public:
  PythonPending(nb::handle transport, Index rank, std::vector<Message> sends, std::vector<Message> receives) {
    std::deque<Packed*> to_self;
    for (Letter& letter : letters_of(std::move(sends), rank)) {
      const bool self = letter.front().peer == rank;
      Packed& p = sends_.emplace_back(packed(std::move(letter), !self));
      if (!p.own.empty()) pack(p);
      if (self) to_self.push_back(&p);
    }
    for (Letter& letter : letters_of(std::move(receives), rank)) {
      const Message& m = letter.back();
      const bool self = m.peer == rank, add = adds(m.combine);
      if (self) {
        if (to_self.empty() || to_self.front()->size != m.size())
          throw Error(text("rank ", rank, " receives ", m.size(), " bytes from itself and sends ",
                           to_self.empty() ? 0 : to_self.front()->size),
                      "name as many bytes on both sides");
        from_self_.emplace_back(to_self.front(), std::move(letter));
        to_self.pop_front();
        order_.push_back({true, from_self_.size() - 1});
      } else {
        receives_.emplace_back(packed(std::move(letter), !add));
        order_.push_back({false, receives_.size() - 1});
      }
    }
    const AcquireGil gil;
    nb::list to, from;
    for (const Packed& p : sends_)
      if (p.peer() != rank && p.size > 0) to.append(nb::make_tuple(p.peer(), as_bytes(p)));
    for (const Packed& p : receives_)
      if (p.size > 0) from.append(nb::make_tuple(p.peer(), as_bytes(p)));
    handle_ = std::make_unique<Handle>(call_python(transport.attr("exchange"), to, from));
  }

  void wait() override {
    handle_->wait();
    for (const auto& [self, i] : order_) {
      if (self)
        unpack(*from_self_[i].first, from_self_[i].second);
      else
        unpack(receives_[i], receives_[i].letter);
    }
  }

 private:
  std::deque<Packed> sends_, receives_;
  std::vector<std::pair<Packed*, Letter>> from_self_;
  std::vector<std::pair<bool, std::size_t>> order_;  // of receives, as given: sums are made in it
  std::unique_ptr<Handle> handle_;                   // goes first: it may use the others' memory
};

// A call whose fingerprints are compared. That they differ is told to the transport before the error unwinds other
// calls, so that ranks which learn of it from those learn why.
class SignedPending final : public Request::Pending {
 public:
  // `members`: ranks of the transport, of which the error's are the places.
  SignedPending(std::unique_ptr<Request::Pending> inner, nb::handle transport, const std::vector<Index>& members)
      : inner_(std::move(inner)), transport_(transport), members_(members) {}

  void wait() override {
    try {
      inner_->wait();
    } catch (const Error& e) {  // what the transport raises is Python's
      const AcquireGil gil;
      if (nb::hasattr(transport_, "fail"))
        call_python(transport_.attr("fail"), nb::str(text("cannot go on: ", e.problem(), whose_ranks()).c_str()));
      throw;
    }
  }

 private:
  // Of a split, whose ranks have other numbers there than for those who read this.
  std::string whose_ranks() const {
    std::string of;
    bool same = true;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      same &= members_[i] == static_cast<Index>(i);
      of += text(i == 0 ? "" : ", ", members_[i]);
    }
    return same ? "" : text(" (among ranks ", of, " of the group, counted from 0)");
  }

  std::unique_ptr<Request::Pending> inner_;
  nb::handle transport_;  // of the communicator, which outlives its calls
  const std::vector<Index>& members_;
};

}  // namespace weft::python
