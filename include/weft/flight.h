// The last calls of a process's communicators as a file, for ranks that hang or fail: `weft explain --flight` draws the
// files of all ranks as one timeline, with the call at which they parted.
#pragma once

#include <string>

#include "weft/config.h"

namespace weft {

// The last 64 calls of each communicator of this process: an object of JSON a line, in the order in which the
// communicators were made. Times are seconds since 1970.
WEFT_API std::string flight_records();

// Where and when flight_records() are written.
struct FlightFile {
  std::string path;        // replaced as a whole each time; empty: nothing is written any more
  bool on_failure = true;  // when a call of any communicator fails for the first time
  int signal = 0;          // whenever the process gets this signal, such as SIGUSR1; 0: at none
};

// From now on, in place of what was said before; communicators that end are then remembered too, the last 64 of them.
// Takes the handler of the signal. A process that is forked afterwards writes nothing before it calls this itself.
// Error if the file's folder cannot be written to, or the signal cannot be taken.
WEFT_API void keep_flight_file(const FlightFile& file);

}  // namespace weft
