// Communicators whose bytes are moved by Python code.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <nanobind/nanobind.h>

#include "weft/communicator.h"

namespace weft::python {

namespace nb = nanobind;

// Calls over a communicator are made by one thread at a time: between ranks their order must be the same, and what
// executors keep is used again. Of one rank a second thread waits; of several it gets an Error, because nobody could
// say in which order its peers see the calls. A thread may take a turn that it has.
class Turns {
 public:
  explicit Turns(Index ranks) : ranks_(ranks) {}
  // All without the GIL: whoever has the turn may need it.
  void take();
  void give_back();
  void wait_until_free();

 private:
  const Index ranks_;
  std::mutex mutex_;
  std::condition_variable free_;
  std::thread::id taken_by_;
  int depth_ = 0;
};

// A communicator as Python holds it. Those of weft.spawn end with it, whoever still holds them.
struct Comm {
  explicit Comm(Communicator& lent) : ended_or_not(&lent), turns(std::make_shared<Turns>(lent.ranks())) {}

  Communicator* ended_or_not;
  std::unique_ptr<Communicator> own = {};  // if it lives as long as this does
  std::shared_ptr<Turns> turns;

  Communicator& get() const;  // Error if it has ended
};

// Around all that a thread does over a communicator, without the GIL. Error if the communicator has ended.
class InTurn {
 public:
  explicit InTurn(const Comm& comm) : turns_(*comm.turns) {
    turns_.take();
    try {
      comm.get();
    } catch (...) {
      turns_.give_back();
      throw;
    }
  }
  InTurn(const InTurn&) = delete;
  InTurn& operator=(const InTurn&) = delete;
  ~InTurn() { turns_.give_back(); }

 private:
  Turns& turns_;
};

// transport.exchange(sends, receives) takes lists of (peer, bytes as a numpy array), starts them, and returns an object
// whose wait() returns when all is done, and whose abandon() makes sure that nobody touches the arrays any more.
// `reaches_gpus`: it also has exchange_on_gpu(sends, receives, device, stream), for bytes on a GPU as objects with
// __dlpack__, all in the order of the stream, and meet_on_gpu(device), which all ranks call before the first of them.
// It may have collective_on_gpu(kind, sent, bytes to each rank, received, bytes from each rank, device, stream, signs),
// too, for all_gather, reduce_scatter (of f32) and all_to_all. signs: None, or what a rank has for all and where those
// of all go, which an all_gather moves in the same launch. disagree(words), if it is there, is called when ranks differ
// in what such a call or exchange_on_gpu has brought, and raises; check() raises if calls were given up. Without
// reaches_gpus bytes of a GPU go as the library sends them.
std::unique_ptr<Comm> make_python_communicator(Index rank, Index ranks, std::string name, nb::object transport,
                                               bool reaches_gpus);

}  // namespace weft::python
