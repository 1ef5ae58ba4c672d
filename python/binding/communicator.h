// Communicators whose bytes are moved by Python code.
#pragma once

#include <memory>
#include <string>

#include <nanobind/nanobind.h>

#include "weft/communicator.h"

namespace weft::python {

namespace nb = nanobind;

// A communicator as Python holds it. Those of weft.spawn end with it, whoever still holds them.
struct Comm {
  Communicator* ended_or_not = nullptr;
  std::unique_ptr<Communicator> own = {};  // if it lives as long as this does

  Communicator& get() const;  // Error if it has ended
};

// transport.exchange(sends, receives) takes lists of (peer, bytes as a numpy array), starts them, and returns an object
// whose wait() returns when all is done, and whose abandon() makes sure that nobody touches the arrays any more.
// `reaches_gpus`: it also has exchange_on_gpu(sends, receives, device, stream), for bytes on a GPU as objects with
// __dlpack__, all in the order of the stream, and meet_on_gpu(device), which all ranks call before the first of them.
// Without it bytes of a GPU go as the library sends them.
std::unique_ptr<Comm> make_python_communicator(Index rank, Index ranks, std::string name, nb::object transport,
                                               bool reaches_gpus);

}  // namespace weft::python
