// The last calls of ranks (weft/flight.h), side by side: where they parted, and the page that shows it.
#pragma once

#include <string>
#include <vector>

#include "weft/slice.h"

namespace weft::draw {

struct FlightCall {
  Index number = 0;
  std::string kind = {}, pass = {};  // any text; an empty pass: of none
  Index step = -1;                   // -1: of none
  std::string state = {};            // posted, waiting, queued, done, failed
  std::string to = {}, from = {};    // ranks, "1+3"
  Index bytes_to = 0, bytes_from = 0;
  double begun = 0, seconds = 0;  // since 1970; in flight

  bool over() const { return state == "done" || state == "failed"; }
  std::string name() const;  // "exchange of forward step 2"
};

struct FlightRank {
  Index rank = 0, pid = 0;
  double time = 0;                     // when it was written
  std::vector<FlightCall> calls = {};  // by number

  const FlightCall* find(Index number) const;  // null: not made, or too long ago
};

// The ranks of one communicator.
struct Flight {
  std::string comm;
  Index ranks = 1;
  std::vector<FlightRank> recorded = {};  // by rank; those whose files were given
};

// The first call that some ranks have made and others have not, or not the same one; -1 if there is none.
struct Parting {
  Index call = -1;
  std::vector<std::string> words = {};  // a line for all, then one for each rank that is not with most of them
};
Parting parting(const Flight& flight);

// A page in one file, without scripts. Text of any origin is text in it, never HTML.
std::string flight_html(const std::vector<Flight>& flights, const std::string& command);

}  // namespace weft::draw
