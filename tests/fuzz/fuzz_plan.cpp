// Bytes to problem to plan to law. Whatever the bytes say, the library gives a right plan or a weft::Error.
#include <cstdio>
#include <cstdlib>

#include "bytes.h"
#include "check/law.h"
#include "weft/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  weft::fuzz::ByteChoices bytes(data, size);
  const bool spoiled = bytes.one_in(2);
  weft::check::Case c = weft::check::random_case(bytes);
  if (spoiled) weft::fuzz::spoil(c, bytes);
  try {
    if (!weft::fuzz::small(c, 64)) return 0;
    const weft::check::LawReport report = weft::check::check_law(c);
    if (report.violation) {
      std::fprintf(stderr, "%s\nreproduce: weft verify %s\n", report.violation->c_str(), flags(c).c_str());
      std::abort();
    }
  } catch (const weft::Error& e) {
    if (!spoiled) {
      std::fprintf(stderr, "a valid problem is refused: %s\nreproduce: weft verify %s\n", e.what(), flags(c).c_str());
      std::abort();
    }
  }
  return 0;
}
