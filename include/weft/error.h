// The one exception of Weft: what was wrong, with the values, and the way out.
#pragma once

#include <stdexcept>
#include <string>

#include "weft/config.h"

namespace weft {

// Thrown by every entry point, before anything is written unless the function says otherwise.
class WEFT_API Error : public std::runtime_error {
 public:
  // what() reads "<problem>; <remedy>".
  Error(std::string problem, std::string remedy);
  ~Error() override;  // out of line: one home for the type's identity, so that it can be caught across libraries

  const std::string& problem() const noexcept { return problem_; }
  const std::string& remedy() const noexcept { return remedy_; }

 private:
  std::string problem_;
  std::string remedy_;
};

}  // namespace weft
