// law_soak N: the law on N random problems, until one breaks it. Small and quick to build, for planted_faults.py.
#include <cstdlib>
#include <exception>
#include <iostream>

#include "check/cases/random_case.h"
#include "check/law.h"

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 1000;
  for (int seed = 0; seed < problems; ++seed) {
    weft::check::RandomChoices choices(static_cast<unsigned long long>(seed));
    const weft::check::Case c = random_case(choices);
    try {
      const weft::check::LawReport report = check_law(c);
      if (!report.violation) continue;
      std::cout << "problem " << seed << ": " << *report.violation << "\n  weft verify " << flags(c) << "\n";
    } catch (const std::exception& e) {
      std::cout << "problem " << seed << " is refused: " << e.what() << "\n  weft verify " << flags(c) << "\n";
    }
    return 1;
  }
  std::cout << problems << " problems, the law holds\n";
  return 0;
}
